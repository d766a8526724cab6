"""Comparing what ranks returned with what was expected, and one failure with another."""

import itertools
import numbers
import re
from dataclasses import dataclass, replace

import torch

from dplab import RankError
from dplab.checks.composition import NEAR, Held, made_of, said

_NONE = "it is None"
MISSING = object()  # in the place of a fact that is not there
COMMUNICATED = "a collective was called"  # a fact of every attempt, known by its call log
BESIDE = "shown beside"  # among the facts, if there: by fact, a line to show where it is wrong


@dataclass(frozen=True)
class AtMost:
    """An expected fact: a number of at most ``limit``; ``why`` says what exceeds it.

    Two attempts that exceed it are alike if they do by as much; or, where that is not ``exact``,
    both by however much.
    """

    limit: float
    why: str
    exact: bool = True


@dataclass(frozen=True)
class Difference:
    """The first fact that is not as expected."""

    rank: int
    fact: str
    expected: object
    got: object
    note: str = ""
    factor: float | None = None  # how many times the expected it is, where that is so throughout
    beside: str = ""  # a further line to show

    def __str__(self):
        if self.expected is True and self.got is False and self.fact.startswith("that "):
            return _not_so(self.fact)
        head = f"{self.fact} is not as expected"
        if self.note:
            head += f": {self.note}"
        if isinstance(self.expected, Held):
            return head
        if isinstance(self.expected, AtMost):
            got = f"{self.got:,.10g}" if isinstance(self.got, int | float) else _words(self.got)
            return f"{head}\n  at most   {self.expected.limit:,.10g}\n  got       {got}"
        expected, got = _words(self.expected), _words(self.got)
        where = _where_most(self.expected, self.got)
        rows = f"\n  expected  {expected}\n  got       {got}"
        text = head + (where if where and expected == got else rows + where)
        return f"{text}\n{self.beside}" if self.beside else text


def first_difference(expected, got, tolerance) -> Difference | None:
    """Of the ranks' facts, in order: the first that differs, with what can be said of it."""
    for rank, fact, right, found in _wrong(expected, got, tolerance):
        if found is MISSING:
            return Difference(rank, fact, right, None, "it is missing")
        note, factor = _note(right, found)
        if note == _NONE and fact.startswith("the gradient"):
            note += ": no `backward` reached it, or it was cleared"
        note = note or _beside_other_ranks([each.get(fact) for each in expected],
                                           [each.get(fact) for each in got], rank, tolerance)
        beside = got[rank].get(BESIDE, {}).get(fact, "")
        return Difference(rank, fact, right, found, note, factor, beside)
    return None


def wrong_facts(expected, got, tolerance) -> set[tuple[int, str]]:
    """Which facts are not as expected, each with its rank."""
    return {(rank, fact) for rank, fact, *_ in _wrong(expected, got, tolerance)}


def _wrong(expected, got, tolerance):
    """Each fact that is not as expected: its rank, its name, what it should be, and what it is."""
    for rank, (right, found) in enumerate(zip(expected, got, strict=True)):
        for fact, value in right.items():
            if fact not in found or not agree(value, found[fact], tolerance):
                yield rank, fact, value, found.get(fact, MISSING)


def other_demands(first: Difference, expected, got, tolerance) -> list[str]:
    """A line for each demand that is not met either on that rank, two at most.

    Demands are limits, what is or is not so, and that there be None. Other facts are left out: one
    mistake may make all numbers wrong.
    """
    lines = []
    for rank, fact, value, found in _wrong(expected, got, tolerance):
        if rank != first.rank or fact == first.fact or found is MISSING:
            continue
        if isinstance(value, AtMost):
            lines.append(f"{fact} is {_words(found)}: {value.why}")
        elif value is True and fact.startswith("that "):
            lines.append(_not_so(fact))
        elif value is None:
            lines.append(f"{fact} is {_words(found)}, and should be None")
    return [f"Besides, {line}." for line in lines[:2]]


def agree(expected, got, tolerance) -> bool:
    if isinstance(expected, AtMost):
        return isinstance(got, int | float) and got <= expected.limit
    if isinstance(expected, Held):  # what cannot be known is not held against anybody
        return not said(got, expected.times)
    if isinstance(expected, dict) and isinstance(got, dict):  # both of attempts
        return expected.keys() == got.keys() and all(
            abs(got[name] - times) <= NEAR for name, times in expected.items())
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
    if isinstance(expected, float):
        number = _number(got)
        return number is not None and (
            abs(number - expected) <= tolerance * max(abs(expected), 1e-12))
    if isinstance(expected, int) and isinstance(got, float):
        return not isinstance(expected, bool) and expected == got
    return type(expected) is type(got) and expected == got


def _not_so(fact):
    return f"the exercise asks {fact}, and that is not so here"


def _number(value):
    """A number as a float, one of NumPy or in a tensor of one element too; None for others."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else None


@dataclass(frozen=True)
class Overlap:
    """What a known mistake explains of an attempt's outcome at one world size.

    ``first``: the attempt's first wrong fact; ``explained``: how many of its wrong facts;
    ``unexplained``: how many it does not; ``contradicted``: it gets a fact wrong which the attempt
    gets right, so it is not the attempt's mistake.
    """

    first: bool
    explained: int = 0
    unexplained: int = 0
    contradicted: bool = False


def overlap(expected, mine, theirs, tolerance, *, communicates=False) -> Overlap:
    """Between an attempt's outcome, ``mine``, and that of a known mistake.

    Each is the ranks' facts, or a failure; the mistake's is None if it fails in whatever way.
    ``communicates``: whether it matters that a collective was called: a mistake of who calls none
    is not that of an attempt which does.
    """
    if isinstance(mine, RankError):
        same = isinstance(theirs, RankError) and _same_failure(mine, theirs)
        return Overlap(same, int(same), int(not same))
    if not isinstance(theirs, list):
        return Overlap(False, contradicted=True)
    wrong = list(_wrong(expected, mine, tolerance))
    contradicted = bool(wrong_facts(expected, theirs, tolerance)
                        - {(rank, fact) for rank, fact, *_ in wrong})
    differ = [own[COMMUNICATED] for own, other in zip(mine, theirs, strict=True)
              if communicates and own[COMMUNICATED] != other[COMMUNICATED]]
    alike = [_alike(right, own, theirs[rank].get(fact, MISSING), tolerance)
             for rank, fact, right, own in wrong]
    return Overlap(bool(alike) and alike[0], sum(alike), alike.count(False) + bool(differ),
                   contradicted or any(differ))


def _same_failure(mine, theirs):
    return ((mine.kind, mine.error) == (theirs.kind, theirs.error)
            and (mine.rank == theirs.rank or mine.kind == "raised")
            and _headline(mine) == _headline(theirs))


def _alike(expected, mine, theirs, tolerance):
    """Whether two values are alike, of which the first is wrong."""
    if mine is MISSING or theirs is MISSING:
        return mine is theirs
    if isinstance(expected, AtMost) and not expected.exact:
        return not agree(expected, theirs, tolerance)
    return agree(theirs, mine, tolerance)


def _headline(error):
    """What happened, without numbers, shapes and addresses: those are the attempt's own."""
    return re.sub(r" of \w+\[[^]]*\]|0x[0-9a-f]+|-?\d+(\.\d+)?", "", str(error).split("\n\n")[0])


def _note(expected, got):
    """What can be said of the two alone, and how many times the expected it is, or None."""
    if isinstance(expected, float) and _number(got) is not None:
        expected, got = (torch.tensor([_number(each)]).double() for each in (expected, got))
    if got is None:
        return _NONE, None
    if isinstance(expected, Held):
        return said(got, expected.times, expected.groups), None
    if not isinstance(expected, torch.Tensor):
        return expected.why if isinstance(expected, AtMost) else "", None
    if not isinstance(got, torch.Tensor):
        return f"it is {_with_article(type(got).__name__)}, not a tensor", None
    if got.shape != expected.shape:
        return f"its shape is {list(got.shape)}, not {list(expected.shape)}", None
    if not expected.is_floating_point():
        words = f"its dtype is {got.dtype}, not {expected.dtype}".replace("torch.", "")
        return words if got.dtype != expected.dtype else "", None
    if not torch.isfinite(got).all():
        return "it holds inf or nan", None
    if got.numel() > 1 and not got.any():
        return "it is all zeros", None
    factor = _factor(expected.double(), got.double())
    if factor is not None:
        return f"it is {factor:.4g} times the reference", factor
    if agree(expected.flatten().sort().values, got.flatten().sort().values, 1e-5):
        return "it has the right numbers, in another order", None
    if got.numel() == 1 and got.item().is_integer():
        return "", None  # a single whole number has few digits in any dtype
    for narrow in (torch.bfloat16, torch.float16):
        if _is_rounded(expected, got, narrow):
            return f"its numbers have the digits of a {str(narrow).removeprefix('torch.')}", None
    return "", None


def _with_article(noun):
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _beside_other_ranks(expected, got, rank, tolerance):
    """What one rank's tensor is, seen beside those of the others."""
    right, found = expected[rank], got[rank]
    if not isinstance(right, torch.Tensor) or not isinstance(found, torch.Tensor):
        return ""
    if all(agree(right, each, tolerance) for each in expected):
        alike = all(agree(found, each, tolerance) for each in got)
        return "" if alike else "the ranks differ, and should all have the same"
    for other, value in enumerate(expected):
        if found.any() and agree(value, found, tolerance):
            return f"it is what rank {other} should have"
    return ""


def _factor(expected, got):
    """How many times the reference it is, if that is so for every element and not just once."""
    index = expected.abs().argmax()
    factor = (got.flatten()[index] / expected.flatten()[index]).item()
    if got.numel() == 1 and not (_is_whole(factor) or (factor and _is_whole(1 / factor))):
        return None  # a single number is always some multiple
    if (factor and abs(factor - 1) > 1e-3
            and torch.allclose(got, factor * expected, rtol=1e-4, atol=1e-7)):
        return factor
    return None


def _is_rounded(expected, got, dtype):
    scale = expected.abs().max()
    return ((got - expected).abs().max() <= 0.02 * scale
            and torch.equal(got, got.to(dtype).to(got.dtype))
            and not torch.equal(expected, expected.to(dtype).to(expected.dtype)))


def _is_whole(number):
    return 0.5 < abs(number) < 1e9 and abs(number - round(number)) <= 1e-3


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
        shown = ", ".join(f"{number:.5g}" if isinstance(number, float) else str(number)
                          for number in flat[:4].tolist())
        return f"[{shown}{', …' if flat.numel() > 4 else ''}]"
    return f"{value:.8g}" if isinstance(value, float) else repr(value)


def explained(difference: Difference, alone, quantities, parts, tolerance) -> Difference:
    """The same difference, and more said of it where more is known.

    alone: the facts that one process would expect of rank 0 alone. quantities: numbers by name.
    parts: by fact, what each rank contributes to the sum.
    """
    notes = [difference.note] if difference.note else []
    if difference.factor is not None and (made := _made_of(difference.factor, quantities)):
        notes[0] += f" ({made})"
    of_one = alone.get(difference.fact)
    if difference.factor is None and (
            sum_of := _sum_of(difference, parts.get(difference.fact, ()))):
        notes = [sum_of]
    elif (difference.factor is None and isinstance(of_one, torch.Tensor)
          and agree(of_one, difference.got, tolerance)
          and not agree(difference.expected, of_one, tolerance)):
        notes.append("it is what rank 0 alone would have")
    return replace(difference, note="; ".join(notes))


def _made_of(factor, quantities):
    """"1 / the micro-batches", if the factor is made of so few numbers; else nothing.

    Where two quantities are equal here, it may be either.
    """
    numbers = [(1, "1"), *((value, name) for name, value in quantities.items())]
    ranks = quantities.get("the ranks", 1)
    for more, words in ((1, "{} / {}"), (1 / ranks, "{} / ({} · the ranks)"),
                        (ranks, "the ranks · {} / {}")):
        made = [words.format(dividend, divisor).removesuffix(" / 1")
                for (below, divisor), (above, dividend) in itertools.product(numbers, numbers)
                if abs(more * above / below - factor) <= 1e-4 * abs(factor)]
        if made:
            return ", or ".join(made[:2])
    return ""


def _sum_of(difference, parts):
    """What is in the tensor and what should be, as "rank 1's part is missing"; "" if unknown.

    Where that is not known of the whole, it may be known of a chunk.
    """
    got, right = difference.got, difference.expected
    if not parts or not isinstance(got, torch.Tensor) or got.shape != right.shape:
        return ""
    if not isinstance(parts, dict):
        parts = {f"rank {rank}'s part": part for rank, part in enumerate(parts)}
    if words := _held(got, right, parts):
        return words
    chunks = [tensor.flatten().tensor_split(len(parts))
              for tensor in (got, right, *parts.values())]
    for chunk, (mine, its, *of_parts) in enumerate(zip(*chunks, strict=True)):
        if words := _held(mine, its, dict(zip(parts, of_parts, strict=True))):
            return f"in chunk {chunk}, {words}"
    return ""


def _held(got, right, parts):
    times = made_of(right, parts)
    return said(made_of(got, parts), times) if times else ""
