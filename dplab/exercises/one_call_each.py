"""Four collectives, told apart by what they leave where: the place of a digit is its rank's."""

import re

import torch
import torch.distributed as dist

from dplab import RankError
from dplab.checks.attempt_code import used_result
from dplab.checks.compare import AtMost, agree
from dplab.checks.exercise import Exercise
from dplab.checks.known_mistakes import AT_LEAST
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


OPERATIONS = {"A": "broadcast", "B": "all_gather", "C": "reduce_scatter", "D": "all_to_all"}
LATER = " in a second round with other numbers"
ROUNDS = ("", 1, "ABCD"), (LATER, 5, "DCBA")


def numbers_of(rank, first):
    """The four numbers of a rank: the place of the digit says whose, the digit says which."""
    return torch.arange(first, first + 4) * 10 ** (3 - rank)


def before(puzzle, rank, first):
    numbers = numbers_of(rank, first)
    return numbers[rank : rank + 1].clone() if puzzle == "B" else numbers


def after(puzzle, rank, first):
    numbers = torch.stack([numbers_of(each, first) for each in range(4)])
    return {"A": numbers[2], "B": numbers.diag(), "C": numbers.sum(0)[rank : rank + 1],
            "D": numbers[:, rank]}[puzzle].contiguous()


# What stands on the right of each puzzle, and what each call leaves that is not the right one.
RIGHT = {
    "A": "On the right stand the four numbers of one rank, the same on every rank.",
    "B": "On the right every rank has the numbers of all four, side by side.",
    "C": "On the right each rank has one number, a sum over all ranks.",
    "D": "On the right no number is a sum, and no two ranks have the same four.",
}
LEAVES = {
    "all_reduce": "every rank has the sums of the ranks' numbers.",
    "reduce": "you put the sums on one rank alone.",
    "broadcast": "every rank has what one rank has.",
    "all_gather": "an all-gather adds nothing, and gives every rank the same: the numbers of all "
                  "ranks, side by side.",
    "reduce_scatter": "a reduce-scatter adds up the ranks' numbers, and leaves each rank a part of "
                      "the sums.",
    "all_to_all": "an all-to-all adds nothing, and cuts each rank's numbers into four parts, one "
                  "for each rank.",
}
CALLS = {
    "all_reduce": ["dist.all_reduce(x) > x"],
    "reduce": [f"dist.reduce(x, dst={rank}) > x" for rank in range(4)],
    "broadcast": [f"dist.broadcast(x, src={rank}) > x" for rank in range(4)],
    "all_gather": ["dist.all_gather_single(y, x) > y", "dist.all_gather_single(x, y) > x"],
    "reduce_scatter": ["dist.reduce_scatter_single(y, x) > y",
                       "dist.reduce_scatter_single(x, y) > x"],
    "all_to_all": ["dist.all_to_all_single(y, x) > y"],
}


def instead(puzzle, why, *calls):
    """A slip: each of ``calls`` in place of the right one, and behind ">" what is returned."""
    right = {"A": "dist.broadcast(x, src=2)\n        return x",
             "B": "dist.all_gather_single(y, x)\n        return y",
             "C": "dist.reduce_scatter_single(y, x)\n        return y",
             "D": "dist.all_to_all_single(y, x)\n        return y"}[puzzle]
    return Slip(f"Puzzle {puzzle}: {why}", *(
        {right: call.replace("; ", "\n").replace(" > ", "\nreturn ")} for call in calls))


class OneCallEach(Exercise):
    number = "0.1"
    title = "Four puzzles, one call each"
    minutes = 5
    solution = staticmethod(one_call_each)
    stub = staticmethod(one_call_each_stub)
    world_sizes = (4,)
    again = False  # a trial has a second round of its own

    def trial(self, attempt):
        rank, facts = dist.get_rank(), {}
        for again, first, puzzles in ROUNDS:
            for puzzle in puzzles:
                x, y = before(puzzle, rank, first), torch.zeros_like(after(puzzle, rank, first))
                with CallLog() as log:
                    try:
                        answer = attempt(puzzle, x, y)
                    except (RuntimeError, ValueError) as error:
                        # The same error in another puzzle is another mistake.
                        error.args = (f"in puzzle {puzzle}: {error}",)
                        raise
                facts |= facts_of(
                    puzzle, again, answer, log.count() > 0, log.count(),
                    answer is None or answer is x or answer is y,
                    log.count() == log.count(OPERATIONS[puzzle]))
        return facts

    def expected(self, world_size):
        once = AtMost(1, "one call is enough")
        return [{fact: right for again, first, puzzles in ROUNDS for puzzle in puzzles
                 for fact, right in facts_of(puzzle, again, after(puzzle, rank, first), True, once,
                                             True, True).items()} for rank in range(world_size)]

    def explanation(self, attempt, got, world_size):
        """Of the first wrong puzzle; the others that are not right by their names alone.

        Where the first wrong one is still open, the right and the open ones are named.
        """
        if isinstance(got, RankError):
            return self._of_error(attempt, got, world_size)
        wrong = self._wrong(got, world_size)
        if not self._wrong(got, world_size, but=LATER):
            return ("With these numbers all is right. With others, in a second round, it is not: "
                    "what you return must come from this call's `x`, and not be kept or written "
                    "down.")
        still_open = [puzzle for puzzle in wrong if all(
            facts[f"what puzzle {puzzle} leaves"] is None
            and not facts[f"that puzzle {puzzle} makes a call"] for facts in got)]
        if not still_open or still_open[0] != wrong[0]:
            if (all(facts[f"what puzzle {wrong[0]} leaves"] is None for facts in got)
                    and not used_result(attempt)):
                why = (f"Puzzle {wrong[0]}: you make a call, and return nothing. Below the call, "
                       "return `x` or `y`, whichever the call has filled.")
                return why + not_right_either(wrong[1:]) if wrong[1:] else why
            if not wrong[1:]:
                return super().explanation(attempt, got, world_size)
            attempt = right_but_for(attempt, wrong[0])
            got = self.observe(attempt, world_size, quiet=True)
            why = (super().explanation(attempt, got, world_size)
                   or f"{AT_LEAST}puzzle {wrong[0]} is not right yet.")
            return why + not_right_either(wrong[1:])
        right = [puzzle for puzzle in "ABCD" if puzzle not in wrong]
        return (f"Right: {', '.join(right)}. " if right else "") + (
            f"Still open: {', '.join(still_open)}.")

    def _wrong(self, got, world_size, but="."):
        """The puzzles that are not right on every rank, but for facts that end so."""
        return [puzzle for puzzle in "ABCD" if not all(
            agree(right, found[fact], self.tolerance)
            for facts, found in zip(self.expected_of_all(world_size), got, strict=True)
            for fact, right in facts.items()
            if f"puzzle {puzzle} " in f"{fact} " and not fact.endswith(but))]

    def _of_error(self, attempt, error, world_size):
        """Of an error in a puzzle, and of the puzzles before it, whose answers the error hides."""
        why = super().explanation(attempt, error, world_size)
        at = re.search(r"in puzzle ([BCD]):", str(error))
        if at is None:
            return why
        before = "ABCD"[:"ABCD".index(at[1])]
        got = self.observe(right_but_for(attempt, before), world_size, quiet=True)
        wrong = [] if isinstance(got, RankError) else self._wrong(got, world_size)
        if not wrong:
            return why
        why = why or f"The call in puzzle {at[1]} raises the error below."
        return why + not_right_either(wrong)

    hints = (
        "Read the digits on the right. Does each rank have numbers of one rank, of all ranks, or "
        "sums? Is it the same on every rank?",
        "Start with C. Which of the four sums does each rank keep, and which word in the six names "
        "says that a tensor is cut up, one part for each rank?",
        "A: `broadcast`, and `src` is the rank whose numbers all have. B: `all_gather_single`. "
        "C: `reduce_scatter_single`. D: `all_to_all_single`. The last three fill `y`.",
    )
    slips = (
        *(instead(puzzle, f"{LEAVES[operation]} {RIGHT[puzzle]}", *calls)
          for puzzle in "ABCD" for operation, calls in CALLS.items()
          if operation != OPERATIONS[puzzle]),
        *(instead("A", f"you sent rank {rank}'s numbers to everyone. The numbers on the right are "
                       "tens. Whose are those? `src` names that rank.",
                  f"dist.broadcast(x, src={rank}) > x") for rank in (0, 1, 3)),
        *(instead(puzzle, "you returned this rank's own numbers. Nothing was sent.", "pass > x")
          for puzzle in "ABCD"),
        *(instead(puzzle, "you returned `x`, which still holds this rank's own numbers. The call "
                          "has filled `y`.", f"dist.{call}(y, x) > x")
          for puzzle, call in (("B", "all_gather_single"), ("C", "reduce_scatter_single"),
                               ("D", "all_to_all_single"))),
        instead("A", "you make a call, and return this rank's own numbers: the call has not "
                     "changed `x`. One with a single tensor overwrites that tensor.",
                "dist.all_to_all_single(y, x) > x", "dist.broadcast(y, src=2) > x"),
        *(instead(puzzle, "`y` is still all zeros, so your call did not fill it. A call with one "
                          "tensor overwrites that tensor; a call with two fills the first.",
                  "dist.all_reduce(x) > y", "dist.broadcast(x, src=2) > y") for puzzle in "ABC"),
        instead("D", "you returned zeros. Either your call did not fill `y`, or it sent `y`. The "
                     "tensor to be filled comes first, and the tensor that this rank gives second.",
                "dist.all_to_all_single(x, y) > x", "dist.all_to_all_single(x, y) > y",
                "dist.all_reduce(x) > y"),
        *(instead(puzzle, "the tensor to be filled comes first, and the tensor that this rank "
                          "gives comes second.", *(f"dist.{call}(x, y) > {kept}" for kept in "xy"))
          for puzzle, call in (("B", "all_gather_single"), ("C", "reduce_scatter_single"))),
        instead("B", "only rank 0 has all four numbers. On the right every rank has them.",
                "dist.gather(x, list(y.split(1)) if dist.get_rank() == 0 else None, dst=0) > y"),
        instead("C", "these are rank 0's numbers alone. On the right each number is a sum over all "
                     "ranks.",
                "dist.scatter(y, list(x.split(1)) if dist.get_rank() == 0 else None, src=0) > y"),
        instead("C", "the number is right. But you gave every rank all four sums, and each rank "
                     "threw three of them away. One call leaves only the one sum, in `y`.",
                "dist.all_reduce(x); rank = dist.get_rank() > x[rank : rank + 1]",
                "dist.all_reduce(x); y[0] = x[dist.get_rank()] > y"),
        instead("C", "the number is right, though not as a tensor of one element. And you gave "
                     "every rank all four sums, of which each threw three away. One call leaves "
                     "only the one sum, in `y`.", "dist.all_reduce(x) > x[dist.get_rank()]"),
        instead("D", "the numbers are right. But you gave every rank all sixteen numbers, and each "
                     "rank threw twelve of them away. One call leaves only the four, in `y`.",
                *(f"every = torch.empty(16, dtype=x.dtype); dist.all_gather_single(every, x){end}"
                  for end in (" > every.view(4, 4)[:, dist.get_rank()]",
                              "; y[:] = every.view(4, 4)[:, dist.get_rank()] > y"))),
    )


def facts_of(puzzle, again, answer, called, calls, itself, alone):
    return {f"what puzzle {puzzle} leaves{again}": answer,
            f"that puzzle {puzzle} makes a call{again}": called,
            f"that puzzle {puzzle} returns `x` or `y` itself{again}": itself,
            f"the number of calls in puzzle {puzzle}{again}": calls,
            f"that the call of puzzle {puzzle} does all of it{again}": alone}


def right_but_for(attempt, puzzles):
    """The attempt in these puzzles, and the solution in the others."""
    def mixed(puzzle, x, y):
        return (attempt if puzzle in puzzles else one_call_each)(puzzle, x, y)

    return mixed


def not_right_either(puzzles):
    *first, last = puzzles
    listed = f"{', '.join(first)} and {last} are" if first else f"{last} is"
    return f" {listed} not right either."
