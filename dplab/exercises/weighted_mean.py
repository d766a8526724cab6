"""Exercise 2.1: a loss that DDP may average."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import gradients, reduced

PADDING = -100


def after_backward(model, loss):
    """The gradients, and the mean over the ranks of their losses: in one process, the loss."""
    loss.backward()
    logged = loss.detach().squeeze()
    if dist.is_initialized():
        logged = reduced(logged.clone()) / dist.get_world_size()
    return {**gradients(model), "the mean over the ranks of what they return": logged}


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
    number = "2.1"
    title = "A loss that DDP may average"
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
