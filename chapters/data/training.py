"""How many GPUs still pay: learning-rate rules, and steps against samples; five seeds of each.

`rules` trains for a fixed number of epochs at growing batch sizes. The base learning rate is the
best one at the smallest batch. From there every batch size gets a grid of rates, powers of two
times the base rate, with warm-up, so that a rule is seen beside the best that any rate gives.
`steps_to_targets` counts the steps until the test loss is below each of `TARGETS`, with Adam, at
five constant rates for each batch size.

One process with one thread trains here. N ranks would take the same steps: the mean of the
gradients of N equal parts is the gradient of the whole batch, and nothing in the model or in its
data depends on N (chapter 02 has the proof; tests/bench/test_recorded.py trains one of these
runs on two ranks). All seeds train side by side: each weight has one more dimension, the seed's.
"""

import math
import platform
import statistics
import time

import torch
import torch.nn.functional as F
from torch.func import functional_call, stack_module_state, vmap

from dplab.bench.results import save
from dplab.workloads.large_batch import (
    BASE_BATCH,
    BATCHES,
    OPTIMIZERS,
    RULES,
    WARM_UP,
    learning_rate,
)
from dplab.workloads.moved_digits import TRAIN_SIZE, load_moved_digits, moved_digits_classifier

EPOCHS, SEEDS = 8, range(5)
BASE_GRID = {"SGD": [0.0125, 0.025, 0.05, 0.1, 0.2],
             "Adam": [0.0005, 0.001, 0.002, 0.004, 0.008]}
TARGETS = (1.0, 0.5, 0.3)  # of the test loss
TARGET_BATCHES = [2**power for power in range(4, 13)]
TARGET_RATE, TARGET_EPOCHS = 0.004, 12  # the rate at `BASE_BATCH`


def main():
    torch.set_num_threads(1)
    began = time.process_time()
    found = {"python": platform.python_version(), "seeds": list(SEEDS),
             "epochs": EPOCHS, "warm_up": WARM_UP, "rules": [],
             "steps_to_targets": []}
    print(f"one thread; {EPOCHS} epochs of {TRAIN_SIZE:,} images; test "
          f"error in %, mean and standard deviation over {len(SEEDS)} seeds")
    for name in OPTIMIZERS:
        for row in rules(name):
            found["rules"].append(row)
            print(f"{name:5} batch {row['batch']:5}  rate {row['learning_rate']:8.4g} = base × "
                  f"{row['times']:6.4g}  {'warm-up' if row['warm_up'] else '':8}"
                  f"{statistics.mean(row['errors']):7.2f} ± {statistics.stdev(row['errors']):.2f}",
                  flush=True)
    for row in steps_to_targets():
        found["steps_to_targets"].append(row)
        print(f"Adam, batch {row['batch']:5}  rate {row['learning_rate']:8.4g}  "
              f"steps to a test loss of {row['target']}: {row['steps']}", flush=True)
    found["seconds"] = round(time.process_time() - began)
    print(f"{found['seconds']} s of one core")
    save("training", **found)


def rules(optimizer: str, batches=BATCHES, seeds=SEEDS):
    """Yields a dict for each run of all seeds: its settings, test errors in % and test losses."""
    base_runs = [_run(optimizer, BASE_BATCH, base, base, seeds) for base in BASE_GRID[optimizer]]
    best = min(base_runs, key=lambda run: statistics.mean(run["errors"]))
    base = best["learning_rate"]
    yield from (run | {"times": run["learning_rate"] / base} for run in base_runs)
    for batch in batches[1:]:
        k = batch // BASE_BATCH
        by_rule = {rule(k) for rule in RULES.values()}
        grid = {2.0**power for power in range(-1, int(math.log2(k)) + 2)}
        for times in sorted(grid | by_rule):
            for warm_up in (0, WARM_UP) if times in by_rule else (WARM_UP,):
                run = _run(optimizer, batch, base, base * times, seeds, warm_up)
                yield run | {"times": times}


def _run(optimizer, batch, base, peak, seeds, warm_up=WARM_UP):
    errors, losses = train(optimizer, batch, base, peak, seeds, warm_up)
    return {"optimizer": optimizer, "batch": batch, "learning_rate": peak, "warm_up": warm_up,
            "errors": [round(100 * error, 3) for error in errors],
            "losses": [round(loss, 4) if math.isfinite(loss) else None for loss in losses]}


def train(optimizer: str, batch: int, base: float, peak: float, seeds=SEEDS,
          warm_up: float = WARM_UP) -> tuple[list[float], list[float]]:
    """The test error, from 0 to 1, and the test loss of each seed after `EPOCHS` epochs."""
    runs = _Runs(optimizer, seeds)
    total = EPOCHS * TRAIN_SIZE // batch
    for step in range(total):
        runs.step(batch, learning_rate(step / total, base, peak, warm_up))
    return runs.test()


def steps_to_targets(batches=TARGET_BATCHES, seeds=SEEDS):
    """Yields for each batch size, target and constant rate of Adam the steps that each seed needs.

    The rates are those of the square-root rule, and up to twice and half of them, a factor of √2
    apart. A seed that does not get there, or takes more than twice as long as the slowest at
    another rate, has None.
    """
    for batch in batches:
        patience = TARGET_EPOCHS * TRAIN_SIZE // batch
        for power in range(-2, 3):
            rate = TARGET_RATE * math.sqrt(batch / BASE_BATCH) * 2 ** (power / 2)
            found = _steps(batch, rate, seeds, patience)
            if None not in found[min(TARGETS)]:
                patience = min(patience, 2 * max(found[min(TARGETS)]))
            for target, steps in found.items():
                yield {"batch": batch, "target": target, "learning_rate": rate, "steps": steps}


def _steps(batch, rate, seeds, patience):
    """For each target the steps of each seed until its test loss is below; None if it is given up.
    """
    runs = _Runs("Adam", seeds)
    steps = {target: [None] * len(seeds) for target in TARGETS}
    step, look_at = 0, 1
    while None in steps[min(TARGETS)] and step < patience:
        runs.step(batch, rate)
        step += 1
        if step >= look_at:
            _, losses = runs.test(samples=1024)
            for target, found in steps.items():
                steps[target] = [step if old is None and loss < target else old
                                 for old, loss in zip(found, losses, strict=True)]
            look_at = 1.03 * step
    return steps


class _Runs:
    """The same model with several seeds, each on its own order of the data, trained in one go."""

    def __init__(self, optimizer, seeds):
        self.data = load_moved_digits()
        models = [moved_digits_classifier(seed) for seed in seeds]
        self.weights, _ = stack_module_state(models)
        self.optimizer = OPTIMIZERS[optimizer](self.weights.values())
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.left = torch.empty(len(seeds), 0, dtype=torch.long)

        def logits(weights, images):
            return functional_call(models[0], weights, (images,))

        self.each_its_own = vmap(logits)
        self.all_the_same = vmap(logits, in_dims=(0, None))

    def step(self, batch, rate):
        """One step of every run with its next ``batch`` samples."""
        if self.left.shape[1] < batch:  # an epoch is over; no batch size leaves a rest
            self.left = torch.stack([torch.randperm(TRAIN_SIZE, generator=generator)
                                     for generator in self.generators])
        indices, self.left = self.left.split([batch, self.left.shape[1] - batch], dim=1)
        logits = self.each_its_own(self.weights, self.data.train_images[indices])
        losses = F.cross_entropy(logits.transpose(1, 2), self.data.train_labels[indices],
                                 reduction="none").mean(dim=1)
        self.optimizer.zero_grad()
        losses.sum().backward()  # no run's loss depends on another's weights
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    @torch.no_grad()
    def test(self, samples=None):
        """Of each run the error, from 0 to 1, and the loss on the first test samples, or on all."""
        labels = self.data.test_labels[:samples]
        logits = self.all_the_same(self.weights, self.data.test_images[:samples])
        errors = (logits.argmax(dim=2) != labels).float().mean(dim=1)
        losses = F.cross_entropy(logits.transpose(1, 2), labels.expand(len(logits), -1),
                                 reduction="none").mean(dim=1)
        return errors.tolist(), losses.tolist()


if __name__ == "__main__":
    main()
