"""What a rank shows beside text: figures, `IPython.display`'s objects, warnings.

What is shown travels to the parent on the rank's connection, and a mark in the rank's output says
where between the lines it belongs. A warning is a mark alone, so that the parent can make one of
all ranks' copies.
"""

import builtins
import contextlib
import io
import itertools
import json
import os
import sys
import types
import warnings

from ..between.calls import is_learners, learner_line
from ..between.messages import Shown, as_text, mark

_ROOM = 2_000_000  # bytes that all ranks of a run may show: a browser has to take them
_DISPLAY = "IPython.core.display_functions"
_BACKEND = f"module://{__package__}.figures"
_WIDGET = "application/vnd.jupyter.widget-view+json"  # its model would be on the rank

_send = None  # takes a `Shown` to the parent, once `install` was called
_room = 0
_numbers = itertools.count(1)


def install(send, world_size: int, in_ipython: bool) -> None:
    """From now on, what this rank shows goes to the parent, and its warnings too.

    ``send`` takes a `Shown` there. ``in_ipython``: the parent has `display` among its builtins.
    """
    global _send, _room
    _send, _room = send, _ROOM // world_size
    builtins.input = sys.breakpointhook = _no_keyboard
    warnings.showwarning = _warn(sys.stderr, warnings.showwarning)
    if in_ipython:
        builtins.display = display  # type: ignore[attr-defined]
    # in the place of IPython's module, which takes half a second to import and knows no parent
    ours = sys.modules.setdefault(_DISPLAY, types.ModuleType(_DISPLAY))
    vars(ours).update(
        display=display, update_display=display, publish_display_data=publish_display_data,
        DisplayHandle=DisplayHandle, clear_output=lambda wait=False: None)
    if "backend_inline" in os.environ.get("MPLBACKEND", "backend_inline"):  # nobody chose another
        os.environ["MPLBACKEND"] = _BACKEND
        if "matplotlib" in sys.modules:
            sys.modules["matplotlib"].rcParams["backend"] = _BACKEND


def display(*values, include=None, exclude=None, metadata=None, display_id=None, raw=False, **_):
    """`IPython.display.display`, on a rank; what updates another is shown below it."""
    for value in values:
        data, about = (value, {}) if raw else _formatted(value, include, exclude)
        publish_display_data(data, {**about, **(metadata or {})})
    return DisplayHandle(display_id) if display_id is not None else None


class DisplayHandle:
    """IPython's class of that name, on a rank."""

    def __init__(self, display_id=None):
        self.display_id = display_id

    def display(self, value, **options):
        display(value, **options)

    update = display


def publish_display_data(data, metadata=None, **_):
    """IPython's function of that name, on a rank."""
    global _room
    data = {kind: value for kind, value in data.items() if kind != _WIDGET}
    size = sum(len(value) if isinstance(value, str | bytes) else len(json.dumps(value))
               for value in data.values())
    if size > _room:
        print(f"{data.get('text/plain', 'something')} is not shown: it takes {size / 1e6:.1f} MB, "
              f"and {_room / 1e6:.1f} MB are left for what this rank shows. Return it instead.")
    elif data:
        _room -= size
        number = next(_numbers)
        _send(Shown(number, data, metadata or {}))
        _write_mark(1, "shown", [number, as_text(data)[:600]])


def show_open_figures() -> None:
    """Shows and closes what `matplotlib.pyplot` has open, as a notebook does at a cell's end."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and pyplot.get_backend() == _BACKEND:
        pyplot.show()


def is_figure(value) -> bool:
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, module.Figure)


def _formatted(value, include, exclude):
    """A value as IPython would show it: data by kind, and about them."""
    if is_figure(value) and not hasattr(value, "_repr_mimebundle_"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", bbox_inches="tight")
        return {"text/plain": repr(value), "image/png": picture.getvalue()}, {}
    from IPython.core.formatters import DisplayFormatter

    return DisplayFormatter().format(value, include=include, exclude=exclude)


def _warn(stream, original):
    def showwarning(message, category, filename, lineno, file=None, line=None):
        if file is not None or sys.stderr is not stream:
            original(message, category, filename, lineno, file, line)
        else:
            place = filename, lineno
            if not is_learners(filename) and is_learners(learner_line(depth=1)[0]):
                place = learner_line(depth=1)
            _write_mark(2, "warned", [category.__name__, str(message)[:600], *place])

    return showwarning


def _write_mark(descriptor, what, value):
    with contextlib.suppress(OSError):  # closed by the rank itself
        os.write(descriptor, mark(what, value))


def _no_keyboard(*_, **__):
    raise EOFError("ranks have no keyboard, so input() and breakpoint() do not work there. Ask in "
                   "the notebook, and hand the answer to the ranks")
