"""Exercises of chapter 02: why averaging gradients is right, and where it is not."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.exercises.exercise import Exercise, Mistake
from dplab.exercises.trials import gradients, reduced

PADDING = -100


def after_backward(model, loss):
    """The gradients, and the mean over the ranks of their losses: in one process, the loss."""
    loss.backward()
    logged = loss.detach().squeeze()
    if dist.is_initialized():
        logged = reduced(logged.clone()) / dist.get_world_size()
    return {**gradients(model), "the mean over the ranks of what they return": logged}


# 2.1: the mean over the tokens of all ranks, although DDP gives every rank the same weight


def loss_for_ddp(logits, targets):
    total = (targets != -100).sum()
    dist.all_reduce(total)
    summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return dist.get_world_size() * summed / total


# What learners write. First, the words that they need: the sum and the mean over this rank's
# tokens, its number of tokens, and the sum of a number over the ranks.


def own_sum(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def own_mean(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(targets):
    return (targets != PADDING).sum()


def of_all_ranks(number):
    return reduced(torch.as_tensor(number).clone())


def own_mean_without_nan(logits, targets):
    return own_sum(logits, targets) / tokens(targets).clamp(min=1)


def without_the_factor(logits, targets):
    return own_sum(logits, targets) / of_all_ranks(tokens(targets))


def share_without_the_factor(logits, targets):
    own = tokens(targets)
    return own / of_all_ranks(own) * own_mean(logits, targets)


def divided_by_the_ranks_too(logits, targets):
    return own_sum(logits, targets) / of_all_ranks(tokens(targets)) / dist.get_world_size()


def factor_twice(logits, targets):
    mean_count = of_all_ranks(tokens(targets)) / dist.get_world_size()
    return dist.get_world_size() * own_sum(logits, targets) / mean_count


def factor_before_own_mean(logits, targets):
    return dist.get_world_size() * own_mean(logits, targets)


def count_was_overwritten(logits, targets):
    own = total = tokens(targets)
    dist.all_reduce(total)
    return dist.get_world_size() * own / total * own_mean(logits, targets)


def share_of_nothing(logits, targets):
    own = tokens(targets)
    share = own / of_all_ranks(own)
    return dist.get_world_size() * share * own_mean(logits, targets)


def padding_counted(logits, targets):
    positions = of_all_ranks(targets.numel())
    return dist.get_world_size() * own_sum(logits, targets) / positions


def padding_counted_without_the_factor(logits, targets):
    return own_sum(logits, targets) / of_all_ranks(targets.numel())


def divided_by_own_positions(logits, targets):
    return own_sum(logits, targets) / targets.numel()


def share_of_positions(logits, targets):
    share = targets.numel() / of_all_ranks(targets.numel())
    return dist.get_world_size() * share * own_mean(logits, targets)


def share_of_sequences(logits, targets):
    share = len(targets) / of_all_ranks(len(targets))
    return dist.get_world_size() * share * own_mean(logits, targets)


def share_of_the_sum(logits, targets):
    own = tokens(targets)
    return dist.get_world_size() * own / of_all_ranks(own) * own_sum(logits, targets)


def token_0_left_out(logits, targets):
    return loss_for_ddp(logits, targets.masked_fill(targets == 0, PADDING))


def token_0_not_counted(logits, targets):
    total = of_all_ranks((targets > 0).sum())
    return dist.get_world_size() * own_sum(logits, targets) / total


def padding_taken_for_0(logits, targets):
    total = of_all_ranks((targets != 0).sum())
    return dist.get_world_size() * own_sum(logits, targets) / total


def largest_count_for_all(logits, targets):
    largest = tokens(targets)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return own_sum(logits, targets) / largest


def largest_count_as_the_total(logits, targets):
    return dist.get_world_size() * largest_count_for_all(logits, targets)


def whole_mean_count(logits, targets):
    mean_count = of_all_ranks(tokens(targets)) // dist.get_world_size()
    return own_sum(logits, targets) / mean_count


def own_sum_times_ranks(logits, targets):
    return dist.get_world_size() * own_sum(logits, targets)


def count_on_rank_0_only(logits, targets):
    total = tokens(targets)
    dist.reduce(total, dst=0)
    return dist.get_world_size() * own_sum(logits, targets) / total


def cut_off(logits, targets):
    return own_sum(logits, targets).detach()


def a_number(logits, targets):
    return loss_for_ddp(logits, targets).item()


def mean_of_sequence_means(logits, targets):
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each.sum(dim=1) / (targets != PADDING).sum(dim=1)).mean()


def share_of_sequences_and_their_means(logits, targets):
    share = len(targets) / of_all_ranks(len(targets))
    return dist.get_world_size() * share * mean_of_sequence_means(logits, targets)


def all_reduced_loss(logits, targets):
    loss = own_sum(logits, targets)
    dist.all_reduce(loss.data)
    return loss / of_all_ranks(tokens(targets))


def all_reduced_loss_times_ranks(logits, targets):
    return dist.get_world_size() * all_reduced_loss(logits, targets)


def all_reduced_mean(logits, targets):
    loss = own_mean(logits, targets)
    dist.all_reduce(loss.data)
    return loss / dist.get_world_size()


def zero_that_is_not_of_the_model(logits, targets):
    loss = loss_for_ddp(logits, targets)
    return loss if tokens(targets) else torch.zeros((), requires_grad=True)


def leaves_without_tokens(logits, targets):
    if tokens(targets) == 0:
        return 0 * logits.sum()
    return loss_for_ddp(logits, targets)


OWN_MEAN = ("This is the mean over this rank's tokens, and DDP's average gives every rank the same "
            "say, however few tokens it has. What should one token weigh, and what does it weigh "
            "now, on a rank with many tokens and on one with few?")
NO_FACTOR = ("The gradients come out N times too small. The tokens of all ranks are the only "
             "divisor of the mean. Your loss has it. Who else divides, and what in your loss "
             "undoes that?")
N_OWN_MEANS = ("This is N times the mean over this rank's own tokens: all ranks still have the "
               "same weight, and the gradients are about N times too large. By what must the sum "
               "over a rank's tokens be divided? (If you do divide by that: an all-reduce "
               "overwrites its tensor. Is this rank's own count still there?)")
TOKEN_0 = ("You leave out the token 0, or do not count it. It is a token like others; what is left "
           "out is -100.")
CUT_OFF = ("No gradient reaches the model: what you return is cut off from the graph. `.item()`, "
           "`.detach()`, `torch.tensor(loss)` and `no_grad` do that.")
SEQUENCE_MEANS = ("This is the mean over sequences of their means, so that a token in a short "
                  "sequence counts more. Sum over all tokens first, and divide once.")


class WeightedMean(Exercise):
    slug = "weighted-mean"
    number = "2.1"
    title = "A loss that DDP may average"
    name = "loss_for_ddp"
    minutes = 15
    hints = (
        "Take two ranks, one with three tokens and one with one. What should each of the four "
        "tokens weigh in the gradient? What does each weigh if both ranks return their own mean?",
        "Write down the gradient that you want: a sum over tokens, divided by a number. Below it, "
        "write what DDP makes of the ranks' losses. What must this rank's loss be, so that both "
        "are equal? Which number in it does no rank know alone?",
        "`(targets != -100).sum()` counts, and `dist.all_reduce` makes it the count of all ranks. "
        "`F.cross_entropy(..., reduction=\"sum\")` leaves out targets of -100 by itself; flatten "
        "sequences and positions before. Multiply by the world size, since DDP divides by it.",
    )
    solution = staticmethod(loss_for_ddp)
    mistakes = (
        Mistake(own_mean, OWN_MEAN),
        Mistake(own_mean_without_nan, OWN_MEAN),
        Mistake(without_the_factor, NO_FACTOR),
        Mistake(share_without_the_factor, NO_FACTOR),
        Mistake(divided_by_the_ranks_too, "You divided by the number of ranks, and DDP does so "
                "again: the gradients come out N² times too small. The tokens of all ranks are the "
                "only divisor of the mean, and a factor N has to undo DDP's division."),
        Mistake(factor_twice, "The gradients come out N times too large: the factor N is in the "
                "loss twice. (A count *averaged* over the ranks holds it already.)"),
        Mistake(factor_before_own_mean, N_OWN_MEANS),
        Mistake(count_was_overwritten, N_OWN_MEANS),
        Mistake(share_of_nothing, "This is right where each rank has tokens. On a rank without "
                "any, the mean is 0/0, which is nan, and a weight of 0 does not help: 0 · nan is "
                "nan. Take the sum, which is 0 there, and divide it by the tokens of all ranks."),
        Mistake(padding_counted, "You counted padding too. The loss leaves out targets of -100, so "
                "count those that are not -100."),
        Mistake(padding_counted_without_the_factor, "Two things: you counted padding too, so count "
                "the targets that are not -100. And DDP's average divides once more: what in your "
                "loss undoes that?"),
        Mistake(divided_by_own_positions, "You divided by the number of positions, padding too, "
                "and by this rank's alone. Count the targets that are not -100, on all ranks."),
        Mistake(share_of_positions, "You weighted the ranks by their numbers of positions, padding "
                "too. The weight is the share of the targets that are not -100."),
        Mistake(token_0_left_out, TOKEN_0),
        Mistake(token_0_not_counted, TOKEN_0),
        Mistake(padding_taken_for_0, "You counted the targets that are not 0. Padding is -100 "
                "here, and 0 is a token like others: count the targets that are not -100."),
        Mistake(cut_off, CUT_OFF),
        Mistake(a_number, CUT_OFF),
        Mistake(own_sum, "You return the sum over this rank's tokens. DDP's average divides by "
                "the number of ranks, and nobody divides by the number of tokens."),
        Mistake(own_sum_times_ranks, "You undid DDP's division by N, so this is the sum over the "
                "tokens of all ranks. A mean also divides by their number."),
        Mistake(share_of_sequences, "You weighted the ranks by their numbers of sequences. The "
                "mean is over tokens: the weight is the share of the *tokens*."),
        Mistake(share_of_the_sum, "You gave the *sum* over this rank's tokens the weight of its "
                "share. The share is for the mean; of the sum, divide by the tokens of all ranks."),
        Mistake(mean_of_sequence_means, SEQUENCE_MEANS),
        Mistake(share_of_sequences_and_their_means, SEQUENCE_MEANS),
        *(Mistake(attempt, "You divided as if every rank had as many tokens as the one with the "
                  "most, or by that count alone. Sum the ranks' own counts.")
          for attempt in (largest_count_for_all, largest_count_as_the_total)),
        Mistake(whole_mean_count, "You divide by a mean count that was rounded to a whole number. "
                "Divide by the exact one: `/` in place of `//`."),
        Mistake(count_on_rank_0_only, "`reduce` gives the total to rank 0 alone; the others divide "
                "by something else. Every rank needs it: `all_reduce`."),
        Mistake(all_reduced_loss, "Your loss has the value of all ranks' tokens, but autograd "
                "does not see what other ranks send: `backward` follows this rank's own tokens, "
                "and DDP's average makes that N times too small. Communicate the *count* alone, "
                "and multiply this rank's own sum by N."),
        Mistake(all_reduced_loss_times_ranks, "The gradients are right, and the value is N times "
                "too large: you summed the losses over the ranks, and multiplied that by N. "
                "Communicate the *count* alone. The mean over the ranks of N times their own sums "
                "is the sum already."),
        Mistake(all_reduced_mean, "You averaged the ranks' means. That changes the value, but "
                "autograd does not see what other ranks send: `backward` follows this rank's own "
                "mean, its weight as wrong as before. Communicate the *count* alone, and divide "
                "this rank's own sum by it."),
        Mistake(leaves_without_tokens, "A rank without tokens leaves before the all-reduce of the "
                "counts, and the others wait for it. It has a count, which is 0, and makes every "
                "call all the same."),
        Mistake(zero_that_is_not_of_the_model, "The rank without tokens returns a zero that does "
                "not come from its model. DDP averages from inside `backward`, and this rank's "
                "`backward` never reaches the model: the others wait for its gradients. Return "
                "a zero that comes from the logits: the summed loss of no tokens is such a zero."),
    )

    def quantities(self, world_size, rank):
        targets = [_text(other)[1] for other in range(world_size)]
        counts = [tokens(each).item() for each in targets]
        return {"the ranks": world_size, "this rank's tokens": counts[rank],
                "the tokens of all ranks": sum(counts), "the most tokens of a rank": max(counts),
                "this rank's sequences": len(targets[rank]),
                "the sequences of all ranks": sum(map(len, targets))}

    def trial(self, attempt):
        model = DistributedDataParallel(_language_model())
        inputs, targets = _text(dist.get_rank())
        loss = attempt(model(inputs), targets)
        return after_backward(model.module, loss)

    def expected(self, world_size):
        model = _language_model()
        parts = [_text(rank) for rank in range(world_size)]
        total = sum(tokens(targets) for _, targets in parts)
        loss = sum(own_sum(model(inputs), targets) for inputs, targets in parts) / total
        return after_backward(model, loss)


def _language_model():
    torch.manual_seed(6)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))


def _text(rank):
    """Rank r's sequences, tokens and the ones that follow them; padded behind their ends.

    All of rank 3's are empty.
    """
    lengths = ((8, 4, 1), (2, 5), (9,), (0, 0))[rank]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(1, 11, (len(lengths), max(lengths) + 3), generator=generator)
    ids[:, 0] = 0  # a start that all share, so that no gradient begins with zeros
    ids[0, 1] = 0  # and a target
    targets = ids[:, 1:].clone()
    for row, length in zip(targets, lengths, strict=True):
        row[length:] = PADDING
    return ids[:, :-1], targets


# 2.2: every rank's loss depends on the sum, so every rank's gradient goes back through it


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


# What learners write. Most of them have the right forward, and another backward.


class PassesOwnGradientOn(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        return gradient


class AveragesTheGradients(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        return of_all_ranks(gradient) / dist.get_world_size()


class MultipliesOwnGradient(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        return dist.get_world_size() * gradient


class DividesOwnGradient(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        return gradient / dist.get_world_size()


class SumTimesRanks(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        return dist.get_world_size() * of_all_ranks(gradient)


class AddsOwnGradientAgain(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        return gradient + of_all_ranks(gradient)


class OnlyTheOthers(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        return of_all_ranks(gradient) - gradient


class GivesTheSum(SumOverRanks):
    @staticmethod
    def forward(context, x):
        context.total = of_all_ranks(x)
        return context.total.clone()

    @staticmethod
    def backward(context, gradient):
        return context.total


class GivesZeros(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        return torch.zeros_like(gradient)


class SumsTheElements(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        return gradient.sum().expand_as(gradient)


class GivesOnes(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        return torch.ones_like(gradient)


class TimesTheInput(SumOverRanks):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return of_all_ranks(x)

    @staticmethod
    def backward(context, gradient):
        return of_all_ranks(gradient) * context.saved_tensors[0]


class OwnGradientTimesTheInput(TimesTheInput):
    @staticmethod
    def backward(context, gradient):
        return gradient * context.saved_tensors[0]


class NoGradient(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        of_all_ranks(gradient)


class InPlaceOnTheGradient(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        dist.all_reduce(gradient)
        return gradient


class InPlaceOnTheInput(SumOverRanks):
    @staticmethod
    def forward(context, x):
        dist.all_reduce(x)
        return x.clone()


class ReturnsNothing(SumOverRanks):
    @staticmethod
    def forward(context, x):
        return dist.all_reduce(x.clone())


class SumOnRank0(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        total = gradient.clone()
        dist.reduce(total, dst=0)
        return total


class GradientOfRank0(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.broadcast(gradient, src=0)
        return gradient


class OnlyRank0Calls(SumOverRanks):
    @staticmethod
    def backward(context, gradient):
        return of_all_ranks(gradient) if dist.get_rank() == 0 else gradient


class ForwardOfOneRank(SumOverRanks):
    @staticmethod
    def forward(context, x):
        return x.clone()


class ForwardAverages(SumOverRanks):
    @staticmethod
    def forward(context, x):
        return of_all_ranks(x) / dist.get_world_size()


class AMeanThroughout(ForwardAverages, AveragesTheGradients):
    pass


class SumOverRanksExercise(Exercise):
    slug = "sum-over-ranks"
    number = "2.2"
    title = "The backward of a sum over ranks"
    name = "SumOverRanks"
    minutes = 8
    hints = (
        "In the example, what is the gradient of rank 1's x, and of which two numbers is it made? "
        "Which of the two does rank 1 have when its `backward` is called?",
        "Each rank's loss depends on the total, and the total on this rank's x. So all ranks' "
        "losses have a part in the gradient of x, and rank r's `backward` is handed only the part "
        "of loss r.",
        "`backward` does with `gradient` what `forward` does with `x`: copy it, all-reduce the "
        "copy, return the copy. There is no factor.",
    )
    solution = SumOverRanks
    mistakes = (
        Mistake(PassesOwnGradientOn, "`backward` passes on this rank's own gradient. That is what "
                "this rank's loss wants of x. The other ranks' losses depend on the total too, and "
                "so on this x: their gradients are missing."),
        Mistake(AveragesTheGradients, "`backward` takes the mean of the ranks' gradients. The "
                "gradient asked for is that of the *sum* of the losses, and the total changes by "
                "as much as x does: there is nothing to divide by."),
        Mistake(MultipliesOwnGradient, "`backward` multiplies this rank's gradient by N, as if all "
                "ranks had the same loss. Each has a loss of its own, and so a gradient of its "
                "own: they have to be communicated."),
        Mistake(DividesOwnGradient, "`backward` divides this rank's gradient by N. The total "
                "changes by as much as x does, not by an N-th of it. And the other ranks' losses "
                "depend on this x too: their gradients are missing."),
        Mistake(SumTimesRanks, "The gradients are added up, and then multiplied by N once more. "
                "Each rank's gradient counts once."),
        Mistake(AddsOwnGradientAgain, "This rank's gradient is in the result twice: the sum over "
                "all ranks has it already."),
        Mistake(OnlyTheOthers, "The other ranks' gradients are added up, and this rank's own is "
                "missing: its loss depends on its x, too."),
        Mistake(GivesTheSum, "`backward` returns what `forward` returned. It is handed the "
                "gradient of the total, and has to return the gradient of x, not a value."),
        Mistake(GivesZeros, "`backward` returns zeros: no loss reaches x. Every rank's loss "
                "depends on the total, and the total on x."),
        Mistake(SumsTheElements, "You added up the elements of this rank's gradient. Element i of "
                "the total depends on element i of each rank's x, and on no other element."),
        Mistake(GivesOnes, "`backward` returns ones, which is the derivative of the total by x. By "
                "the chain rule this is multiplied by what arrives: the gradients of the losses by "
                "the total."),
        *(Mistake(attempt, "`backward` multiplies by x. That is the chain rule of a product or a "
                  "square. A sum changes by as much as x does, whatever x is.")
          for attempt in (TimesTheInput, OwnGradientTimesTheInput)),
        Mistake(NoGradient, "`backward` returns None, so no gradient reaches x. (An all-reduce "
                "returns None too: it leaves the sum in the tensor that it gets.)"),
        Mistake(InPlaceOnTheGradient, "The gradient of x is right. But `backward` overwrites the "
                "tensor that it was handed, and autograd gives the same tensor to other parts of "
                "the graph: theirs is wrong now. All-reduce a copy."),
        Mistake(InPlaceOnTheInput, "`forward` overwrites x, which belongs to the caller: an "
                "all-reduce works in place. All-reduce a copy."),
        Mistake(ReturnsNothing, "`forward` returns None. An all-reduce returns None: it leaves the "
                "sum in the tensor that it gets. Return that tensor."),
        Mistake(SumOnRank0, "`reduce` gives the sum to rank 0 alone. Every rank has an x, so every "
                "rank needs it: `all_reduce`."),
        Mistake(GradientOfRank0, "Every rank gets the gradient of rank 0's loss. The losses of the "
                "other ranks depend on the total too: sum the gradients, `all_reduce`."),
        Mistake(OnlyRank0Calls, "Only rank 0 calls the collective in `backward`, and waits for "
                "ever. A collective is called by every rank.", hangs=True),
        Mistake(ForwardOfOneRank, "`forward` returns this rank's x alone: nothing was summed over "
                "the ranks."),
        Mistake(AMeanThroughout, "This is the mean over the ranks, forward and backward. The "
                "exercise asks for the sum."),
        Mistake(ForwardAverages, "`forward` divides by the number of ranks. The exercise asks for "
                "the sum."),
    )

    def trial(self, attempt):
        rank = dist.get_rank()
        own, x, other = _inputs(rank)
        before = x.detach().clone()
        total = attempt.apply(x)
        seen = total.detach().clone()
        untouched = torch.equal(x, before)
        _loss_of(rank, total + other).backward()
        return _facts(own, seen, untouched)

    def expected(self, world_size):
        inputs = [_inputs(rank) for rank in range(world_size)]
        total = sum(x for _, x, _ in inputs)
        losses = [_loss_of(rank, total + other) for rank, (_, _, other) in enumerate(inputs)]
        sum(losses).backward()
        return [_facts(own, total.detach(), True) for own, _, _ in inputs]


def _inputs(rank):
    """Rank r's own leaves, its x, and another term; all shapes are (3, 2)."""
    generator = torch.Generator().manual_seed(40 + rank)
    of_x, of_other = (torch.rand(3, 2, generator=generator).add(0.5).requires_grad_()
                      for _ in range(2))
    other = of_other.square()
    return (of_x, of_other), of_x.sin(), other


def _loss_of(rank, total):
    weights = torch.rand(3, 2, generator=torch.Generator().manual_seed(60 + rank)) + 0.5
    return (weights * total.square()).sum()


def _facts(own, total, untouched):
    of_x, of_other = own
    return {"the sum over the ranks": total, "that `forward` leaves its input as it is": untouched,
            "the gradient of a leaf behind x": of_x.grad,
            "the gradient of a term that was added to the sum": of_other.grad}


# 2.3: own queries against all keys; what others do to a key comes back through the gather


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
    slug = "contrastive-loss"
    number = "2.3"
    title = "A contrastive loss over the global batch"
    name = "contrastive_loss"
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


EXERCISES = (WeightedMean, SumOverRanksExercise, ContrastiveLoss)
