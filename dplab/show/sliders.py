"""Sliders above a picture: an algorithm to step through, a calculation to turn about."""

import functools
from collections.abc import Callable, Mapping, Sequence

from ipywidgets import HTML, GridBox, HBox, IntSlider, Layout, Play, SelectionSlider, VBox, jslink

from dplab.show.theme import CourseFigure, picture

# ipywidgets ties a slider's label to nothing, gives the index of a choice for its value, and its
# player's buttons have no names; the picture, which comes after each change, puts that right.
NAME_CONTROLS = """
const box = this.closest('.dplab-sliders');
box?.querySelectorAll('.widget-slider').forEach(slider => {
  const handle = slider.querySelector('[role=slider]');
  handle.setAttribute('aria-label', slider.querySelector('.widget-label').textContent);
  handle.setAttribute('aria-valuetext', slider.querySelector('.widget-readout').textContent);
});
box?.querySelectorAll('.widget-play button').forEach((button, index) => {
  button.setAttribute('aria-label', ['play or pause', 'stop', 'repeat'][index]);
});
"""


class Sliders(VBox):
    """``controls`` above ``picture``, which is drawn for their values; a PNG without widgets.

    ``sliders``: those whose values are the arguments of ``draw``, in order.
    """

    def __init__(self, draw: Callable[..., CourseFigure], sliders: Sequence, controls):
        self._draw = functools.cache(lambda *values: _drawn(draw(*values)))
        self._sliders = list(sliders)
        self.picture = HTML()
        for slider in self._sliders:
            slider.observe(self._show, "value")
        self._show()
        super().__init__([controls, self.picture])
        self.add_class("dplab-sliders")

    def _now(self):
        return self._draw(*(slider.value for slider in self._sliders))

    def _show(self, _=None):
        self.picture.value = picture(*self._now(), onload=NAME_CONTROLS)

    def _repr_mimebundle_(self, **kwargs):
        png, alt, width, height = self._now()
        bundle = super()._repr_mimebundle_(**kwargs) | {"image/png": png, "text/plain": alt}
        return bundle, {"image/png": {"width": width, "height": height, "alt": alt}}


class Stepper(Sliders):
    """What `stepper` returns; ``slider`` is the one that it has."""

    def __init__(self, draw: Callable[[int], CourseFigure], steps: int, label: str, start: int):
        self.slider = IntSlider(start, 0, steps - 1, description=label,
                                style={"description_width": "initial"})
        play = Play(start, 0, steps - 1, interval=1500)
        jslink((play, "value"), (self.slider, "value"))
        super().__init__(draw, [self.slider], HBox([play, self.slider]))


class Calculator(Sliders):
    """What `calculator` returns, with its ``sliders`` by name."""

    def __init__(self, draw: Callable[..., CourseFigure], options: Mapping[str, Sequence],
                 start: Mapping[str, object]):
        self.sliders = {name: SelectionSlider(
            options=[(str(value), value) for value in values], value=start.get(name, values[0]),
            description=name, style={"description_width": "6em"}, layout=Layout(width="auto"))
            for name, values in options.items()}
        columns = Layout(grid_template_columns="repeat(auto-fit, minmax(19em, 1fr))",
                         max_width="720px")
        super().__init__(lambda *values: draw(**dict(zip(options, values, strict=True))),
                         list(self.sliders.values()),
                         GridBox(list(self.sliders.values()), layout=columns))


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


def calculator(draw: Callable[..., CourseFigure], options: Mapping[str, Sequence],
               start: Mapping[str, object] | None = None) -> Calculator:
    """A slider for each of ``options``, above ``draw`` of their values by name; as `stepper`.

    ``options`` maps an argument of ``draw`` to the values that its slider offers, in order;
    ``start`` says where sliders stand at first, by default at the first value. Raises ValueError
    for a start that is not offered.
    """
    start = dict(start or {})
    for name, value in start.items():
        if value not in options.get(name, ()):
            raise ValueError(f"{name} {value!r} is not one of {list(options.get(name, ()))}")
    return Calculator(draw, options, start)


def _drawn(figure: CourseFigure) -> tuple[str, str, int, int]:
    png, width, height = figure.embedded()
    return png, figure.alt, width, height
