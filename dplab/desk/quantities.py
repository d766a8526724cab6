"""A number in the unit that was asked for: "10 %", "3 ms", "~1500"."""

import math
import re

_QUANTITY = re.compile(r"(?:~|≈|about )? ?([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?) ?([a-z%µ].*)?",
                       re.IGNORECASE)


class NotUnderstood(ValueError):
    """The text is a question to the reader, in one line."""


def read(text: str, unit: str | None = None) -> float:
    """The number in ``text``, which may name ``unit``. Raises `NotUnderstood`."""
    found = _QUANTITY.fullmatch(text.strip().replace("−", "-"))
    if not found or not math.isfinite(number := float(found[1])):
        raise NotUnderstood(f'Which number is "{text}"? Write it like {written(3, unit)}, without '
                            "commas or spaces, and with a point as in 0.5.")
    rest = (found[2] or "").rstrip(".").lower()
    name = (unit or "").lower()
    singular = name.removesuffix("s") if len(name) > 3 else name
    if rest not in {"", name, singular} | ({"percent"} if unit == "%" else set()):
        raise NotUnderstood(f'What is "{found[2]}" here? Write the number '
                            + (f"in {unit}." if unit else "alone."))
    if unit == "%" and not rest and 0 < abs(number) < 1:
        raise NotUnderstood(f"Do you mean {number:g} % or {100 * number:g} %? Write the % sign.")
    return number


def written(value: float, unit: str | None = None) -> str:
    """``value`` with three digits or more, and its unit."""
    rounded = float(f"{value:.3g}")
    number = f"{value:,.0f}" if 1e3 <= abs(rounded) < 1e15 else f"{rounded:g}"
    return f"{number} {unit}" if unit else number
