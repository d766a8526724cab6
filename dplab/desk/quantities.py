"""Numbers as people write them: "10 %", "0,1", "3 ms", "1 500", "1/8", "~5", "2x", "3 MiB"."""

import math
import re


class NotUnderstood(ValueError):
    """The text is a question to the reader, in one line."""


# Factors to the unit that has 1. A guess in one unit of a table may be asked for in another.
_SECONDS = {
    "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0,
    "ms": 1e-3, "millisecond": 1e-3, "milliseconds": 1e-3,
    "us": 1e-6, "µs": 1e-6, "microsecond": 1e-6, "microseconds": 1e-6, "ns": 1e-9,
    "min": 60.0, "minute": 60.0, "minutes": 60.0, "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "day": 86400.0, "days": 86400.0,
}
_BYTES = {"B": 1.0, "byte": 1.0, "bytes": 1.0, "bit": 1 / 8, "bits": 1 / 8}
for _power, _prefix in enumerate("kMGTP", start=1):
    _BYTES |= {f"{_prefix}B": 1e3 ** _power, f"{_prefix}bit": 1e3 ** _power / 8,
               f"{_prefix.upper()}iB": 1024.0 ** _power}
_BYTES_PER_SECOND = {f"{name}/s": factor for name, factor in _BYTES.items()}
_BYTES_PER_SECOND |= {f"{prefix}bps": _BYTES[f"{prefix}bit"] for prefix in "kMGTP"}
_PERCENT = {"%": 1.0, "percent": 1.0, "per cent": 1.0}
_TIMES = dict.fromkeys(["times", "time", "x", "×", "-fold", "fold"], 1.0)
_KINDS = (_SECONDS, _BYTES, _BYTES_PER_SECOND, _PERCENT, _TIMES)
_SCALES = {"k": 1e3, "K": 1e3, "thousand": 1e3, "M": 1e6, "million": 1e6, "G": 1e9, "billion": 1e9}

_ABOUT = re.compile(r"(?:~|≈|about|around|roughly|approx\.?|circa|ca\.?)\s*", re.IGNORECASE)
_NUMBER = r"[+-]?[\d.,](?:[\d.,'_ ]*[\d.,])?(?:e[+-]?\d+)?"
_QUANTITY = re.compile(
    rf"(?P<first>{_NUMBER})(?:\s*(?P<sign>/|\^|\*\*)\s*(?P<second>{_NUMBER}))?\s*(?P<rest>.*)",
    re.IGNORECASE)
_POWER_OF_TEN = re.compile(r"\s*[×x*·]\s*10(?:\^|\*\*)(?=[+-]?\d)")
_GROUPS = re.compile(r"\d{1,3}(?:([ '_.,])\d{3})(?:\1\d{3})*")  # digits in threes


def read(text: str, unit: str | None = None) -> float:
    """The number in ``text``, in ``unit``; raises `NotUnderstood` for one that is not clear.

    Seconds, bytes and bytes per second are converted; any other unit stands for itself. A number
    without a unit is in ``unit``.
    """
    plain = re.sub(r"\s", " ", text).strip().replace("−", "-").replace("μ", "µ").replace("’", "'")
    plain = _POWER_OF_TEN.sub("e", _ABOUT.sub("", plain, count=1) if _ABOUT.match(plain) else plain)
    found = _QUANTITY.fullmatch(plain)
    if not found:
        raise NotUnderstood(f'Which number is "{text}"? Write it like {written(3, unit)}.')
    number = _number(found["first"])
    if found["sign"]:
        number = _together(number, found["sign"], _number(found["second"]), text)
    rest = found["rest"].strip().rstrip(".")
    if unit in _PERCENT and not rest and found["sign"] == "/":
        number *= 100
    elif unit in _PERCENT and not rest and 0 < abs(number) < 1:
        raise NotUnderstood(f"Do you mean {number:g} % or {100 * number:g} %? Write the % sign.")
    number *= _factor(rest, unit)
    if not math.isfinite(number):
        raise NotUnderstood(f'Is "{text}" a number? It is too large here.')
    return number


def written(value: float, unit: str | None = None) -> str:
    """``value`` with three digits or more, and its unit."""
    rounded = float(f"{value:.3g}")
    if rounded == 0 or not math.isfinite(value) or 1e-3 <= abs(rounded) < 1e3:
        number = f"{rounded:g}"
    elif 1e3 <= abs(rounded) < 1e15:
        number = f"{value:,.0f}"
    else:
        mantissa, exponent = f"{value:.2e}".split("e")
        number = f"{float(mantissa):g}e{int(exponent)}"
    return f"{number} {unit}" if unit else number


def _number(digits):
    """The value of digits with marks between them, an exponent included."""
    sign = -1.0 if digits.startswith("-") else 1.0
    mantissa, _, exponent = digits.lstrip("+-").lower().partition("e")
    groups = _GROUPS.match(mantissa)
    marks = re.findall(r"[ '_.,]", mantissa)
    if re.fullmatch(r"[1-9]\d{0,2},\d{3}", mantissa):
        without, point = mantissa.replace(",", ""), mantissa.replace(",", ".")
        raise NotUnderstood(f'Does "{mantissa}" mean {without} or {float(point):g}? Write it '
                            "without the comma.")
    if groups and (len(marks) > 1 or groups[1] not in ".,"):
        mantissa = groups[0].replace(groups[1], "") + mantissa[groups.end():]
    mantissa = mantissa.replace(",", ".")
    try:
        return sign * float(f"{mantissa}e{exponent or 0}".replace("_", "?"))
    except ValueError:
        raise NotUnderstood(f'Which number is "{digits}"? Write it like 1500 or 0.5.') from None


def _together(first, sign, second, text):
    try:
        return first / second if sign == "/" else math.pow(first, second)
    except (ArithmeticError, ValueError):
        raise NotUnderstood(f'Which number is "{text}"? It cannot be computed.') from None


def _factor(rest, unit):
    """What a number that is followed by ``rest`` has to be multiplied by to be in ``unit``."""
    if not rest:
        return 1.0
    kind = next((table for table in _KINDS if unit in table), {unit: 1.0} if unit else {})
    scale, _, name = rest.partition(" ")
    if rest not in kind and scale in _SCALES and kind.get(unit, 1) == 1:  # no 3 million ms
        return _SCALES[scale] * _factor(name.strip(), unit)
    if kind in (_BYTES, _BYTES_PER_SECOND) and re.fullmatch("[KMGTP]b(/s)?", rest):
        byte, bit = rest.replace("b", "B"), rest.replace("b", "bit")
        raise NotUnderstood(f"Does {rest} mean bytes or bits? Write {byte} or {bit}.")
    known = {_folded(name): factor for name, factor in kind.items()}
    if (factor := kind.get(rest, known.get(_folded(rest)))) is None:
        raise NotUnderstood(f'What is "{rest}" here? ' + (
            f"Write the number in {unit}." if unit else "Write the number alone."))
    return factor / kind[unit]


def _folded(name):
    """In lower case, and without the s of a plural."""
    name = name.casefold()
    return name.removesuffix("s") if len(name) > 3 else name
