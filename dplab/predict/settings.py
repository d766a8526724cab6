"""The settings of each strategy that `choose` knows, to copy: torch's calls, DeepSpeed's JSON.

Sources: torch 2.13, distributed/fsdp, nn/parallel/distributed.py and distributed/optim; DeepSpeed
edaa7221, runtime/zero/config.py and runtime/config.py.
"""

import json

from dplab.predict.checks import one_of, whole
from dplab.predict.cluster import BLOCK_RECOMPUTE

DEEPSPEED_STAGES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP": 3, "HSDP": 3}
"""What comes nearest to each in DeepSpeed. ZeRO-2 has no setting in torch; "FSDP, kept" is near it.
Hybrid sharding (MiCS) has been removed: left is a second copy of the parameters in each node."""

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
"""Usual for language models, the same in torch's code and in DeepSpeed's JSON."""

PRECISIONS = ("mixed", "bf16")
"""The names of `choose.IN_BF16`."""

_REPLICATED = """\
{first}model = DDP(model, gradient_as_bucket_view=True)
optimizer = {optimizer}
"""
_AUTOCAST = '# and in each step: with torch.autocast("{device}", torch.bfloat16): loss = ...\n'
_SHARDED = """\
{first}mesh = init_device_mesh("{device}", {shape})
{policy}for block in model.blocks:
    fully_shard(block, mesh=mesh{options})
fully_shard(model, mesh=mesh{options})
optimizer = {optimizer}
"""
_POLICY = ("policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
           "reduce_dtype=torch.float32)\n")
_IN_BF16 = "model.to(torch.bfloat16)\n"
_CHECKPOINT = "model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)\n"
_IMPORTS = {
    "DDP(": "from torch.nn.parallel import DistributedDataParallel as DDP",
    "ZeroRedundancyOptimizer(": "from torch.distributed.optim import ZeroRedundancyOptimizer",
    "init_device_mesh(": "from torch.distributed.device_mesh import init_device_mesh",
    "fully_shard(": "from torch.distributed.fsdp import fully_shard",
    "checkpoint_wrapper(": "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper "
                           "import checkpoint_wrapper",
    "nn.ModuleList(": "from torch import nn",
}


def in_torch(strategy: str, ranks: int, per_node: int = 8, *, recompute: str = "none",
             device: str = "cuda", precision: str = "mixed") -> str:
    """Python that wraps ``model``, whose blocks are ``model.blocks``, and makes ``optimizer``.

    ``strategy``: one of `choose.CHOICES`; ``recompute``: "none" or "full"; ``precision``: one of
    `PRECISIONS`. Raises ValueError for another, and under HSDP for ranks that do not fill nodes of
    ``per_node``.
    """
    one_of(strategy, ("DDP", "ZeRO-1", "FSDP, kept", "HSDP", "FSDP"), "strategy")
    one_of(recompute, BLOCK_RECOMPUTE, "recompute")
    mixed = one_of(precision, PRECISIONS, "precision") == "mixed"
    first = ("" if mixed else _IN_BF16) + (_CHECKPOINT if recompute == "full" else "")
    # Without `fused` torch updates all tensors at once on a GPU, which needs as much room again.
    adamw = ", ".join(f"{name}={value}" for name, value in (ADAMW | {"fused": True}).items())
    optimizer = (f"ZeroRedundancyOptimizer(\n    model.parameters(), torch.optim.AdamW, {adamw})"
                 if strategy == "ZeRO-1" else
                 f"torch.optim.AdamW(model.parameters(), {adamw})")
    if strategy in ("DDP", "ZeRO-1"):
        body = _REPLICATED.format(first=first, optimizer=optimizer)
        if mixed:
            body += _AUTOCAST.format(device=device)
    else:
        shape = f"({whole(ranks, 'ranks')},)"
        if strategy == "HSDP":
            if ranks % whole(per_node, "per_node"):
                raise ValueError(f"{ranks} ranks do not fill nodes of {per_node}: give per_node")
            shape = (f"({ranks // per_node}, {per_node}), "
                     'mesh_dim_names=("replicate", "shard")')
        options = ", mp_policy=policy" if mixed else ""
        if strategy == "FSDP, kept":
            options += ", reshard_after_forward=False"
        body = _SHARDED.format(first=first, shape=shape, device=device, options=options,
                               policy=_POLICY if mixed else "", optimizer=optimizer)
    imports = [line for name, line in _IMPORTS.items() if name in body]
    if _POLICY in body:
        imports = [line.replace("import fully", "import MixedPrecisionPolicy, fully")
                   for line in imports]
    return "\n".join(["import torch", *sorted(imports), "", body])


def torchrun(nodes: int, per_node: int, script: str = "train.py") -> str:
    """The line that starts a rank on each of ``per_node`` GPUs of each of so many nodes.

    Of several nodes each runs the same line, with the name of one of them for FIRST_HOST. Raises
    like `checks.whole`.
    """
    ranks = f"--nproc-per-node {whole(per_node, 'per_node')}"
    if whole(nodes, "nodes") == 1:
        return f"torchrun --standalone {ranks} {script}"
    return (f"torchrun --nnodes {nodes} {ranks} \\\n    --rdzv-backend c10d "
            f"--rdzv-endpoint FIRST_HOST:29500 {script}")


def in_deepspeed(strategy: str, batch: int, per_node: int = 8) -> str:
    """A DeepSpeed configuration in JSON, for ``batch`` sequences on each rank.

    ``strategy``: one of `DEEPSPEED_STAGES`. bf16 with fp32 master weights; the gradient is clipped
    only where you say so, which DeepSpeed without a word does at 1.0.
    """
    stage = DEEPSPEED_STAGES[one_of(strategy, DEEPSPEED_STAGES, "strategy")]
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if strategy == "HSDP":
        zero["zero_hpz_partition_size"] = whole(per_node, "per_node")
    return json.dumps({
        "train_micro_batch_size_per_gpu": whole(batch, "batch"),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": zero,
    }, indent=2)
