"""What a value is made of: how often each part that could be in it is, by least squares.

Many values in data-parallel training are linear in what the ranks bring: sums over ranks of
gradients, of chunks, of losses. So one can solve for what an attempt did, without a list of what it
might have done. What is said here tells what is in a value, and nothing about how it got there.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch

TOLERANCE = 1e-5  # of float32's rounding, relative to the largest
INDEPENDENT = 1e-3  # the least singular value beside the largest: less would enlarge rounding
NEAR = 1e-3  # of how often a part is in a value, relative to how often it should be

Times = Mapping[str, float]  # how often each part is in a value, by the part's name


@dataclass(frozen=True)
class Held:
    """An expected fact: how often each part is in a value. Got is what `made_of` says of it."""

    times: Times
    groups: Mapping[str, Iterable[str]] = field(default_factory=dict)  # as in `said`


def made_of(value, parts: Mapping[str, torch.Tensor]) -> dict[str, float] | None:
    """How often each part is in ``value``, a tensor as long as each of them.

    None where that cannot be known: it is no sum of these parts, a part is a sum of others, or they
    are as many as its elements, so that anything would be a sum of them.
    """
    if not isinstance(value, torch.Tensor) or value.numel() <= len(parts):
        return None
    columns = [part.detach().flatten().double() for part in parts.values()]
    lengths = torch.stack([column.norm() for column in columns]).clamp(min=1e-300)
    basis = torch.stack(columns, dim=1) / lengths
    target = value.detach().flatten().double()
    if len(basis) != len(target) or not torch.isfinite(target).all():
        return None
    solved = torch.linalg.lstsq(basis, target[:, None], rcond=INDEPENDENT, driver="gelsd")
    if solved.rank < basis.shape[1]:
        return None
    found = solved.solution[:, 0]
    size = max(column.abs().max() for column in columns)
    if (basis @ found - target).abs().max() > TOLERANCE * size:
        return None
    return dict(zip(parts, (found / lengths).tolist(), strict=True))


def fewest(values: Sequence[float], terms: Mapping[str, Sequence[float]],
           most: int = 4) -> dict[str, float] | None:
    """The fewest terms of which all values are sums, and how often each of them is there.

    ``values``: a number by case; ``terms``: the same of each term. There may be more terms than
    cases: only sums of at most ``most`` of them are tried, and fewer than there are cases. None
    where there is no such sum, or more than one that is as short. Nobody writes 39/41 of a term, so
    each is there a number of times that is a fraction of small numbers.
    """
    target = torch.tensor(values, dtype=torch.float64)
    columns = {name: torch.tensor(term, dtype=torch.float64) for name, term in terms.items()
               if sum(map(bool, term)) > 1}  # that of one case would explain whatever is there
    if not torch.isfinite(target).all():
        return None
    for count in range(1, min(most, len(target) - 1) + 1):
        fitting = []
        for names in itertools.combinations(columns, count):
            basis = torch.stack([columns[name] for name in names], dim=1)
            scale = target.abs().clamp(min=1e-300)  # each case counts alike, be it small or large
            solved = torch.linalg.lstsq(basis / scale[:, None], target / scale, rcond=1e-9,
                                        driver="gelsd")
            off = (basis @ solved.solution - target).abs() / scale
            if (solved.rank == count and off.max() <= TOLERANCE
                    and all(map(_is_simple, solved.solution.tolist()))):
                fitting.append(dict(zip(names, solved.solution.tolist(), strict=True)))
        if fitting:
            return fitting[0] if len(fitting) == 1 else None
    return None


def _is_simple(number):
    fraction = Fraction(number).limit_denominator(20)
    return abs(fraction.numerator) <= 20 and abs(fraction - number) <= 1e-6 * abs(number)


def said(found: Times | None, right: Times, groups: Mapping[str, Iterable[str]] | None = None,
         ) -> str:
    """What is in a value and should not be, or the other way round; "" where that is not known.

    ``groups``: names for several parts, which stand for them where all are there equally often:
    ``{"each of rank 0's samples": […]}``. The first that fits is taken.
    """
    if found is None:
        return ""
    near = NEAR * max(map(abs, right.values()))
    right = {name: times for name, times in right.items() if abs(times) > near}
    small = min(near, NEAR * max(map(abs, found.values()), default=0.0) or near)
    held = {name: times for name, times in found.items() if abs(times) > small}
    if not held:
        return "none of the parts is in it"
    missing = [name for name in right if name not in held]
    strange = [name for name in held if name not in right]
    unequal = [name for name in held if name in right and abs(held[name] - right[name]) > near]
    if not (missing or strange or unequal):
        return ""
    most_differ = len(right) > 2 and len(missing + unequal) > len(right) / 2
    if strange or most_differ:
        return f"it holds {_listed(held, groups)}, and should hold {_listed(right, groups)}"
    if len(held) == 1 and not unequal:
        return f"it holds {_and(held)} alone"
    few = [f"{_and(missing)} {'is' if len(missing) == 1 else 'are'} missing"] if missing else []
    few += [f"{name} is in it {_often(held[name] / right[name])}"
            + (" as often as it should be" if abs(right[name] - 1) > NEAR else "")
            for name in unequal]
    return " and ".join(few)


def _listed(times, groups):
    """Parts by how often they are there: "1/2 of A and B, and twice C"."""
    by_times: dict[float, list[str]] = {}
    for name, number in _grouped(times, groups or {}).items():
        by_times.setdefault(number, []).append(name)
    return ", and ".join(f"{_share(number)}{_and(names)}" for number, names in by_times.items())


def _grouped(times, groups):
    """The same with rounded times, and with the name of a group in place of its parts."""
    left = {name: float(f"{number:.4g}") for name, number in times.items()}
    grouped = {}
    for group, members in groups.items():
        if len({left.get(name) for name in members}) == 1 and all(name in left for name in members):
            grouped[group] = next(left[name] for name in members)
            left = {name: number for name, number in left.items() if name not in set(members)}
    return grouped | left


def _share(number):
    if abs(number - 1) < NEAR:
        return ""
    if abs(number - 2) < NEAR:
        return "twice "
    whole = number > 0 and abs(number - round(number)) < NEAR
    return f"{_number(number)} {'times' if whole else 'of'} "


def _often(number):
    return "twice" if abs(number - 2) < NEAR else f"{_number(number)} times"


def _number(number):
    fraction = Fraction(number).limit_denominator(24)
    near = abs(fraction - number) < NEAR * abs(number)
    return str(fraction).replace("-", "−") if near else f"{number:.3g}".replace("-", "−")


def _and(names):
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
