"""A mean over ranks with different numbers of values is made of two sums: of values, of numbers."""

import torch
import torch.distributed as dist

from dplab.checks.composition import Held, made_of
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded


def global_mean(values):
    total = torch.stack([values.sum(), values.new_tensor(float(len(values)))])
    dist.all_reduce(total)
    return total[0] / total[1]


def with_two_calls(values):
    summed = values.sum()
    count = torch.tensor(len(values))
    dist.all_reduce(summed)
    dist.all_reduce(count)
    return summed / count


LENGTHS = 2, 1, 4, 3  # of the values, by rank
CALLS = 6  # more than there are ranks, so that the means say how often each rank's sum is in them


def values_of(rank, call):
    values = seeded(f"values of rank {rank} in call {call}", LENGTHS[rank])
    if call == 1:
        values[0] = 0  # a value as any other
    return values


def sums_of(rank):
    return torch.stack([values_of(rank, call).sum() for call in range(CALLS)])


class GlobalMean(Exercise):
    number = "0.2"
    title = "One mean for all ranks"
    minutes = 5
    solution = staticmethod(global_mean)
    also_right = (with_two_calls,)
    world_sizes = (3, 4, 2, 1)  # three first: of three sums or more, all that are held are listed

    def trial(self, attempt):
        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        means = [attempt(values_of(rank, call)) for call in range(CALLS)]
        of_fewer = attempt(values_of(rank, 0)[:1])
        numbers = [torch.as_tensor(mean).flatten() for mean in means if mean is not None]
        return {"the mean": made_of(torch.cat(numbers), {
                    f"rank {each}'s sum": sums_of(each) for each in ranks}) if numbers else None,
                **{f"the mean of call {call}": mean for call, mean in enumerate(means)},
                "the mean of a later call with one value on each rank": of_fewer}

    def expected(self, world_size):
        ranks = range(world_size)
        given = [[values_of(rank, call) for rank in ranks] for call in range(CALLS)]
        share = 1 / sum(LENGTHS[:world_size])
        return {"the mean": Held({f"rank {rank}'s sum": share for rank in ranks}),
                **{f"the mean of call {call}": torch.cat(values).mean()
                   for call, values in enumerate(given)},
                "the mean of a later call with one value on each rank":
                    torch.stack([values[0] for values in given[0]]).mean()}

    hints = (
        "You know the mean of a list: which two numbers do you divide? Which of them can a rank "
        "compute for its own values?",
        "An all-reduce adds a tensor over all ranks. Which two sums give the mean of everything?",
        "Put this rank's sum and its number of values into one tensor of two elements, all-reduce "
        "it, and divide.",
    )
    slips = (
        Slip("You averaged the ranks' means. The ranks hold different numbers of values, so the "
             "mean of the means is not the mean of all values: a rank with few values counts too "
             "much.",
             {"values.sum()": "values.mean()", "torch.tensor(len(values))": "torch.tensor(1)"}),
        Slip("You added the ranks' means, and divided by nothing. Dividing by the number of ranks "
             "would not be right either, since the ranks hold different numbers of values: add the "
             "sums, and add the numbers of values.",
             {"values.sum()": "values.mean()", "return summed / count": "return summed"}),
        Slip("You take the mean of each rank's values, which is divided by their number already, "
             "and divide once more. Add the ranks' sums instead.",
             {"values.sum()": "values.mean()"}),
        Slip("This is the sum of all values. Divide it by how many there are on all ranks "
             "together.",
             {"return summed / count": "return summed"}),
        Slip("You divided the sum by the number of ranks. It has to be the number of values on all "
             "ranks together.",
             {"torch.tensor(len(values))": "torch.tensor(1)"}),
        Slip("You divided the sum over all ranks by this rank's own number of values: that number "
             "has to be summed over the ranks too.",
             {"dist.all_reduce(count)": ""}),
        Slip("You summed the numbers of values over the ranks, but not the values: you divide this "
             "rank's own sum. Both have to be summed over the ranks.",
             {"dist.all_reduce(summed)": ""}),
        Slip("You took this rank's own number of values times the number of ranks. The ranks hold "
             "different numbers of values: sum these over the ranks, too.",
             {"dist.all_reduce(count)": "count *= dist.get_world_size()"}),
        Slip("You divided as if every rank held as many values as the longest one. What only fills "
             "up a shorter row is no value: sum the ranks' own numbers of values.",
             {"dist.all_reduce(count)": "dist.all_reduce(count, op=dist.ReduceOp.MAX)\n"
                                        "count *= dist.get_world_size()"}),
        Slip("A value of 0 is a value, too: you leave it out, as if it only filled up a row. Take "
             "the number of values from its length on each rank.",
             {"float(len(values))": "float(values.count_nonzero())"},
             {"len(values)": "values.count_nonzero()"}),
        Slip("You return two numbers, the sum of all values and how many there are. Divide one by "
             "the other.",
             {"total[0] / total[1]": "total"}),
        Slip("Every rank gets rank 0's mean, and the values of the others are in no sum. Combine "
             "all ranks' values: `all_reduce`.",
             {"dist.all_reduce(total)": "dist.broadcast(total, src=0)"}),
        Slip("The mean is right, and only rank 0 returns it. The others return None: give it to "
             "every rank.",
             {"return total[0]": "if dist.get_rank() == 0:\n    return total[0]"}),
        Slip("`reduce` gives the result to rank 0 alone; the others are left with parts of it. "
             "Every rank needs the mean: `all_reduce`.",
             {"dist.all_reduce(total)": "dist.reduce(total, dst=0)"},
             {"dist.all_reduce(summed)": "dist.reduce(summed, dst=0)"}),
        Slip("You handed over the values themselves. Their number differs from rank to rank, and "
             "this collective needs tensors of one size.",
             {"values.sum()": "values", "summed / count": "summed.mean()"}),
        Slip("Only rank 0 calls the collective, and waits for ever. A collective is called by "
             "every rank.",
             {"dist.all_reduce(total)": "if dist.get_rank() == 0:\n    dist.all_reduce(total)"},
             hangs=True),
    )
