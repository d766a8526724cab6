"""How results look: an HTML card in a notebook, the same words in plain text elsewhere."""

import difflib
import html
from collections.abc import Mapping

from dplab.spawn.parent.output import in_notebook

GREEN, ORANGE, RED, GREY = "#12894D", "#C05600", "#D0453C", "#6B7680"


def card(head: str, text: str = "", block: str = "", color: str = GREY, *,
         links: dict[str, str] | None = None) -> None:
    """Shows a headline, a sentence in which `names` stand in backquotes, and preformatted text.

    ``links``, addresses by their words, stand below, in a notebook only.
    """
    body = f"<div>{inline(text)}</div>" if text else ""
    if block:
        body += ('<pre style="margin:8px 0 0;padding:8px 10px;border-radius:4px;line-height:1.4;'
                 "overflow-x:auto;background:var(--jp-layout-color2,rgba(127,127,127,.12));"
                 f'color:inherit">{html.escape(block)}</pre>')
    if links:
        body += "<div>" + " · ".join(f'<a href="{html.escape(address)}">{html.escape(words)}</a>'
                                     for words, address in links.items()) + "</div>"
    show("\n".join(filter(None, [head, text, block])), frame(head, body, color))


def did_you_mean(asked: str, names: Mapping[str, str]) -> str:
    """A question with the names that are near to what was asked; empty where none is.

    ``names``: what the reader may write, by each word that may mean it.
    """
    known = {word.lower(): name for word, name in names.items()}
    near = difflib.get_close_matches(asked.lower(), known, n=3, cutoff=0.6)
    listed = ", ".join(dict.fromkeys(f"`{known[word]}`" for word in near))
    return f"Did you mean {listed}?" if near else ""


def frame(head: str, body: str, color: str) -> str:
    """The HTML of a card around ``body``."""
    return (f'<div style="border-left:4px solid {color};padding:6px 14px;margin:4px 0">'
            f'<div style="font-weight:700"><span style="color:{color}">● </span>'
            f"{html.escape(head)}</div>{body}</div>")


def row(cells: list[str], *, indent: bool, color: str, style: str = "") -> str:
    """A table's row, whose last cell has a dot in ``color``; a heading has no ``indent``."""
    cell = f'<td style="text-align:left;padding:2px 12px 2px 0;background:none;{style}'
    *texts, last = [html.escape(text) for text in cells]
    first = "".join(f'{cell}">{text}</td>' for text in texts) if indent else (
        f'{cell}" colspan="2">{texts[0]}</td>')
    dot = "○" if color == GREY else "●"
    return (f'<tr style="background:none">{first}'
            f'{cell}"><span style="color:{color}">{dot} </span>{last}</td></tr>')


def show(plain: str, rich: str) -> None:
    """The HTML in a notebook, the text in a terminal."""
    if in_notebook():
        from IPython.display import display

        display({"text/plain": plain, "text/html": rich}, raw=True)
    else:
        print(plain)


def buttons(actions: dict, plain: str) -> None:
    """A row of buttons by their words; what an action shows appears below them.

    Where there are no widgets, ``plain`` says how to ask for the same.
    """
    if not in_notebook():
        return
    from IPython.display import display

    from dplab.desk.buttons import RUN_AGAIN, Buttons, InPlace

    display(Buttons(actions, plain))
    InPlace().show(RUN_AGAIN)


def inline(text: str) -> str:
    """A sentence as HTML; `names` in backquotes become code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part
                   for index, part in enumerate(parts))
