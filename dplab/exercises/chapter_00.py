"""Exercises of chapter 00: what each collective leaves where, a first one of one's own, and two
ranks that wait for each other.
"""

import contextlib
import dis
import math
import re
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from dplab import RankError
from dplab.exercises.compare import AtMost, agree
from dplab.exercises.exercise import AT_LEAST, Exercise, Mistake, used_result
from dplab.exercises.mistakes import Slip
from dplab.exercises.trials import seeded, whole_numbers
from dplab.measure import CallLog

# 0.1: four puzzles, one call each


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
    slug = "one-call-each"
    number = "0.1"
    title = "Four puzzles, one call each"
    name = "one_call_each"
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


# 0.2: one mean for all ranks


def global_mean(values):
    total = torch.stack([values.sum(), values.new_tensor(float(len(values)))])
    dist.all_reduce(total)
    return total[0] / total[1]


def mean_of_means(values):
    mean = values.mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def sum_of_means(values):
    mean = values.mean()
    dist.all_reduce(mean)
    return mean


def own_mean(values):
    return values.mean()


def undivided_sum(values):
    total = values.sum()
    dist.all_reduce(total)
    return total


def sum_over_ranks(values):
    total = values.sum()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def sum_over_own_count(values):
    total = values.sum()
    dist.all_reduce(total)
    return total / len(values)


def own_sum_over_all(values):
    count = torch.tensor(float(len(values)))
    dist.all_reduce(count)
    return values.sum() / count


def sum_over_own_count_everywhere(values):
    total = values.sum()
    dist.all_reduce(total)
    return total / (len(values) * dist.get_world_size())


def padded_mean(values):
    longest = torch.tensor(len(values))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    total = values.sum()
    dist.all_reduce(total)
    return total / (longest * dist.get_world_size())


def what_the_call_returns(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    total = dist.all_reduce(total)
    return total[0] / total[1]


def of_one_element(values):
    total, count = values.sum().reshape(1), torch.tensor([float(len(values))])
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total / count


def as_a_float(values):
    return global_mean(values).item()


def sum_and_count(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(total)
    return total


def reduce_to_rank_0(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.reduce(total, dst=0)
    return total[0] / total[1]


def mean_of_rank_0(values):
    mean = values.mean()
    dist.broadcast(mean, src=0)
    return mean


def returned_by_rank_0_only(values):
    mean = global_mean(values)
    return mean if dist.get_rank() == 0 else None


def on_rank_0_only(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    return total[0] / total[1]


def all_reduced_parts(values):
    dist.all_reduce(values)
    return values.mean()


class GlobalMean(Exercise):
    slug = "global-mean"
    number = "0.2"
    title = "One mean for all ranks"
    name = "global_mean"
    minutes = 5
    hints = (
        "You know the mean of a list: which two numbers do you divide? Which of them can a rank "
        "compute for its own values?",
        "An all-reduce adds a tensor over all ranks. Which two sums give the mean of everything?",
        "Put this rank's sum and its number of values into one tensor of two elements, all-reduce "
        "it, and divide.",
    )
    solution = staticmethod(global_mean)
    mistakes = (
        Mistake(mean_of_means, "You averaged the ranks' means. The ranks hold different numbers of "
                "values, so the mean of the means is not the mean of all values: a rank with "
                "few values counts too much."),
        Mistake(sum_of_means, "You added the ranks' means, and divided by nothing. Dividing by the "
                "number of ranks would not be right either, since the ranks hold different numbers "
                "of values: add the sums, and add the numbers of values."),
        Mistake(own_mean, "This is each rank's own mean: nothing was communicated."),
        Mistake(undivided_sum, "This is the sum of all values. Divide it by how many there are on "
                "all ranks together."),
        Mistake(sum_over_ranks, "You divided the sum by the number of ranks. It has to be the "
                "number of values on all ranks together."),
        Mistake(sum_over_own_count, "You divided the sum over all ranks by this rank's own number "
                "of values: that number has to be summed over the ranks too."),
        Mistake(own_sum_over_all, "You summed the numbers of values over the ranks, but not the "
                "values: you divide this rank's own sum. Both have to be summed over the ranks."),
        Mistake(sum_over_own_count_everywhere, "You took this rank's own number of values times "
                "the number of ranks. The ranks hold different numbers of values: sum these over "
                "the ranks, too."),
        Mistake(padded_mean, "You divided as if every rank held as many values as the longest one. "
                "What only fills up a shorter row is no value: sum the ranks' own numbers of "
                "values."),
        Mistake(what_the_call_returns, "`dist.all_reduce` returns None. It changes the tensor that "
                "it gets: call it on a line of its own, and go on with that tensor."),
        Mistake(of_one_element, "The mean is right, but its shape is (1,). A tensor of shape () is "
                "asked for: take element 0 of it."),
        Mistake(as_a_float, "The mean is right, but it is a Python number. Return the tensor, "
                "without `.item()`."),
        Mistake(sum_and_count, "You return two numbers, the sum of all values and how many there "
                "are. Divide one by the other."),
        Mistake(mean_of_rank_0, "Every rank gets rank 0's mean, and the values of the others are "
                "in no sum. Combine all ranks' values: `all_reduce`."),
        Mistake(returned_by_rank_0_only, "The mean is right, and only rank 0 returns it. The "
                "others return None: give it to every rank."),
        Mistake(reduce_to_rank_0, "`reduce` gives the result to rank 0 alone; the others are left "
                "with parts of it. Every rank needs the mean: `all_reduce`."),
        Mistake(on_rank_0_only, "Only rank 0 calls the collective, and waits for ever. A "
                "collective is called by every rank.", hangs=True),
        Mistake(all_reduced_parts, "You handed over the values themselves. Their number differs "
                "from rank to rank, and this collective needs tensors of one size."),
    )

    def trial(self, attempt):
        return {"the mean": attempt(_values(dist.get_rank()))}

    def expected(self, world_size):
        return {"the mean": torch.cat([_values(rank) for rank in range(world_size)]).mean()}


def _values(rank):
    """Two values on rank 0, one on rank 1, then four and three."""
    return seeded(f"values of rank {rank}", (2, 1, 4, 3)[rank])


# 0.3: two ranks that wait for each other


def swap(tensor):
    rank = dist.get_rank()
    partner = rank ^ 1  # 0 and 1, 2 and 3, …
    if partner < dist.get_world_size():
        theirs = torch.empty_like(tensor)
        if rank % 2 == 0:
            dist.send(tensor, partner)
            dist.recv(theirs, partner)
        else:
            dist.recv(theirs, partner)
            dist.send(tensor, partner)
        tensor.copy_(theirs)


def swap_broken(tensor):
    rank = dist.get_rank()
    partner = rank ^ 1  # 0 and 1, 2 and 3, …
    if partner < dist.get_world_size():
        dist.send(tensor, partner)
        dist.recv(tensor, partner)


def _partner():
    """The partner's rank, or None."""
    partner = dist.get_rank() ^ 1
    return partner if partner < dist.get_world_size() else None


def both_receive_first(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.empty_like(tensor)
        dist.recv(theirs, partner)
        dist.send(tensor, partner)
        tensor.copy_(theirs)


def barrier_and_swap(tensor):
    dist.barrier()
    swap(tensor)


def barrier_first(tensor):
    dist.barrier()
    if (partner := _partner()) is not None:
        dist.send(tensor, partner)
        dist.recv(tensor, partner)


def rank_0_sends_first(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.empty_like(tensor)
        if dist.get_rank() == 0:
            dist.send(tensor, partner)
            dist.recv(theirs, partner)
        else:
            dist.recv(theirs, partner)
            dist.send(tensor, partner)
        tensor.copy_(theirs)


def rank_0_receives_first(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.empty_like(tensor)
        if dist.get_rank() == 0:
            dist.recv(theirs, partner)
            dist.send(tensor, partner)
        else:
            dist.send(tensor, partner)
            dist.recv(theirs, partner)
        tensor.copy_(theirs)


def odd_ranks_overwrite(tensor):
    if (partner := _partner()) is not None:
        if dist.get_rank() % 2 == 0:
            dist.send(tensor, partner)
            dist.recv(tensor, partner)
        else:
            dist.recv(tensor, partner)
            dist.send(tensor, partner)


def even_ranks_overwrite(tensor):
    if (partner := _partner()) is not None:
        if dist.get_rank() % 2 == 1:
            dist.send(tensor, partner)
            dist.recv(tensor, partner)
        else:
            dist.recv(tensor, partner)
            dist.send(tensor, partner)


def received_while_sending(tensor):
    if (partner := _partner()) is not None:
        sending = dist.isend(tensor, partner)
        dist.recv(tensor, partner)
        sending.wait()


def received_and_sent_at_once(tensor):
    if (partner := _partner()) is not None:
        receiving = dist.irecv(tensor, partner)
        sending = dist.isend(tensor, partner)
        receiving.wait()
        sending.wait()


def sent_while_receiving(tensor):
    if (partner := _partner()) is not None:
        receiving = dist.irecv(tensor, partner)
        dist.send(tensor, partner)
        receiving.wait()


def copied_before_the_wait(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.empty_like(tensor)
        sending = dist.isend(tensor, partner)
        dist.recv(theirs, partner)
        tensor.copy_(theirs)
        sending.wait()


def sent_without_a_wait(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.empty_like(tensor)
        dist.isend(tensor, partner)
        receiving = dist.irecv(theirs, partner)
        receiving.wait()
        tensor.copy_(theirs)


def received_without_a_wait(tensor):
    if (partner := _partner()) is not None:
        theirs = torch.zeros_like(tensor)
        dist.irecv(theirs, partner)
        sending = dist.isend(tensor, partner)
        sending.wait()
        tensor.copy_(theirs)


def one_way(tensor):
    if (partner := _partner()) is not None:
        if dist.get_rank() % 2 == 0:
            dist.send(tensor, partner)
        else:
            dist.recv(tensor, partner)


def in_a_new_tensor(tensor):
    theirs = tensor.clone()
    swap(theirs)
    return theirs


def without_asking_for_a_partner(tensor):
    partner = dist.get_rank() ^ 1
    theirs = torch.empty_like(tensor)
    sending = dist.isend(tensor, partner)
    dist.recv(theirs, partner)
    sending.wait()
    tensor.copy_(theirs)


def with_the_next_rank(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:
        theirs = torch.empty_like(tensor)
        sending = dist.isend(tensor, (rank + 1) % world_size)
        dist.recv(theirs, (rank - 1) % world_size)
        sending.wait()
        tensor.copy_(theirs)


def among_all(tensor):
    everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, tensor)
    if (partner := _partner()) is not None:
        tensor.copy_(everything[partner])


_OVERWRITES = ("A rank receives into `tensor` before it has sent what was there, so it sends its "
               "partner's own numbers back. Receive into another tensor, and copy at the end.")
_SHARED = ("You receive into `tensor` while it is still being sent. What arrives may overwrite "
           "what has yet to leave: which comes first is luck. Receive into another tensor, wait "
           "for the send, and copy at the end.")
_CHANGED = ("You write into `tensor` before the `wait()` of its send: some of the old numbers may "
            "not have left yet. Wait for the send first, then copy.")
_SEND_OPEN = ("You start a send, and never call `wait()` on its handle. Until that `wait()` has "
              "returned, some of the numbers may not have left yet. Keep the handle, and wait "
              "before the function ends and before you write into what you send.")
_RECEIVE_OPEN = ("You start a receive, and never call `wait()` on its handle. Until that `wait()` "
                 "has returned, the partner's numbers may not have come yet. Keep the handle, and "
                 "wait before you use what you receive into.")
_GATHERED = ("On 2 ranks the result is right, but you call a collective of all ranks. The last of "
             "three ranks has no partner, and would have to call it too; and it sends each tensor "
             "to ranks that do not need it. Use sends and receives between partners alone.")
_MET = ("On 2 ranks the result is right, and it is right without the barrier too. A barrier is a "
        "call of all ranks. The last of three ranks has no partner, and would have to call it too; "
        "and partners wait for ranks that have nothing to do with their swap.")
_REBOUND = ("The partner's numbers have come, but `tensor` still holds this rank's own. Write them "
            "into it with `tensor.copy_(…)`: an assignment `tensor = …` only gives the name to "
            "another tensor.")
_TOO_SMALL = ("The tensor that you receive into is smaller than `tensor`. gloo aborts a process "
              "that gets more bytes than its tensor has room for. `torch.empty_like(tensor)` makes "
              "one that fits.")
_OTHER_DTYPE = ("The tensor that you receive into is float32, and `tensor` has another dtype here. "
                "gloo aborts a process that gets more bytes than its tensor has room for. "
                "`torch.empty_like(tensor)` makes one that fits.")
_ONE_PAIR = ("You made an exception for rank 0, which mends the pair of ranks 0 and 1 alone. In "
             "every other pair, both ranks still begin with the same call.")


class RepairDeadlock(Exercise):
    slug = "repair-deadlock"
    number = "0.3"
    title = "Repair the swap"
    name = "swap"
    minutes = 9
    hints = (
        "In the report, in which call does each rank wait? What would its partner have to do so "
        "that this call ends?",
        "Both ranks run the same lines, so both begin with a send. A rank knows its number: let "
        "one of the two begin with the other call. And what will be in `tensor` after a receive?",
        "Make `theirs = torch.empty_like(tensor)`. Even ranks send `tensor`, then receive into "
        "`theirs`. Odd ranks do it in the other order. Then all copy `theirs` into `tensor`.",
    )
    solution = staticmethod(swap)
    stub = staticmethod(swap_broken)
    mistakes = (
        Mistake(odd_ranks_overwrite, _OVERWRITES),
        Mistake(even_ranks_overwrite, _OVERWRITES),
        Mistake(received_while_sending, _SHARED),
        Mistake(received_and_sent_at_once, _SHARED),
        Mistake(sent_while_receiving, _SHARED),
        Mistake(copied_before_the_wait, _CHANGED),
        Mistake(sent_without_a_wait, _SEND_OPEN),
        Mistake(received_without_a_wait, _RECEIVE_OPEN),
        Mistake(one_way, "Even ranks send and odd ranks receive, and that is half of a swap. The "
                "numbers of the odd ranks have to come back."),
        Mistake(in_a_new_tensor, _REBOUND),
        Mistake(with_the_next_rank, "You send to the next rank and receive from the one before, "
                "round in a circle. Here ranks swap in pairs: 0 with 1, 2 with 3."),
        Mistake(without_asking_for_a_partner, "With an odd number of ranks, the last has no "
                "partner. It sends nothing and keeps its own tensor."),
        Mistake(among_all, _GATHERED),
        Mistake(barrier_and_swap, _MET),
        Mistake(barrier_first, "Both ranks of a pair still begin with a send, and wait for a "
                "receive. A barrier, a pause or `isend` with `wait()` right after it changes "
                "nothing about that: one of the two has to receive while the other sends.",
                hangs=True),
        Mistake(both_receive_first, "Now both ranks of a pair begin with a receive, and each waits "
                "for a send that the other has not reached. The two need different orders.",
                hangs=True),
        Mistake(rank_0_sends_first, _ONE_PAIR, hangs=True),
        Mistake(rank_0_receives_first, _ONE_PAIR, hangs=True),
    )

    def trial(self, attempt):
        rank, facts = dist.get_rank(), {}
        with CallLog() as log, InFlight() as flight:
            for swap_name, late, tensors in ((EVEN_LATE, 0, _floats), (ODD_LATE, 1, _integers)):
                tensor = tensors(rank)
                if rank % 2 == late:
                    time.sleep(_LATE)
                attempt(tensor)
                facts[swap_name] = tensor
            changed = flight.changed()
            left_open = flight.end_what_is_open()
        among_all = sum(not call.is_point_to_point for call in log.calls)
        return {**facts, OF_ALL: among_all, BOTH_WAYS: log.count() - among_all,
                SENDS_OPEN: left_open["send"], RECEIVES_OPEN: left_open["recv"],
                SHARED: flight.shared, CHANGED: changed}

    def expected(self, world_size):
        def facts(rank):
            partner = rank ^ 1 if rank ^ 1 < world_size else rank
            of_all = {OF_ALL: AtMost(0, "only partners talk to each other")}
            return {SENDS_OPEN: AtMost(0, "some of the numbers may not have left yet"),
                    RECEIVES_OPEN: AtMost(0, "the partner's numbers may not have come yet"),
                    SHARED: AtMost(0, "what arrives may overwrite what has yet to leave"),
                    CHANGED: AtMost(0, "some of the old numbers may not have left yet"),
                    EVEN_LATE: _floats(partner), ODD_LATE: _integers(partner),
                    **(of_all if world_size > 1 else {}),
                    BOTH_WAYS: 0 if partner == rank else 4}

        return [facts(rank) for rank in range(world_size)]

    def described(self, difference, world_size):
        """Whose numbers a rank holds, instead of what can be said of any tensor."""
        tensors = {EVEN_LATE: _floats, ODD_LATE: _integers}.get(difference.fact)
        if tensors is None:
            return super().described(difference, world_size)
        own = difference.rank
        whose = next((rank for rank in range(4)
                      if agree(tensors(rank), difference.got, self.tolerance)), None)
        note = ("" if whose is None else "it is still this rank's own" if whose == own
                else f"it is rank {whose}'s")
        ranks = f"on {world_size} rank{'s' * (world_size > 1)}"
        return f"{ranks}, rank {own}: {replace(difference, note=note)}"

    def explanation(self, attempt, got, world_size):
        if isinstance(got, RankError):
            return _of_the_receive(got) or super().explanation(attempt, got, world_size)
        for fact, why in ((SENDS_OPEN, _SEND_OPEN), (RECEIVES_OPEN, _RECEIVE_OPEN),
                          (SHARED, _SHARED), (CHANGED, _CHANGED)):
            if any(facts[fact] for facts in got):
                return why  # whatever the tensors hold: that was luck
        own = all(agree(tensors(rank), found[fact], self.tolerance)
                  for rank, (right, found) in enumerate(
                      zip(self.expected_of_all(world_size), got, strict=True))
                  for fact, tensors in ((EVEN_LATE, _floats), (ODD_LATE, _integers))
                  if not agree(right[fact], found[fact], self.tolerance))
        is_wrong = any(not agree(right[fact], found[fact], self.tolerance)
                       for right, found in zip(self.expected_of_all(world_size), got, strict=True)
                       for fact in (EVEN_LATE, ODD_LATE))
        # A rank that sends its partner's numbers back leaves the same: the code tells them apart.
        if is_wrong and own and _rebinds_its_argument(attempt):
            return _REBOUND
        why = super().explanation(attempt, got, world_size)
        if why.removeprefix(AT_LEAST) in (_GATHERED, _MET):
            # What else goes wrong is the hang on three ranks, which these sentences name.
            return "" if is_wrong else why.removeprefix(AT_LEAST)
        return why


def _of_the_receive(error):
    """Why the process died in a receive; "" where it did not, or the tensor has room."""
    into = re.search(r"recv of (\w+)\[([\d, ]*)\]", str(error))
    if error.kind != "died" or into is None:
        return ""
    if into[1] == "float32" and into[2] == "2, 3":  # the tensors of this shape are whole numbers
        return _OTHER_DTYPE
    room = math.prod(int(length) for length in into[2].split(",") if length.strip())
    return _TOO_SMALL if into[1] == "float32" and room < len(_floats(0)) else ""


class InFlight:
    """What becomes of tensors between the start of their send or receive and its ``wait()``.

    ``shared``: how often a tensor was given to a send while a receive into the same memory was not
    over, or to a receive while a send from it was not. Time decides nothing here: a call is over
    when its ``wait()`` has returned.
    """

    def __init__(self):
        self.shared = 0
        self._open = []  # [operation, tensor, its version after the start, work]
        self._changed = 0

    def __enter__(self):
        self._originals = {name: getattr(dist.ProcessGroup, name)
                           for name in ("send", "recv", "recv_anysource")}
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, self._started(name, original))
        self._wait = wait = dist.Work.wait

        def and_over(work, *args, **kwargs):
            result = wait(work, *args, **kwargs)
            self._over(work)
            return result

        dist.Work.wait = and_over
        return self

    def __exit__(self, *_):
        dist.Work.wait = self._wait
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)

    def changed(self):
        """How many tensors were written to before their send was waited for."""
        return self._changed + sum(map(_is_changed, self._open))

    def end_what_is_open(self):
        """How many sends and receives nobody has waited for, which it then does.

        Without this, what becomes of them would be luck: a handle that nobody keeps takes its send
        with it, if the numbers have not left by then. This object keeps all handles.
        """
        still_open, self._open = self._open, []
        for *_, work in still_open:
            with contextlib.suppress(RuntimeError):  # there may be no partner
                self._wait(work, _NO_PARTNER)
        return Counter(operation for operation, *_ in still_open)

    def _started(self, name, original):
        def call(group, tensors, *args, **kwargs):
            operation = "send" if name == "send" else "recv"
            self.shared += any(other[0] != operation and _overlap(other[1], tensor)
                               for other in self._open for tensor in tensors)
            work = original(group, tensors, *args, **kwargs)
            self._open += [[operation, tensor, tensor._version, work] for tensor in tensors]
            return work

        return call

    def _over(self, work):
        over = [each for each in self._open if each[3] is work]
        self._changed += sum(map(_is_changed, over))
        self._open = [each for each in self._open if each[3] is not work]


def _is_changed(started):
    operation, tensor, version, _ = started
    return operation == "send" and tensor._version != version


def _overlap(one, other):
    """Whether two tensors, each without gaps, have memory in common."""
    (begin, end), (start, stop) = ((each.data_ptr(), each.data_ptr() + each.nbytes)
                                   for each in (one, other))
    return begin < stop and start < end


def _rebinds_its_argument(function):
    """Whether it assigns to the name of its first argument."""
    code = getattr(function, "__code__", None)
    return code is not None and any(
        step.opname == "STORE_FAST" and step.argval == code.co_varnames[0]
        for step in dis.get_instructions(code))


EVEN_LATE = "`tensor` after the first swap (even ranks are late)"
ODD_LATE = "`tensor` after the second swap (odd ranks are late)"
SENDS_OPEN = "the number of sends without a `wait()`"
RECEIVES_OPEN = "the number of receives without a `wait()`"
SHARED = "the number of tensors that are sent and received into at once"
CHANGED = "the number of tensors that are written to before the `wait()` of their send"
OF_ALL = "the number of collectives of all ranks"
BOTH_WAYS = "the number of sends and receives in two swaps"
_LATE = 0.05  # seconds: so that the other rank is already waiting
_NO_PARTNER = timedelta(seconds=1)  # after which a call that is still open has none


def _floats(rank):
    return seeded(f"tensor of rank {rank}", 5)


def _integers(rank):
    return whole_numbers(f"tensor of rank {rank}", 2, 3)


EXERCISES = (OneCallEach, GlobalMean, RepairDeadlock)
