"""What stands below a notebook's cell: what the ranks print and show, while they run and after."""

import html
import time

from ..between.messages import Shown, as_text
from . import elapsed, output
from .output import RankText, RankWarnings, is_hidden, shown_in

_REFRESH = 0.2  # seconds between two live refreshes, or more:
_RATE = 400_000  # bytes/s, of which a Jupyter server takes a million
_LONG, _HEIGHT = 30, "36em"  # lines, from which on a text is scrolled, and the height it has then
_OF_MANY = "#57606A"  # the label's colour of what several ranks say
_NOT_ENDED = RuntimeError("whether the run fails is not known yet")


class CellOutput:
    """In rank order: texts, and between them what the ranks show as figures, Markdown and so on.

    Each text and each thing shown is a display of its own. They are rewritten while the ranks run;
    a notebook keeps their last state.
    """

    def __init__(self, world_size):
        self._texts = [RankText() for _ in range(world_size)]
        self._shown: list[dict[int, Shown]] = [{} for _ in range(world_size)]  # by number
        self._heading = output.heading.get()
        self._warnings = RankWarnings()
        self._displays: list[list] = []  # [handle, its data]
        self._failure: BaseException | None = _NOT_ENDED
        self._changed = False
        self._next = time.monotonic() + _REFRESH
        self._live = elapsed.is_live()

    def feed(self, rank, data):
        elapsed.heard()
        self._texts[rank].feed(data)
        self._warnings.add(rank, self._texts[rank])
        self._changed = True

    def take(self, rank, shown):
        elapsed.heard()
        self._changed = True
        if not shown.update:
            self._shown[rank][shown.number] = shown
            return
        for earlier in self._shown[rank].values():
            if earlier.name == shown.name:
                earlier.data, earlier.metadata = shown.data, shown.metadata

    def refresh(self):
        if self._live and self._changed and time.monotonic() > self._next:
            self._show()

    def close(self, failure=None):
        self._failure = failure
        self._show(self._warnings.close())  # also where a refresh has just shown all text

    def _show(self, warnings=()):
        size = 0
        parts = self._parts(warnings)
        for index in range(max(len(parts), len(self._displays))):
            data, metadata = parts[index] if index < len(parts) else ({}, {})
            if index == len(self._displays):
                self._displays.append([_display(data, metadata), data])
            elif self._displays[index][1] != data:
                self._displays[index][0].update(data, raw=True, metadata=metadata)
                self._displays[index][1] = data
            else:
                continue
            size += sum(len(value) for value in data.values())
        self._changed = False
        self._next = time.monotonic() + max(_REFRESH, size / _RATE)

    def _parts(self, warnings):
        """(data, metadata) of each display."""
        parts, rows = [], []
        for rank, text in enumerate(self._texts):
            label = f"rank {rank}", output.rank_color(rank)
            left = {number: shown for number, shown in self._shown[rank].items()
                    if number in text.marked}
            for line in text.lines():
                if is_hidden(rank, line, self._failure):
                    continue
                number, line = shown_in(line) or (None, line)
                shown = left.pop(number, None)
                if shown is None:
                    rows.append((*label, line, line))
                else:
                    rows = _add(shown, parts, rows, label)
            for shown in left.values():  # their marks lie where so much output was cut
                rows = _add(shown, parts, rows, label)
        rows += [(ranks, _OF_MANY, line, line) for ranks, line in warnings]
        parts += _as_display(rows, self._failure is _NOT_ENDED)
        if parts and self._heading:
            first = parts[0][0]
            first["text/plain"] = f"{self._heading}\n{first['text/plain']}"
            first["text/html"] = f"<div>{html.escape(self._heading)}</div>{first['text/html']}"
        return parts


def _add(shown, parts, rows, label):
    """Appends what is shown, below its rank's label; the rows that follow it."""
    text = as_text(shown.data)
    if set(shown.data) <= {"text/plain"}:
        return rows + [(*label, line, line) for line in text.splitlines()]
    parts += _as_display([*rows, (*label, "", text)], running=False)
    parts.append((shown.data, shown.metadata))
    return []


def _as_display(rows, running):
    """The one display of rows (label, its colour, line, line where there is no HTML), if any.

    A long text is scrolled: to its end while the ranks run.
    """
    if not rows:
        return []
    lines = [f'<span style="background:{color};color:#fff;border-radius:3px;padding:0 5px">'
             f"{label}</span> {html.escape(line)}" for label, color, line, _ in rows]
    text = '<pre style="line-height:1.35">' + "\n".join(lines) + "</pre>"
    if len(rows) > _LONG:
        style = f"max-height:{_HEIGHT};overflow:auto;border:1px solid #8A929B;padding:4px"
        if running:
            style += ";display:flex;flex-direction:column-reverse"
        text = f'<div style="{style}">{text}</div>'
    return [({"text/plain": "\n".join(f"[{label}] {line}" for label, _, _, line in rows),
              "text/html": text}, {})]


def _display(data, metadata):
    from IPython.display import display

    return display(data, raw=True, metadata=metadata, display_id=True)
