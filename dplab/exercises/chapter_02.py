"""Exercises of chapter 02: why averaging gradients is right, and where it is not."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.exercises.compare import AtMost
from dplab.exercises.exercise import Exercise, Mistake
from dplab.exercises.trials import gradients, reduced
from dplab.measure import CallLog

PADDING = -100


def _over_ranks(number):
    return reduced(torch.as_tensor(number).clone())


def _after_backward(model, loss):
    """The gradients, and the mean over the ranks of their losses: in one process, the loss."""
    loss.backward()
    logged = loss.detach().squeeze()
    if dist.is_initialized():
        logged = _over_ranks(logged) / dist.get_world_size()
    return {**gradients(model), "the mean over the ranks of what they return": logged}


# 2.1


def average_gradients(model, samples):
    total = torch.tensor(samples)
    dist.all_reduce(total)
    for parameter in model.parameters():
        parameter.grad *= samples / total
        dist.all_reduce(parameter.grad)


def _weighted(weight=lambda own, total, n: 1.0, divisor=lambda own, total, n: 1.0,
              reduce=dist.all_reduce):
    """An attempt that multiplies by one number, sums over the n ranks, and divides by another."""

    def attempt(model, samples):
        numbers = samples, _over_ranks(samples).item(), dist.get_world_size()
        for parameter in model.parameters():
            parameter.grad *= weight(*numbers)
            reduce(parameter.grad)
            parameter.grad /= divisor(*numbers)

    return attempt


def _in_new_tensors(model, samples):
    total = _over_ranks(samples)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad * (samples / total))


def _without_the_empty(model, samples):
    if samples > 0:
        average_gradients(model, samples)


class AverageUnequalParts(Exercise):
    slug = "average-unequal-parts"
    number = "2.1"
    title = "Average the gradients of unequal parts"
    name = "average_gradients"
    minutes = 10
    hints = (
        "This is line 3 of the proof: which weight does rank i's mean get in the global mean?",
        "The weight is this rank's count divided by the count of all ranks. The ranks know their "
        "own only, and a sum over ranks is an `all_reduce`, of a count as of a gradient.",
        "All-reduce `torch.tensor(samples)` once. Then, for each parameter, multiply `.grad` by "
        "`samples / total` and all-reduce it; there is nothing left to divide by. A rank with 0 "
        "samples makes the same calls.",
    )
    solution = staticmethod(average_gradients)
    mistakes = (
        Mistake(_weighted(divisor=lambda own, total, n: n), "You took the plain mean: a rank with "
                "one sample has as much say as a rank with four. Give each rank's gradient the "
                "weight of its share, `samples / total`."),
        Mistake(_weighted(divisor=lambda own, total, n: min(n, 3)), "You left out the rank without "
                "samples. The others differ, too: give each rank's gradient the weight of its "
                "share, `samples / total`; then an empty rank needs no care of its own."),
        Mistake(_weighted(), "You summed the ranks' gradients as they are. Each is a mean already: "
                "give it the weight of its share, `samples / total`, before you sum. (If you did: "
                "an all-reduce overwrites its tensor. Is the own count still there?)"),
        Mistake(_weighted(divisor=lambda own, total, n: total / own if own else float("inf")),
                "You summed first, and multiplied the sum by this rank's share. The share is the "
                "weight of this rank's own gradient: multiply before you sum."),
        Mistake(_weighted(weight=lambda own, total, n: own), "The weighted sum is right, and it is "
                "the sum over all samples: you did not divide it by the number of samples on all "
                "ranks."),
        Mistake(_weighted(weight=lambda own, total, n: own / n), "You divided the sum over all "
                "samples by the number of ranks. Divide it by the number of samples on all ranks."),
        Mistake(_weighted(weight=lambda own, total, n: own / total / n), "The weights "
                "`samples / total` add up to 1 already; you divided by the number of ranks as "
                "well. (The factor N that undoes a division is needed only where DDP divides.)"),
        Mistake(_weighted(weight=lambda own, total, n: n * own / total), "The gradients are N "
                "times too large: you multiplied by the number of ranks, or took the ranks' mean "
                "count for the total. A factor N undoes DDP's division by it; here you sum "
                "yourself, and nobody divides."),
        *(Mistake(_weighted(lambda own, total, n: 1 / max(own, 1), divisor), "You divided each "
                  "rank's gradient by its count of samples. It is a mean, and so divided already: "
                  "give it the weight of its share, `samples / total`.")
          for divisor in (lambda own, total, n: 1, lambda own, total, n: n)),
        *(Mistake(_weighted(lambda own, total, n: own, divisor), "You divided by this rank's own "
                  "count, so the ranks end with different gradients. The divisor is the count of "
                  "all ranks, which takes an `all_reduce`.")
          for divisor in (lambda own, total, n: own, lambda own, total, n: max(own, 1))),
        Mistake(_weighted(lambda own, total, n: own, lambda own, total, n: max(own, 1) * n), "You "
                "took this rank's count times the number of ranks for the total. The ranks have "
                "different counts: all-reduce them."),
        Mistake(_weighted(lambda own, total, n: own / total, reduce=lambda tensor: None), "You "
                "all-reduced the counts, and not the gradients: each rank keeps its own share of "
                "the sum."),
        Mistake(_in_new_tensors, "You sum the weighted gradients in new tensors, and "
                "`parameter.grad` still holds this rank's own. Write in place."),
        Mistake(_weighted(lambda own, total, n: own / total,
                          reduce=lambda tensor: dist.reduce(tensor, dst=0)), "`reduce` gives the "
                "result to rank 0 alone. Every rank takes the step, so every rank needs it: "
                "`all_reduce`."),
        Mistake(_without_the_empty, "A rank without samples left early, and the others wait for "
                "it. Its weight is 0, and it makes every call all the same.", hangs=True),
    )

    def quantities(self, world_size, rank):
        counts = [len(_part(other)) for other in range(world_size)]
        return {"the ranks": world_size, "this rank's samples": counts[rank],
                "the samples of all ranks": sum(counts), "the most samples of a rank": max(counts)}

    def parts(self, world_size, rank):
        counts = [len(_part(other)) for other in range(world_size)]
        means = [gradients(_gradients_of(_part(other))) for other in range(world_size)]
        return {fact: [count / sum(counts) * mean[fact] for count, mean in zip(
            counts, means, strict=True)] for fact in means[0]}

    def trial(self, attempt):
        part = _part(dist.get_rank())
        model = _gradients_of(part)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with CallLog() as log:
            attempt(model, len(part))
        # Below the limit the number says nothing, and must not tell an attempt from a mistake.
        unchanged = all(map(torch.equal, before, model.parameters()))
        return {"that the weights are not changed": unchanged, **gradients(model),
                "the number of collectives": max(log.count(), _ENOUGH)}

    def expected(self, world_size):
        model = _gradients_of(torch.cat([_part(rank) for rank in range(world_size)]))
        limit = AtMost(_ENOUGH, "one for each gradient, and one for the counts, are enough")
        return {"that the weights are not changed": True, **gradients(model),
                "the number of collectives": limit}


_ENOUGH = 8  # collectives: twice the number of gradients


def _part(rank):
    """Rank r's samples of seven features: 3, 1, 4 and none."""
    samples = (3, 1, 4, 0)[rank]
    return torch.sin(torch.arange(samples * 7.0) * 1.7 + 5 * rank).reshape(samples, 7)


def _gradients_of(samples):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model(samples).square().mean().backward()
    return model


# 2.2


def token_loss_for_ddp(logits, targets):
    total = (targets != -100).sum()
    dist.all_reduce(total)
    summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return dist.get_world_size() * summed / total


def _summed(logits, targets, reduction="sum"):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def _loss(factor=lambda: 1, count=lambda targets: (targets != PADDING).sum(), reduced=True):
    """An attempt: the sum over this rank's tokens, times a factor, divided by a count."""

    def attempt(logits, targets):
        total = _over_ranks(count(targets)) if reduced else count(targets)
        return factor() * _summed(logits, targets) / total

    return attempt


def _weighted_by_positions(logits, targets):
    share = targets.numel() / _over_ranks(targets.numel())
    return dist.get_world_size() * share * _own_mean(logits, targets)


def _own_mean(logits, targets):
    return _summed(logits, targets, "mean")


def _share_of_the_sum(logits, targets):
    own = (targets != PADDING).sum()
    return dist.get_world_size() * own / _over_ranks(own) * _summed(logits, targets)


def _all_reduced_loss(logits, targets):
    loss = _summed(logits, targets)
    dist.all_reduce(loss.data)
    return loss / _over_ranks((targets != PADDING).sum())


def _all_reduced_mean(logits, targets):
    loss = _own_mean(logits, targets)
    dist.all_reduce(loss.data)
    return loss / dist.get_world_size()


def _weighted_by_sequences(logits, targets, *, own=_own_mean):
    share = len(targets) / _over_ranks(len(targets))
    return dist.get_world_size() * share * own(logits, targets)


def _mean_of_sequence_means(logits, targets):
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each.sum(dim=1) / (targets != PADDING).sum(dim=1)).mean()


class TokenLossForDDP(Exercise):
    slug = "token-loss"
    number = "2.2"
    title = "A token loss for DDP"
    name = "token_loss_for_ddp"
    minutes = 15
    hints = (
        "Write down the gradient that you want, a sum over all tokens divided by the number of "
        "all tokens. Then write down what DDP makes of the gradients of your losses. What must "
        "this rank's loss be, so that both are equal?",
        "DDP gives you 1/N times the sum over the ranks. So rank i's loss is N times the *sum* "
        "over its own tokens, divided by the number of tokens on all ranks.",
        "`(targets != -100).sum()` counts, `dist.all_reduce` makes it the count of all ranks. "
        "`F.cross_entropy(..., reduction=\"sum\")` leaves out targets of -100 by itself; "
        "flatten sequences and positions before.",
    )
    solution = staticmethod(token_loss_for_ddp)
    mistakes = (
        Mistake(_own_mean, "This is the mean over this rank's tokens, and DDP's average gives "
                "every rank the same say, however few tokens it has. Divide the sum by the "
                "tokens of *all* ranks."),
        Mistake(_loss(), "The gradients come out N times too small: DDP divides the sum over ranks "
                "by N. Multiply the loss by `dist.get_world_size()`."),
        Mistake(_loss(factor=lambda: dist.get_world_size() ** 2), "The gradients come out N times "
                "too large: the factor N is in the loss twice. (A count *averaged* over the ranks "
                "holds it already.)"),
        Mistake(lambda *given: dist.get_world_size() * _own_mean(*given), "N times the mean over "
                "this rank's own tokens: the weights are still equal, and the gradients about N "
                "times too large. Divide the sum by the tokens of *all* ranks."),
        Mistake(_loss(factor=dist.get_world_size, count=torch.numel), "You counted padding too. "
                "The loss leaves out targets of -100, so count those that are not -100."),
        Mistake(_loss(count=torch.numel, reduced=False), "You divided by the number of positions, "
                "padding too, and by this rank's alone. Count the targets that are not -100, on "
                "all ranks."),
        Mistake(_weighted_by_positions, "You weighted the ranks by their numbers of positions, "
                "padding too. The weight is the share of the targets that are not -100."),
        *(Mistake(attempt, "You leave out the token 0, or do not count it. It is a token like "
                  "others; what is left out is -100.") for attempt in (
              lambda logits, targets: token_loss_for_ddp(
                  logits, targets.masked_fill(targets == 0, PADDING)),
              _loss(factor=dist.get_world_size, count=lambda targets: (targets > 0).sum()))),
        Mistake(lambda *given: _summed(*given).detach(), "No gradient reaches the model: what you "
                "return is cut off from the graph. `.item()`, `.detach()`, `torch.tensor(loss)` "
                "and `no_grad` do that."),
        Mistake(_summed, "You return the sum over this rank's tokens. DDP's average divides by "
                "the number of ranks, and nobody divides by the number of tokens."),
        Mistake(_weighted_by_sequences, "You weighted the ranks by their numbers of sequences. The "
                "mean is over tokens: the weight is the share of the *tokens*."),
        Mistake(_share_of_the_sum, "You gave the *sum* over this rank's tokens the weight of its "
                "share. The share is for the mean; of the sum, divide by the tokens of all ranks."),
        *(Mistake(attempt, "This is the mean over sequences of their means, so that a token in a "
                  "short sequence counts more. Sum over all tokens first, and divide once.")
          for attempt in (_mean_of_sequence_means, lambda *given: _weighted_by_sequences(
              *given, own=_mean_of_sequence_means))),
        Mistake(_all_reduced_loss, "Your loss has the value of all ranks' tokens, but autograd "
                "does not see what other ranks send: `backward` follows this rank's own tokens, "
                "and DDP's average makes that N times too small. Communicate the *count* alone, "
                "and multiply this rank's own sum by N."),
        Mistake(_all_reduced_mean, "You averaged the ranks' means. That changes the value, but "
                "autograd does not see what other ranks send: `backward` follows this rank's own "
                "mean, its weight as wrong as before. Communicate the *count* alone, and divide "
                "this rank's own sum by it."),
    )

    def quantities(self, world_size, rank):
        targets = [_text(other)[1] for other in range(world_size)]
        tokens = [(each != PADDING).sum().item() for each in targets]
        return {"the ranks": world_size, "this rank's tokens": tokens[rank],
                "the tokens of all ranks": sum(tokens), "the most tokens of a rank": max(tokens),
                "this rank's sequences": len(targets[rank]),
                "the sequences of all ranks": sum(map(len, targets))}

    def trial(self, attempt):
        model = DistributedDataParallel(_language_model())
        inputs, targets = _text(dist.get_rank())
        loss = attempt(model(inputs), targets)
        return _after_backward(model.module, loss)

    def expected(self, world_size):
        model = _language_model()
        parts = [_text(rank) for rank in range(world_size)]
        total = sum((targets != PADDING).sum() for _, targets in parts)
        loss = sum(_summed(model(inputs), targets) for inputs, targets in parts) / total
        return _after_backward(model, loss)


def _language_model():
    torch.manual_seed(6)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))


def _text(rank):
    """Rank r's sequences, tokens and the ones that follow them; padded behind their ends."""
    lengths = ((7, 3), (2, 4, 1), (9,), (5, 5, 2, 6))[rank]
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(1, 11, (len(lengths), max(lengths) + 3), generator=generator)
    tokens[:, 0] = 0  # a start that all share, so that no gradient begins with zeros
    tokens[0, 1] = 0  # and a target
    targets = tokens[:, 1:].clone()
    for row, length in zip(targets, lengths, strict=True):
        row[length:] = PADDING
    return tokens[:, :-1], targets


# 2.3


class SumOverRanks(torch.autograd.Function):
    """The chapter's all-reduce that autograd sees."""

    @staticmethod
    def forward(context, x):
        return _over_ranks(x)

    @staticmethod
    def backward(context, gradient_of_total):
        return _over_ranks(gradient_of_total)


def contrastive_loss(queries, keys, temperature):
    rank, world_size, own = dist.get_rank(), dist.get_world_size(), len(keys)
    before, behind = rank * own, (world_size - 1 - rank) * own
    all_keys = SumOverRanks.apply(F.pad(keys, (0, 0, before, behind)))
    labels = before + torch.arange(own, device=keys.device)
    return F.cross_entropy(queries @ all_keys.T / temperature, labels)


def _with_gradient(keys):
    before = dist.get_rank() * len(keys)
    behind = (dist.get_world_size() - 1) * len(keys) - before
    return SumOverRanks.apply(F.pad(keys, (0, 0, before, behind)))


def _own_put_back(keys):
    parts = list(_with_gradient(keys).detach().split(len(keys)))
    parts[dist.get_rank()] = keys
    return torch.cat(parts)


def _contrast(gather=_with_gradient, shifted=True, factor=lambda: 1, reduction="mean",
              scale=lambda temperature: 1 / temperature):
    """The loss with one thing wrong."""

    def attempt(queries, keys, temperature):
        labels = torch.arange(len(keys)) + (dist.get_rank() * len(keys) if shifted else 0)
        logits = queries @ gather(keys).T * scale(temperature)
        return factor() * F.cross_entropy(logits, labels, reduction=reduction)

    return attempt


def _of_keys(queries, keys, temperature):
    return _contrast()(keys, queries, temperature)


def _without_the_right_key(queries, keys, temperature):
    logits = queries @ _with_gradient(keys).T / temperature
    right = F.one_hot(dist.get_rank() * len(keys) + torch.arange(len(keys)), logits.shape[1]).bool()
    others = logits.masked_fill(right, float("-inf"))
    return (others.logsumexp(dim=1) - logits[right]).mean()


def _symmetric(*given):
    return (_contrast()(*given) + _of_keys(*given)) / 2


def _everyones_loss(queries, keys, temperature):
    logits = _own_put_back(queries) @ _own_put_back(keys).T / temperature
    return F.cross_entropy(logits, torch.arange(len(logits)))


class ContrastiveLoss(Exercise):
    slug = "contrastive-loss"
    number = "2.3"
    title = "A contrastive loss over the global batch"
    name = "contrastive_loss"
    minutes = 20
    hints = (
        "Each of this rank's queries is compared with the keys of *all* ranks: b rows of logits, "
        "N·b columns. In which column stands the right key of this rank's first query?",
        "A plain `dist.all_gather` gives values without gradients. A gather is also a sum: each "
        "rank brings a tensor of N·b rows, zeros but for its own rows, and `SumOverRanks.apply` "
        "adds them, gradients included.",
        "`F.pad(keys, (0, 0, before, behind))` adds rows of zeros before and behind. The labels "
        "are `rank * b + torch.arange(b)`; `F.cross_entropy` of the logits divided by the "
        "temperature is the mean over this rank's queries, and DDP's average does the rest.",
    )
    solution = staticmethod(contrastive_loss)
    mistakes = (
        Mistake(_contrast(lambda keys: keys, shifted=False), "Your negatives are this rank's own "
                "keys: with N ranks, each query sees one N-th of them. That is another loss, and "
                "no weight repairs it."),
        Mistake(_contrast(shifted=False), "The labels are not shifted: on rank r, the right keys "
                "stand in the columns from r·b on. As it is, all ranks claim rank 0's keys."),
        Mistake(_contrast(lambda keys: _with_gradient(keys).detach()), "The keys were gathered "
                "without their gradients, this rank's own included: the key encoder learns "
                "nothing. `dist.all_gather` is invisible to autograd."),
        Mistake(_contrast(SumOverRanks.apply, shifted=False), "You added the ranks' keys up: b "
                "rows that are nobody's keys. A sum gathers only if each rank's keys have rows of "
                "their own, which are zeros on all other ranks."),
        Mistake(_contrast(lambda keys: torch.cat([keys, _with_gradient(keys)]), shifted=False),
                "This rank's own keys stand among all ranks' keys a second time, as negatives of "
                "themselves. Take the gathered keys alone; the labels say which are the own."),
        Mistake(_without_the_right_key, "The right key is missing from the sum below: all keys of "
                "the batch stand there, the query's own included, as in a cross-entropy."),
        Mistake(_contrast(_own_put_back), "Only this rank's own keys carry a gradient; those of "
                "other ranks count as constants. But a key takes part in *every* rank's loss as a "
                "negative, and these gradients are lost: gather in a way that autograd sees."),
        Mistake(_everyones_loss, "Every rank computes the whole loss, with only its own rows "
                "carrying a gradient. These are right, but each rank brings its own part only, so "
                "DDP's average makes the gradients N times too small. Compute this rank's queries "
                "against all keys, with a gather that autograd sees."),
        Mistake(lambda *given: dist.get_world_size() * _everyones_loss(*given), "The gradients "
                "are right. But every rank computes the loss of all queries, and returns N times "
                "its value. Compute this rank's queries alone, against all keys, with a gather "
                "that autograd sees."),
        Mistake(_contrast(reduction="sum"), "You summed over the queries. The loss is their mean: "
                "the gradients are as many times too large as a rank has queries."),
        Mistake(_contrast(factor=dist.get_world_size), "You multiplied by the number of ranks. The "
                "global loss is the plain mean of the ranks' means, and DDP takes that mean."),
        Mistake(_contrast(factor=lambda: 1 / dist.get_world_size()), "You divided by the number of "
                "ranks, and DDP does so again: the gradients are N times too small."),
        Mistake(_contrast(scale=lambda temperature: 1), "The products are not divided by the "
                "temperature."),
        Mistake(_contrast(scale=lambda temperature: temperature), "You multiplied the products by "
                "the temperature. Divide them by it."),
        Mistake(_of_keys, "You compare each key with all queries. Here each query looks for its "
                "key: own queries, gathered keys, `queries @ all_keys.T`."),
        Mistake(_symmetric, "This is the mean of both directions, as for images and their texts. "
                "Here queries look for keys, and no more."),
    )

    def trial(self, attempt):
        model = DistributedDataParallel(_TwoTowers())
        loss = attempt(*model(_pairs(dist.get_rank())), 0.3)
        return _after_backward(model.module, loss)

    def expected(self, world_size):
        model = _TwoTowers()
        queries, keys = model(torch.cat([_pairs(rank) for rank in range(world_size)]))
        loss = F.cross_entropy(queries @ keys.T / 0.3, torch.arange(len(keys)))
        return _after_backward(model, loss)


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
    return torch.cat([first, first + 0.3 * torch.randn(5, 4, generator=generator)], dim=1)


EXERCISES = (AverageUnequalParts, TokenLossForDDP, ContrastiveLoss)
