"""Comparing what ranks returned with what was expected, and one failure with another."""

import re
from dataclasses import dataclass

import torch

from dplab.spawn import RankError

COMMUNICATED = "a collective was called"  # a fact of every attempt, known by its call log


@dataclass(frozen=True)
class AtMost:
    """An expected fact: a number of at most ``limit``; ``why`` says what exceeds it."""

    limit: float
    why: str


@dataclass(frozen=True)
class Difference:
    """The first fact that is not as expected."""

    rank: int
    fact: str
    expected: object
    got: object
    note: str = ""

    def __str__(self):
        head = f"rank {self.rank}: {self.fact} is not as expected"
        if self.note:
            head += f": {self.note}"
        if isinstance(self.expected, AtMost):
            return f"{head}\n  at most   {self.expected.limit:g}\n  got       {self.got}"
        text = f"{head}\n  expected  {_words(self.expected)}\n  got       {_words(self.got)}"
        return text + _where_most(self.expected, self.got)


def first_difference(expected, got, tolerance) -> Difference | None:
    """Of the ranks' facts, in order: the first that differs, with what can be said of it."""
    for rank, (right, found) in enumerate(zip(expected, got, strict=True)):
        for fact, value in right.items():
            if fact not in found:
                return Difference(rank, fact, value, None, "it is missing")
            if not agree(value, found[fact], tolerance):
                return Difference(rank, fact, value, found[fact], _note(value, found[fact]))
    return None


def agree(expected, got, tolerance) -> bool:
    if isinstance(expected, AtMost):
        return isinstance(got, int | float) and got <= expected.limit
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            return False
        if not expected.is_floating_point():
            return got.dtype == expected.dtype and torch.equal(got, expected)
        if not torch.isfinite(got).all():
            return torch.equal(torch.isnan(expected), torch.isnan(got)) and torch.equal(
                expected.nan_to_num(), got.nan_to_num())
        scale = expected.abs().max().item() if expected.numel() else 0.0
        return expected.numel() == 0 or (
            (got.double() - expected.double()).abs().max().item() <= tolerance * max(scale, 1e-12))
    if isinstance(expected, float) and isinstance(got, int | float):
        return abs(got - expected) <= tolerance * max(abs(expected), 1e-12)
    return type(expected) is type(got) and expected == got


def same_outcome(got, other, expected, tolerance) -> bool:
    """Whether two attempts ended alike: the same facts, or the same failure."""
    if isinstance(got, RankError) or isinstance(other, RankError):
        return (isinstance(got, RankError) and isinstance(other, RankError)
                and (got.kind, got.error) == (other.kind, other.error)
                and (got.rank == other.rank or got.kind == "raised")
                and _headline(got) == _headline(other))
    if any(mine[COMMUNICATED] != theirs[COMMUNICATED]
           for mine, theirs in zip(got, other, strict=True)):
        return False
    return all(
        fact in mine and fact in theirs and _alike(value, mine[fact], theirs[fact], tolerance)
        for mine, theirs, right in zip(got, other, expected, strict=True)
        for fact, value in right.items())


def _alike(expected, mine, theirs, tolerance):
    """Counts within their limit are alike: a detour that is allowed says nothing of a mistake."""
    if isinstance(expected, AtMost) and agree(expected, mine, 0) and agree(expected, theirs, 0):
        return True
    return agree(theirs, mine, tolerance)


def _headline(error):
    """What happened, without numbers and shapes: those are the attempt's own."""
    return re.sub(r" of \w+\[[^]]*\]|-?\d+", "", str(error).split("\n\n")[0])


def _note(expected, got):
    if got is None:
        return "it is None"
    if not isinstance(expected, torch.Tensor):
        return expected.why if isinstance(expected, AtMost) else ""
    if not isinstance(got, torch.Tensor):
        return f"it is a {type(got).__name__}, not a tensor"
    if got.shape != expected.shape:
        return f"its shape is {list(got.shape)}, not {list(expected.shape)}"
    if not expected.is_floating_point():
        return ""
    if not torch.isfinite(got).all():
        return "it holds inf or nan"
    return _factor(expected.double(), got.double())


def _factor(expected, got):
    """"it is 4 times the reference", where that is so for every element."""
    if not got.any():
        return "it is all zeros"
    index = expected.abs().argmax()
    factor = (got.flatten()[index] / expected.flatten()[index]).item()
    if abs(factor - 1) > 1e-3 and torch.allclose(got, factor * expected, rtol=1e-4, atol=1e-7):
        return f"it is {factor:.4g} times the reference"
    return ""


def _where_most(expected, got):
    """The element that differs most, where the first ones do not show it."""
    if not (isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor)
            and expected.shape == got.shape and expected.numel() > 4):
        return ""
    gap = (got.double() - expected.double()).abs().nan_to_num(torch.inf)
    place = torch.unravel_index(gap.argmax(), gap.shape)
    index = [int(number) for number in place]
    return (f"\n  most at {index}: expected {expected[place].item():.5g}, "
            f"got {got[place].item():.5g}")


def _words(value):
    if isinstance(value, torch.Tensor):
        flat = value.detach().flatten()
        shown = ", ".join(f"{number:.5g}" for number in flat[:4].tolist())
        return f"[{shown}{', …' if flat.numel() > 4 else ''}]"
    return repr(value)
