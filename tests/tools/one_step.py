"""Writes chapters/one_step_by_hand.md: one step's time, derived until it is the simulator's.

    python tests/tools/one_step.py
"""

import textwrap
from dataclasses import replace
from pathlib import Path

from dplab.predict import kernels
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.cluster import Cluster, Job, predict
from dplab.predict.network import collective_seconds, computing_slowdown, nccl_candidates
from dplab.predict.published import published_runs, summary
from dplab.predict.transformer_config import numel

PAGE = Path(__file__).resolve().parents[2] / "chapters/one_step_by_hand.md"
MODEL, SEQUENCE = MODELS["Llama-3 8B"], 8192
CLUSTER = Cluster(GPUS["H100"], 8, LINKS["NVLink 4"], LINKS["400 Gb/s"])
JOB = Job(MODEL, 1, SEQUENCE, gradient_bytes=4)  # fully_shard; gathers in bf16, reduces in fp32


def page() -> str:
    """The whole page. Raises AssertionError where the parts do not add up to the simulator's."""
    block, root = parts = MODEL.block_parameters, numel(MODEL.ends.values())
    forward, backward, first, last = (
        each(MODEL, 1, SEQUENCE) for each in (kernels.block_forward, kernels.block_backward,
                                              kernels.ends_forward, kernels.ends_backward))
    layers, ends = kernels.unit_costs(JOB, CLUSTER)
    gathers = [collective_seconds(CLUSTER, "all-gather", 2 * size) for size in parts]
    scatters = [collective_seconds(CLUSTER, "reduce-scatter", 4 * size) for size in parts]
    slowdown = computing_slowdown(CLUSTER)
    count, one = MODEL.layers, layers[0]
    computing = count * (one.forward_seconds + one.backward_seconds) + (
        ends.forward_seconds + ends.backward_seconds)
    hidden = (2 * count - 1) * gathers[0] + (count - 1) * scatters[0]
    slower = (1 - 1 / slowdown) * hidden
    exposed = gathers[0] + gathers[1] + scatters[0] + scatters[1]
    update = kernels.optimizer_seconds(MODEL.parameters / CLUSTER.ranks, CLUSTER.gpu,
                                       nbytes=2 * JOB.optimizer_bytes + 4)
    total = computing + slower + exposed + update
    found = predict(JOB, CLUSTER)
    assert abs(total / found.seconds - 1) < 1e-9, (total, found.seconds)
    fast, slow = (predict(JOB, replace(CLUSTER, pace=pace)).seconds for pace in ("fast", "slow"))
    candidates = nccl_candidates(CLUSTER, "all-gather", 2 * block)
    (leads, protocol), (second, _), *_ = sorted((each, name) for name, each in candidates.items())
    for larger in (nccl_candidates(CLUSTER, "reduce-scatter", 4 * block),
                   nccl_candidates(CLUSTER, "all-gather", 2 * root),
                   nccl_candidates(CLUSTER, "reduce-scatter", 4 * root)):
        assert min(larger, key=larger.__getitem__) == "ring Simple"
    steps = nccl_candidates(CLUSTER, "all-gather", 0)[protocol]
    sent = 2 * block * (CLUSTER.ranks - 1) / CLUSTER.ranks
    copies = one.forward_seconds - _time(forward), one.backward_seconds - _time(backward)
    network = CLUSTER.nics * CLUSTER.between.bandwidth
    reached = sent / (gathers[0] - steps) / network
    every = [*count * [*forward, *backward], *first, *last]
    lent = sum(_time([kernel]) for kernel in every
               if not kernels.rate(kernel, CLUSTER.gpu).as_asked) / _time(every)
    others = summary([run for run in published_runs()
                      if run.gpu == "H100" and run.unit != "efficiency"])
    return _filled(f"""\
# One step by hand

How does `dplab.predict` come to the time of a step? Here is one, part by part: {MODEL.name},
`fully_shard` on {CLUSTER.ranks} H100s ({CLUSTER.nodes} nodes of {CLUSTER.per_node}, NVLink inside,
{CLUSTER.nics} × 400 Gb/s between), one sequence of {SEQUENCE:,} tokens on each rank, nothing
recomputed, not compiled. Weights are gathered in bf16, gradients reduced in fp32. (`python
tests/tools/one_step.py` makes this page and checks that its parts add up to what `predict` says.)

## 1. A block's forward

A product of (m, k) with (k, n) takes 2·m·n·k FLOPs, and attention 4·s²·d for each head of width d
over s tokens, half of that with the causal mask. The peak of the H100 is
{CLUSTER.gpu.bf16_flops / 1e12:.0f} TFLOP/s. Everything else is counted in bytes, what it reads and
what it writes; the peak is {CLUSTER.gpu.memory_bandwidth / 1e12:.2f} TB/s. The rates in the table
are those that others measured. Where no such shape was measured on this GPU (*), the nearest rows
stand in: they make {lent:.0%} of all the kernels' time below.

{_table(forward)}

The sum is {1e3 * _time(forward):.2f} ms. Before its forward `fully_shard` copies the gathered
bytes into the parameters: {1e3 * copies[0]:.2f} ms more. So a block's forward takes
**{1e3 * one.forward_seconds:.2f} ms**.

## 2. A block's backward

Each product has two in backward: one for its input's gradient, one for its weight's. Attention
computes its scores again, which makes 2.5 times the FLOPs of forward.

{_table(backward)}

The sum is {1e3 * _time(backward):.2f} ms, and the copies of weights and gradients take
{1e3 * copies[1]:.2f} ms: **{1e3 * one.backward_seconds:.2f} ms**.

## 3. The ends

What is in no block is a unit of its own, the **root**: the embedding, the last norm and the head.
The head is one large product. The loss is what surprises: the logits have {SEQUENCE:,} ×
{MODEL.vocabulary:,} elements, and are read and written in fp32 several times.

{_table(first)}

Their backward:

{_table(last)}

With the copies of the root's weights and gradients: {1e3 * ends.forward_seconds:.1f} ms and
{1e3 * ends.backward_seconds:.1f} ms.

All computing of {count} blocks and the ends: {count} · ({1e3 * one.forward_seconds:.2f} +
{1e3 * one.backward_seconds:.2f}) + {1e3 * ends.forward_seconds:.1f} +
{1e3 * ends.backward_seconds:.1f} = **{1e3 * computing:.1f} ms**.

## 4. A block's collectives

A block has {block / 1e6:.1f} million parameters. Gathered in bf16 that is {2 * block / 1e6:.0f} MB.
A ring sends {CLUSTER.ranks - 1}/{CLUSTER.ranks} of it through each node's links to the network,
{network / 1e9:.0f} GB/s together. NCCL takes the pair of algorithm and protocol that it expects to
be fastest, here the {protocol}. (A protocol says how a rank learns that bytes have arrived; LL128
has a flag in every 128 bytes.) Its steps and the call cost {1e6 * steps:.0f} µs, the bytes
{1e3 * (gathers[0] - steps):.2f} ms. That is {reached:.0%} of the links' bandwidth: the share
that gathers and reduce-scatters over such a network were measured to reach, times the 92% that
NCCL's own tuner takes for LL128. Three sources measured them: 50% of the bandwidth on 32 nodes, 82%
on 2, and 90% on 4 (that source has 86% on 8, and 65% on 128); the simulator takes the middle, 82%.
Together **{1e3 * gathers[0]:.2f} ms**. (LL128 leads by only {second / leads - 1:.1%}, so NCCL may
choose another.)

The reduce-scatter of its gradients has twice the bytes: **{1e3 * scatters[0]:.2f} ms**. For it, and
for both of the root, NCCL takes Simple, with all of the bandwidth and slower messages. The root,
with {root / 1e6:,.0f} million parameters, takes {1e3 * gathers[1]:.2f} ms to gather and
{1e3 * scatters[1]:.2f} ms to reduce.

## 5. What hides behind what

While a block computes, the next one is gathered, and in backward the last one's gradients are
reduced. Each of them is shorter than the block's computing, so they hide: {2 * count - 1} gathers
and {count - 1} reduce-scatters, {1e3 * hidden:.1f} ms together. But NCCL's kernels need some of the
GPU's multiprocessors and of its bandwidth. Beside them computing takes {slowdown:.3f} times as
long, so hiding costs (1 − 1/{slowdown:.3f}) · {1e3 * hidden:.1f} = **{1e3 * slower:.1f} ms**.

Nothing computes yet while the root and the first block are gathered, and nothing computes any more
while the first block and the root are reduced: {1e3 * gathers[1]:.2f} + {1e3 * gathers[0]:.2f} +
{1e3 * scatters[0]:.2f} + {1e3 * scatters[1]:.2f} = **{1e3 * exposed:.1f} ms** are exposed.

## 6. The step

The optimizer reads and writes {2 * JOB.optimizer_bytes + 4} bytes for each of the rank's
{MODEL.parameters / CLUSTER.ranks / 1e6:.0f} million parameters: {1e3 * update:.1f} ms.

| part | ms |
|:--|--:|
| computing | {1e3 * computing:.1f} |
| slowed down by what hides behind it | {1e3 * slower:.1f} |
| collectives that nothing hides | {1e3 * exposed:.1f} |
| optimizer | {1e3 * update:.1f} |
| **the step** | **{1e3 * total:.1f}** |

`predict` says {found.seconds:.4f} s, and {fast:.3f} to {slow:.3f} s between the fast and the slow
ones of the measured rates. That is {JOB.tokens / found.seconds:,.0f} tokens/s on each GPU, and
{found.mfu:.1%} of the peak, where recomputing does not count and attention counts without its mask.

How good is such a prediction? Of {others.count} published runs on H100s, half are off by
{others.absolute_error:.0%} or less. In the median it is {others.error:.0%} too fast, and only
{others.inside:.0%} of them lie between the fast and the slow pace, which hold the spread of rates
and nothing else. What is left out makes runs slower: loading of data, what the CPU takes beyond
launches, clocks that fall under load, and older software. `python -m dplab.bench cluster` shows
each run.
""")


def _filled(text):
    """With lines of one length; headings and tables stay as they are."""
    return "\n\n".join(part if part.startswith(("#", "|")) else textwrap.fill(part, 100)
                       for part in text.strip().split("\n\n")) + "\n"


def _time(every):
    return kernels.seconds(every, CLUSTER.gpu)


def _table(every):
    """A row for each kernel: what it does, how fast, how long."""
    lines = ["| kernel | work | rate | ms |", "|:--|--:|--:|--:|"]
    for kernel in every:
        name = kernel.name if kernel.count == 1 else f"{kernel.name}, {kernel.count:g} times"
        rate = kernels.rate(kernel, CLUSTER.gpu)
        work, unit = ((f"{kernel.flops / 1e9:,.0f} GFLOP", f"{rate.value / 1e12:.0f} TFLOP/s")
                      if kernel.shape else (f"{kernel.count * kernel.nbytes / 1e6:,.0f} MB",
                                            f"{rate.value / 1e12:.2f} TB/s"))
        unit += "" if rate.as_asked else " *"
        lines.append(f"| {name} | {work} | {unit} | {1e3 * _time([kernel]):.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
