"""What DDP hands to its all-reduces, in the first iteration and after its buckets are rebuilt."""

from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.checks.trials import of_cases
from dplab.exercises.make_buckets import make_buckets

MIB = 2**20


def what_ddp_sends(sizes, ready, iteration):
    """The bytes of DDP's all-reduces in one iteration, in order, with its default options.

    ``sizes``: the bytes of each gradient, by parameter. ``ready``: the parameters' indices in the
    order in which iteration 1 made their gradients. Source: torch 2.13's reducer.cpp and
    distributed.py, which gives it one bucket without a limit to start with.
    """
    if iteration == 1:
        return [sum(sizes)]
    in_order = [sizes[index] for index in reversed(ready)]
    buckets = make_buckets(in_order, 25 * MIB, MIB)
    return [sum(in_order[index] for index in bucket) for bucket in buckets]


def by_ready(sizes, ready, iteration):
    """The same without `make_buckets`."""
    limit = MIB if iteration > 1 else float("inf")
    sent, held = [], 0
    for index in ready:
        held += sizes[index]
        if held >= limit:
            sent.append(held)
            held = 0
            limit = 25 * MIB
    return sent + [held] * (held > 0)


# The bytes of gradients, and the order in which they become ready.
UNEVEN = ([3 * MIB, 4096, 9 * MIB, 2052, 14 * MIB, 40, 6 * MIB, 3 * MIB - 4, 2048, 600_000],
          [9, 8, 6, 7, 5, 4, 2, 3, 0, 1])
SMALL = ([40_000, 1000, 900_000, 64, 500_000, 200], [5, 4, 3, 2, 1, 0])
EXACT = ([25 * MIB, MIB, 24 * MIB, 30 * MIB, MIB // 2, MIB // 2], [4, 5, 0, 1, 2, 3])
TIGHT = ([1000, 25_500_000, 20_000, 1_030_000], [3, 2, 1, 0])  # in MiB, not in millions
CASES = tuple((*each, iteration) for each in (UNEVEN, SMALL, EXACT, TIGHT)
              for iteration in (1, 2, 5))


class WhatDDPSends(Calculation):
    number = "5.5"
    title = "What DDP sends"
    minutes = 5
    solution = staticmethod(what_ddp_sends)
    also_right = (by_ready,)

    def trial(self, attempt):
        return of_cases(bytes_sent, CASES, lambda sizes, ready, iteration: attempt(
            list(sizes), list(ready), iteration))

    def expected(self, world_size):
        return of_cases(bytes_sent, CASES, what_ddp_sends)

    hints = (
        "Iteration 1 is a case of its own. For the others you have a function already, which goes "
        "through a list from its last entry to its first.",
        "Lay the sizes out so that `make_buckets` meets them in the order of `ready`. In the "
        "output above, a full bucket exceeds its limit by less than one layer.",
        "`in_order = [sizes[index] for index in reversed(ready)]`, buckets of 25 MiB with the "
        "first of 1 MiB; the indices that you get back belong to `in_order`.",
    )
    slips = (
        Slip("The buckets of iteration 1 are rebuilt already. In iteration 1 all gradients travel "
             "together, and DDP notes in which order they come.",
             {"iteration == 1": "iteration == 0"}),
        Slip("From iteration 2 on the buckets are rebuilt, and you still send all gradients "
             "together.",
             {"iteration == 1": "iteration < 3"}, {"iteration == 1": "iteration > 0"}),
        Slip("`make_buckets` goes through its list from the end. You gave it the sizes in the "
             "order of `ready`, so its first bucket begins with the gradient that comes last.",
             {"reversed(ready)": "ready"}),
        Slip("You filled the buckets in the reverse order of the parameters. DDP has seen the "
             "order in which the gradients really come: that of `ready`.",
             {"reversed(ready)": "range(len(sizes))"},
             {"in ready": "in reversed(range(len(sizes)))"}),
        Slip("You filled the buckets in the order of the parameters. It is that of `ready`.",
             {"reversed(ready)": "reversed(range(len(sizes)))"},
             {"in ready": "in range(len(sizes))"}),
        Slip("Your first bucket closes at 25 MiB. It closes at 1 MiB, so that sending begins "
             "early.",
             {", MIB)": ")"}, {"limit = MIB if": "limit = 25 * MIB if"}),
        Slip("All your buckets close at 1 MiB. Only the first one does; the others close at 25 "
             "MiB.",
             {"25 * MIB, MIB": "MIB"}, {"limit = 25 * MIB": "limit = MIB"}),
        Slip("You count 1 MiB as a million bytes, or 25 MiB as 25 million. A MiB has 2**20 bytes.",
             {"25 * MIB, MIB": "25e6, 1e6"}, {"limit = 25 * MIB": "limit = 25e6"}),
        Slip("The indices in the buckets are places in the list that you gave to `make_buckets`, "
             "and you take the sizes of the parameters with these numbers.",
             {"sum(in_order[index]": "sum(sizes[index]"}),
        Slip("The last bucket is missing: what is left over when the gradients run out is sent "
             "too.",
             {"return sent + [held] * (held > 0)": "return sent"}),
        Slip("You return how many gradients each all-reduce holds. Return its bytes.",
             {"return [sum(sizes)]": "return [len(sizes)]",
              "sum(in_order[index] for index in bucket)": "len(bucket)"}),
    )


def bytes_sent(case, sent):
    sizes, _, iteration = case
    sent = list(sent) if isinstance(sent, list | tuple) else sent
    return {f"iteration {iteration}: the bytes of each all-reduce, for {len(sizes)} gradients of "
            f"{sum(sizes):,} bytes": sent}
