"""The stack that the reader builds, from send to ZeRO-3: how its parts fit, and short versions.

``python -m dplab.exercises.stack`` prints the table. `PARTS` is the table, `build` makes the parts.
"""

import inspect
from collections.abc import Callable, Mapping

from dplab.exercises.stack.table import EVERY_PART, PARTS, Part

__all__ = ["EVERY_PART", "PARTS", "Part", "build"]


def build(own: Mapping[str, Callable] | None = None) -> dict[str, Callable]:
    """Every part by slug: those of ``own``, and for the others the course's, which call those.

    So the course's ZeRO-3 runs on the reader's ring. ``own``: functions and classes by slug.
    Raises ValueError for a slug that is no part's.
    """
    own = own or {}
    if unknown := own.keys() - {part.slug for part in PARTS}:
        raise ValueError(f"no part of the stack is called {', '.join(sorted(unknown))}; they are "
                         f"called {', '.join(part.slug for part in PARTS)}")
    # A part finds the others among its globals, so each of them is defined anew, beside the others.
    names = dict(vars(inspect.getmodule(PARTS[0].short)))
    for part in PARTS:
        if part.slug in own:
            names[part.name] = own[part.slug]
        else:
            exec(_code_of(part.short), names)
    return {part.slug: names[part.name] for part in PARTS}


def _code_of(function):
    """Its definition, compiled so that an error shows the line in the file that it comes from."""
    lines, first = inspect.getsourcelines(function)
    return compile("\n" * (first - 1) + "".join(lines), inspect.getsourcefile(function), "exec")
