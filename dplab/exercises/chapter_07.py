"""Exercises of chapter 07: seeds, BatchNorm over all ranks, noise scale, DiLoCo's outer step."""

import torch
import torch.distributed as dist

from dplab.exercises.compare import AtMost
from dplab.exercises.exercise import AT_LEAST, Exercise, Mistake
from dplab.exercises.trials import reduced, seeded
from dplab.measure import CallLog

# 7.1

EPOCHS, SEED = 5, 11
DATA_SIZE = 13

SAME_RUN = "that a second run with the same seed draws the same"
OF_DRAWS = (
    SAME_RUN,
    "that there are 6 weights and 8 numbers of noise",
    "that the initial weights are the same on all ranks",
    "that the initial weights are the same whatever the epoch",
    "that some initial weights are negative, as normal ones are",
    "how many samples the ranks draw together in an epoch",
    "that no sample is drawn twice in an epoch",
    "that every sample is drawn in every epoch",
    "that the ranks take equally many, or one more",
    "that each epoch has another order",
    "that another seed has another order",
    "that the noise lies between 0 and 1",
    "that the noise differs from rank to rank",
    "that a rank's noise differs from epoch to epoch",
    "that no rank draws in one epoch what another draws in another",
    "that another seed has other noise",
)
RIGHT_DRAWS = dict.fromkeys(OF_DRAWS, True) | {
    "how many samples the ranks draw together in an epoch": DATA_SIZE}


def draw(seed, epoch, size):
    def from_seed(number):
        return torch.Generator().manual_seed(number)

    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_epoch = (1000 * seed + epoch) * (ranks + 1)  # one for the order, one for each rank's noise
    weights = torch.randn(6, generator=from_seed(-1 - seed))  # no epoch has a number below 0
    order = torch.randperm(size, generator=from_seed(of_epoch))
    noise = torch.rand(8, generator=from_seed(of_epoch + 1 + rank))
    return weights, order[rank::ranks], noise


def _seeded(number):
    return torch.Generator().manual_seed(number)


def _drawn(weights=lambda seed, epoch, rank, ranks: seed,
           order=lambda seed, epoch, rank, ranks: 1000 * seed + epoch,
           noise=lambda seed, epoch, rank, ranks: (1000 * seed + epoch) * ranks + rank,
           part=lambda order, rank, ranks: order[rank::ranks], shuffled=True, numbers=torch.rand):
    """The draws with one seed, or the part of the samples, wrong."""

    def attempt(seed, epoch, size):
        place = seed, epoch, dist.get_rank(), dist.get_world_size()
        indices = torch.randperm(size, generator=_seeded(order(*place)))
        indices = indices if shuffled else torch.arange(size)
        return (torch.randn(6, generator=_seeded(weights(*place))), part(indices, *place[2:]),
                numbers(8, generator=_seeded(noise(*place))))

    return attempt


def _from_one_seed(seed_of):
    return _drawn(seed_of, seed_of, seed_of)


def _from_global_state(seed, epoch, size):
    order = torch.randperm(size)
    dist.broadcast(order, src=0)
    return torch.randn(6), order[dist.get_rank() :: dist.get_world_size()], torch.rand(8)


_ONE = ("One seed for all three cannot be right. The weights follow from the seed alone, the order "
        "from the seed and the epoch, the noise from the seed, the epoch and the rank.")
_GLOBAL = ("You draw from the random state that a rank happens to have, so that a second run with "
           "the same seed is another run. Seed a `torch.Generator` for each of the three.")


class Draw(Exercise):
    slug = "seeds-of-ranks"
    number = "7.1"
    title = "What must agree, and what must differ"
    name = "draw"
    minutes = 15
    communicates = False
    hints = (
        "Ask for each of the three: may it depend on the rank? On the epoch? `torch.randn(…, "
        "generator=torch.Generator().manual_seed(number))` draws from a seed of its own.",
        "The weights depend on `seed` alone; the order on `seed` and `epoch`, so that all ranks "
        "shuffle alike, and each takes every N-th sample; the noise on all three.",
        "`seed + epoch + rank` is the same number for rank 1 in epoch 0 and for rank 0 in epoch 1. "
        "`(1000 * seed + epoch) * (ranks + 1) + 1 + rank` never is, and leaves each epoch a number "
        "for the order. The weights need one that no epoch has, such as `-1 - seed`.",
    )
    solution = staticmethod(draw)
    mistakes = (
        Mistake(_from_one_seed(lambda seed, epoch, rank, ranks: seed), _ONE),
        Mistake(_from_one_seed(lambda seed, epoch, rank, ranks: seed + rank), _ONE),
        Mistake(_from_one_seed(lambda seed, epoch, rank, ranks: 1000 * seed + epoch), _ONE),
        Mistake(_from_one_seed(lambda seed, epoch, rank, ranks: seed + 1000 * epoch + rank), _ONE),
        Mistake(_from_global_state, _GLOBAL),
        Mistake(_drawn(weights=lambda seed, epoch, rank, ranks: seed + rank), "Each rank draws "
                "its own initial weights. They have to be the same on all: no rank in their seed."),
        Mistake(_drawn(weights=lambda seed, epoch, rank, ranks: 1000 * seed + epoch), "The initial "
                "weights change with the epoch, so that a job resumed in another epoch would "
                "build another model: no epoch in their seed."),
        Mistake(_drawn(order=lambda seed, epoch, rank, ranks: 1000 * seed + 100 * epoch + rank),
                "Each rank shuffles in its own way and takes its slice of another order, so some "
                "samples are drawn twice and some never: no rank in the seed of the order."),
        Mistake(_drawn(order=lambda seed, epoch, rank, ranks: seed), "Every epoch has the same "
                "order: its seed has to depend on the epoch (`set_epoch`, in a sampler)."),
        Mistake(_drawn(shuffled=False), "The samples come in the order in which they lie in the "
                "data set. Shuffle them, anew in every epoch."),
        Mistake(_drawn(order=lambda seed, epoch, rank, ranks: seed,
                       noise=lambda seed, epoch, rank, ranks: seed + rank), "You make no use of "
                "the epoch: each has the same order, and on each rank the same noise."),
        Mistake(_drawn(part=lambda order, rank, ranks: order[: len(order) // ranks]), "All ranks "
                "take the same part of the order: where it begins has to depend on the rank."),
        Mistake(_drawn(part=lambda order, rank, ranks: order), "Every rank takes all samples: "
                "each has to take its own part, every N-th."),
        Mistake(_drawn(part=lambda order, rank, ranks: order.view(-1)[
                rank * (len(order) // ranks) : (rank + 1) * (len(order) // ranks)]), "The world "
                "size does not divide the samples, and you drop the rest: give some ranks one "
                "more, as `order[rank::ranks]` does."),
        Mistake(_drawn(part=lambda order, rank, ranks: torch.cat(
                [order, order[: -len(order) % ranks]])[rank::ranks]), "The order is padded to a "
                "multiple of the ranks, as `DistributedSampler` does it, so some samples come "
                "twice. Give some ranks one more, as `order[rank::ranks]` does."),
        Mistake(_drawn(numbers=torch.randn), "The noise is normally distributed. It should be "
                "uniform, between 0 and 1, as `torch.rand` draws it."),
        Mistake(_drawn(noise=lambda seed, epoch, rank, ranks: 1000 * seed + epoch), "All ranks "
                "draw the same noise, so N samples drop the same units: the rank belongs in its "
                "seed."),
        Mistake(_drawn(noise=lambda seed, epoch, rank, ranks: 1000 * seed + rank), "A rank draws "
                "the same noise in every epoch: the epoch belongs in its seed."),
        Mistake(_drawn(noise=lambda seed, epoch, rank, ranks: seed + epoch + rank), "A sum "
                "collides: `seed + epoch + rank` is the same for rank 1 in epoch 0 and for rank 0 "
                "in epoch 1."),
    )

    def explanation(self, attempt, got, world_size):
        why = super().explanation(attempt, got, world_size)
        another_run = isinstance(got, list) and not got[0][SAME_RUN]
        return _GLOBAL if another_run and (not why or why.startswith(AT_LEAST)) else why

    def trial(self, attempt):
        return _facts_of_draws(attempt)

    def expected(self, world_size):
        return RIGHT_DRAWS


def _facts_of_draws(attempt):
    """Each of `OF_DRAWS` of ``attempt(seed, epoch, size)`` on all ranks."""
    first, second, other = (
        _draws_of_a_run(attempt, *run) for run in enumerate((SEED, SEED, SEED + 1)))
    weights, order, noise = first
    together = [[index for part in epoch for index in part] for epoch in order]
    return dict(zip(OF_DRAWS, (
        first == second,
        all(len(rank) == 6 for epoch in weights for rank in epoch)
        and all(len(rank) == 8 for epoch in noise for rank in epoch),
        all(rank == epoch[0] for epoch in weights for rank in epoch),
        all(epoch == weights[0] for epoch in weights),
        min(weights[0][0] + other[0][0][0]) < 0,
        max(map(len, together)),
        all(len(set(epoch)) == len(epoch) for epoch in together),
        all(set(epoch) == set(range(DATA_SIZE)) for epoch in together),
        all(max(map(len, epoch)) - min(map(len, epoch)) <= 1 for epoch in order),
        _all_differ(order),
        _all_differ([order, other[1]]),
        all(0 <= number < 1 for epoch in noise for rank in epoch for number in rank),
        all(map(_all_differ, noise)),
        all(map(_all_differ, zip(*noise, strict=True))),
        _all_differ([of_rank for epoch in noise for of_rank in epoch]),
        _all_differ([noise, other[2]]),
    ), strict=True))


def _draws_of_a_run(attempt, number, seed):
    """Weights, order and noise, each as lists of numbers for each epoch and rank."""
    torch.manual_seed(1000 * number + dist.get_rank())  # a new process has a state of its own
    own = [[torch.as_tensor(part).tolist() for part in attempt(seed, epoch, DATA_SIZE)]
           for epoch in range(EPOCHS)]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return [[[rank[epoch][kind] for rank in everyone] for epoch in range(EPOCHS)]
            for kind in range(3)]


def _all_differ(values):
    texts = [str(value) for value in values]
    return len(set(texts)) == len(texts)


# 7.2

# `x` has the shape (samples, channels, length), with a number of samples for each rank.
EPS, MOMENTUM = 1e-5, 0.1
SAMPLES = (3, 5, 1, 2)  # of each rank
FAR = 5000


def normalize(x, running_mean, running_var):
    count = torch.tensor([x.numel() / x.shape[1]])
    sums = torch.cat([x.sum(dim=(0, 2)), count])
    dist.all_reduce(sums)
    mean, count = sums[:-1] / sums[-1], sums[-1]
    centred = x - mean.view(1, -1, 1)
    squares = centred.square().sum(dim=(0, 2))
    dist.all_reduce(squares)
    running_mean.lerp_(mean, 0.1)
    running_var.lerp_(squares / (count - 1), 0.1)
    return centred / (squares / count + 1e-5).sqrt().view(1, -1, 1)


def _total(tensor):
    return reduced(torch.as_tensor(tensor, dtype=torch.float32).clone())


def _per_channel(x):
    return x.sum(dim=(0, 2))


def _along_channels(values):
    return values.view(1, -1, 1)


def _own_count(x):
    return torch.tensor(x.numel() / x.shape[1])


def _count(x):
    return _total(_own_count(x))


def _mean(x):
    return _total(_per_channel(x)) / _count(x)


def _own_mean(x):
    return x.mean(dim=(0, 2))


def _mean_of_both_channels(x):
    return (_total(x.sum()) / _count(x) / x.shape[1]).expand(x.shape[1])


def _mean_of_means(x):
    return _total(_own_mean(x)) / dist.get_world_size()


def _squares(x, mean):
    return _total(_per_channel((x - _along_channels(mean)).square()))


def _own_squares(x, mean):
    return _per_channel((x - _along_channels(mean)).square())


def _mean_of_own_squares(x, mean):
    return _count(x) * _total(_own_squares(x, mean) / _own_count(x)) / dist.get_world_size()


def _mean_of_variances(x, mean):
    own = _own_squares(x, _own_mean(x)) / _own_count(x)
    return _count(x) * _total(own) / dist.get_world_size()


def _move(running, new, share=MOMENTUM):
    running.mul_(1 - share).add_(share * new)


def _normalized(mean=_mean, squares=_squares, count=_count, *, move=_move, by_running=False,
                biased=lambda n: n, unbiased=lambda n: n - 1,
                root=lambda variance: (variance + EPS).sqrt()):
    """The forward pass with one thing wrong."""

    def attempt(x, running_mean, running_var):
        center, n = mean(x), count(x)
        spread = squares(x, center)
        move(running_mean, center)
        move(running_var, spread / unbiased(n))
        if by_running:
            return (x - _along_channels(running_mean)) / _along_channels((running_var + EPS).sqrt())
        return (x - _along_channels(center)) / _along_channels(root(spread / biased(n)))

    return attempt


def _by_position(x, running_mean, running_var):
    """With a mean and a variance for each position, not for each channel."""
    n = _total(len(x))
    center = _total(x.sum(dim=0)) / n
    squares = _total((x - center).square().sum(dim=0))
    _move(running_mean, center.mean(dim=1))
    _move(running_var, (squares / (n - 1)).mean(dim=1))
    return (x - center) / (squares / n + EPS).sqrt()


def _squares_of_values(x, mean):
    """n (E[x²] − E[x]²), for float32."""
    return _count(x) * (_total(_per_channel(x.square())) / _count(x) - mean.square())


class Normalize(Exercise):
    slug = "batch-norm-over-ranks"
    number = "7.2"
    title = "BatchNorm over all ranks"
    name = "normalize"
    minutes = 20
    tolerance = 1e-4
    hints = (
        "The mean of all values is a sum over the ranks divided by a count over the ranks; the "
        "ranks have different numbers of samples.",
        "The variance is a sum of squared distances to that mean, over the ranks, and a count: "
        "first the mean, then the squares. Divide by n to normalize, and by n − 1 for "
        "`running_var`.",
        "`sums = torch.cat([x.sum(dim=(0, 2)), count])` needs one all-reduce for both. For the "
        "statistics: `running_mean.lerp_(mean, 0.1)` changes it in place.",
    )
    solution = staticmethod(normalize)
    mistakes = (
        Mistake(_normalized(_own_mean, _own_squares, _own_count), "These are each rank's "
                "own statistics: an ordinary BatchNorm. Nothing was communicated."),
        *(Mistake(_normalized(_mean_of_means, squares), "You averaged the ranks' means. They "
                  "have different numbers of samples: add up sums and counts.")
          for squares in (_squares, _mean_of_own_squares)),
        Mistake(_normalized(_mean_of_means, _mean_of_variances), "You averaged the ranks' "
                "means and variances. The ranks have different numbers of samples; and how far "
                "their means lie from one another belongs to the variance."),
        Mistake(_normalized(squares=lambda x, mean: _squares(x, _own_mean(x))), "Your "
                "squares are those of the distances to each rank's own mean, so how far these "
                "means lie from one another is lost. Take the mean of *all* values."),
        Mistake(_normalized(squares=_own_squares), "You added up the sums, and not the "
                "squares: they are still this rank's own."),
        Mistake(_normalized(lambda x: _total(_per_channel(x)) / _own_count(x),
                            count=_own_count), "You divided sums over all ranks by this rank's "
                "own count. The count has to be added up, too."),
        Mistake(_normalized(unbiased=lambda n: n), "`running_var` takes the unbiased variance, "
                "with the divisor n − 1. (The output is normalized with n.)"),
        *(Mistake(_normalized(unbiased=divisor), "n counts values, not samples: each sample has "
                  "5 values of a channel.") for divisor in (lambda n: n - 5, lambda n: n / 5 - 1)),
        Mistake(_by_position, "You take statistics for each of the five positions. BatchNorm's "
                "are one for each channel: over samples *and* positions, `dim=(0, 2)`."),
        Mistake(_normalized(biased=lambda n: n - 1), "You normalize with the divisor n − 1. In "
                "the output it is n; n − 1 is for `running_var` alone."),
        Mistake(_normalized(move=lambda running, new: None), "`running_mean` and `running_var` "
                "did not change. Write into the tensors, for example with `lerp_`; `running = …` "
                "makes a new one."),
        Mistake(_normalized(move=lambda running, new: _move(running, new, 0.9)), "You "
                "exchanged the weights: 0.9 of the old running statistics stays, and 0.1 is new."),
        Mistake(_normalized(by_running=True), "You normalize with the running statistics. That "
                "is eval mode; in training it is the batch's own mean and variance."),
        Mistake(_normalized(root=lambda variance: variance.sqrt()), "You left out the 1e-5 under "
                "the root, which a channel with hardly any spread needs."),
        Mistake(_normalized(root=lambda variance: variance + EPS), "You divide by the "
                "variance: the square root is missing."),
        *(Mistake(_normalized(_mean_of_both_channels, squares), "Both channels have the same mean "
                  "in yours. Each has its own: sum over `dim=(0, 2)` alone.") for squares in (
            _squares, lambda x, mean: _squares(x, mean).mean().expand(2))),
        Mistake(_normalized(root=lambda variance: variance.sqrt() + EPS), "The 1e-5 belongs "
                "under the root: you add it to the root."),
        Mistake(_normalized(squares=_squares_of_values), "E[x²] − E[x]² is the difference of two "
                "large numbers where the mean is far above the spread, and float32 loses the "
                "variance. Take the mean first, then squares of the distances to it."),
    )

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        x, statistics = _samples_of(rank), _running_statistics()
        with CallLog() as log:
            output = attempt(x, *statistics)
        far = attempt(x + FAR, *_running_statistics())
        return {"the output": output, "`running_mean`": statistics[0],
                "`running_var`": statistics[1],
                f"that values around {FAR:,} come out as those around 0":
                    isinstance(far, torch.Tensor) and torch.allclose(
                        far[:, 0], _right_outputs(ranks)[rank][:, 0], atol=0.1),
                "the bytes in this rank's messages": log.bytes()}

    def expected(self, world_size):
        statistics = _running_statistics()
        sent = AtMost(64, "a few sums for each channel are enough")
        return [{"the output": output, "`running_mean`": statistics[0],
                 "`running_var`": statistics[1],
                 f"that values around {FAR:,} come out as those around 0": True,
                 "the bytes in this rank's messages": sent}
                for output in _right_outputs(world_size, statistics)]


def _samples_of(rank):
    """Rank r's samples, (samples, 2, 5): each rank with its own mean; one channel hardly varies."""
    x = seeded(f"samples of rank {rank}", SAMPLES[rank], 2, 5)
    return (x + rank) * torch.tensor([1.0, 0.003]).view(1, 2, 1)


def _running_statistics():
    return torch.tensor([0.5, -0.25]), torch.tensor([2.0, 3.0])


def _right_outputs(world_size, statistics=(None, None)):
    """Each rank's part of the output, by torch's BatchNorm on all samples."""
    whole = torch.cat([_samples_of(rank) for rank in range(world_size)])
    normal = torch.nn.functional.batch_norm(whole, *statistics, training=True)
    return normal.split(SAMPLES[:world_size])


# 7.3

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
    slug = "noise-scale"
    number = "7.3"
    title = "The noise scale from two norms"
    name = "signal_and_noise"
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


# 7.4

ROUNDS, OUTER_RATE, OUTER_MOMENTUM = 3, 0.7, 0.9


def outer_step(parameters, anchor, velocity):
    for parameter, start, speed in zip(parameters, anchor, velocity, strict=True):
        gradient = (start - parameter) / dist.get_world_size()
        dist.all_reduce(gradient)
        speed.mul_(0.9).add_(gradient)
        start -= 0.7 * (gradient + 0.9 * speed)
        parameter.copy_(start)


def _outer(gradient=lambda start, end: _mean_over_ranks(start - end), *,
           speed=lambda old, gradient: OUTER_MOMENTUM * old + gradient, keep=True, rate=OUTER_RATE,
           direction=lambda gradient, old, new: gradient + OUTER_MOMENTUM * new,
           origin=lambda start, end: start,
           finish=lambda anchor, parameters, place, new: (anchor[place].copy_(new),
                                                          parameters[place].copy_(new))):
    """The outer step with one thing wrong."""

    def attempt(parameters, anchor, velocity):
        for place, (end, start, old) in enumerate(zip(parameters, anchor, velocity, strict=True)):
            outer = gradient(start, end)
            new = speed(old, outer)
            target = origin(start, end) - rate * direction(outer, old.clone(), new)
            if keep:
                old.copy_(new)
            finish(anchor, parameters, place, target)

    return attempt


def _average_kept(to_anchor):
    """The outer step from the anchor, while the parameters hold the ranks' average."""

    def attempt(parameters, anchor, velocity):
        for parameter, start, speed in zip(parameters, anchor, velocity, strict=True):
            parameter.copy_(_mean_over_ranks(parameter))
            outer = start - parameter
            speed.mul_(OUTER_MOMENTUM).add_(outer)
            if to_anchor:
                start -= OUTER_RATE * (outer + OUTER_MOMENTUM * speed)

    return attempt


class OuterStep(Exercise):
    slug = "diloco-outer-step"
    number = "7.4"
    title = "The outer step of DiLoCo"
    name = "outer_step"
    minutes = 15
    hints = (
        "The outer gradient is the mean over the ranks of anchor − parameter: where all ranks "
        "moved along, it points the other way, as a gradient does. One all-reduce a tensor.",
        "Nesterov momentum as in `torch.optim.SGD(nesterov=True)`: v ← 0.9 v + g, and then a step "
        "of −0.7 (g + 0.9 v), with the *new* v, from the anchor.",
        "Write in place: `speed.mul_(0.9).add_(gradient)`, `start -= …`, `parameter.copy_(start)`. "
        "The parameters and the anchor hold the same values afterwards, in memory of their own.",
    )
    solution = staticmethod(outer_step)
    mistakes = (
        Mistake(_outer(lambda start, end: start - end), "The outer gradient is this rank's own: "
                "nothing was communicated, and the ranks drift apart."),
        Mistake(_outer(lambda start, end: _total(start - end)), "You summed the differences and "
                "did not divide by the world size: the outer step is N times too long."),
        Mistake(_outer(lambda start, end: _mean_over_ranks(end - start)), "The sign is wrong: a "
                "gradient points away from where the ranks went, anchor − parameter. You step "
                "back from what they found."),
        Mistake(_outer(direction=lambda gradient, old, new: gradient, rate=1.0), "This is the "
                "average of the ranks' parameters: local SGD. DiLoCo's outer optimizer, with its "
                "learning rate and momentum, is missing."),
        *(Mistake(_average_kept(to_anchor), "The parameters hold the ranks' average, and the outer "
                  "step's result does not reach them. Parameters and anchor get it, in place: "
                  "`copy_`; `start = …` only gives a name to a new tensor.")
          for to_anchor in (True, False)),
        Mistake(_outer(finish=lambda *_: None), "The outer step's result reaches neither the "
                "parameters nor the anchor. Write it into both, in place: `copy_`; `start = …` "
                "only gives a name to a new tensor."),
        Mistake(_outer(direction=lambda gradient, old, new: gradient), "You have no momentum: the "
                "step is −0.7 (g + 0.9 v), and v carries the earlier rounds."),
        Mistake(_outer(direction=lambda gradient, old, new: new), "This is ordinary momentum, a "
                "step of −0.7 v. Nesterov's is −0.7 (g + 0.9 v)."),
        Mistake(_outer(keep=False), "The velocity is forgotten after each round: write the new one "
                "into `velocity`, in place."),
        Mistake(_outer(origin=lambda start, end: end), "The step starts from this rank's own "
                "parameters, so the ranks end in different places. It starts from the anchor."),
        Mistake(_outer(finish=lambda anchor, parameters, place, new: anchor[place].copy_(new)),
                "The parameters are still those of this rank's inner steps: the next round has to "
                "begin at the new anchor, on all ranks."),
        Mistake(_outer(finish=lambda anchor, parameters, place, new: parameters[place].copy_(new)),
                "The anchor is still that of the first round. The next outer gradient is the "
                "difference to where that round began, so copy the parameters into it."),
        Mistake(_outer(finish=lambda anchor, parameters, place, new: anchor.__setitem__(
                place, parameters[place].copy_(new))), "Anchor and parameter are now the same "
                "tensor, so the next inner steps move both and the difference is 0. Copy the "
                "values: `copy_`."),
        Mistake(_outer(speed=lambda old, gradient: _mean_over_ranks(OUTER_MOMENTUM * old + gradient
                )), "The values are right, but you sent twice the bytes: the velocity is the same "
                "on all ranks already, since the outer gradient is."),
    )

    def trial(self, attempt):
        parameters, anchor, velocity = _at_start(), _at_start(), [0 * each for each in _at_start()]
        own, facts = list(parameters), {}
        for number in range(ROUNDS):
            for parameter, moved in zip(own, _inner(dist.get_rank(), number), strict=True):
                parameter += moved
            with CallLog() as log:
                attempt(parameters, anchor, velocity)
            facts |= _of_round(number, own, anchor, log.bytes())
        return facts

    def expected(self, world_size):
        facts, parameters = {}, [torch.nn.Parameter(each) for each in _at_start()]
        optimizer = torch.optim.SGD(parameters, lr=OUTER_RATE, momentum=OUTER_MOMENTUM,
                                    nesterov=True)
        size = sum(each.numel() for each in parameters)
        for number in range(ROUNDS):
            moved = [_inner(rank, number) for rank in range(world_size)]
            for parameter, of_ranks in zip(parameters, zip(*moved, strict=True), strict=True):
                parameter.grad = -torch.stack(of_ranks).mean(dim=0)
            optimizer.step()
            now = [parameter.detach().clone() for parameter in parameters]
            sent = AtMost(4 * size, "one all-reduce of the differences is enough")
            facts |= _of_round(number, now, now, sent)
        return facts


def _at_start():
    return [seeded("weight", 2, 4), seeded("bias", 5)]


def _inner(rank, number):
    """What the inner steps of a round change on rank r."""
    return [seeded(f"movement {place} of rank {rank} in round {number}", *start.shape)
            for place, start in enumerate(_at_start())]


def _of_round(number, parameters, anchor, sent):
    facts = {}
    for place, (parameter, start) in enumerate(zip(parameters, anchor, strict=True)):
        facts |= {f"`parameters[{place}]` after round {number + 1}": parameter.clone(),
                  f"`anchor[{place}]` after round {number + 1}": start.clone()}
    return facts | {f"the bytes in this rank's messages in round {number + 1}": sent}


EXERCISES = (Draw, Normalize, SignalAndNoise, OuterStep)
