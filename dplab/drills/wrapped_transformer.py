"""Chapter 10's drills: a transformer under torch's `fully_shard`, wrapped otherwise than planned.

The job runs on two to four real ranks, and the plan beside it is the same job, wrapped well.
"""

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from dplab import run
from dplab.drills.sick_job import Case, Fault, SickJob, Suspect, instrument, print_table
from dplab.measure import CallLog, MemoryTimeline
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads.transformer import Block, Transformer  # noqa: F401, a fault needs Block

STEPS, SAMPLES, LENGTH, VOCABULARY, RATE = 6, 2, 16, 64, 0.5


@dataclass(frozen=True)
class Settings:
    blocks: int
    seed: int


@dataclass
class Seen:
    """Of one rank: the loss of each step, and of the last one its calls and what it held."""

    losses: list[float] = field(default_factory=list)
    calls: dict[tuple[str, str, str], int] = field(default_factory=dict)  # part, operation, dtype
    held: dict[tuple[str, str], int] = field(default_factory=dict)  # part, category: the most bytes
    peak: int = 0


# The job's part


def wrap(model, mesh):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class Stack(nn.Module):
    """Blocks one after another."""

    def __init__(self, blocks):
        super().__init__()
        self.parts = nn.ModuleList(blocks)

    def forward(self, x, rotation=None):
        for block in self.parts:
            x = block(x, rotation)
        return x


def train(wrap, settings):
    """Runs the job on this rank."""
    torch.manual_seed(settings.seed)
    model = Transformer(TransformerConfig(
        layers=settings.blocks, d_model=64, heads=2, d_ff=128, vocabulary=VOCABULARY,
        context=LENGTH, gated=True, biases=False, norm="rmsnorm", learned_positions=False,
        tied=False))
    wrap(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=RATE), Seen()
    for number in range(STEPS):
        if number < STEPS - 1:
            _step(model, settings, number, seen)
        else:
            with MemoryTimeline(model, optimizer) as memory:
                _step(model, settings, number, seen, memory.phase)
            seen.peak = memory.peak
            seen.held = _most_held(memory)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _step(model, settings, number, seen, phase=contextlib.nullcontext):
    """Forward and backward; the targets are the tokens themselves."""
    generator = torch.Generator().manual_seed(
        1000 * settings.seed + 10 * number + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    with CallLog() as forward, phase("forward"):
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    with CallLog() as backward, phase("backward"):
        loss.backward()
    seen.losses.append(loss.item())
    seen.calls = Counter((part, call.operation, call.dtype)
                         for part, log in (("forward", forward), ("backward", backward))
                         for call in log.calls)


def _most_held(memory):
    """The most bytes of each category, in forward and in backward."""
    found: dict[tuple[str, str], int] = {}
    for phase in memory.phases:
        for sample in memory.samples:
            if phase.holds(sample):
                for category, nbytes in sample.bytes.items():
                    place = phase.name, category
                    found[place] = max(found.get(place, 0), nbytes)
    return found


# Readings


@dataclass
class Readings:
    ranks: list[Seen]
    planned: Seen  # rank 0's, wrapped well
    planned_losses: list[float]  # the means over the ranks

    @property
    def here(self):
        return self.ranks[0]

    def losses(self):
        return means(self.ranks)

    def gathers(self, part, seen=None):
        return sum(count for (where, what, _), count in (seen or self.here).calls.items()
                   if (where, what) == (part, "all_gather"))

    def of_dtype(self, operation, dtype):
        return sum(count for (_, what, kind), count in self.here.calls.items()
                   if (what, kind) == (operation, dtype))

    def share(self, part, category):
        return self.here.held[part, category] / self.planned.held[part, category]


def means(ranks):
    return [sum(each) / len(each) for each in zip(*(rank.losses for rank in ranks), strict=True)]


# Suspects


def lost(readings):
    here, planned = (readings.gathers("forward", seen) for seen in (None, readings.planned))
    return here < planned, f"{here} all-gathers in forward, and {planned} were planned."


def unresharded(readings):
    forward, backward = (readings.gathers(part) for part in ("forward", "backward"))
    planned = readings.gathers("backward", readings.planned)
    return (forward == readings.gathers("forward", readings.planned) and backward < planned,
            f"{forward} all-gathers in forward, and {backward} in backward, where {planned} were "
            "planned.")


def in_fp32(readings):
    count = readings.of_dtype("all_gather", "float32")
    return count > 0, f"{count} all-gathers of a step carry float32."


def too_long(readings):
    equal = readings.here.calls == readings.planned.calls
    share = readings.share("backward", "activations")
    return equal and share > 1.25, (
        f"The calls are {'as' if equal else 'not as'} planned, and in backward the activations "
        f"reach {share:.2f} times what was planned.")


def in_bf16(readings):
    count = readings.of_dtype("reduce_scatter", "bfloat16")
    return count > 0, f"{count} reduce-scatters of a step carry bfloat16."


SUSPECTS = (
    Suspect("lost units", "Layers that should be gathered by themselves belong to the root.",
            "calls", lost),
    Suspect("missing reshard", "Layers stay whole from forward to backward.", "calls",
            unresharded),
    Suspect("wide gather", "Some layers are gathered in float32.", "calls", in_fp32),
    Suspect("long recomputation", "One checkpoint covers several layers.", "memory", too_long),
    Suspect("coarse reduction", "Gradients are added over the ranks in bfloat16.", "calls",
            in_bf16),
)

_POLICY = "MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
_BLOCK = "fully_shard(block, mesh=mesh, mp_policy=policy)"
_END = "fully_shard(model, mesh=mesh, mp_policy=policy)"
_WRAPPED = ("for number, block in enumerate(model.blocks):\n        model.blocks[number] = "
            "checkpoint_wrapper(block, preserve_rng_state=False)\n    for block in model.blocks:\n"
            f"        {_BLOCK}")
_MORE = "Since our last release a step on {n} GPUs takes more memory than planned. Nothing fails."
_HALF = "We had to halve the batch on {n} GPUs. The losses are those of the last release."
_OFF = "The losses on {n} GPUs are a little off those of our last release. Nothing fails."
_CURVE = "On {n} GPUs the new curve is close to the old one, and it is another one. No warning."
_SAME, _APART = {"more memory", "equal losses"}, {"a little apart"}


def _stacks(size):
    """The edit that puts a checkpoint around each ``size`` blocks, inside of which they are units.
    """
    return {_WRAPPED: f"for block in model.blocks:\n    {_BLOCK}\nblocks = list(model.blocks)\n"
                      "stacks = [Stack(blocks[first:first + SIZE]) for first in "
                      f"range(0, len(blocks), SIZE)]\nmodel.blocks = nn.ModuleList(".replace(
                          "SIZE", size)
                      + "\n    checkpoint_wrapper(each, preserve_rng_state=False) for each in "
                        "stacks)"}


CASES = (
    Case("a", "lost units", wrap, (
        Fault({_BLOCK: f"if isinstance(block, Block):\n    {_BLOCK}"}, _MORE, _SAME,
              also=(_HALF,)),
        Fault({"for block in model.blocks:": "for block in model.blocks[1::2]:"}, _HALF, _SAME,
              also=(_MORE,)))),
    Case("b", "missing reshard", wrap, (
        Fault({_BLOCK: _BLOCK.replace("policy)", "policy, reshard_after_forward=False)")}, _MORE,
              _SAME, (3, 4), also=(_HALF,)),
        Fault({_END: f"{_END}\nfor block in model.blocks:\n"
                     "    block.set_reshard_after_forward(False)"}, _HALF, _SAME, (3, 4),
              also=(_MORE,)))),
    Case("c", "wide gather", wrap, (
        Fault({"for block in model.blocks:": "first = list(model.blocks)[:3]\nwide = "
               "MixedPrecisionPolicy(torch.float32, torch.float32)\nfor block in model.blocks:",
               _BLOCK: _BLOCK.replace("policy)", "wide if block in first else policy)")},
              _OFF, _APART, also=(_CURVE,)),
        Fault({_BLOCK: "wide = MixedPrecisionPolicy(torch.float32, torch.float32)\n"
                       "fully_shard(block, mesh=mesh, mp_policy=wide if block is model.blocks[1] "
                       "else policy)"}, _CURVE, _APART, also=(_OFF,)))),
    Case("d", "long recomputation", wrap, (
        Fault(_stacks("len(blocks)"), _MORE, _SAME, also=(_HALF,)),
        Fault(_stacks("3"), _HALF, _SAME, (3, 4), also=(_MORE,)))),
    Case("e", "coarse reduction", wrap, (
        Fault({_POLICY: "MixedPrecisionPolicy(torch.bfloat16)"}, _CURVE, _APART, also=(_OFF,)),
        Fault({_BLOCK: "last = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)\n"
                       "fully_shard(block, mesh=mesh, mp_policy=last if block is model.blocks[-1] "
                       "else policy)"}, _OFF, _APART, also=(_CURVE,)))),
)


# The jobs


class WrappedTransformer(SickJob):
    """A transformer whose blocks are recomputed, and gathered by `fully_shard`."""

    chapter = 10
    suspects_known = SUSPECTS
    cases = CASES

    def _draw_settings(self, chances: random.Random) -> Settings:
        return Settings(blocks=chances.choice((6, 8)), seed=chances.randrange(1000))

    def _description(self):
        return (f"The job runs on {self._world_size} ranks. It trains a transformer of "
                f"{self._settings.blocks} blocks for {STEPS} steps by SGD. It is planned so: each "
                "block is gathered by itself, in bfloat16, freed after forward, and computed again "
                "in backward; gradients are added in float32. “Planned” below is what this plan "
                "gives.")

    def _run(self, part):
        ranks, planned = (run(train, self._world_size, each, self._settings, backend="gloo")
                          for each in (part, wrap))
        return Readings(ranks, planned[0], means(planned))

    @instrument
    def losses(self) -> None:
        """The loss of each step: on each rank, their mean, and as planned."""
        readings = self._readings
        ranks = readings.ranks
        print_table(["step", *(f"rank {rank}" for rank in range(len(ranks))), "mean", "planned"],
                    *([number + 1, *(f"{rank.losses[number]:.6f}" for rank in ranks),
                       f"{mean:.6f}", f"{planned:.6f}"] for number, (mean, planned) in enumerate(
                           zip(readings.losses(), readings.planned_losses, strict=True))))

    @instrument
    def calls(self) -> None:
        """The collectives of the last step on rank 0, in forward and in backward."""
        here, planned = self._readings.here.calls, self._readings.planned.calls
        print_table(["in", "collective", "of", "calls", "planned"],
                    *([*each, here.get(each, 0), planned.get(each, 0)]
                      for each in dict.fromkeys([*planned, *here])))

    @instrument
    def memory(self) -> None:
        """The most kB that rank 0 holds in the last step, by what they are."""
        readings = self._readings
        rows = [[part, category, f"{held / 1e3:.1f}",
                 f"{readings.planned.held[part, category] / 1e3:.1f}"]
                for (part, category), held in readings.here.held.items() if held]
        peaks = [f"{seen.peak / 1e3:.1f}" for seen in (readings.here, readings.planned)]
        print_table(["in", "what", "kB", "planned"], *rows, ["step", "all, at the peak", *peaks])
