"""DeepSpeed's stages, a small model on two ranks over gloo: what they call, and the losses.

Needs DeepSpeed, which installs on Linux. Chapter 10 shows the rows. What is sent is counted as
rings send these calls, as in the chapter: over gloo, a reduce-scatter would send as an all-reduce.
"""

import torch
from torch import nn

from dplab import run
from dplab.bench.results import save
from dplab.bench.training_step import DEEPSPEED, training_step
from dplab.measure import CallLog, sent_bytes

RANKS, LAYERS, WIDTH, STEPS = 2, 6, 256, 6


def train(name):
    """The bytes that a rank sends in a step, over those of one all-gather, and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    size = sum(each.nbytes for each in model.parameters())
    step = training_step(name, model, lambda model, x: model(x).square().mean(), torch.optim.AdamW,
                         lr=1e-3)
    torch.manual_seed(1 + torch.distributed.get_rank())
    batches = [torch.randn(4, WIDTH) for _ in range(STEPS)]
    losses = [step(each) for each in batches[:2]]  # what is made once is made
    with CallLog() as log:
        losses += [step(each) for each in batches[2:]]
    once = (RANKS - 1) / RANKS * size
    return sum(map(sent_bytes, log.calls)) / (STEPS - 2) / once, losses


def main():
    _, right = run(train, RANKS, "DDP", backend="gloo")[0]
    rows = []
    for name in DEEPSPEED:
        sent, losses = run(train, RANKS, name, backend="gloo", timeout=300)[0]
        gap = max(abs(a - b) for a, b in zip(losses, right, strict=True))
        rows.append({"name": name, "sent": round(sent, 3), "gap": gap})
        print(rows[-1], flush=True)
    save("zero_stages", rows=rows)


if __name__ == "__main__":
    main()
