"""Exercise 7.2: BatchNorm over all ranks from small parts, so that one of them can be wrong.

``x`` has the shape (samples, channels, length), with a number of samples for each rank.
"""

import torch
import torch.distributed as dist

from dplab.exercises.facts import reduced

EPS, MOMENTUM = 1e-5, 0.1
SAMPLES = (3, 5, 1, 2)  # of each rank


def total(tensor):
    return reduced(torch.as_tensor(tensor, dtype=torch.float32).clone())


def per_channel(x):
    return x.sum(dim=(0, 2))


def along(values):
    return values.view(1, -1, 1)


def own_count(x):
    return torch.tensor(x.numel() / x.shape[1])


def count(x):
    return total(own_count(x))


def mean(x):
    return total(per_channel(x)) / count(x)


def own_mean(x):
    return x.mean(dim=(0, 2))


def of_both_channels(x):
    return (total(x.sum()) / count(x) / x.shape[1]).expand(x.shape[1])


def mean_of_means(x):
    return total(own_mean(x)) / dist.get_world_size()


def squares(x, mean):
    return total(per_channel((x - along(mean)).square()))


def own_squares(x, mean):
    return per_channel((x - along(mean)).square())


def mean_of_squares(x, mean):
    return count(x) * total(own_squares(x, mean) / own_count(x)) / dist.get_world_size()


def mean_of_variances(x, mean):
    own = own_squares(x, own_mean(x)) / own_count(x)
    return count(x) * total(own) / dist.get_world_size()


def move(running, new, share=MOMENTUM):
    running.mul_(1 - share).add_(share * new)


def normalized(mean=mean, squares=squares, count=count, *, move=move, by_running=False,
               biased=lambda n: n, unbiased=lambda n: n - 1,
               root=lambda variance: (variance + EPS).sqrt()):
    """The forward pass with one thing wrong."""

    def attempt(x, running_mean, running_var):
        center, n = mean(x), count(x)
        spread = squares(x, center)
        move(running_mean, center)
        move(running_var, spread / unbiased(n))
        if by_running:
            return (x - along(running_mean)) / along((running_var + EPS).sqrt())
        return (x - along(center)) / along(root(spread / biased(n)))

    return attempt


def by_position(x, running_mean, running_var):
    """With a mean and a variance for each position, not for each channel."""
    n = total(len(x))
    center = total(x.sum(dim=0)) / n
    squares = total((x - center).square().sum(dim=0))
    move(running_mean, center.mean(dim=1))
    move(running_var, (squares / (n - 1)).mean(dim=1))
    return (x - center) / (squares / n + EPS).sqrt()


def of_values(x, mean):
    """n (E[x²] − E[x]²), for float32."""
    return count(x) * (total(per_channel(x.square())) / count(x) - mean.square())


def samples(rank):
    """Rank r's samples, (samples, 2, 5): each rank with its own mean; one channel hardly varies."""
    x = torch.sin(2.1 * torch.arange(10.0 * SAMPLES[rank]) + rank).view(SAMPLES[rank], 2, 5)
    return (x + rank) * torch.tensor([1.0, 0.003]).view(1, 2, 1)


def running():
    return torch.tensor([0.5, -0.25]), torch.tensor([2.0, 3.0])


def outputs(world_size, statistics=(None, None)):
    """Each rank's part of the output, by torch's BatchNorm on all samples."""
    whole = torch.cat([samples(rank) for rank in range(world_size)])
    normal = torch.nn.functional.batch_norm(whole, *statistics, training=True)
    return normal.split(SAMPLES[:world_size])
