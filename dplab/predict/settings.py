"""The settings of each strategy that `choose` knows, to copy: torch's calls, DeepSpeed's JSON.

Sources: torch 2.13, distributed/fsdp, nn/parallel/distributed.py and distributed/optim; torchtitan
000204a4, train.py (the order in which a model on the meta device is sharded and filled); DeepSpeed
0.19.8, runtime/zero/config.py and runtime/config.py.
"""

import json

from dplab.predict.checks import one_of, whole
from dplab.predict.choose import BLOCK_RECOMPUTE, CHOICES, PRECISION_CHOICES

DEEPSPEED_STAGES = {"DDP": 0, "ZeRO-1": 1, "FSDP, kept": 2, "FSDP": 3, "HSDP": 3}
"""What comes nearest to each in DeepSpeed; its ZeRO-2, which torch has not, is near "FSDP, kept".
Hybrid sharding was MiCS (``mics_shard_size``), which DeepSpeed 0.19.8 refuses. What comes nearest
there is a second copy of the parameters, sharded in each node (``zero_hpz_partition_size``)."""

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
"""Usual for language models, the same in torch's code and in DeepSpeed's JSON."""

_START = """\
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()

"""
_YOURS = "# build_model() is yours; model.blocks must be the list of its transformer blocks.\n"
_WHOLE = """\
model = build_model().cuda()
{first}{wrapped}optimizer = {optimizer}

# In each step:
# with torch.autocast("cuda", torch.bfloat16):
#     loss = ...
"""
_DDP = "model = DDP(model, gradient_as_bucket_view=True)\n"
_SHARDED = """\
with torch.device("meta"):  # without memory: no rank holds the whole model
    model = build_model()
{first}mesh = init_device_mesh("cuda", {shape})
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.{reduced})
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy{kept})
fully_shard(model, mesh=mesh, mp_policy=policy{kept})
model.to_empty(device="cuda")
init_weights(model)  # yours: it sets all parameters and buffers, or loads a checkpoint
optimizer = {optimizer}
"""
_CHECKPOINT = "model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)\n"
_COMPILE = "for block in model.blocks:\n    block.compile()\n"
_ACCUMULATE = {
    "DDP": "\n# Of each step's {n} micro-batches all but the last run under model.no_sync();\n"
           "# each loss is divided by {n}.\n",
    "FSDP": "\n# Each step has {n} micro-batches; each loss is divided by {n}.\n",
    "HSDP": "\n# Of each step's {n} micro-batches only the last needs the other nodes:\n"
            "# model.set_requires_all_reduce(is_last); each loss is divided by {n}.\n",
}
_IMPORTS = {
    "os.": "import os\n",
    "": "import torch",
    "dist.": "import torch.distributed as dist",
    "nn.": "from torch import nn",
    "checkpoint_wrapper(": "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper "
                           "import (\n    checkpoint_wrapper,\n)",
    "init_device_mesh(": "from torch.distributed.device_mesh import init_device_mesh",
    "MixedPrecisionPolicy(": "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
    "ZeroRedundancyOptimizer(": "from torch.distributed.optim import ZeroRedundancyOptimizer",
    "DDP(": "from torch.nn.parallel import DistributedDataParallel as DDP",
}


def in_torch(strategy: str, ranks: int, per_node: int = 8, *, recompute: str = "none",
             precision: str = "mixed", compiled: bool = False, accumulation: int = 1) -> str:
    """The head of a training script: it makes ``model``, wrapped, and ``optimizer``.

    It runs as it is under `torchrun`'s line; ``build_model`` and ``init_weights`` are the reader's.
    ``strategy``: one of `choose.CHOICES`; on one rank DDP is a model without a wrapper.
    ``recompute``: one of `choose.BLOCK_RECOMPUTE`; ``precision``: one of
    `choose.PRECISION_CHOICES`; ``accumulation``: micro-batches in a step, which a comment explains.
    No line is longer than 88 columns. Raises ValueError for another, and under HSDP for ranks that
    do not fill nodes of ``per_node``.
    """
    one_of(strategy, CHOICES, "strategy")
    one_of(precision, PRECISION_CHOICES, "precision")
    full = one_of(recompute, BLOCK_RECOMPUTE, "recompute") == "full"
    alone = whole(ranks, "ranks") == 1 and strategy == "DDP"
    first = (_CHECKPOINT if full else "") + (_COMPILE if compiled else "")
    # Without `fused` torch updates all tensors at once on a GPU, which needs as much room again.
    adamw = ", ".join(f"{name}={value}" for name, value in (ADAMW | {"fused": True}).items())
    optimizer = f"torch.optim.AdamW(\n    model.parameters(), {adamw})"
    if strategy == "ZeRO-1":
        optimizer = ("ZeroRedundancyOptimizer(\n    model.parameters(), torch.optim.AdamW,\n    "
                     f"{adamw})")
    if CHOICES[strategy].replicated:
        body = _WHOLE.format(first=first, wrapped="" if alone else _DDP, optimizer=optimizer)
    else:
        shape = f"({ranks},)"
        if strategy == "HSDP":
            if ranks % whole(per_node, "per_node"):
                raise ValueError(f"{ranks} ranks do not fill nodes of {per_node}: give per_node")
            shape = (f"({ranks // per_node}, {per_node}), "
                     'mesh_dim_names=("replicate", "shard")')
        kept = "" if CHOICES[strategy].reshard else ", reshard_after_forward=False"
        body = _SHARDED.format(first=first, shape=shape, optimizer=optimizer, kept=kept,
                               reduced="bfloat16" if "bf16" in precision else "float32")
    if whole(accumulation, "accumulation") > 1:
        body += _ACCUMULATE["FSDP" if alone else CHOICES[strategy].simulated].format(n=accumulation)
    body = ("" if alone else _START) + _YOURS + body
    return "\n".join([*(line for name, line in _IMPORTS.items() if name in body), "", body])


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


def in_deepspeed(strategy: str, batch: int, per_node: int = 8, *, accumulation: int = 1) -> str:
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
        "gradient_accumulation_steps": whole(accumulation, "accumulation"),
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": zero,
    }, indent=2)
