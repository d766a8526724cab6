"""The table of the stack: how the parts of the course fit together, from send to ZeRO-3.

Whoever writes a part, its exercise, or a chapter that uses it, keeps to its row. An exercise's
check tests what the row says, since the parts after it rely on that. The exercises of chapter 08
that have these slugs take no group yet; each takes its row's contract when its chapter is
rewritten, and until then what a reader wrote for it is no part of the stack.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dplab.exercises.stack import parts

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
    short: Callable
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
        return self.short.__name__


_ANY = "any numeric dtype that gloo sends, kept"
_FLOATS = "any float dtype, kept"
_ONE_FLOAT = "one float dtype for all parameters"
_NOTHING = "nothing"
_GROUP = "yes"
_NO_RANKS = "none: it calls no other rank"
_BLOCKS = "blocks"
_CALLER = "by the caller"
_ITSELF = "pads and cuts by itself"
_NONE = "none"


def _part(slug, chapter, signature, short, *, uses="", by="reader", gives, chunks, padding=_CALLER,
          dtypes=_ONE_FLOAT, overwrites=_NOTHING, group=_GROUP, blocking=_BLOCKS):
    if group == _NO_RANKS:
        blocking = "does not wait for anybody"
    return Part(slug, chapter, signature, by, short, tuple(uses.split()), gives, chunks, padding,
                dtypes, overwrites, group, blocking)


PARTS = (
    _part("exchange", "03", "exchange(outgoing, to, source, group=None)", parts.exchange,
          gives="what rank `source` sent: a new tensor of outgoing's size and dtype",
          chunks="no matter", padding=_NONE, dtypes=_ANY),
    _part("ring-reduce-scatter", "03", "ring_reduce_scatter(flat, group=None)",
          parts.ring_reduce_scatter, uses="exchange",
          gives="chunk r of the sum over the ranks (no division): a new tensor of n/N elements",
          chunks="rank r gets chunk r", dtypes=_ANY),
    _part("ring-all-gather", "03", "ring_all_gather(chunk, group=None)", parts.ring_all_gather,
          uses="exchange",
          gives="all ranks' chunks in rank order: a new flat tensor of N len(chunk) elements",
          chunks="rank r brings chunk r; all chunks have the same length", dtypes=_ANY),
    _part("ring-all-reduce", "03", "ring_all_reduce(flat, group=None)", parts.ring_all_reduce,
          uses="ring-reduce-scatter ring-all-gather",
          gives="the sum over the ranks (no division), equal to the last bit on all ranks: a new "
                "flat tensor",
          chunks="cut and joined inside", dtypes=_ANY),
    _part("ring-seconds", "03", "ring_seconds(nbytes, ranks, bandwidth, latency)",
          parts.ring_seconds,
          gives="seconds of a ring all-reduce of nbytes; bandwidth in bytes/s, latency in seconds "
                "for each message",
          chunks=_NONE, padding=_NONE, dtypes="numbers", group=_NO_RANKS),

    _part("pack", "04", "pack(tensors, ranks)", parts.pack, by="course",
          gives="a flat copy of the tensors, one behind the other, zeros at the end: the least "
                "length that N divides",
          chunks="none yet", padding="this is what pads",
          dtypes="one dtype for all tensors", group=_NO_RANKS),
    _part("unpack", "04", "unpack(flat, tensors)", parts.unpack, by="course",
          gives="views into flat, one in the shape of each tensor: writing to them writes to flat; "
                "autograd goes back through them",
          chunks="none: flat is whole", padding="ignored", dtypes=_ANY, group=_NO_RANKS),
    _part("broadcast-weights", "04", "broadcast_weights(model, group=None)",
          parts.broadcast_weights, gives="None", chunks=_NONE, padding=_NONE,
          dtypes="any that gloo broadcasts, kept",
          overwrites="all parameters and buffers, also frozen ones and those that no state_dict "
                     "has, in place, with those of the group's rank 0"),
    _part("average-gradients", "04", "average_gradients(model, group=None)",
          parts.average_gradients, uses="ring-all-reduce pack unpack", gives="None",
          chunks=_NONE, padding=_ITSELF, dtypes="any float dtypes",
          overwrites="each `.grad`, in place, with its mean; one that is None stays so, and is "
                     "None on all ranks"),
    _part("train-by-hand", "04",
          "train_by_hand(model, optimizer, images, labels, batches, group=None)",
          parts.train_by_hand, uses="broadcast-weights average-gradients", gives="None",
          chunks=_NONE, padding=_NONE, dtypes="any float dtypes",
          overwrites="the model and the optimizer's state. `batches` holds the indices of global "
                     "batches, of which rank r takes batch[r::N]; N divides their length"),

    _part("make-buckets", "05", "make_buckets(sizes, bucket_bytes)", parts.make_buckets,
          gives="lists of indices into sizes, from the last index to the first; a bucket closes "
                "when it reaches bucket_bytes",
          chunks=_NONE, padding=_NONE, dtypes="numbers of bytes", group=_NO_RANKS),
    _part("gradient-buckets", "05", "average_in_buckets(buckets, group=None)",
          parts.average_in_buckets, uses="ring-all-reduce pack unpack", gives="None",
          chunks=_NONE, padding=_ITSELF, dtypes="one float dtype in each bucket",
          overwrites="the `.grad` of each parameter in the buckets, in place, with its mean. A "
                     "bucket is a list of parameters, all of which have a gradient"),
    _part("overlapped-gradients", "05", "OverlappedGradients(buckets, group)",
          parts.OverlappedGradients, uses="gradient-buckets",
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
    _part("predict-step", "05", "predict_step(layers, bucket_bytes, ranks, bandwidth, latency)",
          parts.predict_step, uses="make-buckets ring-seconds",
          gives="(seconds of the step, seconds of exposed communication), from layers as "
                "dplab.measure.layer_times gives them",
          chunks=_NONE, padding=_NONE, dtypes="numbers", group=_NO_RANKS),

    _part("lay-flat", "08", "lay_flat(parameters, ranks)", parts.lay_flat, uses="pack unpack",
          by="course", gives="the flat tensor, padded, into which the parameters are views now",
          chunks="whole on each rank", padding="pads", group=_NO_RANKS,
          overwrites="each parameter's `.data`: the values stay, the memory is another"),
    _part("sharded-optimizer", "08", "ShardedOptimizer(flat, make_optimizer, group=None)",
          parts.ShardedOptimizer, uses="ring-reduce-scatter ring-all-gather",
          gives="an object: step(gradient) takes this rank's flat gradient, padded as flat is; "
                "update(chunk) takes chunk r of the mean gradient. The optimizer must be "
                "elementwise, as SGD and Adam are: one that takes norms of whole tensors (LAMB, "
                "LBFGS, Adafactor) sees one chunk only, and does something else",
          chunks="rank r updates chunk r of flat, and has optimizer state for that alone",
          overwrites="flat, in place, in step() and update()"),
    _part("scatter-gradients", "08", "scatter_gradients(parameters, group=None)",
          parts.scatter_gradients, uses="ring-reduce-scatter pack",
          gives="chunk r of the mean gradient of all parameters laid flat: a new tensor",
          chunks="rank r gets chunk r", padding="pads by itself",
          overwrites="each `.grad`, with None"),
    _part("sharded-gradients", "08",
          "ShardedGradients(parameters, make_optimizer, bucket_bytes, group=None)",
          parts.ShardedGradients,
          uses="make-buckets lay-flat sharded-optimizer scatter-gradients",
          gives="an object: one backward, then step(), with no zero_grad between. step() raises "
                "RuntimeError where a parameter got no gradient. The optimizer is elementwise",
          chunks="rank r owns chunk r of each bucket", padding=_ITSELF,
          overwrites="each parameter's `.data` in the constructor and step(); each `.grad` is None "
                     "after backward",
          blocking="the hook blocks, on purpose: on a thread, whole gradients could pile up before "
                   "it"),

    _part("sharded-forward", "09", "sharded_forward(chunk, compute, x, group=None)",
          parts.sharded_forward, uses="ring-all-gather",
          gives="compute(whole, x), computed under no_grad: it has no graph, and nothing keeps "
                "the whole parameters",
          chunks="rank r has chunk r of the layer's parameters laid flat",
          padding="by the caller; compute gets whole with its padding"),
    _part("sharded-backward", "09", "sharded_backward(chunk, compute, x, gradient, group=None)",
          parts.sharded_backward, uses="ring-all-gather ring-reduce-scatter",
          gives="(gradient of x, or None where x is integer; chunk r of the mean gradient of the "
                "parameters), under no_grad and outside it. It runs compute once more, so compute "
                "may draw no random numbers",
          chunks="rank r has chunk r of the layer's parameters laid flat",
          padding="by the caller; compute gets whole with its padding"),
    _part("sharded-function", "09", "ShardedFunction.apply(chunk, compute, x, group)",
          parts.ShardedFunction, uses="sharded-forward sharded-backward", by="course",
          gives="the output, with the two parts above as its forward and backward",
          chunks="rank r has chunk r of the layer's parameters laid flat"),
    _part("sharded-unit", "09", "ShardedUnit(module, group=None)", parts.ShardedUnit,
          uses="sharded-function pack unpack", by="course",
          gives="a module that computes what `module` did, with .chunk, a parameter, and .size, "
                "the elements without padding. Inputs come by position. The first is a tensor, and "
                "it alone may ask for a gradient (another one: ValueError). The output is one "
                "tensor. Not for buffers, frozen or tied parameters, dropout",
          chunks="rank r has chunk r of the module's parameters laid flat", padding=_ITSELF,
          overwrites="the module, whose numbers are gone (it is moved to `meta`)"),
    _part("shard-units", "09", "shard_units(model, group=None)", parts.shard_units,
          uses="sharded-unit", by="course", gives="None", chunks="as ShardedUnit",
          padding=_ITSELF,
          overwrites="the model: each child with parameters, and each such child of a "
                     "ModuleList, becomes a ShardedUnit. A model with parameters beside those of "
                     "its children is refused (ValueError). Weights are equal on all ranks before "
                     "(`broadcast_weights`)"),

    _part("recut", "12", "recut(chunks, size, rank, ranks)", parts.recut,
          gives="rank's chunk of ranks for a flat tensor of size elements: a new tensor; reads of "
                "the old chunks only what it needs",
          chunks="from chunks of N ranks, in rank order, to chunk r of M ranks",
          padding="size is without padding; the result is padded with zeros", dtypes=_ANY,
          group=_NO_RANKS),
    _part("save-sharded", "12", "save_sharded(folder, model, optimizer, group=None)",
          parts.save_sharded, by="course",
          gives="None, when the files of all ranks are there; each rank writes one file into "
                "folder, which is empty before, and the same for all ranks",
          chunks="rank r writes chunk r of each unit, and of its optimizer state", padding="kept",
          dtypes="any, kept"),
    _part("load-sharded", "12", "load_sharded(folder, model, optimizer, group=None)",
          parts.load_sharded, uses="recut", by="course", gives="None",
          chunks="from chunks of N ranks to chunk r of M ranks", padding=_ITSELF,
          dtypes="any, kept",
          overwrites="the chunks of the model's units, and their state in the optimizer"),
)
