"""Exercise 7.1: what is true of the draws of several epochs, on all ranks, in a second run."""

import torch
import torch.distributed as dist

EPOCHS, SEED = 5, 11
SIZE = 13  # of the data set

SAME_RUN = "that a second run with the same seed draws the same"
FACTS = (
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
RIGHT_FACTS = dict.fromkeys(FACTS, True) | {
    "how many samples the ranks draw together in an epoch": SIZE}


def _generator(number):
    return torch.Generator().manual_seed(number)


def drawn(weights=lambda seed, epoch, rank, ranks: seed,
          order=lambda seed, epoch, rank, ranks: 1000 * seed + epoch,
          noise=lambda seed, epoch, rank, ranks: (1000 * seed + epoch) * ranks + rank,
          part=lambda order, rank, ranks: order[rank::ranks], shuffled=True, numbers=torch.rand):
    """The draws with one seed, or the part of the samples, wrong."""

    def attempt(seed, epoch, size):
        place = seed, epoch, dist.get_rank(), dist.get_world_size()
        indices = torch.randperm(size, generator=_generator(order(*place)))
        indices = indices if shuffled else torch.arange(size)
        return (torch.randn(6, generator=_generator(weights(*place))), part(indices, *place[2:]),
                numbers(8, generator=_generator(noise(*place))))

    return attempt


def from_one(seed_of):
    return drawn(seed_of, seed_of, seed_of)


def from_global_state(seed, epoch, size):
    order = torch.randperm(size)
    dist.broadcast(order, src=0)
    return torch.randn(6), order[dist.get_rank() :: dist.get_world_size()], torch.rand(8)


def facts_of(attempt):
    """Each of `FACTS` of ``attempt(seed, epoch, size)`` on all ranks."""
    first, second, other = (_run(attempt, *run) for run in enumerate((SEED, SEED, SEED + 1)))
    weights, order, noise = first
    drawn = [[index for part in epoch for index in part] for epoch in order]
    return dict(zip(FACTS, (
        first == second,
        all(len(rank) == 6 for epoch in weights for rank in epoch)
        and all(len(rank) == 8 for epoch in noise for rank in epoch),
        all(rank == epoch[0] for epoch in weights for rank in epoch),
        all(epoch == weights[0] for epoch in weights),
        min(weights[0][0] + other[0][0][0]) < 0,
        max(map(len, drawn)),
        all(len(set(epoch)) == len(epoch) for epoch in drawn),
        all(set(epoch) == set(range(SIZE)) for epoch in drawn),
        all(max(map(len, epoch)) - min(map(len, epoch)) <= 1 for epoch in order),
        _all_differ(order),
        _all_differ([order, other[1]]),
        all(0 <= number < 1 for epoch in noise for rank in epoch for number in rank),
        all(map(_all_differ, noise)),
        all(map(_all_differ, zip(*noise, strict=True))),
        _all_differ([of_rank for epoch in noise for of_rank in epoch]),
        _all_differ([noise, other[2]]),
    ), strict=True))


def _run(attempt, number, seed):
    """Weights, order and noise, each as lists of numbers for each epoch and rank."""
    torch.manual_seed(1000 * number + dist.get_rank())  # a new process has a state of its own
    own = [[torch.as_tensor(part).tolist() for part in attempt(seed, epoch, SIZE)]
           for epoch in range(EPOCHS)]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return [[[rank[epoch][kind] for rank in everyone] for epoch in range(EPOCHS)]
            for kind in range(3)]


def _all_differ(values):
    texts = [str(value) for value in values]
    return len(set(texts)) == len(texts)
