"""BatchNorm with the statistics of all ranks' samples, of which each rank has another number."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.measure import CallLog


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


SAMPLES = (3, 5, 1, 2)  # of each rank
FAR = 5000
OWN_SQUARES = "centred.square().sum(dim=(0, 2))"
OF_THE_MEANS = {"centred = ": "mean = x.mean(dim=(0, 2))\ndist.all_reduce(mean)\n"
                "mean /= dist.get_world_size()\ncentred = "}


class Normalize(Exercise):
    number = "C.3"
    title = "BatchNorm over all ranks"
    minutes = 20
    tolerance = 1e-4
    solution = staticmethod(normalize)

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

    hints = (
        "The mean of all values is a sum over the ranks divided by a count over the ranks; the "
        "ranks have different numbers of samples.",
        "The variance is a sum of squared distances to that mean, over the ranks, and a count: "
        "first the mean, then the squares. Divide by n to normalize, and by n − 1 for "
        "`running_var`.",
        "`sums = torch.cat([x.sum(dim=(0, 2)), count])` needs one all-reduce for both. For the "
        "statistics: `running_mean.lerp_(mean, 0.1)` changes it in place.",
    )
    slips = (
        # The mean.
        Slip("These are each rank's own statistics: an ordinary BatchNorm. Nothing was "
             "communicated.",
             {"dist.all_reduce(sums)": "pass", "dist.all_reduce(squares)": "pass"}),
        Slip("You averaged the ranks' means. They have different numbers of samples: add up sums "
             "and counts.", OF_THE_MEANS,
             OF_THE_MEANS | {OWN_SQUARES: "centred.square().mean(dim=(0, 2)) * count / "
                             "dist.get_world_size()"}),
        Slip("You averaged the ranks' means and variances. The ranks have different numbers of "
             "samples; and how far their means lie from one another belongs to the variance.",
             OF_THE_MEANS | {OWN_SQUARES: "x.var(dim=(0, 2), correction=0) * count / "
                             "dist.get_world_size()"}),
        Slip("You divided sums over all ranks by this rank's own count. The count has to be added "
             "up, too.",
             {"mean, count = sums[:-1] / sums[-1], sums[-1]": "mean = sums[:-1] / count"}),
        Slip("Both channels have the same mean in yours. Each has its own: sum over `dim=(0, 2)` "
             "alone.", {"sums[:-1] / sums[-1]": "(sums[:-1] / sums[-1]).mean().expand(2)"},
             {"sums[:-1] / sums[-1]": "(sums[:-1] / sums[-1]).mean().expand(2)",
              "dist.all_reduce(squares)": "dist.all_reduce(squares)\n"
              "squares = squares.mean().expand(2)"}),
        Slip("You take statistics for each of the five positions. BatchNorm's are one for each "
             "channel: over samples *and* positions, `dim=(0, 2)`.",
             {"x.numel() / x.shape[1]": "float(len(x))",
              "sum(dim=(0, 2))": "sum(dim=0).flatten()", "view(1, -1, 1)": "view(1, 2, 5)",
              "lerp_(mean,": "lerp_(mean.view(2, 5).mean(dim=1),",
              "lerp_(squares / (count - 1),":
              "lerp_((squares / (count - 1)).view(2, 5).mean(dim=1),"}),
        # The variance.
        Slip("Your squares are those of the distances to each rank's own mean, so how far these "
             "means lie from one another is lost. Take the mean of *all* values.",
             {OWN_SQUARES: "(x - x.mean(dim=(0, 2), keepdim=True)).square().sum(dim=(0, 2))"}),
        Slip("You added up the sums, and not the squares: they are still this rank's own.",
             {"dist.all_reduce(squares)": "pass"}),
        Slip("E[x²] − E[x]² is the difference of two large numbers where the mean is far above "
             "the spread, and float32 loses the variance. Take the mean first, then squares of "
             "the distances to it.",
             {OWN_SQUARES: "x.square().sum(dim=(0, 2))",
              "dist.all_reduce(squares)": "dist.all_reduce(squares)\n"
              "squares -= count * mean.square()"}),
        # The running statistics.
        Slip("`running_var` takes the unbiased variance, with the divisor n − 1. (The output is "
             "normalized with n.)", {"(count - 1)": "count"}),
        Slip("n counts values, not samples: each sample has 5 values of a channel.",
             {"count - 1": "count - 5"}, {"count - 1": "count / 5 - 1"}),
        Slip("`running_mean` and `running_var` did not change. Write into the tensors, for "
             "example with `lerp_`; `running = …` makes a new one.", {".lerp_(": ".lerp("}),
        Slip("You exchanged the weights: 0.9 of the old running statistics stays, and 0.1 is new.",
             {", 0.1)": ", 0.9)"}),
        # The output.
        Slip("You normalize with the divisor n − 1. In the output it is n; n − 1 is for "
             "`running_var` alone.", {"squares / count +": "squares / (count - 1) +"}),
        Slip("You normalize with the running statistics. That is eval mode; in training it is the "
             "batch's own mean and variance.",
             {"return centred / (squares / count +":
              "return (x - running_mean.view(1, -1, 1)) / (running_var +"}),
        Slip("You left out the 1e-5 under the root, which a channel with hardly any spread needs.",
             {" + 1e-5": ""}),
        Slip("You divide by the variance: the square root is missing.", {".sqrt()": ""}),
        Slip("The 1e-5 belongs under the root: you add it to the root.",
             {" + 1e-5).sqrt()": ").sqrt().add(1e-5)"}),
    )


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
