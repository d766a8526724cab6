"""Chapter 08's drills: a sharded optimizer that holds too much, or trains something else.

The job runs on two to four real ranks. Each owns a chunk of all parameters, laid flat: it gets the
mean gradient of its chunk, updates it, and gathers those of the others. Its readings stand beside
those of one process that trains on the same global batches.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

from dplab import run
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, instrument, print_table
from dplab.measure import CallLog, MemoryTimeline
from dplab.workloads.digits import load_digits

STEPS, LONGEST = 8, 0.05  # the length to which gradients are scaled down
ROUNDING = 1e-4
GROWTH = 100_000  # bytes; what autograd saves for the test set is more in each step


@dataclass(frozen=True)
class Settings:
    width: int
    batch: int  # of a rank
    seed: int


# The parts


class Owners:
    """Each rank keeps Adam's moments for its own chunk of all parameters, laid flat."""

    def __init__(self, parameters, rank, ranks):
        self.parameters, self.rank, self.ranks = list(parameters), rank, ranks
        flat = parameters_to_vector(self.parameters).detach()
        self.flat = F.pad(flat, (0, -len(flat) % ranks))
        self.own = self.flat.chunk(ranks)[rank].clone()
        self.adam = torch.optim.AdamW([self.own], lr=0.01, eps=0.01)
        del self.flat

    def reduce(self):
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters]) / self.ranks
        flat = F.pad(flat, (0, -len(flat) % self.ranks))
        self.own.grad = torch.empty_like(self.own)
        dist.reduce_scatter_single(self.own.grad, flat)
        for parameter in self.parameters:
            parameter.grad = None

    def scale(self, longest):
        squares = self.own.grad.square().sum()
        dist.all_reduce(squares)
        factor = min(1.0, longest / squares.sqrt().item())
        self.own.grad.mul_(factor)
        return factor

    def step(self):
        self.adam.step()
        whole = torch.empty(self.ranks * len(self.own))
        dist.all_gather_single(whole, self.own)
        for parameter in self.parameters:
            new, whole = whole[: parameter.numel()], whole[parameter.numel() :]
            parameter.data.copy_(new.view_as(parameter))


def evaluate(model, images, labels, log):
    with torch.no_grad():
        loss = F.cross_entropy(model(images), labels)
    log.append(loss.item())


# The job


@dataclass
class Recording:
    """One rank: a number or a row for each step; memory in bytes."""

    losses: list[float]
    factors: list[float]
    calls: list[str]
    apart: list[float]  # between this rank's parameters and what their owners have
    adam: int
    behind: int  # the gradients of what the rank owns
    memory: list[dict[str, int]]
    own: int  # elements


def train(parts, settings):
    """Runs the job on this rank."""
    rank, ranks, digits = dist.get_rank(), dist.get_world_size(), load_digits()
    model = make_model(settings)
    owners = parts["Owners"](model.parameters(), rank, ranks)
    losses, factors, calls, apart, log = [], [], [], [], []
    with MemoryTimeline(model, owners.adam) as held:
        for step in range(STEPS):
            with held.phase(f"step {step + 1}"), CallLog() as called:
                begin = (step * ranks + rank) * settings.batch
                images, labels = (each[begin : begin + settings.batch] for each in (
                    digits.train_images, digits.train_labels))
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                owners.reduce()
                factors.append(owners.scale(LONGEST))
                owners.step()
                losses.append(loss.item())
                del loss
                parts["evaluate"](model, digits.test_images, digits.test_labels, log)
            calls.append("; ".join(f"{call.operation} {call.bytes:,}" for call in called.calls))
            apart.append(_apart(model, owners))
    gradient = owners.own.grad
    return Recording(
        losses, factors, calls, apart,
        sum(each.nbytes for state in owners.adam.state.values() for each in state.values()),
        gradient.untyped_storage().nbytes() if gradient is not None else 0,
        [_at_the_end(held, phase) for phase in held.phases], len(owners.own))


def alone(settings, ranks):
    """The losses of one process on the same global batches."""
    model, losses, digits = make_model(settings), [], load_digits()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01)
    for step in range(STEPS):
        batch = slice(step * ranks * settings.batch, (step + 1) * ranks * settings.batch)
        loss = F.cross_entropy(model(digits.train_images[batch]), digits.train_labels[batch])
        adam.zero_grad()
        loss.backward()
        length = parameters_to_vector([each.grad for each in model.parameters()]).norm().item()
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, LONGEST / length))
        adam.step()
        losses.append(loss.item())
    return losses


def make_model(settings):
    torch.manual_seed(settings.seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, settings.width), nn.ReLU(),
                         nn.Linear(settings.width, settings.width), nn.ReLU(),
                         nn.Linear(settings.width, 10))


def _apart(model, owners):
    own = [torch.empty_like(owners.own) for _ in range(owners.ranks)]
    dist.all_gather(own, owners.own.detach())
    flat = parameters_to_vector(model.parameters()).detach()
    return (flat - torch.cat(own)[: len(flat)]).abs().max().item()


def _at_the_end(held, phase):
    """Without what gloo's threads may still hold of the last collective."""
    last = [sample for sample in held.samples if sample.op <= phase.end][-1].bytes
    return {category: size for category, size in last.items() if category != "communication"}


# Readings


@dataclass
class Readings:
    ranks: list[Recording]
    one_process: list[float]

    @property
    def losses(self) -> list[float]:
        """The loss of each step, the mean over the ranks."""
        return [sum(step) / len(step) for step in zip(*(rank.losses for rank in self.ranks),
                                                      strict=True)]

    @property
    def growth(self) -> int:
        """The bytes by which rank 0 holds more after the last step than after the second."""
        _, second, *_, last = (sum(each.values()) for each in self.ranks[0].memory)
        return last - second


# Suspects


def unsharded(readings):
    own, adam = readings.ranks[0].own, readings.ranks[0].adam
    return adam > 1.5 * 8 * own, (f"Adam holds {adam:,} bytes on rank 0, which owns {own:,} "
                                  f"parameters: two moments of these have {8 * own:,}.")


def local_clipping(readings):
    first = [rank.factors[0] for rank in readings.ranks]
    differ = max(first) - min(first) > ROUNDING * max(first)
    return differ, ("In step 1 the ranks multiply their gradients by "
                    f"{', '.join(f'{each:.5f}' for each in first)}.")


def kept_graph(readings):
    growth = readings.growth
    return growth > GROWTH, (f"After step {STEPS}, rank 0 holds {growth:,} bytes more than after "
                           "step 2.")


def large_slice(readings):
    own, behind = readings.ranks[0].own, readings.ranks[0].behind
    return behind > 1.5 * 4 * own, (f"Behind the gradient of the {own:,} parameters that rank 0 "
                                    f"owns are {behind:,} bytes; these gradients have {4 * own:,}.")


def missed_gather(readings):
    apart = [max(rank.apart) for rank in readings.ranks]
    return max(apart) > 0, ("A parameter differs by up to "
                            f"{', '.join(f'{each:.2g}' for each in apart)} on the ranks from what "
                            "its owner has.")


SUSPECTS = (
    Suspect("unsharded state", "Each rank keeps Adam's moments for all parameters.", "memory",
            unsharded),
    Suspect("local clipping", "Each rank scales its gradients by a number of its own.", "factors",
            local_clipping),
    Suspect("kept graph", "What autograd saved for a backward is never freed.", "memory",
            kept_graph),
    Suspect("large slice", "A small tensor is a view, and keeps a large one in memory.", "memory",
            large_slice),
    Suspect("missed gather", "Not every updated parameter gets to every rank.", "parameters",
            missed_gather),
)

CASES = (
    Case("a", "unsharded state", Owners, (
        Fault({"AdamW([self.own], lr=0.01, eps=0.01)\n        del self.flat":
               "AdamW([self.flat], lr=0.01, eps=0.01)",
               "self.own = self.flat.chunk(ranks)[rank].clone()":
               "self.own = self.flat.chunk(ranks)[rank]",
               "self.adam.step()":
               "self.flat.grad = torch.zeros_like(self.flat)\n"
               "self.flat.grad.chunk(self.ranks)[self.rank].copy_(self.own.grad)\n"
               "self.adam.step()\nself.flat.grad = None"},
              "We went to {n} GPUs and to a sharded optimizer at once. The loss is that of the "
              "one-GPU run, and memory hardly went down.", {"equal losses", "too much"},
              also=("Twice the GPUs do not make a rank's part of memory smaller. All losses are "
                    "right. We have {n} of them now.",)),)),
    Case("b", "local clipping", Owners, (
        Fault({"dist.all_reduce(squares)\n        factor": "factor"},
              "Memory on {n} GPUs is as planned. The first loss is right, the later ones are a "
              "little off. The ranks' checkpoints are equal to the last bit.",
              {"from step 2", "equal ranks"}),
        Fault({"squares.sqrt().item()": "(self.ranks * squares).sqrt().item()",
               "dist.all_reduce(squares)\n        factor": "factor"},
              "From step 2 on, the losses on {n} GPUs are not those of the one-GPU run. All ranks "
              "have the same checkpoint. Is this rounding?", {"from step 2", "equal ranks"}))),
    Case("c", "kept graph", evaluate, (
        Fault({"    with torch.no_grad():\n        loss": "    loss",
               "log.append(loss.item())": "log.append(loss)"},
              "The job on {n} GPUs is fine for an hour. Then a rank is out of memory, each time at "
              "about the same step. The losses are right.", {"equal losses", "grows"}),
        Fault({"with torch.no_grad():": "with torch.enable_grad():",
               "log.append(loss.item())": "log.append(sum([loss, *log[-1:]]))"},
              "Every loss is that of the one-GPU run. Only, the longer the job runs on {n} GPUs, "
              "the less memory is free.", {"equal losses", "grows"}))),
    Case("d", "large slice", Owners, (
        Fault({"self.own.grad = torch.empty_like(self.own)":
               "self.own.grad = flat.chunk(self.ranks)[self.rank]"},
              "The loss is that of the one-GPU run. With {n} GPUs each rank should have more free "
              "memory after a step than it has.", {"equal losses", "too much"}),
        Fault({"self.own.grad = torch.empty_like(self.own)\n"
               "        dist.reduce_scatter_single(self.own.grad, flat)":
               "dist.all_reduce(flat)\nself.own.grad = flat.chunk(self.ranks)[self.rank]"},
              "All losses agree with one GPU. I have computed what a rank of {n} holds after a "
              "step, and it holds more.", {"equal losses", "too much"}))),
    Case("e", "missed gather", Owners, (
        Fault({"dist.all_gather_single(whole, self.own)":
               "whole = F.pad(parameters_to_vector(self.parameters).detach(), (0, self.ranks))\n"
               "whole[: self.ranks * len(self.own)].chunk(self.ranks)[self.rank].copy_(self.own)"},
              "Memory is as planned on {n} GPUs, and the first loss is right. After that the log "
              "is no longer the one-GPU log.", {"from step 2"}),
        Fault({"for parameter in self.parameters:\n            new":
               "for parameter in self.parameters[:-1]:\n    new"},
              "From step 2 on, the losses on {n} GPUs are a little off, though all ranks' "
              "checkpoints are equal.", {"from step 2", "equal ranks"}))),
)


# The jobs


class ShardedTraining(SickJob):
    """Training of a digits classifier with a sharded optimizer."""

    chapter = 8
    suspects_known = SUSPECTS
    cases = CASES

    def _draw_settings(self, chances: random.Random) -> Settings:
        return Settings(width=chances.randrange(61, 90), batch=chances.randrange(20, 40),
                        seed=chances.randrange(1000))

    def _description(self):
        settings = self._settings
        return (f"The job trains a classifier of digits on {self._world_size} ranks with "
                f"{settings.batch} digits each, {STEPS} steps. Each rank owns a part of all "
                "parameters. It should hold Adam's moments and mean gradients for that part alone. "
                f"The gradient of each step is scaled down to a length of {LONGEST}, and the model "
                "is tried on the test set after each step.")

    def _run(self, part: Callable):
        parts = {each.__name__: each for each in (Owners, evaluate)} | {self._part_name: part}
        return Readings(run(train, self._world_size, parts, self._settings, backend="gloo"),
                        alone(self._settings, self._world_size))

    @instrument
    def losses(self) -> None:
        """The loss in each step, of each rank and of one process."""
        rows = {f"rank {rank}": each.losses for rank, each in enumerate(self._readings.ranks)}
        rows |= {"mean": self._readings.losses, "one process": self._readings.one_process}
        print_table(["step", *range(1, STEPS + 1)], *(
            [name, *(f"{loss:.5f}" for loss in losses)] for name, losses in rows.items()))

    @instrument
    def memory(self) -> None:
        """What a rank holds after steps, in bytes, and what of it is for Adam and for gradients."""
        own = self._readings.ranks[0].own
        print(f"A rank owns {own:,} parameters, of 4 bytes each.")
        print_table(["after step", *(f"{step:,}" for step in (1, 2, 4, STEPS)), "for Adam",
                     "behind gradients"], *(
            [f"rank {rank}", *(f"{sum(each.memory[step - 1].values()):,}"
                               for step in (1, 2, 4, STEPS)), f"{each.adam:,}", f"{each.behind:,}"]
            for rank, each in enumerate(self._readings.ranks)))

    @instrument
    def parameters(self) -> None:
        """How far a rank's parameters are from what their owners have, after each step."""
        print_table(["step", *range(1, STEPS + 1)], *(
            [f"rank {rank}", *(f"{gap:.2g}" for gap in each.apart)]
            for rank, each in enumerate(self._readings.ranks)))

    @instrument
    def factors(self) -> None:
        """By what each rank multiplies its gradients, in each step."""
        print_table(["step", *range(1, STEPS + 1)], *(
            [f"rank {rank}", *(f"{factor:.5f}" for factor in each.factors)]
            for rank, each in enumerate(self._readings.ranks)))

    @instrument
    def calls(self) -> None:
        """The collectives of step 2, with the bytes that each rank hands over."""
        for rank, each in enumerate(self._readings.ranks):
            print(f"rank {rank}: {each.calls[1]}")
