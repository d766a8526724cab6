"""Exercise 2.3: a contrastive loss over the global batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.checks.exercise import Exercise, Mistake
from dplab.exercises.sum_over_ranks import SumOverRanks
from dplab.exercises.weighted_mean import after_backward

MySum = SumOverRanks  # the chapter's name for it


def contrastive_loss(queries, keys, temperature):
    rank, b = dist.get_rank(), len(keys)
    parts = [torch.zeros_like(keys)] * dist.get_world_size()
    parts[rank] = keys  # (k₀, 0, 0) + (0, k₁, 0) + (0, 0, k₂) = (k₀, k₁, k₂)
    all_keys = MySum.apply(torch.cat(parts))
    labels = rank * b + torch.arange(b, device=keys.device)
    return F.cross_entropy(queries @ all_keys.T / temperature, labels)


# What learners write. First, the words that they need: the gather alone, the right labels, and the
# gather of those who use `dist.all_gather`, which has no gradient.


def gather(rows):
    parts = [torch.zeros_like(rows)] * dist.get_world_size()
    parts[dist.get_rank()] = rows
    return SumOverRanks.apply(torch.cat(parts))


def own_labels(keys):
    return dist.get_rank() * len(keys) + torch.arange(len(keys))


def with_own_put_back(rows):
    parts = list(gather(rows).detach().split(len(rows)))
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def own_keys_only(queries, keys, temperature):
    return F.cross_entropy(queries @ keys.T / temperature, torch.arange(len(keys)))


def labels_not_shifted(queries, keys, temperature):
    return F.cross_entropy(queries @ gather(keys).T / temperature, torch.arange(len(keys)))


def labels_shifted_by_the_rank(queries, keys, temperature):
    labels = dist.get_rank() + torch.arange(len(keys))
    return F.cross_entropy(queries @ gather(keys).T / temperature, labels)


def labels_shifted_by_ranks(queries, keys, temperature):
    labels = dist.get_rank() * dist.get_world_size() + torch.arange(len(keys))
    return F.cross_entropy(queries @ gather(keys).T / temperature, labels)


def queries_among_queries(queries, keys, temperature):
    return contrastive_loss(queries, queries, temperature)


def keys_without_gradient(queries, keys, temperature):
    logits = queries @ gather(keys).detach().T / temperature
    return F.cross_entropy(logits, own_labels(keys))


def keys_added_up(queries, keys, temperature):
    logits = queries @ SumOverRanks.apply(keys).T / temperature
    return F.cross_entropy(logits, torch.arange(len(keys)))


def all_keys_in_front(queries, keys, temperature):
    nothing = [torch.zeros_like(keys)] * (dist.get_world_size() - 1)
    all_keys = SumOverRanks.apply(torch.cat([keys, *nothing]))
    return F.cross_entropy(queries @ all_keys.T / temperature, own_labels(keys))


def all_keys_in_front_not_shifted(queries, keys, temperature):
    nothing = [torch.zeros_like(keys)] * (dist.get_world_size() - 1)
    all_keys = SumOverRanks.apply(torch.cat([keys, *nothing]))
    return F.cross_entropy(queries @ all_keys.T / temperature, torch.arange(len(keys)))


def placed_from_behind(queries, keys, temperature):
    parts = [torch.zeros_like(keys)] * dist.get_world_size()
    parts[-1 - dist.get_rank()] = keys
    all_keys = SumOverRanks.apply(torch.cat(parts))
    return F.cross_entropy(queries @ all_keys.T / temperature, own_labels(keys))


def placed_in_float32(queries, keys, temperature):
    placed = torch.zeros(dist.get_world_size() * len(keys), keys.shape[1])
    placed[own_labels(keys)] = keys
    logits = queries @ SumOverRanks.apply(placed).T / temperature
    return F.cross_entropy(logits, own_labels(keys))


def placed_in_turn(queries, keys, temperature):
    placed = keys.new_zeros(dist.get_world_size() * len(keys), keys.shape[1])
    placed[dist.get_rank()::dist.get_world_size()] = keys
    logits = queries @ SumOverRanks.apply(placed).T / temperature
    return F.cross_entropy(logits, own_labels(keys))


def gathered_keys_averaged(queries, keys, temperature):
    return contrastive_loss(queries, keys, temperature * dist.get_world_size())


def placed_with_a_plain_all_reduce(queries, keys, temperature):
    placed = keys.new_zeros(dist.get_world_size() * len(keys), keys.shape[1])
    placed[own_labels(keys)] = keys
    dist.all_reduce(placed)
    return F.cross_entropy(queries @ placed.T / temperature, own_labels(keys))


def own_keys_twice(queries, keys, temperature):
    logits = queries @ torch.cat([keys, gather(keys)]).T / temperature
    return F.cross_entropy(logits, torch.arange(len(keys)))


def without_the_right_key(queries, keys, temperature):
    logits = queries @ gather(keys).T / temperature
    right = F.one_hot(own_labels(keys), logits.shape[1]).bool()
    others = logits.masked_fill(right, float("-inf"))
    return (others.logsumexp(dim=1) - logits[right]).mean()


def other_keys_are_constants(queries, keys, temperature):
    logits = queries @ with_own_put_back(keys).T / temperature
    return F.cross_entropy(logits, own_labels(keys))


def own_key_alone_has_a_gradient(queries, keys, temperature):
    gathered = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, keys.detach())
    logits = queries @ torch.cat(gathered).T / temperature
    right = (queries * keys).sum(dim=1) / temperature
    return (logits.logsumexp(dim=1) - right).mean()


def everyones_loss(queries, keys, temperature):
    logits = with_own_put_back(queries) @ with_own_put_back(keys).T / temperature
    return F.cross_entropy(logits, torch.arange(len(logits)))


def everyones_loss_times_ranks(queries, keys, temperature):
    return dist.get_world_size() * everyones_loss(queries, keys, temperature)


def summed_over_queries(queries, keys, temperature):
    logits = queries @ gather(keys).T / temperature
    return F.cross_entropy(logits, own_labels(keys), reduction="sum")


def times_ranks(queries, keys, temperature):
    return dist.get_world_size() * contrastive_loss(queries, keys, temperature)


def divided_by_ranks(queries, keys, temperature):
    return contrastive_loss(queries, keys, temperature) / dist.get_world_size()


def without_temperature(queries, keys, temperature):
    return contrastive_loss(queries, keys, 1)


def times_temperature(queries, keys, temperature):
    return contrastive_loss(queries, keys, 1 / temperature)


def of_keys(queries, keys, temperature):
    return contrastive_loss(keys, queries, temperature)


def all_queries_among_own_keys(queries, keys, temperature):
    logits = gather(queries) @ keys.T / temperature
    return F.cross_entropy(logits, torch.arange(len(keys)).repeat(dist.get_world_size()))


def symmetric(queries, keys, temperature):
    there = contrastive_loss(queries, keys, temperature)
    return (there + contrastive_loss(keys, queries, temperature)) / 2


def normalised_over_queries(queries, keys, temperature):
    logits = gather(queries) @ keys.T / temperature
    right = logits[own_labels(keys), torch.arange(len(keys))]
    return (logits.logsumexp(dim=0) - right).mean()


class ContrastiveLoss(Exercise):
    number = "2.3"
    title = "A contrastive loss over the global batch"
    minutes = 15
    hints = (
        "Take two ranks with three samples each. What is the shape of rank 1's logits, and in "
        "which columns stand the right keys of its queries?",
        "A gather can be written as a sum. Two ranks have one key each. Which two tensors, one "
        "from each rank, add up to a tensor with both keys in rows of their own?",
        "Rank 0 brings (k₀, 0) and rank 1 brings (0, k₁): begin with one part of zeros for each "
        "rank, put the own keys in place of part `rank`, concatenate, and sum with `MySum.apply`. "
        "The labels are `rank * b + torch.arange(b)`. `F.cross_entropy` of the logits divided by "
        "the temperature is the mean over this rank's queries, and DDP's average does the rest.",
    )
    solution = staticmethod(contrastive_loss)
    mistakes = (
        Mistake(own_keys_only, "Your negatives are this rank's own keys: with N ranks, each query "
                "sees one N-th of them. That is another loss, and no weight repairs it."),
        Mistake(labels_not_shifted, "The labels are not shifted: on rank r, the right keys stand "
                "in the columns from r·b on. As it is, all ranks claim rank 0's keys."),
        *(Mistake(attempt, "The labels are shifted, and not by the right number. In front of rank "
                  "r's keys stand those of r ranks, b of each: the first right key is in column "
                  "r·b.") for attempt in (labels_shifted_by_the_rank, labels_shifted_by_ranks)),
        *(Mistake(attempt, "All ranks put their keys into the same rows, where they are added up, "
                  "and the other rows stay zero. Each rank's keys need rows of their own.")
          for attempt in (all_keys_in_front, all_keys_in_front_not_shifted)),
        *(Mistake(attempt, "The keys stand in another order than your labels say: query i's own "
                  "key is not in the column of its label. Look where you put rank r's key i.")
          for attempt in (placed_from_behind, placed_in_turn)),
        Mistake(gathered_keys_averaged, "The products are N times too small, as if the gathered "
                "keys were averaged. Every row has one owner and zeros from all others: their sum "
                "is the key itself."),
        Mistake(queries_among_queries, "You compare the queries with the queries of all ranks. "
                "Gather the keys."),
        Mistake(keys_without_gradient, "The keys were gathered without their gradients, this "
                "rank's own included: the key encoder learns nothing. `dist.all_gather` is "
                "invisible to autograd."),
        Mistake(keys_added_up, "You added the ranks' keys up: b rows that are nobody's keys. A sum "
                "gathers only if each rank's keys have rows of their own, which are zeros on all "
                "other ranks."),
        Mistake(placed_in_float32, "`torch.zeros` makes float32, and the queries and keys have "
                "another dtype here. `keys.new_zeros(…)` takes the dtype and the device of the "
                "keys."),
        Mistake(own_keys_twice, "This rank's own keys stand among all ranks' keys a second time, "
                "as negatives of themselves. Take the gathered keys alone; the labels say which "
                "are the own."),
        Mistake(without_the_right_key, "The right key is missing from the sum below: all keys of "
                "the batch stand there, the query's own included, as in a cross-entropy."),
        *(Mistake(attempt, "Only this rank's own keys carry a gradient; those of other ranks "
                  "count as constants. (A plain collective has no backward of its own.) But a key "
                  "takes part in *every* rank's loss as a negative, and these gradients are lost: "
                  "gather in a way that autograd sees.")
          for attempt in (other_keys_are_constants, placed_with_a_plain_all_reduce)),
        Mistake(own_key_alone_has_a_gradient, "A key gets a gradient as the right key of its own "
                "query, above, and none from the sum below, where all gathered keys count as "
                "constants, this rank's own too. (`dist.all_gather` has no gradient.) Every "
                "query's sum depends on every key: gather in a way that autograd sees."),
        Mistake(everyones_loss, "Every rank computes the whole loss, with only its own rows "
                "carrying a gradient. These are right, but each rank brings its own part only, so "
                "DDP's average makes the gradients N times too small. Compute this rank's queries "
                "against all keys, with a gather that autograd sees."),
        Mistake(everyones_loss_times_ranks, "The gradients are right. But every rank computes the "
                "loss of all queries, and returns N times its value. Compute this rank's queries "
                "alone, against all keys, with a gather that autograd sees."),
        Mistake(summed_over_queries, "You summed over the queries. The loss is their mean: the "
                "gradients are as many times too large as a rank has queries."),
        Mistake(times_ranks, "The loss is N times too large, by a factor or by a sum over the "
                "ranks. The global loss is the plain mean of the ranks' means, and DDP takes that "
                "mean."),
        Mistake(divided_by_ranks, "You divided by the number of ranks, and DDP does so again: the "
                "gradients are N times too small."),
        Mistake(without_temperature, "The products are not divided by the temperature."),
        Mistake(times_temperature, "You multiplied the products by the temperature. Divide them by "
                "it."),
        *(Mistake(attempt, "You compare each key with all queries. Here each query looks for its "
                  "key: this rank's queries, all ranks' keys.")
          for attempt in (of_keys, normalised_over_queries)),
        Mistake(all_queries_among_own_keys, "You gathered the queries. Every query needs the keys "
                "of all ranks, and you compare it with this rank's alone: gather the keys."),
        Mistake(symmetric, "This is the mean of both directions, as for images and their texts. "
                "Here queries look for keys, and no more."),
    )

    def trial(self, attempt):
        model = DistributedDataParallel(_TwoTowers().double())
        loss = attempt(*model(_pairs(dist.get_rank())), 0.3)
        return after_backward(model.module, loss)

    def expected(self, world_size):
        model = _TwoTowers().double()
        queries, keys = model(torch.cat([_pairs(rank) for rank in range(world_size)]))
        loss = F.cross_entropy(queries @ keys.T / 0.3, torch.arange(len(keys)))
        return after_backward(model, loss)


class _TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.of_queries, self.of_keys = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, pairs):
        return (F.normalize(self.of_queries(pairs[:, :4]), dim=1),
                F.normalize(self.of_keys(pairs[:, 4:]), dim=1))


def _pairs(rank):
    """Rank r's five pairs of related vectors, a query's input beside its key's."""
    generator = torch.Generator().manual_seed(20 + rank)
    first = torch.randn(5, 4, generator=generator)
    second = first + 0.3 * torch.randn(5, 4, generator=generator)
    return torch.cat([first, second], dim=1).double()
