"""Exercise 0.1: four puzzles, one call each."""

import re

import torch
import torch.distributed as dist

from dplab import RankError
from dplab.checks.compare import AtMost, agree
from dplab.checks.exercise import AT_LEAST, Exercise, used_result
from dplab.checks.mistakes import Slip
from dplab.measure import CallLog


def one_call_each(puzzle, x, y):
    if puzzle == "A":
        dist.broadcast(x, src=2)
        return x
    if puzzle == "B":
        dist.all_gather_single(y, x)
        return y
    if puzzle == "C":
        dist.reduce_scatter_single(y, x)
        return y
    if puzzle == "D":
        dist.all_to_all_single(y, x)
        return y


def one_call_each_stub(puzzle, x, y):
    if puzzle == "A":
        return None
    if puzzle == "B":
        return None
    if puzzle == "C":
        return None
    if puzzle == "D":
        return None

_RIGHT = {"A": "dist.broadcast(x, src=2)\n        return x",
         "B": "dist.all_gather_single(y, x)\n        return y",
         "C": "dist.reduce_scatter_single(y, x)\n        return y",
         "D": "dist.all_to_all_single(y, x)\n        return y"}


def _said(puzzle, why, *calls):
    """Each of ``calls`` in place of the right one, and the tensor that is returned below it."""
    ways = ({_RIGHT[puzzle]: call.replace("; ", "\n").replace(" > ", "\nreturn ")}
            for call in calls)
    return Slip(f"Puzzle {puzzle}: {why}", *ways)

_UNFILLED = ("`y` is still all zeros, so your call did not fill it. A call with one "
             "tensor overwrites that tensor; a call with two fills the first.")

_RETURNED_X = ("you returned `x`, which still holds this rank's own numbers. The call "
               "has filled `y`.")

_SWAPPED = ("the tensor to be filled comes first, and the tensor that this rank gives comes "
            "second.")

_NONE = ("you make a call, and return nothing. Below the call, return `x` or `y`, whichever the "
         "call has filled.")

_INSTEAD = (
    *(_said("A", f"you sent rank {rank}'s numbers to everyone. The numbers on the right are tens. "
                 "Whose are those? `src` names that rank.", f"dist.broadcast(x, src={rank}) > x")
      for rank in (0, 1, 3)),
    _said("A", "you added the numbers of all ranks. On the right stand the numbers of one rank "
               "alone.", "dist.all_reduce(x) > x"),
    _said("A", "each rank has one number of every rank. On the right stand four numbers of one "
               "rank.", "dist.all_to_all_single(y, x) > y"),
    _said("A", "an all-gather puts the numbers of all ranks side by side, and that is sixteen. On "
               "the right stand four numbers of one rank.",
          "dist.all_gather_single(y, x) > y", "dist.all_gather_single(y, x) > x",
          "dist.all_gather_single(x, y) > x"),
    _said("A", "a reduce-scatter adds numbers up. On the right stand the numbers of one rank "
               "alone.", "dist.reduce_scatter_single(y, x) > y",
          "dist.reduce_scatter_single(y, x) > x", "dist.reduce_scatter_single(x, y) > x"),
    _said("A", "you returned zeros. A call with one tensor overwrites that tensor, `x`, and leaves "
               "`y` as it is.", "dist.broadcast(x, src=2) > y", "dist.all_reduce(x) > y"),
    _said("A", "each rank still has its own numbers. Nothing was sent.", "pass > x"),
    _said("A", "you make a call, and return this rank's own numbers: the call has not changed `x`. "
               "One with a single tensor overwrites that tensor.",
          "dist.all_to_all_single(y, x) > x", "dist.broadcast(y, src=2) > x"),
    *(_said("A", f"you put a sum on rank {rank} alone. On the right every rank has the numbers of "
                 "one rank.", f"dist.reduce(x, dst={rank}) > x") for rank in range(4)),

    _said("B", "you added the four numbers. On the right they stand side by side.",
          "dist.all_reduce(x) > x"),
    *(_said("B", f"every rank has rank {rank}'s number. On the right every rank has the numbers of "
                 "all four.", f"dist.broadcast(x, src={rank}) > x") for rank in range(4)),
    _said("B", "a reduce-scatter adds tensors up and cuts the sum into parts. On the right nothing "
               "is added and nothing is cut.", "dist.reduce_scatter_single(y, x) > y"),
    _said("B", "an all-to-all cuts each rank's tensor into four parts, one for each rank. Here a "
               "rank has one number, and all ranks get it.", "dist.all_to_all_single(y, x) > y"),
    _said("B", "only rank 0 has all four numbers. On the right every rank has them.",
          "dist.gather(x, list(y.split(1)) if dist.get_rank() == 0 else None, dst=0) > y"),
    _said("B", _SWAPPED, "dist.all_gather_single(x, y) > x", "dist.all_gather_single(x, y) > y"),
    _said("B", "you returned `x`, which still holds this rank's own number. The call fills `y`.",
          "dist.all_gather_single(y, x) > x"),
    _said("B", _UNFILLED, "dist.all_reduce(x) > y", "dist.broadcast(x, src=0) > y"),
    _said("B", "you returned this rank's own number. Nothing was sent.", "pass > x"),
    *(_said("B", f"you put a sum on rank {rank} alone. On the right nothing is added, and every "
                 "rank has all four numbers.", f"dist.reduce(x, dst={rank}) > x")
      for rank in range(4)),

    _said("C", "every rank has all four sums. On the right each rank has one of them.",
          "dist.all_reduce(x) > x"),
    _said("C", "the number is right. But you gave every rank all four sums, and each rank threw "
               "three of them away. One call leaves only the one sum, in `y`.",
          "dist.all_reduce(x); rank = dist.get_rank() > x[rank : rank + 1]"),
    _said("C", "the number is right, though not as a tensor of one element. And you gave every "
               "rank all four sums, of which each threw three away. One call leaves only the one "
               "sum, in `y`.", "dist.all_reduce(x) > x[dist.get_rank()]"),
    _said("C", "these are rank 0's numbers alone. On the right each number is a sum over all "
               "ranks.",
          "dist.scatter(y, list(x.split(1)) if dist.get_rank() == 0 else None, src=0) > y"),
    *(_said("C", f"you put all four sums on rank {rank}. On the right each rank has one of them.",
            f"dist.reduce(x, dst={rank}) > x") for rank in range(4)),
    _said("C", _SWAPPED, "dist.reduce_scatter_single(x, y) > y",
          "dist.reduce_scatter_single(x, y) > x"),
    _said("C", "an all-gather adds nothing. On the right each number is a sum over all ranks.",
          "dist.all_gather_single(y, x) > y"),
    _said("C", "an all-to-all adds nothing. On the right each number is a sum over all ranks.",
          "dist.all_to_all_single(y, x) > y"),
    _said("C", _UNFILLED, "dist.all_reduce(x) > y", "dist.reduce(x, dst=0) > y"),
    _said("C", "you returned `x`, which still holds this rank's own numbers.", "pass > x"),
    _said("C", _RETURNED_X, "dist.reduce_scatter_single(y, x) > x"),
    *(_said("C", f"every rank has rank {rank}'s four numbers. On the right each rank has one "
                 "number, a sum over all ranks.", f"dist.broadcast(x, src={rank}) > x")
      for rank in range(4)),

    _said("D", "you returned this rank's own numbers. Nothing was sent.", "pass > x"),
    _said("D", _RETURNED_X, "dist.all_to_all_single(y, x) > x"),
    _said("D", "the numbers are right. But you gave every rank all sixteen numbers, and each rank "
               "threw twelve of them away. One call leaves only the four, in `y`.",
          "everything = torch.empty(16, dtype=x.dtype); dist.all_gather_single(everything, x)"
          " > everything.view(4, 4)[:, dist.get_rank()]"),
    _said("D", "you returned zeros. Either your call did not fill `y`, or it sent `y`. The tensor "
               "to be filled comes first, and the tensor that this rank gives second.",
          "dist.all_to_all_single(x, y) > x", "dist.all_to_all_single(x, y) > y",
          "dist.all_reduce(x) > y"),
    _said("D", "you added the numbers. On the right no number is a sum.", "dist.all_reduce(x) > x"),
    _said("D", "an all-gather gives every rank the same sixteen numbers. On the right each rank "
               "has four, and no two ranks have the same four.", "dist.all_gather_single(y, x) > y",
          "dist.all_gather_single(x, y) > x"),
    _said("D", "a reduce-scatter adds numbers up. On the right no number is a sum.",
          "dist.reduce_scatter_single(y, x) > y", "dist.reduce_scatter_single(x, y) > x"),
    *(_said("D", f"every rank has rank {rank}'s four numbers. On the right no two ranks have the "
                 "same.", f"dist.broadcast(x, src={rank}) > x") for rank in range(4)),
    *(_said("D", f"you put a sum on rank {rank} alone. On the right no number is a sum.",
            f"dist.reduce(x, dst={rank}) > x") for rank in range(4)),
)


class OneCallEach(Exercise):
    number = "0.1"
    title = "Four puzzles, one call each"
    minutes = 5
    world_sizes = (4,)
    hints = (
        "Read the digits on the right. Does each rank have numbers of one rank, of all ranks, or "
        "sums? Is it the same on every rank?",
        "Start with C. Which of the four sums does each rank keep, and which word in the six names "
        "says that a tensor is cut up, one part for each rank?",
        "A: `broadcast`, and `src` is the rank whose numbers all have. B: `all_gather_single`. "
        "C: `reduce_scatter_single`. D: `all_to_all_single`. The last three fill `y`.",
    )
    solution = staticmethod(one_call_each)
    stub = staticmethod(one_call_each_stub)
    slips = _INSTEAD

    def trial(self, attempt):
        facts = {}
        for puzzle in "ABCD":
            x, after = _before(puzzle, dist.get_rank()), _after(puzzle, dist.get_rank())
            y = torch.zeros_like(after)
            with CallLog() as log:
                try:
                    answer = attempt(puzzle, x, y)
                except (RuntimeError, ValueError) as error:
                    # The same error in another puzzle is another mistake.
                    error.args = (f"in puzzle {puzzle}: {error}",)
                    raise
            facts |= {f"what puzzle {puzzle} leaves": answer,
                      f"that puzzle {puzzle} makes a call": log.count() > 0,
                      f"that puzzle {puzzle} returns `x` or `y` itself":
                          answer is None or answer is x or answer is y,
                      f"the number of calls in puzzle {puzzle}": log.count()}
        return facts

    def expected(self, world_size):
        return [{fact: right for puzzle in "ABCD" for fact, right in (
            (f"what puzzle {puzzle} leaves", _after(puzzle, rank)),
            (f"that puzzle {puzzle} makes a call", True),
            (f"that puzzle {puzzle} returns `x` or `y` itself", True),
            (f"the number of calls in puzzle {puzzle}", AtMost(1, "one call is enough")))}
            for rank in range(world_size)]

    def explanation(self, attempt, got, world_size):
        """Of the first wrong puzzle; the others that are not right by their names alone.

        Where the first wrong one is still open, the right and the open ones are named.
        """
        if isinstance(got, RankError):
            return self._of_error(attempt, got, world_size)
        wrong = self._wrong(got, world_size)
        still_open = [puzzle for puzzle in wrong if all(
            facts[f"what puzzle {puzzle} leaves"] is None
            and not facts[f"that puzzle {puzzle} makes a call"] for facts in got)]
        if not still_open or still_open[0] != wrong[0]:
            if (all(facts[f"what puzzle {wrong[0]} leaves"] is None for facts in got)
                    and not used_result(attempt)):
                why = f"Puzzle {wrong[0]}: {_NONE}"
                return why + _not_right_either(wrong[1:]) if wrong[1:] else why
            if not wrong[1:]:
                return super().explanation(attempt, got, world_size)
            attempt = _right_but_for(attempt, wrong[0])
            got = self._observe(attempt, world_size, quiet=True)
            why = (super().explanation(attempt, got, world_size)
                   or f"{AT_LEAST}puzzle {wrong[0]} is not right yet.")
            return why + _not_right_either(wrong[1:])
        right = [puzzle for puzzle in "ABCD" if puzzle not in wrong]
        return (f"Right: {', '.join(right)}. " if right else "") + (
            f"Still open: {', '.join(still_open)}.")

    def _wrong(self, got, world_size):
        """The puzzles that are not right on every rank."""
        return [puzzle for puzzle in "ABCD" if not all(
            agree(right, found[fact], self.tolerance)
            for facts, found in zip(self.expected_of_all(world_size), got, strict=True)
            for fact, right in facts.items() if f"puzzle {puzzle} " in f"{fact} ")]

    def _of_error(self, attempt, error, world_size):
        """Of an error in a puzzle, and of the puzzles before it, whose answers the error hides."""
        why = super().explanation(attempt, error, world_size)
        at = re.search(r"in puzzle ([BCD]):", str(error))
        if at is None:
            return why
        before = "ABCD"[:"ABCD".index(at[1])]
        got = self._observe(_right_but_for(attempt, before), world_size, quiet=True)
        wrong = [] if isinstance(got, RankError) else self._wrong(got, world_size)
        if not wrong:
            return why
        why = why or f"The call in puzzle {at[1]} raises the error below."
        return why + _not_right_either(wrong)


def _right_but_for(attempt, puzzles):
    """The attempt in these puzzles, and the solution in the others."""
    def mixed(puzzle, x, y):
        return (attempt if puzzle in puzzles else one_call_each)(puzzle, x, y)

    return mixed


def _not_right_either(puzzles):
    *first, last = puzzles
    listed = f"{', '.join(first)} and {last} are" if first else f"{last} is"
    return f" {listed} not right either."


def _numbers(rank):
    """The four numbers of a rank: the place of the digit says whose, the digit says which."""
    return torch.arange(1, 5) * 10 ** (3 - rank)


def _before(puzzle, rank):
    return _numbers(rank)[rank : rank + 1].clone() if puzzle == "B" else _numbers(rank)


def _after(puzzle, rank):
    numbers = torch.stack([_numbers(each) for each in range(4)])
    return {"A": numbers[2], "B": numbers.diag(), "C": numbers.sum(0)[rank : rank + 1],
            "D": numbers[:, rank]}[puzzle].contiguous()
