"""The widget of a guess; loaded only in a notebook, since ipywidgets takes a while."""

import html
from collections.abc import Callable, Sequence
from pathlib import Path

from ipywidgets import HTML, Button, HBox, Layout, RadioButtons, Text, VBox

from dplab.desk import cards
from dplab.desk.buttons import said_without_kernel

# ipywidgets makes no group of its radio buttons, and ties neither them nor a field to a question;
# JupyterLab takes their arrow keys for its own. A style sheet's load event comes once it is in the
# page; its neighbours may come a moment later.
NAME_CONTROLS = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8") + said_without_kernel(
    "dplab-guess", "Run this cell again to use these controls.", ":not(:has(:disabled))")


class GuessBox(VBox):
    """The question, its choices or a field with the unit beside it, and what was noted.

    ``note`` is called with each answer: the label of a choice, or the text in the field.
    ``reveal`` is called when the reader asks for the result that `offer_result` offers.
    """

    def __init__(self, question: str, choices: Sequence[str], unit: str | None, answer: str | None,
                 note: Callable[[str], None], reveal: Callable[[], None]):
        sheet = f'<style onload="{html.escape(NAME_CONTROLS)}">{STYLE}</style>'
        dot = f'<span style="color:{cards.GREY}">● </span>'
        in_unit = f"<span hidden> In {html.escape(unit)}.</span>" if unit else ""
        head = HTML(f'{sheet}<div style="font-weight:700">{dot}Your guess</div>'
                    f'<div class="dplab-question">{question}{in_unit}</div>')
        self._said = HTML()
        self._said.add_class("dplab-said")
        if choices:
            self.field = RadioButtons(options=choices, value=answer, layout=Layout(width="auto"))
            self._controls = [self.field]
            below = self.field
        else:
            self.field = Text(answer or "", continuous_update=False, layout=Layout(width="10em"))
            button = Button(description="Note it", layout=Layout(width="auto"))
            button.on_click(lambda _: note(self.field.value))
            self._controls = [self.field, button]
            below = HBox([self.field, *([HTML(html.escape(unit))] if unit else []), button])
        self.field.observe(lambda change: note(change["new"]), "value")
        self.result = Button(description="Show the result",
                             layout=Layout(width="fit-content", display="none"))
        self.result.on_click(lambda _: reveal())
        super().__init__([head, below, self._said, self.result], layout=Layout(
            border_left=f"4px solid {cards.GREY}", padding="6px 14px", margin="4px 0"))
        self.add_class("dplab-guess")

    def say(self, text: str) -> None:
        """Shows a line of HTML below."""
        self._said.value = text

    def offer_result(self, is_offered: bool) -> None:
        """Shows or hides the button that asks for it."""
        self.result.layout.display = None if is_offered else "none"

    def lock(self, answer: str) -> None:
        """Shows this answer, and takes no other."""
        self.field.value = answer
        for control in self._controls:
            control.disabled = True
