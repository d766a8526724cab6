"""What a dry run found: memory over the step, by category, and collectives."""

from dataclasses import dataclass, field

from dplab.measure.memory_timeline import CATEGORIES, Phase, Sample, Sampled
from dplab.predict.memory import States


class UnsupportedOperator(RuntimeError):
    """The model or its loss asks for a tensor's values, and a dry run has shapes alone."""


@dataclass(frozen=True)
class Collective:
    """``bytes`` is the size of the whole tensor: what an all-gather makes, what a reduce-scatter
    takes; ``ranks`` is how many take part; ``phase`` is "forward", "backward" or "optimizer".
    """

    operation: str
    bytes: int
    dtype: str
    ranks: int
    phase: str = ""


@dataclass(frozen=True)
class DryRun(Sampled):
    """One training step of one rank, the fullest of ``world_size``, that never held any data.

    It is a step in the middle of training: the optimizer's state exists. ``samples`` and ``phases``
    are those of `dplab.measure.MemoryTimeline`, without seconds. ``states``: bytes of parameters,
    gradients and optimizer state that remain after the step. ``traced_blocks`` of ``blocks`` blocks
    were run; where these are fewer, the step of one in the middle stands for the others that are
    like it. ``seconds`` are what the dry run itself took.
    """

    strategy: str
    world_size: int
    parameters: int
    states: States
    samples: list[Sample] = field(repr=False)
    phases: list[Phase] = field(repr=False)
    collectives: tuple[Collective, ...] = field(repr=False)
    blocks: int
    traced_blocks: int
    seconds: float

    @property
    def peak_phase(self) -> str:
        """The part of the step in which that was: "forward", "backward" or "optimizer"."""
        return next((phase.name for phase in reversed(self.phases)
                     if phase.start < self._highest.op), self.phases[0].name)

    def count(self, operation: str | None = None) -> int:
        """How many collectives there were, of one operation or of all."""
        return sum(operation in (None, each.operation) for each in self.collectives)

    def bytes(self, operation: str | None = None) -> int:
        """The bytes of the whole tensors that they worked on."""
        return sum(each.bytes for each in self.collectives if operation in (None, each.operation))

    def __str__(self):
        how = (f"{self.traced_blocks} of {self.blocks} blocks traced, the others like them"
               if self.traced_blocks < self.blocks else "traced in full")
        lines = [f"dry run of {self.strategy}: {self.parameters:,} parameters, "
                 f"{self.world_size} ranks ({how}, {self.seconds:.1f} s)",
                 f"peak {_gb(self.peak)} per rank, in {self.peak_phase}"]
        lines += [f"  {category:14}{_gb(self.at_peak[category])}" for category in CATEGORIES]
        for operation in dict.fromkeys(each.operation for each in self.collectives):
            lines.append(f"{self.count(operation):5} × {operation:14}"
                         f"{_gb(self.bytes(operation))}")
        return "\n".join(lines)


def _gb(nbytes):
    return f"{nbytes / 1e9:10.3f} GB"
