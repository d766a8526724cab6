"""How large the noise of a gradient is, from the norms before and after the average."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.measure import CallLog


def signal_and_noise(own, averaged, local_batch):
    ranks = dist.get_world_size()
    if ranks == 1:
        return None
    small = own.square().sum()
    dist.all_reduce(small)
    small /= ranks
    big = averaged.square().sum()
    b, B = local_batch, ranks * local_batch
    return (B * big - b * small) / (B - b), (small - big) / (1 / b - 1 / B)


LOCAL_BATCH = 3
APART = "|G|² and tr Σ of gradients that point apart"
# As they stand in the right answer:
SIGNAL, NOISE = "(B * big - b * small) / (B - b)", "(small - big) / (1 / b - 1 / B)"


class SignalAndNoise(Exercise):
    number = "7.5"
    title = "The noise scale from two norms"
    minutes = 15
    tolerance = 1e-4
    solution = staticmethod(signal_and_noise)

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own, averaged = _gradient(rank), _mean_gradient(ranks)
        with CallLog() as log:
            found = attempt(own, averaged, LOCAL_BATCH)
        apart = attempt(_gradient(rank, True), _mean_gradient(ranks, True), LOCAL_BATCH)
        return {"|G|² and tr Σ": _as_tensor(found), APART: _as_tensor(apart),
                "that `own` and `averaged` are not changed": torch.equal(own, _gradient(rank))
                and torch.equal(averaged, _mean_gradient(ranks)),
                "the bytes in this rank's messages": log.bytes()}

    def expected(self, world_size):
        return {"|G|² and tr Σ": _right(world_size), APART: _right(world_size, True),
                "that `own` and `averaged` are not changed": True,
                "the bytes in this rank's messages": AtMost(16, "one number is enough")}

    hints = (
        "Two numbers go in. t: the squared norm of the averaged gradient, which each rank has. s: "
        "the mean over the ranks of the squared norm of each one's own gradient.",
        "On average s = |G|² + tr Σ / b and t = |G|² + tr Σ / B, with B = N b. Subtract one from "
        "the other for tr Σ, and put it back for |G|².",
        "`small = own.square().sum()`, an all-reduce of it and a division by N; then "
        "`(small - big) / (1 / b - 1 / B)` and `(B * big - b * small) / (B - b)`.",
    )
    slips = (
        # The norms.
        Slip("You used this rank's own squared norm, so each rank finds another result, with N "
             "times the noise. Take its mean over the ranks.",
             {"dist.all_reduce(small)": "pass", "small /= ranks": "pass"}),
        Slip("These are norms, not their squares. Only squares add up: |G|² + tr Σ / b.",
             {".square().sum()": ".norm()"}),
        Slip("The averaged gradient's norm is not squared. Only squares add up: |G|² + tr Σ / B.",
             {"averaged.square().sum()": "averaged.norm()"}),
        Slip("You squared the mean of the norms. What adds up is the mean of the *squared* norms.",
             {"own.square().sum()": "own.norm()", "small /= ranks": "small = (small / ranks)**2"}),
        Slip("On one rank there is nothing to compare: return None.",
             {"return None": "return averaged.square().sum(), 0.0"}),
        Slip("You summed the squared norms over the ranks and did not divide by the world size.",
             {"small /= ranks": "pass"}),
        Slip("You took means over the elements, `square().mean()`. A squared norm is the sum of "
             "the squares.", {".square().sum()": ".square().mean()"}),
        Slip("The values are right, but you sent whole gradients again. One number of each rank, "
             "its squared norm, has to be added up.",
             {"if ranks": "averaged = own / ranks\ndist.all_reduce(averaged)\nif ranks"},
             {"big = ": "averaged = own / ranks\ndist.all_reduce(averaged)\nbig = "}),
        # The batches.
        Slip("On one rank, b and B are the same and you divide by zero. There is nothing to "
             "compare there: return None.", {"return None": "pass"},
             {"return None": "pass", "big = ": "small = small.item()\nbig = ",
              "averaged.square().sum()": "averaged.square().sum().item()"}),
        Slip("`local_batch` is b, of one rank, and you took it for the global batch. That one is "
             "B = N b.", {"local_batch, ranks * local_batch": "local_batch / ranks, local_batch"}),
        # The estimates.
        Slip("Your |G|² is the squared norm of the averaged gradient. That one still has noise in "
             "it, tr Σ / B on average: subtract it.", {SIGNAL: "big"}),
        Slip("Your tr Σ is too small by (N − 1)/N: the local gradients scatter around their own "
             "mean, which follows them. The factor is 1 / (1/b − 1/B).",
             {NOISE: "b * (small - big)"}),
        Slip("Your tr Σ is too small by (N − 1)/N, and |G|² with it: the distances are those to "
             "the mean of the same N gradients. Divide their sum by N − 1.",
             {SIGNAL: "big - b * (small - big) / B", NOISE: "b * (small - big)"}),
        Slip("Your |G|² is the raw squared norm, and tr Σ lacks a factor of N / (N − 1). Both "
             "forget that the averaged gradient still has noise in it, tr Σ / B.",
             {SIGNAL: "big", NOISE: "b * (small - big)"}),
        Slip("Your tr Σ is that of the mean gradient of a local batch. Per sample it is b times "
             "as large.", {NOISE: "(small - big) / (1 - b / B)"},
             {"local_batch, ranks * local_batch": "1, ranks"}),
        Slip("Your tr Σ is N times too large: what a gradient of b samples scatters, times b, is "
             "that of one sample. You took B.", {NOISE: f"B / b * {NOISE}"}),
        Slip("You exchanged the two norms: the averaged gradient is that of the larger batch B.",
             {"b, B = ": "small, big = big, small\nb, B = "}),
        Slip("You cut the estimate off at 0. Where noise is all there is, an unbiased estimate of "
             "|G|² is below 0 about as often as above: cut off, its mean over the steps is too "
             "large.", {SIGNAL: f"torch.clamp({SIGNAL}, min=0)"}),
        Slip("You return the ratio. Return the two estimates: each has to be smoothed over the "
             "steps before one is divided by the other.",
             {f"{SIGNAL}, {NOISE}": f"{NOISE} / ({SIGNAL})"}),
    )


def _gradient(rank, apart=False):
    """Of all ranks, they point the same way; ``apart``: every second one the other way."""
    return (-1) ** (apart * rank) + seeded(f"gradient of rank {rank}", 11)


def _mean_gradient(ranks, apart=False):
    return torch.stack([_gradient(rank, apart) for rank in range(ranks)]).mean(dim=0)


def _right(ranks, apart=False):
    """From how far the ranks' gradients are apart, without the two equations."""
    if ranks == 1:
        return None
    gradients = torch.stack([_gradient(rank, apart) for rank in range(ranks)]).double()
    mean = gradients.mean(dim=0)
    scatter = (gradients - mean).square().sum() / (ranks - 1)
    return torch.stack([mean.square().sum() - scatter / ranks, LOCAL_BATCH * scatter])


def _as_tensor(found):
    if isinstance(found, tuple | list):
        return torch.tensor([float(each) for each in found])
    return found if found is None else float(found)
