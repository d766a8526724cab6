"""Buttons below a card; loaded only in a notebook, since ipywidgets takes a while."""

from collections.abc import Callable, Mapping

from ipywidgets import Button, HBox, Layout, Output, VBox


class Buttons(VBox):
    """One button for each of ``actions``, by its words; what an action shows appears below."""

    def __init__(self, actions: Mapping[str, Callable[[], object]], plain: str):
        self._plain = plain
        self.shown = Output()
        super().__init__([HBox([self._button(*each) for each in actions.items()]), self.shown])

    def _button(self, words, action):
        button = Button(description=words, layout=Layout(width="auto"))
        button.on_click(lambda _: self._run(action))
        return button

    def _run(self, action):
        with self.shown:
            action()

    def _repr_mimebundle_(self, **kwargs):
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": self._plain}
