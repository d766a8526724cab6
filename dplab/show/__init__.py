"""Figures from plain data, in one style. Loads neither torch nor anything else of dplab.

Names are loaded on first use, so that the palette is at hand without matplotlib.
"""

import importlib

_MODULE_OF = {
    "RANK_COLORS": "palette",
    "rank_color": "palette",
    "CourseFigure": "theme",
    "save_beside": "theme",
    "style": "theme",
    "subplots": "theme",
    "to_png": "theme",
    "to_svg": "theme",
    "Canvas": "diagram",
    "loss_curves": "curves",
    "time_shares": "shares",
    "timeline": "timelines",
    "ring_states": "ring",
    "ring_step": "ring",
    "row_limits": "limits",
    "memory_over_step": "memory_areas",
    "units_over_step": "units_over_step",
    "Beside": "predictions",
    "predicted_beside_published": "predictions",
    "stepper": "sliders",
    "calculator": "sliders",
    "table": "tables",
}

__all__ = list(_MODULE_OF)


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dplab.show' has no attribute {name!r}")
    module = importlib.import_module(f"dplab.show.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, name)
    return value
