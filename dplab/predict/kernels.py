"""How long computing takes: a block of a transformer as its kernels, one by one.

`block_forward` and `block_backward` list the kernels of a model's block: matrix products with their
shapes, attention, and memory-bound work between them with its bytes. `seconds` sums them up at the
rates that others measured (see `rates`):

- a product (m, k) · (k, n) takes 2·m·n·k FLOPs at the rate of that shape. Backward has two of them
  for each: the input's gradient (tokens × in, over out) and the weight's (out × in, over tokens);
- attention takes 4·s²·head_dim FLOPs a head, half of that with the causal mask, its backward 2.5
  times as much, because it computes the scores again;
- everything else reads and writes memory, and takes its bytes at the bandwidth of its kind. Eagerly
  each operation is a kernel that reads its inputs and writes its result. Compiled, neighbours are
  one kernel: the addition to the residual stream and the norm after it, the activation and the
  product with it, all of rotary, all of the loss. Matrix products and attention stay as they are;
- no kernel is shorter than the time to launch it.

Left out: gaps that the CPU leaves otherwise, matrix products on sizes that no tile divides,
dropout, and contention with communication. A compiled block's fusions are Inductor's as far as they
are plain; a different version of it fuses a little more or less.

Sources: V. Korthikanti et al., "Reducing activation recomputation in large transformer models",
2022 (what a block consists of); T. Dao, "FlashAttention-2", 2023, arXiv 2307.08691 (attention's
FLOPs); torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py (the copies around FSDP's
collectives); ``kernels.json`` (each rate's own).
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dplab.predict.catalogue import Gpu
from dplab.predict.checks import one_of, whole
from dplab.predict.job import RECOMPUTE, Cluster, Job
from dplab.predict.rates import ATTENTION_KERNELS, PUBLISHED, Rate, Rates
from dplab.predict.step import Layer
from dplab.predict.transformer_config import TransformerConfig, numel

BF16 = 2  # bytes of a number


@dataclass(frozen=True)
class Kernel:
    """One kernel. ``what``: "matmul", "attention", "attention backward", or memory-bound work by
    the name that it has in `Rates.memory`.

    ``shape``: (m, n, k) of a product; (batch, heads, sequence, head_dim) of attention, which is
    causal. ``nbytes``: what all other kernels read and write. ``count``: so many alike.
    """

    name: str
    what: str
    shape: tuple[int, ...] = ()
    nbytes: float = 0
    count: float = 1

    @property
    def flops(self) -> float:
        """Of all ``count`` of them; 0 for memory-bound work."""
        if self.what == "matmul":
            return 2 * math.prod(self.shape) * self.count
        if not self.shape:
            return 0
        batch, heads, sequence, head_dim = self.shape
        half = 4 * batch * heads * sequence**2 * head_dim / 2
        return half * (2.5 if self.what == "attention backward" else 1) * self.count


def block_forward(model: TransformerConfig, batch: int, sequence: int, *, compiled: bool = False
                  ) -> list[Kernel]:
    """The kernels of one block's forward on ``batch`` sequences, in bf16.

    Raises ValueError and TypeError for sizes that are no whole numbers from 1 up.
    """
    tokens, width, inside = _sizes(model, batch, sequence)
    kernels = [Kernel(f"{name} product", "matmul", (tokens, out, into))
               for name, (out, into) in _matrices(model)]
    kernels.append(Kernel("attention", "attention", (
        batch, model.heads, sequence, model.d_model // model.heads)))
    if compiled:
        kernels += [
            Kernel("norm", "norm", nbytes=2 * width),
            Kernel("residual addition and norm", "norm", nbytes=4 * width),
            Kernel("activation", "activation", nbytes=(3 if model.gated else 2) * inside),
            Kernel("residual addition", "elementwise", nbytes=3 * width)]
    else:
        kernels += [
            Kernel("norm", "norm", nbytes=2 * width, count=2),
            Kernel("residual addition", "elementwise", nbytes=3 * width, count=2),
            Kernel("activation", "activation", nbytes=2 * inside)]
        if model.gated:
            kernels.append(Kernel("gate times up", "activation", nbytes=3 * inside))
    return kernels + _rotary("rotary positions", model, tokens, compiled)


def block_backward(model: TransformerConfig, batch: int, sequence: int, *, compiled: bool = False,
                   recompute: str = "none") -> list[Kernel]:
    """The kernels of one block's backward, with what ``recompute`` runs again; see `RECOMPUTE`.

    Raises as `block_forward`, and ValueError for another ``recompute``.
    """
    tokens, width, inside = _sizes(model, batch, sequence)
    forward = block_forward(model, batch, sequence, compiled=compiled)
    kernels = {"none": [], "full": forward, "selective": [
        replace(kernel, count=kernel.count / 2) if kernel.what == "matmul" else kernel
        for kernel in forward if kernel.what != "attention"],
    }[one_of(recompute, RECOMPUTE, "recompute")]
    for name, (out, into) in _matrices(model):
        kernels += [Kernel(f"{name} input's gradient", "matmul", (tokens, into, out)),
                    Kernel(f"{name} weight's gradient", "matmul", (out, into, tokens))]
    kernels.append(Kernel("attention backward", "attention backward", (
        batch, model.heads, sequence, model.d_model // model.heads)))
    if compiled:
        kernels += [
            Kernel("activation backward", "activation", nbytes=(5 if model.gated else 3) * inside),
            # each reads its input, the stream's gradient and those of the products after it
            Kernel("norm and addition backward", "norm backward",
                   nbytes=(5 if model.gated else 4) * width),
            Kernel("norm and addition backward", "norm backward", nbytes=6 * width)]
    else:
        kernels += [
            Kernel("norm backward", "norm backward", nbytes=5 * width, count=2),
            # where a norm's output feeds several products, and where the stream forks
            Kernel("addition of gradients", "elementwise", nbytes=3 * width,
                   count=5 if model.gated else 4),
            Kernel("activation backward", "activation", nbytes=3 * inside)]
        if model.gated:
            kernels.append(Kernel("gate times up backward", "activation", nbytes=3 * inside,
                                  count=2))
    kernels += _rotary("rotary backward", model, tokens, compiled)
    if model.biases:
        keys = tokens * BF16 * model.d_kv
        kernels.append(Kernel("biases' gradients", "norm", nbytes=3 * width + 2 * keys + inside))
    return kernels


def _rotary(name, model, tokens, compiled):
    """Of queries and keys; eagerly four products and two sums of halves, then put together."""
    if model.learned_positions:
        return []
    turned = tokens * BF16 * (model.d_model + model.d_kv)
    return [Kernel(name, "rotary", nbytes=(2 if compiled else 9) * turned)]


def ends_forward(model: TransformerConfig, batch: int, sequence: int, *, compiled: bool = False
                 ) -> list[Kernel]:
    """The kernels outside the blocks: embedding, last norm, head and the loss.

    The loss is cross-entropy in fp32. Eagerly the logits are cast, read three times for their
    maximum, their sum and the result, and written as logarithmic probabilities; compiled they are
    read twice, of which the measured rates count one.
    """
    tokens, width, _ = _sizes(model, batch, sequence)
    logits = tokens * model.vocabulary
    kernels = [Kernel("embedding", "embedding", nbytes=2 * width),
               Kernel("last norm", "norm", nbytes=2 * width),
               Kernel("head", "matmul", (tokens, model.vocabulary, model.d_model))]
    if compiled:
        return [*kernels, Kernel("loss", "loss", nbytes=BF16 * logits)]
    return [*kernels, Kernel("logits in fp32", "elementwise", nbytes=(BF16 + 4) * logits),
            Kernel("loss", "loss", nbytes=16 * logits)]


def ends_backward(model: TransformerConfig, batch: int, sequence: int, *, compiled: bool = False
                  ) -> list[Kernel]:
    """The backward of `ends_forward`; the embedding's gradient is as large as the embedding."""
    tokens, width, _ = _sizes(model, batch, sequence)
    logits = tokens * model.vocabulary
    kernels = [Kernel("head input's gradient", "matmul",
                      (tokens, model.d_model, model.vocabulary)),
               Kernel("head weight's gradient", "matmul",
                      (model.vocabulary, model.d_model, tokens)),
               Kernel("last norm backward", "norm backward", nbytes=5 * width),
               Kernel("embedding backward", "embedding",
                      nbytes=2 * width + BF16 * model.vocabulary * model.d_model)]
    if compiled:
        return [*kernels, Kernel("loss backward", "loss backward", nbytes=2 * BF16 * logits)]
    return [*kernels, Kernel("loss backward", "loss backward", nbytes=20 * logits),
            Kernel("logits' gradient in bf16", "elementwise", nbytes=(BF16 + 4) * logits)]


@functools.lru_cache(maxsize=4096)  # on more ranks, and in each micro-batch, it is the same
def rate(kernel: Kernel, gpu: Gpu, *, compiled: bool = False, pace: str = "typical",
         attention: str = ATTENTION_KERNELS[0], rates: Rates = PUBLISHED) -> Rate:
    """The rate at which the kernel runs, with where it comes from: FLOP/s, or bytes/s.

    Eager work that was measured only eagerly, such as FSDP's copies, is eager in a compiled model.
    """
    if kernel.what == "matmul":
        m, n, k = kernel.shape
        return rates.matmul(gpu, m, n, k, pace)
    if kernel.what.startswith("attention"):
        *_, sequence, head_dim = kernel.shape
        direction = "backward" if kernel.what.endswith("backward") else "forward"
        return rates.attention(gpu, head_dim, sequence, direction=direction, kernel=attention,
                               pace=pace)
    kind = "eager" if not compiled or kernel.what in ("copy", "embedding") else "compiled"
    return rates.memory(gpu, kernel.what, kind, pace)


def seconds(kernels: Iterable[Kernel], gpu: Gpu, *, compiled: bool = False, pace: str = "typical",
            attention: str = ATTENTION_KERNELS[0], rates: Rates = PUBLISHED) -> float:
    """Seconds of the kernels, one after the other.

    ``compiled``: whether the code between the products was compiled; ``attention``: one of
    `rates.ATTENTION_KERNELS`. Raises ValueError for another pace or attention.
    """
    launch = rates.launch_seconds("compiled" if compiled else "eager", pace)
    total = 0.0
    for kernel in kernels:
        speed = rate(kernel, gpu, compiled=compiled, pace=pace, attention=attention,
                     rates=rates).value
        work = kernel.flops / kernel.count if kernel.shape else kernel.nbytes
        total += kernel.count * max(work / speed, launch)
    return total


def optimizer_seconds(parameters: float, gpu: Gpu, *, nbytes: float = 28, pace: str = "typical"
                      ) -> float:
    """Seconds of AdamW on ``parameters`` of one rank, fused, which move ``nbytes`` each.

    28: in fp32 the parameter, its gradient and both moments are read, all but the gradient written.
    Raises ValueError for another pace.
    """
    return parameters * nbytes / PUBLISHED.memory(gpu, "optimizer", "fused", pace).value


def unit_costs(job: Job, cluster: Cluster) -> tuple[list[Layer], Layer]:
    """What each block costs on one rank, and the root: all ends' kernels, their gradients' bytes.

    A block's backward includes what is computed again. FSDP's copies are in it: a gathered unit is
    copied into its parameters, a unit's gradients into the buffer that is reduced. All at the
    cluster's pace.
    """
    block, root = _costs(job, cluster.gpu, cluster.pace)
    return [replace(block, name=f"block {index}") for index in range(job.model.layers)], root


@functools.lru_cache(maxsize=256)  # on more ranks of the same kind they cost the same
def _costs(job, gpu, pace):
    return [Layer(*(seconds(each, gpu, compiled=job.compiled, pace=pace, attention=job.attention)
                    for each in kernels), parameters * job.gradient_bytes, name)
            for name, parameters, kernels in _units(job)]


def rates_of(job: Job, cluster: Cluster) -> list[Rate]:
    """The different rates that the job's computing is predicted from, each with its basis."""
    return list(dict.fromkeys(
        rate(kernel, cluster.gpu, compiled=job.compiled, pace=cluster.pace, attention=job.attention)
        for *_, kernels in _units(job) for each in kernels for kernel in each))


def _units(job):
    """Of a block, and of the root: name, parameters, kernels of forward and of backward."""
    shape, compiled = (job.model, job.batch, job.sequence), job.compiled
    for name, tensors, forward, backward, gathered_again in (
            ("block", job.model.block, block_forward(*shape, compiled=compiled),
             block_backward(*shape, compiled=compiled, recompute=job.recompute), job.reshard),
            ("root", job.model.ends, ends_forward(*shape, compiled=compiled),
             ends_backward(*shape, compiled=compiled), False)):
        parameters = numel(tensors.values())
        there, back = _copies(job, parameters, gathered_again)
        yield name, parameters, (forward + there, backward + back)


def _copies(job, parameters, gathered_again):
    """The copies of a unit of so many parameters in forward and in backward; see `Job`."""
    forward, backward = [], []
    if job.strategy != "DDP":
        forward.append(Kernel("gathered unit into parameters", "copy",
                              nbytes=2 * job.parameter_bytes * parameters))
    if job.cast_weights:
        forward.append(Kernel("weights in bf16", "copy", nbytes=6 * parameters))
        backward.append(Kernel("gradients in fp32", "copy", nbytes=6 * parameters))
    gradient = 4 if job.cast_weights else 2
    backward.append(Kernel("gradients into what is reduced", "copy",
                           nbytes=(gradient + job.gradient_bytes) * parameters))
    return forward, backward + (forward if gathered_again else [])


def _matrices(model):
    return [(name.removesuffix(".weight"), shape) for name, shape in model.block.items()
            if len(shape) == 2]


def _sizes(model, batch, sequence):
    """Tokens; bytes of the stream; bytes inside the feed-forward part."""
    tokens = whole(batch, "batch") * whole(sequence, "sequence")
    return tokens, tokens * BF16 * model.d_model, tokens * BF16 * model.d_ff
