"""What `predict` asks of its arguments."""

from collections.abc import Collection
from numbers import Integral
from typing import Any

DERIVED: Any = None
"""The default of a field that, where it is not given, is made from the others."""


def whole(value, name: str) -> int:
    """``value`` as an int: TypeError for no integer (or a bool), ValueError below 1."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is an integer, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} is at least 1, not {value}")
    return int(value)


def one_of(name, allowed: Collection[str], kind: str) -> str:
    """``name``, which is one of ``allowed``: else ValueError, with the names that there are."""
    if name not in allowed:
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(map(repr, allowed))}")
    return name
