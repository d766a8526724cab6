"""Ranks that meet seldom, local SGD and DiLoCo, by bytes and loss; and gradients that are stale.

`meetings` trains a byte-level transformer with AdamW: synchronously, by local SGD, by DiLoCo, and
on one rank alone; its loss is on text that none has seen. `delays` trains the digits with gradients
that are a chosen number of updates old, over learning rates.

One process with one thread plays all ranks: each weight has one more dimension, that of ranks and
seeds. tests/bench/test_infrequent.py compares it with `dplab.parallel` on real ranks.
"""

import collections
import math
import statistics

import torch
import torch.nn.functional as F
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dplab.bench.results import save
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads import standard_library
from dplab.workloads.digits import TRAIN_SIZE, digits_classifier, load_digits
from dplab.workloads.transformer import Transformer

STEPS, SEEDS = 512, range(3)
RANKS, LOCAL_BATCH, LENGTH, HELD_OUT = 4, 4, 32, 200_000
LEARNING_RATE, WARM_UP = 3e-3, 20
METHODS = {  # how many ranks, H, and the outer learning rate and momentum
    "one rank alone": (1, None, None),
    "synchronous": (RANKS, None, None),
    **{f"local, H = {every}": (RANKS, every, (1.0, 0.0)) for every in (4, 16, 64)},
    **{f"DiLoCo, H = {every}": (RANKS, every, (0.7, 0.9)) for every in (16, 64)},
    "DiLoCo, H = 16, less momentum": (RANKS, 16, (0.7, 0.5)),
}
STALENESS = (0, 1, 3, 7, 15)
RATES = [0.8 / 2 ** (step / 2) for step in range(13)]
DIGITS_UPDATES, DIGITS_BATCH = 300, 32


def main():
    torch.set_num_threads(1)
    print(f"one thread; AdamW, {STEPS} steps, "
          f"{LOCAL_BATCH} × {LENGTH} bytes a rank; held-out loss by seed")
    print(f"{'':30}{'bytes per step':>16}" + "".join(f"{seed:8}" for seed in SEEDS))
    met = []
    for method in METHODS:
        rows = meetings(method)
        met += rows
        print(f"{method:30}{rows[0]['bytes_per_step']:16,.0f}"
              + "".join(f"{row['loss']:8.3f}" for row in rows), flush=True)
    print(f"\ndigits, loss after {DIGITS_UPDATES} updates with gradients so many updates old\n"
          f"{'learning rate':>14}" + "".join(f"{rate:9.4g}" for rate in RATES))
    late = []
    for staleness in STALENESS:
        late += delays(staleness)
        medians = [statistics.median(row["loss"] for row in late if row["staleness"] == staleness
                                     and row["learning_rate"] == rate) for rate in RATES]
        print(f"{staleness:14}" + "".join(f"{loss:9.3g}" for loss in medians), flush=True)
    save("infrequent", steps=STEPS, seeds=list(SEEDS), meetings=met, delays=late)


def meetings(method: str, steps: int = STEPS, seeds=SEEDS) -> list[dict]:
    """For each seed the loss on held-out text, and the bytes that a rank hands over per step."""
    ranks, every, outer = METHODS[method]
    models = trained(ranks, every, outer, steps, seeds)
    text = standard_library.load_source()[-HELD_OUT:]
    inputs, targets = standard_library.sample(text, 256, LENGTH, seed=0)
    size = sum(parameter.numel() for parameter in models[0].parameters())
    with torch.no_grad():
        losses = [F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
                  for model in models]
    return [{"method": method, "steps": steps, "every": every, "seed": seed, "parameters": size,
             "bytes_per_step": 4 * size / (every or 1) if ranks > 1 else 0, "loss": round(loss, 4)}
            for seed, loss in zip(seeds, losses, strict=True)]


def trained(ranks, every, outer, steps, seeds) -> list[Transformer]:
    """For each seed rank 0's model at the end.

    ``every``: the steps between two meetings, or None where gradients are averaged in each step.
    ``outer``: DiLoCo's outer learning rate and momentum; with 1 and 0 it is local SGD.
    """
    text = standard_library.load_source()[:-HELD_OUT]
    models = [transformer(seed) for seed in seeds]
    weights, _ = stack_module_state([model for model in models for _ in range(ranks)])
    weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    optimizer, schedule = adamw(weights.values(), steps)
    anchors = [_mean(weight, ranks).clone() for weight in weights.values()]
    rate, momentum = outer or (0, 0)
    outer_optimizer = torch.optim.SGD(anchors, rate, momentum, nesterov=momentum > 0)
    loss_of_each = vmap(lambda weight, x, y: F.cross_entropy(
        functional_call(models[0], weight, (x,)).flatten(0, 1), y.flatten()))

    for step in range(1, steps + 1):
        batches = [standard_library.sample(text, LOCAL_BATCH, LENGTH, sample_of(seed, step, rank))
                   for seed in seeds for rank in range(ranks)]
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):  # the one that vmap can do
            loss_of_each(weights, *map(torch.stack, zip(*batches, strict=True))).sum().backward()
        if every is None:
            for weight in weights.values():
                weight.grad = _mean(weight.grad, ranks)
        optimizer.step()
        schedule.step()
        if every is not None and step % every == 0:
            with torch.no_grad():
                for anchor, weight in zip(anchors, weights.values(), strict=True):
                    anchor.grad = anchor - _mean(weight, ranks)
                outer_optimizer.step()
                for anchor, weight in zip(anchors, weights.values(), strict=True):
                    weight.copy_(anchor)
    for number, model in enumerate(models):
        model.load_state_dict({name: weight[number * ranks] for name, weight in weights.items()},
                              strict=False)
    return models


def _mean(weight, ranks):
    """The mean over the ranks of a seed, repeated for each of them."""
    mean = weight.detach().unflatten(0, (-1, ranks)).mean(1)
    return mean.repeat_interleave(ranks, dim=0)


def transformer(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(TransformerConfig(2, 48, 4, 192, standard_library.VOCABULARY, LENGTH))


def adamw(parameters, steps: int):
    """The optimizer, and a schedule that warms up and then falls to a tenth."""
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP) * (1 - 0.9 * step / steps))


def sample_of(seed: int, step: int, rank: int) -> int:
    """The number of the sample that this rank takes in this step: no two take the same."""
    return (100_000 * seed + step) * RANKS + rank


def delays(staleness: int, seeds=SEEDS) -> list[dict]:
    """The loss on all training digits for each learning rate and seed; infinite if it overflowed.
    """
    images, labels, *_ = load_digits()
    rows = []
    for rate in RATES:
        for seed in seeds:
            model = delayed(staleness, rate, DIGITS_UPDATES, seed)
            with torch.no_grad():
                loss = F.cross_entropy(model(images), labels).item()
            rows.append({"staleness": staleness, "learning_rate": rate, "seed": seed,
                         "loss": round(loss, 4) if math.isfinite(loss) else 1e9})
    return rows


def delayed(staleness: int, learning_rate: float, updates: int, seed: int = 0):
    """The digits classifier after plain SGD with gradients of parameters that many updates old.

    The first gradients, before there are such parameters, are of the initial ones.
    """
    images, labels, *_ = load_digits()
    model, old = digits_classifier(seed), digits_classifier(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    states: collections.deque[list[torch.Tensor]] = collections.deque(maxlen=staleness + 1)
    for update in range(updates):
        states.append([parameter.detach().clone() for parameter in model.parameters()])
        with torch.no_grad():
            for parameter, value in zip(old.parameters(), states[0], strict=True):
                parameter.copy_(value)
        chosen = digits_batch(update, seed)
        loss = F.cross_entropy(old(images[chosen]), labels[chosen])
        gradients = torch.autograd.grad(loss, list(old.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model


def digits_batch(update: int, seed: int = 0) -> torch.Tensor:
    """The indices of the digits that gradient number ``update`` is of."""
    generator = torch.Generator().manual_seed(10_000 * seed + update)
    return torch.randint(TRAIN_SIZE, (DIGITS_BATCH,), generator=generator)


if __name__ == "__main__":
    main()
