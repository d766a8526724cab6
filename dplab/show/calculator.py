"""Several sliders above a picture: a calculation that the reader turns about."""

import functools
import html
from collections.abc import Callable, Mapping, Sequence

from ipywidgets import HTML, GridBox, Layout, SelectionSlider, VBox

from dplab.show.theme import CourseFigure


class Calculator(VBox):
    """What `calculator` returns: ``sliders`` by name, and the picture as PNG without widgets."""

    def __init__(self, draw: Callable[..., CourseFigure], options: Mapping[str, Sequence],
                 start: Mapping[str, object]):
        self._draw = functools.cache(lambda *values: _drawn(
            draw(**dict(zip(options, values, strict=True)))))
        self.sliders = {name: SelectionSlider(
            options=[(str(value), value) for value in values], value=start.get(name, values[0]),
            description=name, style={"description_width": "6em"}, layout=Layout(width="auto"))
            for name, values in options.items()}
        self.picture = HTML()
        for slider in self.sliders.values():
            slider.observe(self._show, "value")
        self._show()
        columns = Layout(grid_template_columns="repeat(auto-fit, minmax(19em, 1fr))",
                         max_width="720px")
        super().__init__([GridBox(list(self.sliders.values()), layout=columns), self.picture])

    def _now(self):
        return self._draw(*(slider.value for slider in self.sliders.values()))

    def _show(self, _=None):
        png, alt, width, height = self._now()
        self.picture.value = (f'<img alt="{html.escape(alt)}" width="{width}" height="{height}" '
                              f'src="data:image/png;base64,{png}">')

    def _repr_mimebundle_(self, **kwargs):
        png, alt, width, height = self._now()
        bundle = super()._repr_mimebundle_(**kwargs) | {"image/png": png, "text/plain": alt}
        return bundle, {"image/png": {"width": width, "height": height, "alt": alt}}


def calculator(draw: Callable[..., CourseFigure], options: Mapping[str, Sequence],
               start: Mapping[str, object] | None = None) -> Calculator:
    """A slider for each of ``options``, above ``draw`` of their values by name.

    ``options`` maps an argument of ``draw`` to the values that its slider offers, in order;
    ``start`` says where sliders stand at first, by default at the first value. Each picture is
    drawn when it is first shown, and kept. Where there are no widgets (on GitHub, in a file), the
    picture at which the sliders stood is shown. Raises ValueError for a start that is not offered.
    """
    start = dict(start or {})
    for name, value in start.items():
        if value not in options.get(name, ()):
            raise ValueError(f"{name} {value!r} is not one of {list(options.get(name, ()))}")
    return Calculator(draw, options, start)


def _drawn(figure: CourseFigure) -> tuple[str, str, int, int]:
    png, width, height = figure.embedded()
    return png, figure.alt, width, height
