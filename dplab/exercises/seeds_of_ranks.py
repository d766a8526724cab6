"""What is random in an epoch: which of its seeds have the rank in them, and which the epoch."""

import torch
import torch.distributed as dist

from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import AT_LEAST, Slip


def draw(seed, epoch, size):
    def from_seed(number):
        return torch.Generator().manual_seed(number)

    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_epoch = (1000 * seed + epoch) * (ranks + 1)  # one for the order, one for each rank's noise
    weights = torch.randn(6, generator=from_seed(-1 - seed))  # no epoch has a number below 0
    order = torch.randperm(size, generator=from_seed(of_epoch))
    noise = torch.rand(8, generator=from_seed(of_epoch + 1 + rank))
    return weights, order[rank::ranks], noise


EPOCHS, SEED, DATA_SIZE = 5, 11, 13
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


class Draw(Exercise):
    number = "C.2"
    title = "What must agree, and what must differ"
    minutes = 15
    communicates = False
    solution = staticmethod(draw)

    def trial(self, attempt):
        return _facts_of_draws(attempt)

    def expected(self, world_size):
        return RIGHT_DRAWS

    def explanation(self, attempt, got, world_size):
        why = super().explanation(attempt, got, world_size)
        another_run = isinstance(got, list) and not got[0][SAME_RUN]
        if another_run and (not why or why.startswith(AT_LEAST)):
            return ("You draw from the random state that a rank happens to have, so that a second "
                    "run with the same seed is another run. Seed a `torch.Generator` for each of "
                    "the three.")
        return why

    hints = (
        "Ask for each of the three: may it depend on the rank? On the epoch? `torch.randn(…, "
        "generator=torch.Generator().manual_seed(number))` draws from a seed of its own.",
        "The weights depend on `seed` alone; the order on `seed` and `epoch`, so that all ranks "
        "shuffle alike, and each takes every N-th sample; the noise on all three.",
        "`seed + epoch + rank` is the same number for rank 1 in epoch 0 and for rank 0 in epoch 1. "
        "`(1000 * seed + epoch) * (ranks + 1) + 1 + rank` never is, and leaves each epoch a number "
        "for the order. The weights need one that no epoch has, such as `-1 - seed`.",
    )
    slips = (
        Slip("One seed for all three cannot be right. The weights follow from the seed alone, the "
             "order from the seed and the epoch, the noise from the seed, the epoch and the rank.",
             {"manual_seed(number)": "manual_seed(seed)"},
             {"manual_seed(number)": "manual_seed(seed + rank)"},
             {"manual_seed(number)": "manual_seed(1000 * seed + epoch)"},
             {"manual_seed(number)": "manual_seed(seed + 1000 * epoch + rank)"}),
        Slip("Each rank draws its own initial weights. They have to be the same on all: no rank "
             "in their seed.", {"-1 - seed": "-1 - seed - rank"}),
        Slip("The initial weights change with the epoch, so that a job resumed in another epoch "
             "would build another model: no epoch in their seed.",
             {"-1 - seed": "-1 - 1000 * seed - epoch"}),
        Slip("Each rank shuffles in its own way and takes its slice of another order, so some "
             "samples are drawn twice and some never: no rank in the seed of the order.",
             {"from_seed(of_epoch))": "from_seed(of_epoch + rank))"}),
        Slip("Every epoch has the same order: its seed has to depend on the epoch (`set_epoch`, "
             "in a sampler).", {"from_seed(of_epoch))": "from_seed(seed))"}),
        Slip("The samples come in the order in which they lie in the data set. Shuffle them, anew "
             "in every epoch.",
             {"torch.randperm(size, generator=from_seed(of_epoch))": "torch.arange(size)"}),
        Slip("You make no use of the epoch: each has the same order, and on each rank the same "
             "noise.", {"1000 * seed + epoch": "seed"}),
        Slip("All ranks take the same part of the order: where it begins has to depend on the "
             "rank.", {"order[rank::ranks]": "order[: size // ranks]"}),
        Slip("Every rank takes all samples: each has to take its own part, every N-th.",
             {"order[rank::ranks]": "order"}),
        Slip("The world size does not divide the samples, and you drop the rest: give some ranks "
             "one more, as `order[rank::ranks]` does.",
             {"order[rank::ranks]": "order.split(size // ranks)[rank]"}),
        Slip("The order is padded to a multiple of the ranks, as `DistributedSampler` does it, so "
             "some samples come twice. Give some ranks one more, as `order[rank::ranks]` does.",
             {"order[rank::ranks]": "torch.cat([order, order[: -size % ranks]])[rank::ranks]"}),
        Slip("The noise is normally distributed. It should be uniform, between 0 and 1, as "
             "`torch.rand` draws it.", {"torch.rand(": "torch.randn("}),
        Slip("All ranks draw the same noise, so N samples drop the same units: the rank belongs "
             "in its seed.", {"of_epoch + 1 + rank": "of_epoch + 1"}),
        Slip("A rank draws the same noise in every epoch: the epoch belongs in its seed.",
             {"of_epoch + 1 + rank": "1000 * seed + rank"}),
        Slip("A sum collides: `seed + epoch + rank` is the same for rank 1 in epoch 0 and for "
             "rank 0 in epoch 1.", {"of_epoch + 1 + rank": "seed + epoch + rank"}),
    )


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
