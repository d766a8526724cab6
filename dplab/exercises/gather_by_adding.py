"""An all-gather made of an all-reduce: each rank adds its numbers to zeros, in a row of its own."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import whole_numbers
from dplab.measure import CallLog


def gather_by_adding(x):
    rows = x.new_zeros(dist.get_world_size(), len(x))
    rows[dist.get_rank()] = x
    dist.all_reduce(rows)
    return rows


LENGTH = 3
OTHERS = "the number of calls other than all-reduce"
NAN = "where the rows are NaN, if rank 0 has one number, NaN,"


def numbers_of(rank, dtype):
    return whole_numbers(f"numbers of rank {rank}", LENGTH).to(dtype)


class GatherByAdding(Exercise):
    number = "0.1"
    title = "Everything, by adding alone"
    minutes = 6
    solution = staticmethod(gather_by_adding)
    world_sizes = (3, 4, 2, 1)

    def trial(self, attempt):
        facts = {}
        for dtype in (torch.float32, torch.int64):
            x = numbers_of(dist.get_rank(), dtype)
            before = x.clone()
            with CallLog() as log:
                facts[f"the rows of {dtype} numbers"] = attempt(x)
            facts[f"that `x` ({dtype}) is left alone"] = torch.equal(x, before)
        rows = attempt(torch.tensor([torch.nan if dist.get_rank() == 0 else 1.0]))
        facts[NAN] = rows.isnan() if isinstance(rows, torch.Tensor) else rows
        return {**facts, OTHERS: log.count() - log.count("all_reduce")}

    def expected(self, world_size):
        facts = {}
        for dtype in (torch.float32, torch.int64):
            facts[f"the rows of {dtype} numbers"] = torch.stack(
                [numbers_of(rank, dtype) for rank in range(world_size)])
            facts[f"that `x` ({dtype}) is left alone"] = True
        facts[NAN] = torch.arange(world_size)[:, None] == 0
        return {**facts, OTHERS: AtMost(0, "the puzzle is to do it with `dist.all_reduce` alone")}

    hints = (
        "All-reduce adds place by place. What must three ranks hold at a place so that the sum is "
        "the number of the fourth?",
        "Every rank calls with a tensor of the result's shape. In which row may this rank have "
        "something other than zeros?",
        "`rows = x.new_zeros(dist.get_world_size(), len(x))`, then put `x` into this rank's row, "
        "all-reduce `rows`, and return it.",
    )
    slips = (
        Slip("Every row is the sum over all ranks: each rank wrote its numbers into every row. "
             "Write them into this rank's row alone, and leave zeros in the others.",
             {"rows[dist.get_rank()] = x": "rows[:] = x"}),
        Slip("You added the ranks' numbers in one row, so that nobody can tell them apart. Each "
             "rank needs a place of its own.",
             {"rows[dist.get_rank()] = x": "rows[0] = x"}),
        Slip("This is this rank's row alone, and zeros. Nothing was sent: all-reduce the rows.",
             {"dist.all_reduce(rows)": ""}),
        Slip("`reduce` leaves the result on rank 0 alone. Every rank needs it: `all_reduce`.",
             {"dist.all_reduce(rows)": "dist.reduce(rows, dst=0)"}),
        Slip("The other rows hold numbers too when you add. A row must be zero on all ranks but "
             "its own.", {"new_zeros": "new_ones"}),
        Slip("`torch.zeros` makes float32, which holds only some of the large int64 numbers. Take "
             "the dtype of `x`: `torch.zeros(…, dtype=x.dtype)`, or `x.new_zeros(…)`.",
             {"x.new_zeros(": "torch.zeros("}),
        Slip("0 times NaN is NaN: write `x` into your row, do not multiply by a mask.",
             {"rows[dist.get_rank()] = x":
              "rows[:] = (torch.arange(len(rows)) == dist.get_rank())[:, None] * x"}),
        Slip("Only rank 0 calls the all-reduce, and waits for ever. A collective is called by "
             "every rank.",
             {"dist.all_reduce(rows)": "if dist.get_rank() == 0:\n    dist.all_reduce(rows)"},
             hangs=True),
    )
