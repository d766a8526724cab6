"""Python source in colour, in a fold; the colours can be read on light and on dark."""

import html
import itertools

from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String, _TokenType

# JupyterLab's own colours, which change with its theme; elsewhere, one for light and dark.
COLORS: dict[_TokenType, tuple[str, str]] = {
    Comment: ("comment", "#6B7F86"),
    String: ("string", "#C2453D"),
    Number: ("number", "#0E8A5F"),
    Keyword.Constant: ("atom", "#0E8A5F"),
    Keyword: ("keyword", "#2B8A3E"),
    Operator.Word: ("keyword", "#2B8A3E"),
    Name.Decorator: ("meta", "#A15CD0"),
    Name.Function: ("def", "#3F7FD0"),
    Name.Class: ("def", "#3F7FD0"),
    Name.Builtin: ("builtin", "#2B8A3E"),
}


def folded(title: str, source: str) -> str:
    """HTML: the title, which opens the source with a click or a key."""
    return (f'<details style="margin:4px 0"><summary style="cursor:pointer">{html.escape(title)}'
            '</summary><pre style="margin:6px 0 0;padding:8px 10px;border-radius:4px;'
            "line-height:1.4;overflow-x:auto;color:inherit;"
            f'background:var(--jp-layout-color2,rgba(127,127,127,.12))">{colored(source)}</pre>'
            "</details>")


def colored(source: str) -> str:
    """The source as HTML that shows the same characters."""
    tokens = PythonLexer(stripnl=False, ensurenl=False).get_tokens(source)
    runs = itertools.groupby(((_style_of(kind), text) for kind, text in tokens),
                             key=lambda pair: pair[0])
    return "".join(_span(style, html.escape("".join(text for _, text in run)))
                   for style, run in runs)


def _style_of(kind) -> str:
    for each in reversed(kind.split()):  # from the particular to the general
        if each in COLORS:
            variable, color = COLORS[each]
            return f"color:var(--jp-mirror-editor-{variable}-color,{color})"
    return ""


def _span(style, text):
    return f'<span style="{style}">{text}</span>' if style else text
