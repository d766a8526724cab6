"""Exercise of chapter 00: the first collective of one's own."""

import torch
import torch.distributed as dist

from dplab.exercises.exercise import Exercise, Mistake


def global_mean(values):
    total = torch.stack([values.sum(), values.new_tensor(float(len(values)))])
    dist.all_reduce(total)
    return total[0] / total[1]


def mean_of_means(values):
    mean = values.mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def own_mean(values):
    return values.mean()


def undivided_sum(values):
    total = values.sum()
    dist.all_reduce(total)
    return total


def sum_over_ranks(values):
    total = values.sum()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def sum_over_own_count(values):
    total = values.sum()
    dist.all_reduce(total)
    return total / len(values)


def sum_over_own_count_everywhere(values):
    total = values.sum()
    dist.all_reduce(total)
    return total / (len(values) * dist.get_world_size())


def padded_mean(values):
    longest = torch.tensor(len(values))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    total = values.sum()
    dist.all_reduce(total)
    return total / (longest * dist.get_world_size())


def reduce_to_rank_0(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.reduce(total, dst=0)
    return total[0] / total[1]


def mean_of_rank_0(values):
    mean = values.mean()
    dist.broadcast(mean, src=0)
    return mean


def returned_by_rank_0_only(values):
    mean = global_mean(values)
    return mean if dist.get_rank() == 0 else None


def on_rank_0_only(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    if dist.get_rank() == 0:
        dist.all_reduce(total)
    return total[0] / total[1]


def all_reduced_parts(values):
    dist.all_reduce(values)
    return values.mean()


class GlobalMean(Exercise):
    slug = "global-mean"
    number = "0.1"
    title = "The mean of numbers that lie on different ranks"
    name = "global_mean"
    minutes = 5
    hints = (
        "Each rank can compute two numbers on its own: the sum of its values, and how many it has.",
        "An all-reduce adds a tensor over all ranks. Which two sums give the mean of everything?",
        "Put both numbers into one tensor of two elements, all-reduce it, and divide.",
    )
    solution = staticmethod(global_mean)
    mistakes = (
        Mistake(mean_of_means, "You averaged the ranks' means. The ranks hold different numbers of "
                "values, so the mean of the means is not the mean of all values: a rank with "
                "few values counts too much."),
        Mistake(own_mean, "This is each rank's own mean: nothing was communicated."),
        Mistake(undivided_sum, "This is the sum of all values. Divide it by how many there are on "
                "all ranks together."),
        Mistake(sum_over_ranks, "You divided the sum by the number of ranks. It has to be the "
                "number of values on all ranks together."),
        Mistake(sum_over_own_count, "You divided the sum over all ranks by this rank's own number "
                "of values: that number has to be summed over the ranks too."),
        Mistake(sum_over_own_count_everywhere, "You took this rank's own number of values times "
                "the number of ranks. The ranks hold different numbers of values: sum these over "
                "the ranks, too."),
        Mistake(padded_mean, "You divided as if every rank held as many values as the longest one. "
                "What only fills up a shorter row is no value: sum the ranks' own numbers of "
                "values."),
        Mistake(mean_of_rank_0, "Every rank gets rank 0's mean, and the values of the others are "
                "in no sum. Combine all ranks' values: `all_reduce`."),
        Mistake(returned_by_rank_0_only, "The mean is right, and only rank 0 returns it. The "
                "others return None: give it to every rank."),
        Mistake(reduce_to_rank_0, "`reduce` gives the result to rank 0 alone; the others are left "
                "with parts of it. Every rank needs the mean: `all_reduce`."),
        Mistake(on_rank_0_only, "Only rank 0 calls the collective, and waits for ever. A "
                "collective is called by every rank.", hangs=True),
        Mistake(all_reduced_parts, "You handed over the values themselves. Their number differs "
                "from rank to rank, and this collective needs tensors of one size."),
    )

    def trial(self, attempt):
        return {"the mean": attempt(_values(dist.get_rank()))}

    def expected(self, world_size):
        return {"the mean": torch.cat([_values(rank) for rank in range(world_size)]).mean()}


def _values(rank):
    """Rank r holds r + 2 values, all different."""
    return torch.arange(1.0, rank + 3) ** 2 + 7 * rank


EXERCISES = (GlobalMean,)
