"""A number in the unit that was asked for: "10 %", "0,1", "3 ms", "1 500", "~5"."""

import math
import re

_QUANTITY = re.compile(r"(?:~|≈|about )? ?([+-]?[\d.,' _]*\d[.,]?(?:e[+-]?\d+)?) ?(.*)",
                       re.IGNORECASE)
_IN_THREES = re.compile(r"[+-]?\d{1,3}(?:([ '_.,])\d{3})(?:\1\d{3})*(?!\d)")


class NotUnderstood(ValueError):
    """The text is a question to the reader, in one line."""


def read(text: str, unit: str | None = None) -> float:
    """The number in ``text``, which may name ``unit``. Raises `NotUnderstood`.

    A comma is a decimal mark, and groups of three digits may be marked off.
    """
    plain = re.sub(r"\s+", " ", text).strip().replace("−", "-")
    found = _QUANTITY.fullmatch(plain)
    if not found:
        raise NotUnderstood(f'Which number is "{text}"? Write it like {written(3, unit)}.')
    digits, rest = found[1], found[2].rstrip(".").lower()
    if re.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}", digits):
        raise NotUnderstood(f'Does "{digits}" mean {digits.replace(",", "")} or '
                            f"{float(digits.replace(',', '.')):g}? Write it without the comma.")
    groups = _IN_THREES.match(digits)
    if groups and (groups[1] not in ".," or digits.count(groups[1]) > 1
                   or re.search("[.,]", digits[groups.end():])):
        digits = groups[0].replace(groups[1], "") + digits[groups.end():]
    try:
        number = float(digits.replace(",", ".").replace("_", "?"))
    except ValueError:
        raise NotUnderstood(f'Which number is "{text}"? Write it like 1500 or 0.5.') from None
    if not math.isfinite(number):
        raise NotUnderstood(f'Is "{text}" a number? It is too large here.')
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
