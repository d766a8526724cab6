"""Exercise 7.1: what must agree, and what must differ."""

import torch
import torch.distributed as dist

from dplab.checks.exercise import AT_LEAST, Exercise, Mistake

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
    number = "7.1"
    title = "What must agree, and what must differ"
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
