"""What a reader calls: arguments checked here, the step run in a process of its own."""

from collections.abc import Callable

import torch
from torch import nn

from dplab.dryrun.findings import DryRun
from dplab.dryrun.setup import Setup
from dplab.dryrun.units import POLICIES
from dplab.predict.checks import one_of, whole
from dplab.predict.transformer_config import TransformerConfig


def fully_shard(model: TransformerConfig | Callable[[], nn.Module], world_size: int, *,
                batch: int = 1, sequence: int | None = None, units="blocks",
                reshard_after_forward: bool | None = None, shard_ranks: int | None = None,
                precision: str = "mixed", checkpointing: bool = False,
                optimizer: Callable = torch.optim.AdamW, inputs: Callable | None = None,
                full: bool = True) -> DryRun:
    """A training step under torch's `fully_shard`, on fake tensors: memory and collectives.

    model: a configuration, such as ``predict.catalogue.MODELS["Llama-3 70B"]``, or a function
        without arguments that makes an ``nn.Module``.
    batch, sequence: sequences of each rank, and tokens of each; by default the model's context.
    units: what is gathered at a time, besides the root with what is left: ``"blocks"``, each block
        (a child of an ``nn.ModuleList``, or of the model if it is an ``nn.Sequential``);
        a number of blocks; ``"root"``, the whole model; a class of modules, or several; or a
        function from the model to a list of modules, and of lists of modules gathered together.
    reshard_after_forward: as for `torch.distributed.fsdp.fully_shard`: by default, all but the
        root are.
    shard_ranks: for HSDP, how many ranks share one copy of the model, such as those of a node; the
        others hold copies of it, on a mesh of (copies, shard_ranks).
    precision: ``"fp32"``; ``"mixed"``: fp32 shards, gathered in bf16, gradients reduced in fp32;
        ``"bf16"``: everything, Adam's moments too. In `predict.memory.PRECISIONS`: "fp32",
        "fp32 shards, bf16 gathered", "pure bf16".
    checkpointing: each block keeps its input alone, and computes the rest again in backward.
    optimizer: makes an optimizer from the parameters, such as
        ``functools.partial(torch.optim.SGD, momentum=0.9)``.
    inputs: for a model of your own, makes what it is called with, a tensor or a tuple; the loss is
        the output's mean.
    full: False runs a few blocks of a configuration and takes the others to be like them, where
        that is possible; ``traced_blocks`` tells.

    Attention is `scaled_dot_product_attention`'s flash kernel for CPUs, which like that for GPUs
    keeps no scores. The optimizer works on one tensor after another, as torch's do on a CPU. On a
    GPU AdamW takes all tensors at once, unless told ``fused=True``; an ``optimizer`` of
    ``functools.partial(torch.optim.AdamW, foreach=True)`` does so here. `fully_shard` keeps its
    buffers alive by references in Python, which are the same on every device. Not covered is what a
    GPU adds: memory that one stream has freed and another cannot use yet, the allocator's rounding
    and fragmentation, NCCL's own buffers, and what kernels allocate inside. Nothing remains in this
    process: there is no process group afterwards.

    Raises TypeError and ValueError for arguments that cannot be, `UnsupportedOperator` for a model
    that asks for a tensor's values, and `RankError` for whatever the model itself raises.
    """
    return _run(Setup("fully_shard", model, world_size, batch, sequence, precision, checkpointing,
                      optimizer, inputs, full, units, reshard_after_forward, shard_ranks))


def ddp(model: TransformerConfig | Callable[[], nn.Module], world_size: int, *,
        bucket_views: bool = False, **options) -> DryRun:
    """The same for `DistributedDataParallel`, in its second step, with the buckets that stay.

    With ``precision="mixed"`` the step runs under `torch.autocast`, whose copies of the parameters
    in bf16 count as gathered. ``bucket_views``: as with ``gradient_as_bucket_view=True``, so that
    the buckets are the gradients. options: batch, sequence, precision, checkpointing, optimizer
    and inputs, as for `fully_shard`.
    """
    return _run(Setup("DDP", model, world_size, bucket_views=bucket_views, **options))


def zero_1(model: TransformerConfig | Callable[[], nn.Module], world_size: int, *,
           bucket_views: bool = False, **options) -> DryRun:
    """The same for `ZeroRedundancyOptimizer` with DDP, on the rank that has most of the state."""
    return _run(Setup("ZeRO-1", model, world_size, bucket_views=bucket_views, **options))


def _run(setup):
    model, ranks = setup.model, whole(setup.world_size, "the world size")
    one_of(setup.precision, ("fp32", "mixed", "bf16"), "precision")
    if isinstance(setup.units, str):
        one_of(setup.units, POLICIES, "units")
    if setup.shard_ranks is not None and ranks % setup.shard_ranks:
        raise ValueError(f"{setup.shard_ranks} shard_ranks do not divide {ranks} ranks: take a "
                         "number that does")
    if not isinstance(model, TransformerConfig):
        if isinstance(model, nn.Module) or not callable(model):
            raise TypeError("the model is a configuration, or a function that makes an nn.Module, "
                            f"not {type(model).__name__}: for a module that is there already, its "
                            "memory would have been needed")
        if setup.inputs is None:
            raise TypeError("a model of your own needs inputs, a function that makes its arguments")

    from dplab import run
    from dplab.dryrun.fake_step import dry_run

    result = run(dry_run, 1, setup, backend="gloo", timeout=24 * 3600)[0]
    if isinstance(result, Exception):
        raise result
    return result
