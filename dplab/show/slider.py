"""A slider above a picture: steps of an algorithm that the reader walks through."""

import functools
import html
from collections.abc import Callable

from ipywidgets import HTML, HBox, IntSlider, Play, VBox, jslink

from dplab.show.theme import CourseFigure


class Stepper(VBox):
    """What `stepper` returns: `slider` and `picture`, and the picture as PNG without widgets."""

    def __init__(self, draw: Callable[[int], CourseFigure], steps: int, label: str, start: int):
        self._draw = functools.cache(lambda step: _drawn(draw(step)))
        self.slider = IntSlider(start, 0, steps - 1, description=label,
                                style={"description_width": "initial"})
        self.picture = HTML()
        play = Play(start, 0, steps - 1, interval=1500)
        jslink((play, "value"), (self.slider, "value"))
        self.slider.observe(self._show, "value")
        self._show()
        super().__init__([HBox([play, self.slider]), self.picture])

    def _show(self, _=None):
        png, alt, width, height = self._draw(self.slider.value)
        self.picture.value = (f'<img alt="{html.escape(alt)}" width="{width}" height="{height}" '
                              f'src="data:image/png;base64,{png}">')

    def _repr_mimebundle_(self, **kwargs):
        png, alt, width, height = self._draw(self.slider.value)
        bundle = super()._repr_mimebundle_(**kwargs) | {"image/png": png, "text/plain": alt}
        return bundle, {"image/png": {"width": width, "height": height, "alt": alt}}


def stepper(draw: Callable[[int], CourseFigure], steps: int, *, label: str = "step",
            start: int = 0) -> Stepper:
    """A slider from 0 to ``steps`` − 1, with a button that plays it, above ``draw`` of its value.

    Each picture is drawn when it is first shown, and kept. Where there are no widgets (on GitHub,
    in a file), the picture at which the slider stood is shown. Raises ValueError where ``start``
    is not one of the steps.
    """
    if start not in range(steps):
        raise ValueError(f"{label} {start} is not one of 0 to {steps - 1}")
    return Stepper(draw, steps, label, start)


def _drawn(figure: CourseFigure) -> tuple[str, str, int, int]:
    png, width, height = figure.embedded()
    return png, figure.alt, width, height
