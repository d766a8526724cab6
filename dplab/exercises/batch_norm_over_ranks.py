"""Exercise 7.2: batchNorm over all ranks."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import reduced, seeded
from dplab.measure import CallLog

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
    number = "7.2"
    title = "BatchNorm over all ranks"
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
