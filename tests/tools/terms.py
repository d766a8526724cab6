"""The glossary's terms, and in which cell of which chapter each is defined.

The definition is the chapter's own sentence: the one with the term in bold, or with ``at`` in it,
and ``more`` sentences after it. ``put`` gives the words that a sentence needs to stand alone ("it"
becomes what it is); like ``at``, they must be in the cell as they are here.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Term:
    name: str
    chapter: int
    cell: str
    at: str = ""
    more: int = 0
    put: dict[str, str] = field(default_factory=dict)


TERMS = (
    # 00
    Term("rank", 0, "three-words"),
    Term("world size", 0, "three-words", put={"how many there are": "how many ranks there are"}),
    Term("process group", 0, "three-words"),
    Term("backend", 0, "this-machine", put={"backend**": "backend**, such as NCCL or gloo"}),
    Term("collective", 0, "collectives"),
    Term("broadcast", 0, "device-note"),
    Term("scatter", 0, "before-scatter", put={"rank 0 has": "the root has"}),
    Term("root (of a collective)", 0, "before-scatter", at="**root**",
         put={"`src` is the **root**, the": "The **root** is the"}),
    Term("gather", 0, "before-gather", put={"the way back": "the way back from a scatter"}),
    Term("all-gather", 0, "before-all-gather", put={"does that": "is a gather"}),
    Term("reduce", 0, "before-reduce"),
    Term("all-reduce", 0, "after-reduce", put={"the sum": "the sum of all ranks' tensors"}),
    Term("reduce-scatter", 0, "before-reduce-scatter",
         put={"the same sum": "the sum of all ranks' tensors"}),
    Term("all-to-all", 0, "after-two-halves"),
    Term("send and receive", 0, "point-to-point", at="**Send**", more=1),
    Term("barrier", 0, "before-barrier"),
    # 01
    Term("CallLog", 1, "data-parallel-forward", at="The `CallLog`",
         put={"inside its block": "inside its `with` block"}),
    Term("data parallelism", 1, "data-parallel-forward", more=1,
         put={"cuts b. Rank": "cuts the batch: rank"}),
    Term("replica", 1, "no-communication-forward", put={
        "The weights have none, and every rank holds all of them": "Every rank holds all weights"}),
    Term("global batch", 1, "batches"),
    Term("local batch", 1, "batches", put={"part of it": "part of the global batch"}),
    Term("micro-batch", 1, "batches"),
    Term("gradient accumulation", 1, "batches", at="*gradient accumulation*",
         put={"its slices": "the slices of its local batch"}),
    Term("tensor parallelism", 1, "other-cuts", put={
        ", along **f** or along **d**,": " of a layer, along their columns or their rows,"}),
    Term("pipeline parallelism", 1, "other-cuts"),
    Term("model parallelism", 1, "other-cuts", at="*model parallelism*"),
    Term("WireMeter", 1, "count-the-bytes", at="`WireMeter`", put={
        "Now we count, with the `WireMeter`: it": "The `WireMeter`",
        "divides": "divides the bytes between them"}),
    Term("arithmetic intensity", 1, "intensity",
         put={"it computes": "a device computes", "that traffic": "traffic with its memory"}),
    Term("ridge point", 1, "ridge-points", put={"Its **": "A device's **"}),
    Term("activations", 1, "memory-wall", put={"And between": "Between"}),
    # 03
    Term("deadlock", 3, "why-deadlock", at="Every rank waits in `send`",
         put={"Every rank waits": "In a deadlock of a ring every rank waits"}),
    Term("tree", 3, "tree", at="On the way up",
         put={"On the way up, a rank": "On the way up the tree, a rank"}),
    Term("ring", 3, "send-waits"),
    Term("chunk", 3, "ring", at="**chunks**", more=1),
    Term("latency and bandwidth (α, β)", 3, "alpha-beta", at="**latency**"),
    Term("algorithm bandwidth", 3, "bandwidths"),
    Term("bus bandwidth", 3, "bandwidths", at="So multiply by", more=1,
         put={"So multiply": "Multiply the algorithm bandwidth", "size. That": "size: that"}),
    Term("SHARP", 3, "in-network", at="NVLink SHARP"),
    # 04
    Term("launcher", 4, "launcher",
         put={"does:": "starts the processes:", "or here": "or in this course"}),
    Term("DDP", 4, "launcher", at="DDP is a wrapper"),
    Term("frozen parameter", 4, "frozen-and-tied", at="**frozen**"),
    Term("tied weight", 4, "frozen-and-tied", at="**tied**"),
    Term("buffers", 4, "tied-lesson", at="BatchNorm updates", more=1, put={
        "BatchNorm updates its running mean": "BatchNorm's running mean is a buffer, updated",
        "(the option is called `forward_sync_buffers`; its older name, `broadcast_buffers`, which "
        "torch 2.13 deprecates, switched off the copy in the constructor, too)":
            "(`forward_sync_buffers`)"}),
    Term("SyncBatchNorm", 4, "buffers-lesson", at="`nn.SyncBatchNorm`", put={
        "The cure is `nn.SyncBatchNorm`, which takes the": "`nn.SyncBatchNorm` takes BatchNorm's"}),
    Term("DistributedSampler", 4, "sampler", at="`DistributedSampler`",
         put={"does the split": "gives each rank its part of the data"}),
    Term("set_epoch", 4, "sampler-seed", at="`set_epoch`"),
    Term("Join", 4, "join", at="`Join`", put={"run out": "run out of data"}),
    Term("DataParallel", 4, "threads", at="older wrapper", more=1),
    # 05
    Term("emulated link", 5, "lens"),
    Term("hidden and exposed", 5, "read-three-ways", at="**hidden**"),
    Term("bucket", 5, "read-three-ways"),
    Term("post-accumulate hook", 5, "step-order", at="`register_post_accumulate_grad_hook`",
         put={"Autograd tells you when one is: ": ""}),
    Term("asynchronous collective", 5, "step-async", at="`async_op=True`",
         put={"the call returns": "a collective returns"}),
    Term("bucket_cap_mb", 5, "one-bucket-first", at="*threshold", put={
        "The second one was to hold 25 MiB and holds 28: the cap": "The cap of a bucket's size"}),
    Term("gradient_as_bucket_view", 5, "views", at="With this switch",
         put={"this switch": "`gradient_as_bucket_view=True`,"}),
    Term("find_unused_parameters", 5, "silent-lesson", at="DDP walks through the graph"),
    Term("static_graph", 5, "read-options", at="`static_graph=True`"),
    Term("no_sync", 5, "no-sync", at="`no_sync()`",
         put={"in all but the last": "in all backwards of a step but the last"}),
    # 06
    Term("communication ratio", 6, "ratio", at="a rank's ratio",
         put={"Now a rank's ratio": "A rank's communication ratio"}),
    Term("strong scaling", 6, "scaling", at="**Strong**",
         put={"**Strong**: the": "In strong scaling the"}),
    Term("weak scaling", 6, "scaling", at="**Weak**", put={"**Weak**: the": "In weak scaling the"}),
    Term("efficiency", 6, "scaling", at="Efficiency is"),
    Term("communication hook", 6, "compression"),
    Term("PowerSGD", 6, "compression", at="`powerSGD_hook`"),
    Term("quantization", 6, "compression", put={"; it is written below": ""}),
    Term("sparsification", 6, "compression"),
    Term("error feedback", 6, "read-hooks", at="error feedback built in", put={
        "PowerSGD's is large, and its loss may be as good as without compression, because it has "
        "error feedback built in: what is missing": "With error feedback, what compression drops"}),
    Term("autocast", 6, "read-precision", at="under autocast"),
    Term("loss scaling", 6, "master-weights", at="`GradScaler`", put={
        "Small gradients become zero, so": "Small gradients become zero in fp16, so"}),
    Term("flight recorder", 6, "timing-rules", put={
        "entries of the **flight recorder**, which keeps": "The **flight recorder** keeps",
        "; 0 switches it off": ""}),
    Term("straggler", 6, "straggler", at="In synchronous training",
         put={"the slowest": "the slowest rank, the straggler"}),
    # 07
    Term("learning-rate scaling", 7, "takeaways", at="scale the rate", put={
        "With a larger one": "With a larger global batch"}),
    Term("warm-up", 7, "steps-lesson", put={
        "is the remedy of the same paper: begin": "is to begin", "kη": "k times that"}),
    Term("noise scale", 7, "noise-scale", at="signal and noise are equal", more=1, put={
        r"$B = \mathrm{tr}\,\Sigma/|G|^2$": "a batch of tr Σ/|G|² samples",
        "noise are": "noise of a gradient are"}),
    Term("critical batch size", 7, "critical-batch", at="A small batch needs", more=1,
         put={"$B_{crit}$": "the critical batch size"}),
    Term("asynchronous SGD", 7, "asynchronous",
         put={"does not: a": "does not wait for all gradients: a"}),
    Term("staleness", 7, "asynchronous", at="**stale**", put={
        "It is": "A gradient of parameters that are gone when it arrives is"}),
    Term("local SGD", 7, "local-sgd", at="Each rank trains", put={"Each": "In local SGD, each"}),
    Term("DiLoCo", 7, "diloco", more=1, put={"It takes": "DiLoCo takes"}),
    Term("backup workers", 7, "backup-workers", put={"it waits": "a synchronous step waits"}),
    # 08
    Term("model states", 8, "sixteen-bytes", at="For each parameter", more=1),
    Term("K", 8, "what-k-is", at="K is the name",
         put={"optimizer's bytes": "optimizer's bytes for each parameter"}),
    Term("master weights", 8, "what-k-is",
         put={", and Adam's two moments: K = 12, and 16 bytes again": ""}),
    Term("ZeRO", 8, "three-stages", at="zero redundancy optimizer",
         put={"the copies": "the copies that the ranks of DDP hold"}),
    Term("sharding", 8, "three-stages", at="It is still data parallelism", more=1,
         put={"It is still": "Sharding is still"}),
    Term("ZeRO-1", 8, "ddp-measured", at="Each rank has Adam", put={
        "Each rank": "In ZeRO-1 each rank", "chunk alone": "chunk of the parameters alone"}),
    Term("ZeRO-2", 8, "zero-1-free", at="gives them away", put={
        "gives them away": "gives the gradients of other ranks' chunks away"}),
    Term("ZeRO-3", 8, "our-zero-3", at="Two all-gathers"),
    Term("GiB", 8, "calculator-note", put={
        "What it calls GB has 2³⁰ bytes, a **GiB**": "A GiB has 2³⁰ bytes, a GB has 10⁹"}),
    Term("context parallelism", 8, "calculator-note", at="context parallelism", put={
        "(What does, is called": "What divides a sequence among ranks is called",
        "course.)": "course."}),
    # 09
    Term("FSDP", 9, "title", at="*fully sharded data parallel*", put={
        "You know reduce-scatter and all-gather from chapter 03, and from chapter 08 what ZeRO "
        "shards at each of its stages: ": ""}),
    Term("dry run", 9, "dry-run"),
    Term("unit", 9, "shard-it", put={"call it on": "call `fully_shard` on"}),
    Term("root (of FSDP)", 9, "shard-it", at="**root**", put={"Call it": "Call `fully_shard`"}),
    Term("DTensor", 9, "what-is-a-parameter", at="`DTensor`s",
         put={"Its parameters are `DTensor`s now: they": "`DTensor`s"}),
    Term("reshard_after_forward", 9, "reshard", at="`reshard_after_forward=False`",
         put={"keeps them": "keeps a unit's parameters after forward"}),
    Term("HSDP", 9, "root-lesson", put={"And a mesh": "A mesh of ranks"}),
    Term("prefetching", 9, "overlap"),
    Term("MixedPrecisionPolicy", 9, "mixed-precision", at="`MixedPrecisionPolicy"),
    Term("offloading", 9, "offload", at="`offload_policy"),
    Term("meta device", 9, "meta"),
    Term("distributed checkpoint", 9, "checkpoints", at="`torch.distributed.checkpoint`"),
    Term("activation checkpointing", 9, "read-70b", put={
        "So it is they who decide, and the answer to them is not another rank but **activation":
        "**Activation"}),
    Term("FSDP1", 9, "names"),
    Term("DeepSpeed", 9, "names"),
    # 10
    Term("simulator", 10, "bytes-lesson"),
    Term("MFU", 10, "read-recommendation", put={
        "Where it fits: the predicted step, the **MFU** (model": "**MFU** is model",
        "in that time), and the resource that bounds the step": "in the time of a step"}),
    Term("flat and two-level rings", 10, "two-levels", at="**flat ring**", put={
        "The simulator knows three ways: one": "On many nodes a collective goes one of three ways: "
                                               "one"}),
    Term("stops paying", 10, "weak-scaling", put={"Say that adding": "Adding"}),
    Term("goodput", 10, "goodput"),
    Term("pipeline bubble", 10, "pipeline", at="a stage waits",
         put={"a stage waits": "a stage of a pipeline waits"}),
    Term("rendezvous", 10, "several-machines"),
    Term("local rank", 10, "several-machines", at="`LOCAL_RANK`",
         put={"is told by": "learns its place from"}),
)
