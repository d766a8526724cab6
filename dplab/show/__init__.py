"""Figures from plain data, in one style. Loads neither torch nor anything else of dplab.

Names are loaded on first use, so that the palette is at hand without matplotlib.
"""

import importlib

_MODULE_OF = {name: module for module, names in {
    "palette": "RANK_COLORS rank_color",
    "theme": "CourseFigure save_beside style subplots to_png to_svg",
    "diagram": "Canvas",
    "curves": "loss_curves",
    "shares": "time_shares",
    "timelines": "timeline",
    "ring": "ring_states ring_step",
    "memory_areas": "memory_over_step units_over_step",
    "predictions": "Beside predicted_beside_published row_limits",
    "sliders": "calculator stepper",
    "tables": "table",
}.items() for name in names.split()}

__all__ = list(_MODULE_OF)


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dplab.show' has no attribute {name!r}")
    module = importlib.import_module(f"dplab.show.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, name)
    return value
