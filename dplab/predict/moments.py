"""When does a training step hold the most? The bytes at each moment that can be the highest.

A rank always holds its part of the parameters and of the optimizer's state. The rest comes and
goes. Activations grow through forward and shrink through backward. Gradients grow through backward.
Single operations hold large tensors for a moment: the loss its gradients in fp32, `fully_shard` the
whole parameters and gradients of a block. `moments` lists the moments at which a rank can hold
most, in the order of the step, with their bytes by formula. The largest is the peak of the step.

What is counted is what Python and autograd hold, as in `dplab.dryrun`. Not counted is what a kernel
allocates inside, what NCCL and CUDA hold, and the allocator's rounding and fragmentation. On a GPU,
`fully_shard` allocates on several streams. It keeps its buffers alive by the same references on
every device, so the counted bytes are the same. But memory that one stream has freed cannot serve
another stream at once, so the allocator reserves more than is counted.

Sources: torch 2.13, distributed/fsdp/_fully_shard: `FSDPParamGroup.wait_for_unshard` (in forward
the buffer of an all-gather lives until the next unit is copied out of its own),
`_backward_prefetch` (one unit ahead), `post_backward` (the input of a reduce-scatter lives until
the next one), `foreach_reduce`; nn/functional.py, `cross_entropy`; optim/adam.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from dplab.predict.activations import Activations, activations
from dplab.predict.precision import Precision, States
from dplab.predict.shards import padded_parameters
from dplab.predict.transformer_config import TransformerConfig, numel

PARTS = ("parameters", "optimizer", "gathered", "gradients", "communication", "activations",
         "other")
"""The categories of `dplab.dryrun` and `dplab.measure.MemoryTimeline`, with the same meaning:

"gathered" is whole parameters of sharded ones, and autocast's copies; "communication" is what
collectives work on, such as buckets; "other" is what backward and the optimizer hold in passing.
"""


@dataclass(frozen=True)
class Moment:
    """One moment of a step: ``parts`` has the bytes that a rank holds then, for each of `PARTS`."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Step:
    """One rank's step, of which the moments are wanted. ``ranks``: those that share one copy.

    ``sharded``: of "parameters", "gradients" and "optimizer" what is divided among the ranks.
    ``reshard``, ``bucket_views`` and ``accumulates``: see `memory.budget`.
    """

    model: TransformerConfig
    ranks: int
    sharded: tuple[str, ...]
    precision: Precision
    states: States
    batch: int
    sequence: int
    recompute: str = "none"
    reshard: bool = True
    bucket_views: bool = False
    accumulates: bool = False

    @property
    def autocast(self) -> bool:
        """Whether whole parameters are used through copies of fewer bytes."""
        return ("parameters" not in self.sharded
                and self.precision.gathered < self.precision.parameters)

    @property
    def stream(self) -> int:
        """Bytes of the residual stream, or of its gradient."""
        element = self.precision.parameters if self.autocast else self.precision.gathered
        return self.batch * self.sequence * self.model.d_model * element

    @cached_property
    def kept(self) -> Activations:
        """What forward keeps for backward."""
        return activations(self.model, self.batch, self.sequence, element=self.precision.gathered,
                           recompute=self.recompute, autocast=self.autocast)

    def kept_below(self, block: int) -> float:
        """Bytes of activations of the blocks before this one."""
        return self.kept.blocks * block / self.model.layers

    def kept_until(self, block: int) -> float:
        """The same with this block, which is recomputed if asked."""
        return self.kept_below(block + 1) + self.kept.recomputed

    def at(self, name: str, *, gathered: float = 0, gradients: float = 0,
           communication: float = 0, activations: float = 0, other: float = 0) -> Moment:
        if self.accumulates and "gradients" in self.sharded and name != "optimizer step":
            gradients += self.states.gradients  # the sum of the micro-batches before
        return Moment(name, {
            "parameters": self.states.parameters, "optimizer": self.states.optimizer,
            "gathered": gathered, "gradients": gradients, "communication": communication,
            "activations": activations, "other": other})


def moments(step: Step, *, outermost: bool = False) -> list[Moment]:
    """The moments of the step that can be its highest, in order.

    ``outermost``: only those of the two blocks at each end. From one block to the next between
    them, what is held grows or shrinks evenly, so that the highest moment is always among these.
    """
    of = _sharded if "parameters" in step.sharded else _replicated
    backwards = [*range(step.model.layers)][::-1]
    return [*of(step, [each for place, each in enumerate(backwards) if not outermost
                       or place < 2 or each < 2])]


def _sharded(step: Step, backwards: list[int]) -> Iterator[Moment]:
    """`fully_shard` on each block and the root, or a ZeRO-3 like it."""
    model, precision, kept, layers = step.model, step.precision, step.kept, step.model.layers
    # Whole gradients, in the precision of backward.
    block, root, head, down = (size * precision.gathered for size in _elements(model))
    # What collectives carry, and what comes out of them, has its rows filled up to whole shards.
    of_block, of_root = (padded_parameters("fully_shard", step.ranks, [[*tensors.values()]])
                         for tensors in (model.block, model.ends))
    whole_block, whole_root = of_block * precision.gathered, of_root * precision.gathered
    sent_block, sent_root = of_block * precision.reduced, of_root * precision.reduced
    block_shard = of_block * precision.gradients / step.ranks
    root_shard = of_root * precision.gradients / step.ranks
    # The buffer of an all-gather is as large as what is copied out of it. One rank needs none.
    arriving, root_arriving = (0, 0) if step.ranks == 1 else (whole_block, whole_root)
    # A tied matrix gets a second gradient, from the embedding. Until then none is the parameter's.
    head_gradient, half_gradient = (0, head) if model.tied else (head, 0)

    def gathered(blocks):
        """The root, and of so many blocks that are still needed one or, if kept, all."""
        return whole_root + (min(blocks, 1) if step.reshard else blocks) * whole_block

    def prefetched(number):
        """In backward the block before this one arrives while this one computes."""
        return arriving if step.reshard and number > 0 else 0

    yield step.at("first gathers", gathered=gathered(1), activations=step.stream,
                      communication=root_arriving + arriving)
    if layers > 1:
        yield step.at("last gathers", gathered=gathered(layers), communication=2 * arriving,
                          activations=step.kept_below(layers - 1) + step.stream)
    at_loss = gathered(0 if step.reshard else layers)
    yield step.at("logits", gathered=at_loss, communication=arriving,
                      activations=kept.blocks + kept.ends + kept.logits)
    yield from _loss(step, at_loss, at_loss, step.at)
    yield step.at("gradient of the head", gathered=at_loss, communication=prefetched(layers),
                      gradients=head_gradient, activations=kept.blocks + kept.ends,
                      other=half_gradient + kept.logits + kept.ends - step.stream)

    for number in backwards:
        done = head_gradient + (layers - 1 - number) * block_shard
        # The input of the last reduce-scatter lives until the next one.
        buffers = prefetched(number) + (sent_block if number < layers - 1 else 0)
        passing, dropped = _feed_forward(step)
        yield step.at(
            f"backward of block {number}", gathered=gathered(number + 1), communication=buffers,
            gradients=done + down, activations=step.kept_until(number) - dropped,
            other=half_gradient + passing)
        # At the layer of the queries, the last. The norm's input and output are still kept, and
        # passing are gradients of both, of the queries, and of the stream around attention.
        yield step.at(
            f"gradients of block {number}", gathered=gathered(number + 1), communication=buffers,
            gradients=done + block, activations=step.kept_below(number) + 2 * step.stream,
            other=half_gradient + 4 * step.stream)
        yield step.at(
            f"reduction of block {number}", gathered=gathered(0 if step.reshard else number),
            communication=prefetched(number) + sent_block,
            gradients=done + _reducing(block, block_shard, 0 if model.biases else down),
            activations=step.kept_below(number), other=half_gradient + step.stream)

    shards = layers * block_shard
    yield step.at("gradient of the embedding", gathered=whole_root, communication=sent_block,
                      gradients=shards + root, other=2 * half_gradient)
    yield step.at("reduction of the root", communication=sent_root,
                      gradients=shards + _reducing(root, root_shard, head_gradient))
    yield _optimizer(step)


def _reducing(whole, shard, last):
    """A unit's gradients: all of them, or later what comes out, beside the last of the whole ones.

    A variable in `foreach_reduce`'s loop still refers to that one.
    """
    return max(whole, shard + last)


def _replicated(step: Step, backwards: list[int]) -> Iterator[Moment]:
    """DDP and ZeRO-1, whose gradients stay whole; ZeRO-2, which reduces a block at a time."""
    model, precision, kept, layers = step.model, step.precision, step.kept, step.model.layers
    # Whole gradients, and what stays of a block's after its reduction.
    block, root, head, down = (size * precision.gradients for size in _elements(model))
    head_gradient, half_gradient = (0, head) if model.tied else (head, 0)  # as in `_sharded`
    reduces = "gradients" in step.sharded
    left = block / step.ranks if reduces else block
    # Autocast copies what its linear layers multiply with. Forward keeps the copies to its end, and
    # backward needs them until each layer is done; a recomputed block makes its own.
    copy = precision.gathered if step.autocast else 0
    head_copy = copy * model.vocabulary * model.d_model
    copies = copy * numel(shape for name, shape in model.block.items() if "norm" not in name)
    copies_after = 0 if step.recompute == "full" else layers * copies
    # Buckets are there all the time, as large as the gradients, or they are the gradients.
    everything = model.parameters * precision.gradients
    in_views = step.bucket_views and not reduces
    buckets = 0 if reduces or in_views else everything

    def moment(name, *, gradients=0.0, communication=0.0, new=0.0, other=0.0, **parts):
        """``new``: of the gradients those that are still to be copied into a bucket."""
        if in_views:
            gradients, other = everything, other + new
        return step.at(name, gradients=gradients, communication=communication + buckets,
                           other=other, **parts)

    new_head = head / precision.gradients * precision.gathered  # its gradient, before any cast
    yield from _loss(step, layers * copies + head_copy, copies_after + head_copy, moment)
    yield moment("gradient of the head", gathered=copies_after + head_copy,
                 activations=kept.blocks + kept.ends,
                 other=kept.logits + kept.ends - step.stream + new_head)
    if step.autocast:
        yield moment("gradient of the head in fp32", gathered=copies_after,
                     activations=kept.blocks + step.stream,
                     other=new_head + head + step.stream)

    for number in backwards:
        done = head_gradient + (layers - 1 - number) * left
        copied = copies if step.recompute == "full" else (number + 1) * copies
        passing, dropped = _feed_forward(step)
        yield moment(
            f"backward of block {number}", gathered=copied - copy * model.d_ff * model.d_model,
            gradients=done + down, new=down, activations=step.kept_until(number) - dropped,
            other=half_gradient + passing)
        if reduces:
            yield moment(f"reduction of block {number}", gradients=done + block,
                         communication=block, other=half_gradient + step.stream,
                         activations=step.kept_below(number))

    yield moment("gradient of the embedding", gradients=layers * left + root, new=head,
                 other=2 * half_gradient)
    yield _optimizer(step, communication=buckets)


def _loss(step, in_forward, after, moment):
    """Cross-entropy in fp32, of logits that nothing else refers to after it.

    In backward there are three tensors as large as they: the logarithmic probabilities, their
    gradient and the logits' gradient. ``in_forward`` and ``after``: what is gathered then.
    """
    kept = step.kept
    fp32 = kept.loss
    as_fp32 = 0 if step.precision.gathered == 4 else fp32
    yield moment("loss in forward", gathered=in_forward,
                 activations=kept.blocks + kept.ends + kept.logits + as_fp32 + fp32)
    yield moment("loss", gathered=after, activations=kept.blocks + kept.ends + fp32,
                 other=2 * fp32)


def _feed_forward(step):
    """Where a block's backward is highest: (bytes in passing, activations that it has dropped).

    The last matrix's input is gone. A gated unit then has that input's gradient and those of both
    its factors, GELU the gradients of its output and of its input; and there is the stream's.
    """
    inner = step.batch * step.sequence * step.model.d_ff * step.precision.gathered
    return (3 if step.model.gated else 2) * inner + step.stream, inner


def _elements(model):
    """Of a block and of the root; of the head; of a block's last matrix, first in backward."""
    return (model.block_parameters, numel(model.ends.values()), model.vocabulary * model.d_model,
            model.d_ff * model.d_model)


def _optimizer(step, communication=0.0):
    """The optimizer works on one tensor after another, as with ``fused=True``.

    Adam takes the root of a tensor's second moment and divides it into another tensor. What it made
    of the tensor before is still there. A rank has its rows of each tensor, where parameters are
    sharded, and else whole tensors, as far as it owns their state.
    """
    model, precision = step.model, step.precision
    owned = step.states.optimizer / precision.optimizer if precision.optimizer else 0
    elements = max(size + before / 2 for before, size in pairwise([0, *_tensors(model)]))
    elements = elements / step.ranks if "parameters" in step.sharded else min(elements, owned)
    return step.at("optimizer step", gradients=step.states.gradients,
                       communication=communication, other=elements * precision.in_step)


def _tensors(model):
    """The elements of each tensor in the order of the model, of like blocks the first two."""
    ends = {name: numel([shape]) for name, shape in model.ends.items()}
    first = [name for name in ends if name.startswith(("embedding", "positions"))]
    block = [numel([shape]) for shape in model.block.values()]
    return [*(ends.pop(name) for name in first), *block, *block, *ends.values()]
