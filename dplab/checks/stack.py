"""The table of the stack: how the parts that a reader writes fit together, from `send` on.

``python -m dplab.checks.stack`` prints it. Whoever writes a part, its exercise, or a chapter that
uses it, keeps to its row. An exercise's check tests what the row says, since the parts after it
rely on that. The course's own part is the right answer of its exercise.
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from dplab.exercises.average_gradients import average_gradients, pack, unpack
from dplab.exercises.broadcast_weights import broadcast_weights
from dplab.exercises.exchange import exchange
from dplab.exercises.gather_chunks import Gather
from dplab.exercises.gradient_buckets import average_in_buckets
from dplab.exercises.hidden_zero import HiddenZeRO
from dplab.exercises.make_buckets import make_buckets
from dplab.exercises.overlapped_gradients import OverlappedGradients
from dplab.exercises.own_collectives import use_own_rings
from dplab.exercises.predict_sharded_step import predict_sharded_step
from dplab.exercises.predict_step import predict_step
from dplab.exercises.ring_all_gather import ring_all_gather, ring_all_reduce
from dplab.exercises.ring_reduce_scatter import ring_reduce_scatter
from dplab.exercises.ring_seconds import ring_seconds
from dplab.exercises.scatter_gradients import scatter_gradients
from dplab.exercises.shard_a_model import shard_model
from dplab.exercises.sharded_optimizer import ShardedOptimizer
from dplab.exercises.sharded_unit import ShardedUnit
from dplab.exercises.train_by_hand import train_by_hand
from dplab.exercises.zero_2 import ZeRO2

EVERY_PART = """\
What holds for every part:
  shape     A flat tensor has one dimension. The caller pads it with zeros to N equal chunks
            (`pack`), and a part may fail on one that N does not divide.
  chunks    Rank r of a group of N ranks owns chunk r: elements [r n/N, (r+1) n/N) of n.
  ranks     Ranks are those of the group. `group=None` means all ranks.
  calls     Every rank of the group makes the same calls, in the same order, with tensors of the
            same sizes and dtypes.
  inputs    A part leaves its inputs as they are, unless its row says what it overwrites. A result
            has memory of its own, on one rank as well.
  blocking  A part returns when its result is there. It starts no thread, unless its row says so.
  backend   gloo, on CPUs.
  earlier   A part calls earlier parts by their names. In a notebook, one cell before it binds them:
            `ring_all_gather = dplab.mine("ring-all-gather")`. So the names travel to the ranks with
            the function that uses them.
"""


@dataclass(frozen=True)
class Part:
    """One row. ``by``: who writes it, the "reader", or the "course", which shows it.

    ``uses``: the slugs of the parts that it calls. ``overwrites``: which inputs, where any.
    """

    slug: str
    chapter: str
    signature: str
    by: str
    solution: Callable
    uses: tuple[str, ...]
    gives: str
    chunks: str
    padding: str
    dtypes: str
    overwrites: str
    group: str
    blocking: str

    @property
    def name(self) -> str:
        return self.solution.__name__


_ANY = "any numeric dtype that gloo sends, kept"
_FLOATS = "any float dtype, kept"
_ONE_FLOAT = "one float dtype for all parameters"
_NOTHING = "nothing"
_GROUP = "yes"
_NO_RANKS = "none: it calls no other rank"
_ALL = "all ranks"
_BLOCKS = "blocks"
_CALLER = "by the caller"
_ITSELF = "pads and cuts by itself"
_NONE = "none"


def _part(slug, chapter, signature, solution, *, uses="", by="reader", gives, chunks,
          padding=_CALLER, dtypes=_ONE_FLOAT, overwrites=_NOTHING, group=_GROUP, blocking=_BLOCKS):
    if group == _NO_RANKS:
        blocking = "does not wait for anybody"
    return Part(slug, chapter, signature, by, solution, tuple(uses.split()), gives, chunks, padding,
                dtypes, overwrites, group, blocking)


PARTS = (
    _part("exchange", "03", "exchange(outgoing, to, source, group=None)", exchange,
          gives="what rank `source` sent: a new tensor of outgoing's size and dtype",
          chunks="no matter", padding=_NONE, dtypes=_ANY),
    _part("ring-reduce-scatter", "03", "ring_reduce_scatter(flat, group=None)",
          ring_reduce_scatter, uses="exchange",
          gives="chunk r of the sum over the ranks (no division): a new tensor of n/N elements",
          chunks="rank r gets chunk r", dtypes=_ANY),
    _part("ring-all-gather", "03", "ring_all_gather(chunk, group=None)", ring_all_gather,
          uses="exchange",
          gives="all ranks' chunks in rank order: a new flat tensor of N len(chunk) elements",
          chunks="rank r brings chunk r; all chunks have the same length", dtypes=_ANY),
    _part("ring-all-reduce", "03", "ring_all_reduce(flat, group=None)", ring_all_reduce,
          uses="ring-reduce-scatter ring-all-gather", by="course",
          gives="the sum over the ranks (no division), equal to the last bit on all ranks: a new "
                "flat tensor",
          chunks="cut and joined inside", dtypes=_ANY),
    _part("ring-seconds", "03", "ring_seconds(nbytes, ranks, bandwidth, latency)",
          ring_seconds,
          gives="seconds of a ring all-reduce of nbytes; bandwidth in bytes/s, latency in seconds "
                "for each message",
          chunks=_NONE, padding=_NONE, dtypes="numbers", group=_NO_RANKS),

    _part("pack", "04", "pack(tensors, ranks)", pack, by="course",
          gives="a flat copy of the tensors, one behind the other, zeros at the end: the least "
                "length that N divides",
          chunks="none yet", padding="this is what pads",
          dtypes="one dtype for all tensors", group=_NO_RANKS),
    _part("unpack", "04", "unpack(flat, tensors)", unpack, by="course",
          gives="views into flat, one in the shape of each tensor: writing to them writes to flat; "
                "autograd goes back through them",
          chunks="none: flat is whole", padding="ignored", dtypes=_ANY, group=_NO_RANKS),
    _part("broadcast-weights", "04", "broadcast_weights(model, group=None)",
          broadcast_weights, gives="None", chunks=_NONE, padding=_NONE,
          dtypes="any that gloo broadcasts, kept",
          overwrites="all parameters and buffers, also frozen ones and those that no state_dict "
                     "has, in place, with those of the group's rank 0"),
    _part("average-gradients", "04", "average_gradients(model, group=None)",
          average_gradients, uses="ring-all-reduce pack unpack", gives="None",
          chunks=_NONE, padding=_ITSELF, dtypes="any float dtypes",
          overwrites="each `.grad`, in place, with its mean; one that is None stays so, and is "
                     "None on all ranks"),
    _part("train-by-hand", "04",
          "train_by_hand(model, optimizer, images, labels, batches, group=None)",
          train_by_hand, uses="broadcast-weights average-gradients", gives="None",
          chunks=_NONE, padding=_NONE, dtypes="any float dtypes",
          overwrites="the model and the optimizer's state. `batches` holds the indices of global "
                     "batches, of which rank r takes batch[r::N]; N divides their length"),

    _part("make-buckets", "05", "make_buckets(sizes, bucket_bytes, first_bytes=None)", make_buckets,
          gives="lists of indices into sizes, from the last index to the first; a bucket closes "
                "when it reaches bucket_bytes, the first at first_bytes where that is given",
          chunks=_NONE, padding=_NONE, dtypes="numbers of bytes", group=_NO_RANKS),
    _part("gradient-buckets", "05", "average_in_buckets(buckets, group=None)",
          average_in_buckets, uses="ring-all-reduce pack unpack", gives="None",
          chunks=_NONE, padding=_ITSELF, dtypes="one float dtype in each bucket",
          overwrites="the `.grad` of each parameter in the buckets, in place, with its mean. A "
                     "bucket is a list of parameters, all of which have a gradient"),
    _part("overlapped-gradients", "05", "OverlappedGradients(buckets, group)",
          OverlappedGradients, uses="gradient-buckets",
          gives="an object: construct once, and call finish() after each backward. Every rank "
                "sends the buckets in the order of the list. finish() raises RuntimeError where a "
                "parameter got no gradient, or more than one",
          chunks=_NONE, padding=_ITSELF, dtypes="one float dtype in each bucket",
          overwrites="the `.grad` of each parameter in the buckets. Nobody may touch one between "
                     "backward and finish()",
          group="a group of its own, which nobody else uses: all ranks make it with "
                "dist.new_group()",
          blocking="hooks return at once. One thread with a queue runs the blocking ring, as NCCL "
                   "runs its kernels on a stream of their own. finish() blocks"),
    _part("predict-step", "05",
          "predict_step(layers, bucket_bytes, ranks, bandwidth, latency, first_bytes=None)",
          predict_step, uses="make-buckets ring-seconds",
          gives="(seconds of the step, seconds of exposed communication), from layers, each a "
                "dplab.predict.step.Layer",
          chunks=_NONE, padding=_NONE, dtypes="numbers", group=_NO_RANKS),

    _part("sharded-optimizer", "08", "ShardedOptimizer(flat, make_optimizer)", ShardedOptimizer,
          uses="ring-all-gather",
          gives="an object: construct once, and call step(gradient) with the mean of all ranks, "
                "laid flat like `flat`",
          chunks="rank r owns chunk r", padding=_ITSELF, dtypes="float32",
          overwrites="`flat`, in place, in step()", group=_ALL),
    _part("scatter-gradients", "08", "scatter_gradients(parameters, group=None)",
          scatter_gradients, uses="ring-reduce-scatter pack",
          gives="chunk r of the mean of the gradients, laid flat: a new tensor",
          chunks="rank r gets chunk r", padding=_ITSELF,
          overwrites="sets each `.grad` to None"),
    _part("zero-2", "08", "ZeRO2(buckets, make_optimizer)", ZeRO2,
          uses="scatter-gradients ring-all-gather pack unpack",
          gives="an object: construct once, and call step() after each backward",
          chunks="rank r owns chunk r of each bucket", padding=_ITSELF,
          dtypes="float32",
          overwrites="the parameters, in place, in step(); each `.grad` is None after backward",
          group=_ALL,
          blocking="hooks wait for the reduce-scatter, step() for the all-gathers"),
    _part("hidden-zero", "08", "HiddenZeRO(layers, make_optimizer, group)", HiddenZeRO,
          uses="scatter-gradients ring-all-gather pack unpack",
          gives="an object: construct once, and call step() after each backward, and wait() before "
                "anybody else reads the parameters",
          chunks="rank r owns chunk r of each layer", padding=_ITSELF, dtypes="float32",
          overwrites="the parameters, in place, before each layer's forward; `.grad` is None when "
                     "step() returns",
          group="a group of its own, which nobody else uses",
          blocking="one thread sends. step() waits for the reduce-scatters alone, a layer's "
                   "forward for the layer's own all-gather, wait() for all"),

    _part("gather-chunks", "09", "Gather.apply(chunk, group)", Gather,
          uses="ring-all-gather ring-reduce-scatter",
          gives="all ranks' chunks in rank order, as a step of autograd: in backward, rank r's "
                "chunk gets the mean over the ranks of their gradients for it",
          chunks="rank r brings chunk r; all chunks have the same length", dtypes=_FLOATS,
          blocking="forward blocks, and so does backward: every rank runs it in the same order"),
    _part("sharded-unit", "09", "ShardedUnit(module, group=None)", ShardedUnit,
          uses="gather-chunks ring-all-gather pack unpack",
          gives="an object whose `chunk` is an nn.Parameter: this rank's chunk of the module's "
                "packed parameters. Forward and backward of the module gather them, and free them "
                "when they have computed; each backward adds the mean gradient to `chunk.grad`. No "
                "unit lies in another one, and no parameter in two places",
          chunks="rank r keeps chunk r", padding=_ITSELF,
          overwrites="the module's parameters: None stands in their places, but while it computes"),
    _part("shard-a-model", "09", "shard_model(model, parts)", shard_model,
          uses="broadcast-weights sharded-unit ring-all-gather unpack",
          gives="(chunks, whole): the units' chunks, for an optimizer, and a function that gathers "
                "the weights as they are when every rank calls it, in their shapes",
          chunks="rank r keeps chunk r of each part", padding=_ITSELF,
          overwrites="the model's parameters and buffers with rank 0's; then each part is a unit",
          group="no: all ranks"),
    _part("predict-sharded-step", "09",
          "predict_sharded_step(layers, ranks, bandwidth, latency, ahead)", predict_sharded_step,
          uses="ring-seconds",
          gives="seconds of the step, from layers as in predict_step, whose gradient_bytes are "
                "also those of the parameters",
          chunks=_NONE, padding=_NONE, dtypes="numbers", group=_NO_RANKS),

    _part("own-collectives", "10", "use_own_rings(model)", use_own_rings,
          uses="ring-all-gather ring-reduce-scatter",
          gives="nothing: the units of a model under torch's `fully_shard` gather and reduce over "
                "the two rings from now on",
          chunks="as `fully_shard` cuts: rank r of a unit's group has chunk r", padding=_NONE,
          dtypes="that in which a unit gathers or reduces", group="each unit's own"),
)


_COLUMNS = ("gives", "chunks", "padding", "dtypes", "overwrites", "group", "blocking")


def as_text() -> str:
    """What holds for every part, a line for each of them, and then each row whole."""
    lines = [EVERY_PART, "The parts, by chapter:\n"]
    width = max(len(part.slug) for part in PARTS)
    for part in PARTS:
        lines.append(f"  {part.chapter}  {_whose(part)}  {part.slug:{width}}  {part.signature}")
    for part in PARTS:
        lines.append(f"\n{part.slug} ({_whose(part)}, chapter {part.chapter})")
        lines.append(f"    {part.signature}")
        lines.append(_line("uses", ", ".join(part.uses) or "torch alone"))
        lines.extend(_line(column, getattr(part, column)) for column in _COLUMNS)
    return "\n".join(lines)


def _whose(part):
    return {"reader": "yours", "course": "given"}[part.by]


def _line(column, text):
    return textwrap.fill(text, 100, initial_indent=f"    {column:12}", subsequent_indent=" " * 16)


if __name__ == "__main__":
    print(as_text())
