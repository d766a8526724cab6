"""Exercise 0.2: one mean for all ranks."""

import torch
import torch.distributed as dist

from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import seeded


def global_mean(values):
    total = torch.stack([values.sum(), values.new_tensor(float(len(values)))])
    dist.all_reduce(total)
    return total[0] / total[1]


def mean_of_means(values):
    mean = values.mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def sum_of_means(values):
    mean = values.mean()
    dist.all_reduce(mean)
    return mean


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


def own_sum_over_all(values):
    count = torch.tensor(float(len(values)))
    dist.all_reduce(count)
    return values.sum() / count


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


def what_the_call_returns(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    total = dist.all_reduce(total)
    return total[0] / total[1]


def of_one_element(values):
    total, count = values.sum().reshape(1), torch.tensor([float(len(values))])
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total / count


def as_a_float(values):
    return global_mean(values).item()


def sum_and_count(values):
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(total)
    return total


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
    number = "0.2"
    title = "One mean for all ranks"
    minutes = 5
    hints = (
        "You know the mean of a list: which two numbers do you divide? Which of them can a rank "
        "compute for its own values?",
        "An all-reduce adds a tensor over all ranks. Which two sums give the mean of everything?",
        "Put this rank's sum and its number of values into one tensor of two elements, all-reduce "
        "it, and divide.",
    )
    solution = staticmethod(global_mean)
    mistakes = (
        Mistake(mean_of_means, "You averaged the ranks' means. The ranks hold different numbers of "
                "values, so the mean of the means is not the mean of all values: a rank with "
                "few values counts too much."),
        Mistake(sum_of_means, "You added the ranks' means, and divided by nothing. Dividing by the "
                "number of ranks would not be right either, since the ranks hold different numbers "
                "of values: add the sums, and add the numbers of values."),
        Mistake(own_mean, "This is each rank's own mean: nothing was communicated."),
        Mistake(undivided_sum, "This is the sum of all values. Divide it by how many there are on "
                "all ranks together."),
        Mistake(sum_over_ranks, "You divided the sum by the number of ranks. It has to be the "
                "number of values on all ranks together."),
        Mistake(sum_over_own_count, "You divided the sum over all ranks by this rank's own number "
                "of values: that number has to be summed over the ranks too."),
        Mistake(own_sum_over_all, "You summed the numbers of values over the ranks, but not the "
                "values: you divide this rank's own sum. Both have to be summed over the ranks."),
        Mistake(sum_over_own_count_everywhere, "You took this rank's own number of values times "
                "the number of ranks. The ranks hold different numbers of values: sum these over "
                "the ranks, too."),
        Mistake(padded_mean, "You divided as if every rank held as many values as the longest one. "
                "What only fills up a shorter row is no value: sum the ranks' own numbers of "
                "values."),
        Mistake(what_the_call_returns, "`dist.all_reduce` returns None. It changes the tensor that "
                "it gets: call it on a line of its own, and go on with that tensor."),
        Mistake(of_one_element, "The mean is right, but its shape is (1,). A tensor of shape () is "
                "asked for: take element 0 of it."),
        Mistake(as_a_float, "The mean is right, but it is a Python number. Return the tensor, "
                "without `.item()`."),
        Mistake(sum_and_count, "You return two numbers, the sum of all values and how many there "
                "are. Divide one by the other."),
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
    """Two values on rank 0, one on rank 1, then four and three."""
    return seeded(f"values of rank {rank}", (2, 1, 4, 3)[rank])
