"""Buttons below a card; loaded only in a notebook, since ipywidgets takes a while."""

from collections.abc import Callable, Mapping

from IPython.display import DisplayHandle
from ipywidgets import HTML, Button, HBox, Layout, Output, VBox

RUN_AGAIN = "Run this cell again for a hint or a solution."


def said_without_kernel(name: str, words: str, where: str = "") -> str:
    """CSS: widgets of the class ``name`` that are opened again without their kernel say ``words``.

    JupyterLab would put a broken link before each of them. ``where``: a selector for those alone.
    """
    gone = f".{name}.jupyter-widgets-disconnected"
    return (f"{gone}::before, .{name} .jupyter-widgets-disconnected::before {{ display: none; }}\n"
            f'{gone}{where}::after {{ content: "{words}"; }}\n')


# JupyterLab writes "model not found" where a widget was whose state was not saved, or was lost when
# the kernel was restarted; only then has the output's node this class.
IN_PLACE = """<style>
.jp-OutputArea:has(> * > .jp-OutputArea-output.jupyter-widgets) .dplab-in-place { display: block; }
.jp-OutputArea:has(.dplab-in-place) > :has(> .jp-OutputArea-output.jupyter-widgets) {
  display: none; }
</style>"""


class InPlace:
    """An output below a widget, which JupyterLab shows in its place where it cannot find it."""

    def __init__(self):
        self._handle = DisplayHandle()

    def show(self, rich: str) -> None:
        """Adds it to the outputs of the cell that runs."""
        self._handle.display(self.bundle(rich), raw=True)

    def change(self, rich: str) -> None:
        """Replaces it wherever it was shown."""
        self._handle.update(self.bundle(rich), raw=True)

    def bundle(self, rich: str) -> dict[str, str]:
        """Its MIME types."""
        return {"text/plain": "",
                "text/html": f'{IN_PLACE}<div class="dplab-in-place" hidden>{rich}</div>'}


STYLE = f"""<style>
.dplab-buttons.jupyter-widgets-disconnected .widget-button {{ display: none; }}
{said_without_kernel("dplab-buttons", RUN_AGAIN)}</style>"""


class Buttons(VBox):
    """One button for each of ``actions``, by its words; what an action shows appears below."""

    def __init__(self, actions: Mapping[str, Callable[[], object]], plain: str):
        self._plain = plain
        self.shown = Output()
        row = HBox([self._button(*each) for each in actions.items()])
        super().__init__([row, self.shown, HTML(STYLE, layout=Layout(display="none"))])
        self.add_class("dplab-buttons")

    def _button(self, words, action):
        button = Button(description=words, layout=Layout(width="auto"))
        button.on_click(lambda _: self._run(action))
        return button

    def _run(self, action):
        with self.shown:
            action()

    def _repr_mimebundle_(self, **kwargs):
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": self._plain}
