"""A number in the unit that was asked for: "10 %", "3 ms", "~1500"."""

import re

_QUANTITY = re.compile(r"[~≈]? ?([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d\d?)?) ?([a-z%µ].*)?", re.I)


class NotUnderstood(ValueError):
    """The text is a question to the reader, in one line."""


def read(text: str, unit: str | None = None) -> float:
    """The number in ``text``, which may name ``unit``. Raises `NotUnderstood`."""
    found = _QUANTITY.fullmatch(text.strip().replace("−", "-"))
    if not found:
        raise NotUnderstood(f'Which number is "{text}"? Write it like {written(3, unit)}, without '
                            "commas or spaces, and with a point as in 0.5.")
    number, named, asked = float(found[1]), (found[2] or "").lower(), (unit or "").lower()
    if named not in ("", asked, asked.removesuffix("s") if len(asked) > 3 else asked):
        raise NotUnderstood(f'What is "{found[2]}" here? Write the number '
                            + (f"in {unit}." if unit else "alone."))
    if unit == "%" and not named and 0 < abs(number) < 1:
        raise NotUnderstood(f"Do you mean {number:g} % or {100 * number:g} %? Write the % sign.")
    return number


def written(value: float, unit: str | None = None) -> str:
    """``value`` with three digits or more, and its unit."""
    rounded = float(f"{value:.3g}")
    number = f"{value:,.0f}" if 1e3 <= abs(rounded) < 1e15 else f"{rounded:g}"
    return f"{number} {unit}" if unit else number
