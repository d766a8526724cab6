"""Training steps in time: what ranks compute and send, and what overlap does not hide."""

import math
import re
from collections.abc import Sequence
from itertools import cycle

from matplotlib.patches import Rectangle

from dplab.show import palette
from dplab.show.labels import LINE, SIZE, SWATCH, number, text_height, text_width, wrap
from dplab.show.shares import LabelledBars
from dplab.show.theme import WIDTH, CourseFigure, add_area, style

EXPOSED, HIDDEN = palette.PART_COLORS["communication"], "#FBE3A8"
BAND, THIN, GAP = 22, 15, 12
HATCHES = {"data": "....", "stalled": "////"}  # of what is no work


def timeline(ranks: Sequence[Sequence], *, title: str, note: str = "",
             names: Sequence[str] | None = None,
             since: str = "the step began") -> CourseFigure:
    """Draws a row per rank: a band of what it computes, and below it a bar per collective.

    ``ranks`` has each rank's spans, in seconds from a common zero: ``name``, ``lane`` ("compute",
    "communication", "stalled"), ``start``, ``end``. A name that begins with a part of PART_COLORS
    is that part; in the lane "stalled", "data" is told apart from what else stalls. A collective is
    solid where its rank computes nothing, light where it does, and hollow in the seconds at its
    start in which it was ``queued``; those under way at once share the band. ``names`` are the
    rows' labels, by default "rank r"; ``note`` stands below the title, and ``since`` on the axis
    says what the zero is.
    """
    names = names or [f"rank {rank}" for rank in range(len(ranks))]
    last = max(span.end for spans in ranks for span in spans)
    unit, factor = ("s", 1) if last >= 1 else ("ms", 1e3) if last >= 1e-3 else ("µs", 1e6)
    rows = [_Row(name, spans, unit, factor) for name, spans in zip(names, ranks, strict=True)]
    kinds = {re.sub(r"\W*\d+$", "", name).replace("_", "-")
             for row in rows for name, *_ in row.collectives}
    lane = "communication" if len(kinds) > 1 else "".join(kinds)
    parts = list(dict.fromkeys(part for row in rows for part, *_ in row.doing))
    colors = dict(zip(parts, cycle(palette.OTHER_COLORS), strict=False)) | palette.PART_COLORS
    colors |= dict.fromkeys(HATCHES, "#FFFFFF")

    left = 20 + max(text_width(text, SIZE) for row in rows for text in (row.label, lane))
    right = 20 + max(max(text_width(row.total, SIZE, "bold"),
                         SWATCH + text_width(row.exposed, SIZE)) for row in rows)
    note = wrap(note, SIZE, 72 * WIDTH - 24)
    with style():
        draw = _Rows(left, right, last * factor, colors)
        y = text_height(note, SIZE) if note else 0
        draw.text((12 - left) / draw.scale, y / 2 - 8, note, color=palette.MUTED)
        y = top = draw.names(rows[0].doing, parts, y)
        for row in rows:
            y = draw.row(row, lane, max(THIN, min(3 * THIN, 12 * THIN / len(rows))), y)
            lane = "" if row.collectives else lane
        draw.edges()
        figure = draw.finished(title, f"{'; '.join(row.said for row in rows)}. {note}",
                               f"time since {since} [{unit}]", y)
        draw.axes.vlines(draw.axes.get_xticks(), top, y, palette.GRID, linewidth=0.8, zorder=0.5)
    return figure


class _Row:
    """A row's spans as (name, start, end) in the figure's unit, and the texts about them."""

    def __init__(self, name, spans, unit, factor):
        spans = sorted(spans, key=lambda span: (span.start, -span.end))
        computes, self.collectives, stalls = (
            [(span.name, span.start * factor, span.end * factor)
             for span in spans if span.lane == lane]
            for lane in ("compute", "communication", "stalled"))
        self.queued = [factor * span.queued for span in spans if span.lane == "communication"]
        self.busy, sending = _union(computes), _union(self.collectives)
        data = _without(_union(span for span in stalls if span[0] == "data"), self.busy)
        stalled = _without(_union(self.collectives + stalls),
                           _union([("", *times) for times in self.busy + data]))
        self.doing = [(next(filter(name.startswith, palette.PART_COLORS), name), *piece)
                      for index, (name, *times) in enumerate(computes)  # the innermost wins
                      for piece in _without([times], _union(computes[index + 1:]))]
        self.doing += [("data", *times) for times in data]
        self.doing += [("stalled", *times) for times in stalled]

        total = factor * (max(span.end for span in spans) - min(span.start for span in spans))
        digits = len(number(total).partition(".")[2])
        sent, bare = (sum(end - start for start, end in intervals)
                      for intervals in (sending, _without(sending, self.busy)))
        rank = re.fullmatch(r"rank (\d+)", name)
        self.color = palette.rank_color(int(rank[1])) if rank else palette.INK
        self.label, self.total = wrap(name, SIZE, 150), f"{number(total)} {unit}"
        count = len(self.collectives)
        self.exposed = f"{bare:,.{digits}f} exposed" if count else ""
        self.said = f"{name}: {self.total}, {count or 'no'} collective{'s' * (count != 1)}"
        if count:
            self.said += (f", {bare:,.{digits}f} {unit} of communication exposed "
                          f"and {abs(sent - bare):,.{digits}f} {unit} hidden")


class _Rows(LabelledBars):
    """Draws rows. In its axes x is in the unit of time, y in points, downwards."""

    def __init__(self, *args):
        super().__init__(*args)
        self._edges = []  # x, top, bottom and width of white lines

    def names(self, doing, parts, y):
        """Names the parts in the first row or above it; returns the y at which that row starts."""
        blocks = {part: max(_union([span for span in doing if span[0] == part], 1 / self.scale),
                            key=lambda block: block[1] - block[0], default=(0, 0))
                  for part in parts}
        inside = [part for part, (start, end) in blocks.items()
                  if text_width(part, SIZE) + 8 <= (end - start) * self.scale]
        above = {part: sum(blocks[part]) / 2 * self.scale for part in parts
                 if part not in inside and part != "stalled"}
        texts = {part: part for part in above}
        if any(blocks[part][1] == 0 for part in above):
            y = self.swatches(list(above), texts, y)
        elif above:
            y = self.outside(list(above), above, texts, y, above=True)
        for part in inside:
            color = self.colors[part]
            self.text(sum(blocks[part]) / 2, y + BAND / 2, part, ha="center",
                      color=palette.readable_on(color),
                      bbox={"facecolor": color, "edgecolor": "none", "pad": 1})
        return y

    def row(self, row, lane, most, y):
        """Draws one row from y on and returns the y at which the next one starts."""
        for part, start, end in row.doing:
            self.bar(part, start, end, y, BAND, self.colors[part],
                     lines=0.1 * (self.scale * (end - start) - 2.5))
        left, right = -10 / self.scale, (self.plot_width + 8) / self.scale
        low, bottom = y + BAND + 2, y + max(BAND, text_height(row.label, SIZE))
        self.text(left, (y + bottom) / 2, row.label, ha="right", color=row.color)
        self.text(right, y + BAND / 2, row.total, weight="bold")
        if not row.collectives:
            return bottom + GAP
        tracks = _tracks(row.collectives)
        pitch = min(THIN, most / (1 + max(tracks)))
        for index, (name, start, end) in enumerate(row.collectives):
            top = low + tracks[index] * pitch
            if row.queued[index] > 0:
                began = min(end, start + row.queued[index])
                self.hollow(name, start, began, top, 0.9 * pitch)
                start = began
            exposed = _without([(start, end)], row.busy)
            self.bar(name, start, end, top, 0.9 * pitch, HIDDEN,
                     lines=0.15 * self.scale * (end - start))
            for piece in exposed:
                self.bar("exposed", *piece, top, 0.9 * pitch, EXPOSED)
            text = (re.findall(r"\d+$", name) or [str(index)])[0]
            first, last = max([*exposed, *_without([(start, end)], exposed)],
                              key=lambda piece: piece[1] - piece[0], default=(start, end))
            if pitch == THIN and text_width(text, SIZE) + 3 <= (last - first) * self.scale:
                self.text((first + last) / 2, top + 0.45 * pitch, text, ha="center",
                          color=palette.readable_on(EXPOSED))
        middle = low + pitch * (0.9 + max(tracks)) / 2
        self.swatch(self.plot_width + 8, middle, EXPOSED)
        self.text(right + SWATCH / self.scale, middle, row.exposed)
        if lane:
            bottom = max(middle + LINE / 2, bottom + LINE + 3)
            self.text(left, bottom - LINE / 2, lane, ha="right", color=palette.MUTED)
        return max(bottom, 2 * middle - low) + GAP

    def bar(self, name, start, end, y, height, color, lines=0.0):
        """A rectangle with white lines at its ends; those of HATCHES are hatched."""
        add_area(self.axes, Rectangle(
            (start, y), end - start, height, label=name, linewidth=0, facecolor=color,
            edgecolor=palette.REFERENCE, hatch=HATCHES.get(name), clip_on=False),
            0.2 * min(self.scale * (end - start), height))
        if lines > 0:
            self._edges += [(x, y, y + height, min(0.7, lines)) for x in (start, end)]

    def hollow(self, name, start, end, y, height):
        """An outline: what waits there is not under way yet."""
        self.axes.add_patch(Rectangle(
            (start, y + 0.05 * height), end - start, 0.9 * height, label=f"{name} queued",
            facecolor="none", edgecolor=palette.MUTED, linewidth=0.8, clip_on=False))

    def edges(self):
        """Draws the white lines at the ends of all bars, in one go."""
        if self._edges:
            x, top, bottom, widths = zip(*self._edges, strict=True)
            self.axes.vlines(x, top, bottom, "white", linewidth=widths)


def _union(spans, gap=0):
    """The intervals that (…, start, end) cover, in order; those up to ``gap`` apart are one."""
    merged = []
    for *_, start, end in sorted(spans, key=lambda span: span[-2:]):
        if merged and start <= merged[-1][1] + gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def _without(intervals, holes):
    """What the intervals cover and the holes, which are in order and apart, do not."""
    left = []
    for start, end in intervals:
        for first, last in (hole for hole in holes if hole[0] < end and hole[1] > start):
            left.append((start, first))
            start = last
        left.append((start, end))
    return [(start, end) for start, end in left if start < end]


def _tracks(spans):
    """For each span, in order of start, the first track where those before it have ended.

    An end that is later by a rounding alone is no overlap.
    """
    ends, tracks = [], []
    for _, start, end in spans:
        tracks.append(next((i for i, last in enumerate(ends)
                            if last <= start or math.isclose(last, start)), len(ends)))
        ends[tracks[-1]:tracks[-1] + 1] = [end]
    return tracks
