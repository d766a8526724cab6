"""Sliders above a picture: an algorithm to step through, a calculation to turn about.

The picture is an ordinary output of the cell, below the controls. So the notebook keeps it: without
a kernel, and in a program that knows no widgets, only the controls are missing.
"""

import functools
import html
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path

import ipywidgets as widgets
from IPython.display import display

from dplab.show.theme import CourseFigure

# What names the controls runs when an invisible picture is loaded, after each change.
NAME_CONTROLS = Path(__file__).with_name("name_controls.js").read_text(encoding="utf-8")
EMPTY = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
STYLE = f"<style>{Path(__file__).with_name('sliders.css').read_text(encoding='utf-8')}</style>"
READOUT = """<style>
.dplab-readout-{0} .widget-readout {{ flex: none; min-width: {0}ch; text-align: right; }}
</style>"""


class Sliders:
    """``sliders``, by name, ``arranged`` above the picture that is drawn for their values."""

    def __init__(self, draw: Callable[..., CourseFigure], sliders: Mapping,
                 arranged: widgets.Widget):
        self._draw = functools.cache(lambda *values: draw(*values).display_data())
        self.sliders = dict(sliders)
        self._pictures: list = []
        self._names = widgets.HTML(layout={"display": "none"})
        self.controls = widgets.VBox([arranged, self._names])
        longest = max((len(text) for slider in self.sliders.values()
                       if isinstance(slider, widgets.SelectionSlider)
                       for text, _ in slider.options), default=0)
        self.controls.add_class("dplab-sliders").add_class(f"dplab-readout-{longest}")
        self._readout = READOUT.format(longest)
        for slider in self.sliders.values():
            slider.observe(self._show, "value")
        self._show()

    def picture(self) -> tuple[dict, dict]:
        """The data and the metadata of the picture as the controls stand now."""
        data, metadata = self._draw(*self._values())
        *names, last = self.sliders
        said = f"{', '.join(names)} and {last}" if names else last
        note = (f'<p class="dplab-run-this"><em>Run this cell to change {html.escape(said)}.'
                '</em></p>')
        return data | {"text/html": f"{STYLE}{note}{data['text/html']}"}, metadata

    def _values(self):
        return [slider.value for slider in self.sliders.values()]

    def _show(self, _=None):
        data, metadata = self.picture()
        for shown in self._pictures:
            shown.update(data, raw=True, metadata=metadata)
        self._names.value = (
            f'{self._readout}<img alt="" src="{EMPTY}" data-values="'
            f'{html.escape(repr(self._values()))}" onload="{html.escape(NAME_CONTROLS)}">')

    def _ipython_display_(self):
        data, metadata = self.picture()
        view = self.controls._repr_mimebundle_()
        display({**view, "text/plain": ""}, raw=True)
        self._pictures.append(display(data, raw=True, metadata=metadata, display_id=True))


def stepper(draw: Callable[..., CourseFigure], values: Sequence, *, start, label: str = "step",
            unit: str = "") -> Sliders:
    """A slider over ``values``, with a button that plays it, above ``draw`` of the one chosen.

    The slider shows each value with ``unit``, and begins at ``start``. Each picture is drawn when
    it is first shown, and kept.
    """
    slider = _control(widgets.SelectionSlider, label, values, start, unit,
                      style={"description_width": "initial"})
    play = widgets.Play(slider.index, 0, len(values) - 1, interval=1500)
    widgets.jslink((play, "value"), (slider, "index"))
    return Sliders(draw, {label: slider}, widgets.HBox([play, slider]))


def calculator(draw: Callable[..., CourseFigure], options: Mapping[str, Sequence],
               start: Mapping[str, object], *, units: Mapping[str, str]) -> Sliders:
    """Controls for all ``options``, above ``draw`` of their values by name; as `stepper`.

    ``options`` maps an argument of ``draw`` to its values: numbers get a slider, names a
    drop-down. ``start`` says which value each has at first, by default the first; ``units`` what
    is written after it.
    """
    sliders = {name: _control(
        widgets.SelectionSlider if isinstance(values[0], Real) else widgets.Dropdown,
        name, values, start.get(name, values[0]), units.get(name, ""),
        style={"description_width": "6em"}, layout={"width": "auto"})
        for name, values in options.items()}
    columns = {"grid_template_columns": "repeat(auto-fit, minmax(22em, 1fr))",
               "max_width": "720px", "align_items": "center"}
    return Sliders(lambda *values: draw(**dict(zip(options, values, strict=True))), sliders,
                   widgets.GridBox([*sliders.values()], layout=columns))


def _control(kind, name, values, start, unit, **looks):
    """A control that shows each value with the unit."""
    texts = [f"{value:,}" if isinstance(value, Real) else str(value) for value in values]
    options = [(f"{text} {unit}".strip(), value) for text, value in zip(texts, values, strict=True)]
    return kind(options=options, value=start, description=name, **looks)
