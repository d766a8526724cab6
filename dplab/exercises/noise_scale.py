"""Exercise 7.3: the noise scale from two norms."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import reduced, seeded
from dplab.measure import CallLog

LOCAL_BATCH = 3


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


def _mean_over_ranks(tensor):
    return reduced(tensor) / dist.get_world_size()


def _squared_norm(own):
    return own.square().sum()


def _mean_squared_norm(own):
    return _mean_over_ranks(_squared_norm(own))


def _noise(small=_mean_squared_norm, big=_squared_norm, *, batches=lambda b, ranks: (b, ranks * b),
           parts=lambda small, big, b, B: ((B * big - b * small) / (B - b),
                                           (small - big) / (1 / b - 1 / B)), alone=True):
    """The two estimates with one thing wrong; ``alone``: whether one rank is a case of its own."""

    def attempt(own, averaged, local_batch):
        ranks = dist.get_world_size()
        if ranks == 1 and alone:
            return None
        return parts(small(own), big(averaged), *batches(local_batch, ranks))

    return attempt


def _anew(own, averaged, local_batch):
    return signal_and_noise(own, _mean_over_ranks(own.clone()), local_batch)

_ALONE = ("On one rank, b and B are the same and you divide by zero. There is nothing to compare "
          "there: return None.")

_BYTES = ("The values are right, but you sent whole gradients again. One number of each rank, its "
          "squared norm, has to be added up.")

_PER_SAMPLE = ("Your tr Σ is that of the mean gradient of a local batch. Per sample it is b times "
               "as large.")


class SignalAndNoise(Exercise):
    number = "7.3"
    title = "The noise scale from two norms"
    minutes = 15
    tolerance = 1e-4
    hints = (
        "Two numbers go in. t: the squared norm of the averaged gradient, which each rank has. s: "
        "the mean over the ranks of the squared norm of each one's own gradient.",
        "On average s = |G|² + tr Σ / b and t = |G|² + tr Σ / B, with B = N b. Subtract one from "
        "the other for tr Σ, and put it back for |G|².",
        "`small = own.square().sum()`, an all-reduce of it and a division by N; then "
        "`(small - big) / (1 / b - 1 / B)` and `(B * big - b * small) / (B - b)`.",
    )
    solution = staticmethod(signal_and_noise)
    mistakes = (
        Mistake(_noise(_squared_norm), "You used this rank's own squared norm, so each rank finds "
                "another result, with N times the noise. Take its mean over the ranks."),
        Mistake(_noise(lambda own: _mean_over_ranks(own.norm()), torch.Tensor.norm), "These are "
                "norms, not their squares. Only squares add up: |G|² + tr Σ / b."),
        Mistake(_noise(big=torch.Tensor.norm), "The averaged gradient's norm is not squared. Only "
                "squares add up: |G|² + tr Σ / B."),
        Mistake(_noise(lambda own: _mean_over_ranks(own.norm()).square()), "You squared the mean "
                "of the norms. What adds up is the mean of the *squared* norms."),
        Mistake(_noise(lambda own: _mean_squared_norm(own) * dist.get_world_size()), "You summed "
                "the squared norms over the ranks and did not divide by the world size."),
        Mistake(_noise(lambda own: _mean_squared_norm(own) / len(own),
                       lambda averaged: averaged.square().mean()), "You took means over the "
                "elements, `square().mean()`. A squared norm is the sum of the squares."),
        Mistake(_noise(parts=lambda small, big, b, B: (big, (small - big) / (1 / b - 1 / B))),
                "Your |G|² is the squared norm of the averaged gradient. That one still has noise "
                "in it, tr Σ / B on average: subtract it."),
        Mistake(_noise(parts=lambda small, big, b, B: ((B * big - b * small) / (B - b),
                                                       b * (small - big))), "Your tr Σ is too "
                "small by (N − 1)/N: the local gradients scatter around their own mean, which "
                "follows them. The factor is 1 / (1/b − 1/B)."),
        Mistake(_noise(parts=lambda small, big, b, B: (big - b * (small - big) / B,
                                                       b * (small - big))), "Your tr Σ is too "
                "small by (N − 1)/N, and |G|² with it: the distances are those to the mean of the "
                "same N gradients. Divide their sum by N − 1."),
        Mistake(_noise(parts=lambda small, big, b, B: (big, b * (small - big))), "Your |G|² is the "
                "raw squared norm, and tr Σ lacks a factor of N / (N − 1). Both forget that the "
                "averaged gradient still has noise in it, tr Σ / B."),
        Mistake(_noise(parts=lambda small, big, b, B: ((B * big - b * small) / (B - b),
                       (small - big) * B / (B - b))), _PER_SAMPLE),
        Mistake(_noise(parts=lambda small, big, b, B: ((B * small - b * big) / (B - b),
                       (big - small) / (1 / b - 1 / B))), "You exchanged the two norms: the "
                "averaged gradient is that of the larger batch B."),
        Mistake(_noise(batches=lambda b, ranks: (b / ranks, b)), "`local_batch` is b, of one rank, "
                "and you took it for the global batch. That one is B = N b."),
        Mistake(_noise(batches=lambda b, ranks: (1, ranks)), _PER_SAMPLE),
        Mistake(_noise(parts=lambda small, big, b, B: (small - big) / (1 / b - 1 / B) * (B - b) /
                       (B * big - b * small)), "You return the ratio. Return the two estimates: "
                "each has to be smoothed over the steps before one is divided by the other."),
        *(Mistake(_noise(small, alone=False), _ALONE) for small in (
            _mean_squared_norm, _squared_norm)),
        Mistake(lambda own, averaged, b: _noise(lambda own: _mean_squared_norm(own).item(),
                lambda averaged: _squared_norm(averaged).item(), alone=False)(own, averaged, b),
                _ALONE),
        Mistake(_anew, _BYTES),
    )

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own, averaged = _gradient(rank), _mean_gradient(ranks)
        with CallLog() as log:
            found = attempt(own, averaged, LOCAL_BATCH)
        return {"|G|² and tr Σ": torch.tensor([float(each) for each in found])
                if isinstance(found, tuple | list) else found if found is None else float(found),
                "that `own` and `averaged` are not changed": torch.equal(own, _gradient(rank))
                and torch.equal(averaged, _mean_gradient(ranks)),
                "the bytes in this rank's messages": log.bytes()}

    def expected(self, world_size):
        found = None
        if world_size > 1:
            gradients = torch.stack([_gradient(rank) for rank in range(world_size)]).double()
            mean = gradients.mean(dim=0)
            scatter = (gradients - mean).square().sum() / (world_size - 1)
            found = torch.stack([mean.square().sum() - scatter / world_size, LOCAL_BATCH * scatter])
        return {"|G|² and tr Σ": found, "that `own` and `averaged` are not changed": True,
                "the bytes in this rank's messages": AtMost(16, "one number is enough")}


def _gradient(rank):
    return 1 + seeded(f"gradient of rank {rank}", 11)


def _mean_gradient(ranks):
    return torch.stack([_gradient(rank) for rank in range(ranks)]).mean(dim=0)
