"""The memory that formulas predict for a training step, beside the dry run of torch's own code."""

import functools
from collections.abc import Callable

from dplab import dryrun
from dplab.predict import choose, memory
from dplab.predict.catalogue import MODELS

STEPS = [  # model, strategy, ranks, batch, sequence, precision, recompute, more of the strategy
    ("Llama-3 8B", "FSDP", 8, 1, 8192, "mixed", "none", {}),
    ("Llama-3 8B", "FSDP", 64, 1, 4096, "mixed", "full", {}),
    ("Llama-3 8B", "FSDP", 16, 1, 2048, "mixed", "none", {}),
    ("Llama-3 8B", "FSDP", 8, 1, 8192, "mixed", "full", {}),
    ("Llama-3 8B", "FSDP", 512, 1, 256, "mixed", "none", {}),
    ("Llama-3 8B", "FSDP", 16, 2, 2048, "fp32", "none", {}),
    ("Llama-3 8B", "FSDP", 8, 2, 4096, "bf16", "full", {}),
    ("Llama-3 8B", "FSDP, kept", 64, 1, 2048, "mixed", "none", {}),
    ("Llama-3 8B", "FSDP, kept", 16, 1, 512, "mixed", "full", {}),
    ("Llama-3 8B", "HSDP", 64, 1, 8192, "mixed", "none", {"shard_ranks": 8}),
    ("Llama-2 7B", "FSDP", 32, 1, 4096, "mixed", "none", {}),
    ("Llama-2 13B", "FSDP, kept", 64, 1, 512, "fp32", "full", {}),
    ("Llama-2 13B", "FSDP", 4, 1, 512, "bf16", "none", {}),
    ("Llama-2 70B", "FSDP", 256, 2, 4096, "bf16", "full", {}),
    ("Llama-2 70B", "HSDP", 1024, 1, 2048, "mixed", "full", {"shard_ranks": 64}),
    ("Llama-3 70B", "FSDP", 8, 1, 4096, "mixed", "full", {}),
    ("Llama-3 70B", "FSDP", 1024, 1, 8192, "mixed", "none", {}),
    ("Llama-3.1 405B", "FSDP", 1024, 1, 4096, "mixed", "full", {}),
    ("GPT-2", "FSDP", 8, 8, 1024, "mixed", "none", {}),
    ("GPT-2 medium", "FSDP", 64, 1, 128, "fp32", "none", {}),
    ("GPT-2 XL", "FSDP", 64, 4, 1024, "fp32", "none", {}),
    ("GPT-2 XL", "HSDP", 16, 2, 512, "fp32", "full", {"shard_ranks": 4}),
    ("GPT-2", "DDP", 8, 8, 1024, "mixed", "none", {"bucket_views": True}),
    ("GPT-2 medium", "DDP", 8, 4, 1024, "fp32", "none", {}),
    ("GPT-2 large", "DDP", 16, 1, 512, "bf16", "none", {"bucket_views": True}),
    ("GPT-2 XL", "DDP", 64, 1, 1024, "mixed", "full", {"bucket_views": True}),
    ("Llama-3 8B", "DDP", 8, 1, 2048, "mixed", "none", {}),
    ("Llama-3 8B", "DDP", 8, 1, 4096, "mixed", "full", {"bucket_views": True}),
    ("Llama-2 7B", "DDP", 8, 1, 4096, "bf16", "none", {"bucket_views": True}),
    ("GPT-2 XL", "ZeRO-1", 8, 2, 1024, "mixed", "none", {}),
    ("Llama-3 8B", "ZeRO-1", 16, 1, 1024, "mixed", "full", {}),
]
PRECISIONS = {"fp32": "fp32", "mixed": "fp32 shards, bf16 gathered", "bf16": "pure bf16"}
"""Of the dry run, and of `predict.memory`."""


def title(step) -> str:
    name, strategy, ranks, batch, sequence, precision, recompute, more = step
    said = [f"{name}, {strategy} on {ranks:,} ranks, {batch} × {sequence:,} tokens, {precision}"]
    said += ["blocks recomputed"] if recompute == "full" else []
    said += [f"{key} {value}" for key, value in more.items()]
    return ", ".join(said)


def predicted(step) -> memory.Budget:
    """The budget of one of `STEPS`."""
    name, strategy, ranks, batch, sequence, precision, recompute, more = step
    model, precision = MODELS[name], PRECISIONS[precision]
    return memory.budget(
        model, more.get("shard_ranks", ranks), 80e9, precision=precision, batch=batch,
        stage=strategy if strategy in memory.STAGES else "ZeRO-3", sequence=sequence,
        recompute=recompute, reshard=strategy != "FSDP, kept",
        bucket_views=more.get("bucket_views", False),
        held=choose.fullest_rank(model, ranks, precision) if strategy == "ZeRO-1" else None)


def dry(step) -> dryrun.DryRun:
    """Its dry run; of sharded models a few blocks stand for the others."""
    name, strategy, ranks, batch, sequence, precision, recompute, more = step
    run: Callable[..., dryrun.DryRun]
    if strategy in ("DDP", "ZeRO-1"):
        run = dryrun.ddp if strategy == "DDP" else dryrun.zero_1
    else:
        run = functools.partial(dryrun.fully_shard, full=False)
    if strategy == "FSDP, kept":
        more = {"reshard_after_forward": False}
    return run(MODELS[name], ranks, batch=batch, sequence=sequence, precision=precision,
               checkpointing=recompute == "full", **more)
