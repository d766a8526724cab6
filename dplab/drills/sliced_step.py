"""Chapter 01's drills: one data-parallel step in slices, with a fault in how it shares the work.

The instruments show what a rank takes, holds and sends, and of which rows its result is the sum.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab import run
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, instrument, print_table
from dplab.measure import CallLog
from dplab.workloads.digits import load_digits


def own_rows(batch):
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def accumulate(model, images, labels, micro):
    for x, y in zip(images.split(micro), labels.split(micro), strict=True):
        loss = F.cross_entropy(model(x), y) * len(x) / len(images)
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@dataclass
class Recording:
    """What one rank did."""

    rows: list[int]
    held: int  # the most rows whose activations it kept at a time
    sent: list[int]  # the bytes of each call
    shares: list[float]  # how often each rank's right rows are in its result


def step(parts, batch, micro) -> Recording:
    digits, held = load_digits(), [0]
    images, labels = digits.train_images.flatten(1).double(), digits.train_labels
    torch.manual_seed(len(batch))
    model = nn.Linear(64, 10, bias=False, dtype=torch.float64)
    right = [torch.autograd.grad(F.cross_entropy(model(images[rows]), labels[rows]), model.weight)
             [0].flatten() for rows in batch.chunk(dist.get_world_size())]

    def count(_, inputs, output):
        held.append(held[-1] + len(output))
        output.register_hook(lambda gradient: held.append(held[-1] - len(gradient)))

    model.register_forward_hook(count)
    rows = parts["own_rows"](batch)
    with CallLog() as log:
        parts["accumulate"](model, images[rows], labels[rows], micro)
    [result] = [each.grad.flatten()[:, None] * len(right) for each in model.parameters()
                if each.grad is not None]
    shares = torch.linalg.lstsq(torch.stack(right).T, result).solution.flatten()
    return Recording(rows.tolist(), max(held), [call.bytes for call in log.calls],
                     [abs(round(each, 3)) for each in shares.tolist()])


def counted(ranks):
    return "In rank 0's result each rank's rows count " + ", ".join(
        f"{each:.2f}" for each in ranks[0].shares) + " times"


def kept(ranks):
    held, rows = ranks[0].held, len(ranks[0].rows)
    return held == rows, f"Rank 0 takes {rows} rows, and keeps what {held} of them need."


def called(ranks):
    return len(ranks[0].sent) > 1, (
        f"Calls of rank 0: {len(ranks[0].sent)}, with {sum(ranks[0].sent):,} bytes together.")


def taken_twice(ranks):
    both = {*ranks[0].rows} & {*ranks[1].rows}
    return bool(both), f"Ranks 0 and 1 have {len(both)} rows in common. {counted(ranks)}."


def alone(ranks):
    return not ranks[0].shares[1] and ranks[0].rows != ranks[1].rows, (
        f"{counted(ranks)}, and rank 1 takes rows {ranks[1].rows[0]} to {ranks[1].rows[-1]}.")


COMPLAINT = ("In slices on {n} GPUs, the result should be that of one GPU, each GPU should hold "
             "less, and it should send one gradient. One of the three is not so. No error.")
CASES = (
    Case("a", "postponed backward", accumulate, (
        Fault({"for x, y": "losses = []\nfor x, y", "loss.backward()": "losses.append(loss)",
               "for parameter": "sum(losses).backward()\nfor parameter"},
              COMPLAINT, {"one of three"}),)),
    Case("b", "impatient exchange", accumulate, (
        Fault({"loss.backward()": "[gradient] = torch.autograd.grad(loss, model.weight)\n"
               "dist.all_reduce(gradient)\nbefore = model.weight.grad\n"
               "model.weight.grad = gradient if before is None else before + gradient",
               "dist.all_reduce(parameter.grad)": "pass"}, COMPLAINT, {"one of three"}),)),
    Case("c", "repeated data", own_rows, (
        Fault({"[dist.get_rank()]": "[0]"}, COMPLAINT, {"one of three"}),)),
    Case("d", "solitary training", accumulate, (
        Fault({"dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad.clone())",
               "/= dist.get_world_size()": "/= 1"}, COMPLAINT, {"one of three"}),)),
)


class SlicedStep(SickJob):
    """A step whose ranks do not share the work as they should."""
    chapter = 1
    cases = CASES
    suspects_known = (
        Suspect("postponed backward", "It runs once, after all slices.", "memory", kept),
        Suspect("impatient exchange", "The ranks add up incomplete sums.", "calls", called),
        Suspect("repeated data", "Ranks take rows that others have.", "memory", taken_twice),
        Suspect("solitary training", "No rank gets what others found.", "sums", alone))

    def _draw_settings(self, chances):
        return chances.randrange(3, 6)  # rows of a slice; four of them are a rank's

    def _description(self):
        return (f"{self._world_size} ranks share a batch, {4 * self._settings} rows for each, in "
                f"slices of {self._settings}.")

    def _run(self, part):
        parts = {"own_rows": own_rows, "accumulate": accumulate, self._part_name: part}
        batch = torch.arange(4 * self._settings * self._world_size)
        return run(step, self._world_size, parts, batch, self._settings, backend="gloo")

    @instrument
    def memory(self) -> None:
        """Which rows each rank takes, and for how many it holds activations at a time."""
        for rank, each in enumerate(self._readings):
            print(f"rank {rank} takes rows {each.rows[0]} to {each.rows[-1]}, and holds the "
                  f"activations of {each.held} of them at most")

    @instrument
    def calls(self) -> None:
        """What each rank sends in the step."""
        print_table(["", "calls", "bytes"], *([f"rank {rank}", len(each.sent), sum(each.sent)]
                                              for rank, each in enumerate(self._readings)))

    @instrument
    def sums(self) -> None:
        """How often each rank's right rows are in rank 0's result, where 1 is right."""
        print_table(["rows of", "count"], *([f"rank {rank}", f"{each:.2f}"] for rank, each
                                            in enumerate(self._readings[0].shares)))
