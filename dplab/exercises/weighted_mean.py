"""A loss whose average over ranks is the mean over all tokens, however many each rank has."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import gradients, reduced


def loss_for_ddp(logits, targets):
    total = (targets != -100).sum()
    dist.all_reduce(total)
    summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return dist.get_world_size() * summed / total


def by_its_share(logits, targets):
    """The same from this rank's own mean: its weight is its share of the tokens."""
    own = (targets != -100).sum()
    all_ranks = own.clone()
    dist.all_reduce(all_ranks)
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    mean = each.sum() / own.clamp(min=1)
    return dist.get_world_size() * (own / all_ranks) * mean


class WeightedMean(Exercise):
    number = "2.1"
    title = "A loss that DDP may average"
    minutes = 15
    solution = staticmethod(loss_for_ddp)
    also_right = (by_its_share,)

    def trial(self, attempt):
        model = DistributedDataParallel(language_model())
        inputs, targets = text_of(dist.get_rank())
        return after_backward(model.module, attempt(model(inputs), targets))

    def expected(self, world_size):
        model = language_model()
        counts, sums = of_ranks(world_size, model)
        return after_backward(model, sum(sums) / sum(counts))

    def quantities(self, world_size, rank):
        every = [text_of(other)[1] for other in range(world_size)]
        quantities = {"the ranks": world_size}
        for whose, texts in {"this rank's": [every[rank]], "all ranks'": every}.items():
            quantities |= {f"{whose} tokens": sum((each != -100).sum().item() for each in texts),
                           f"{whose} positions": sum(each.numel() for each in texts),
                           f"{whose} sequences": sum(len(each) for each in texts)}
        return {name: number for name, number in quantities.items() if number}

    def parts(self, world_size, rank):
        """What the tokens of each rank that has some bring to a gradient."""
        parts = {}
        for other in range(world_size):
            model = language_model()
            counts, sums = of_ranks(world_size, model)
            if counts[other]:
                (sums[other] / sum(counts)).backward()
                for fact, gradient in gradients(model).items():
                    parts.setdefault(fact, {})[f"the part of rank {other}'s tokens"] = gradient
        return parts

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
    slips = (
        Slip("This is the mean over this rank's tokens, and DDP's average gives every rank the "
             "same say, however few tokens it has. What should one token weigh, and what does it "
             "weigh now, on a rank with many tokens and on one with few?",
             {"dist.all_reduce(total)": "", "dist.get_world_size() * summed": "summed"},
             {"dist.get_world_size() * (own / all_ranks) *": ""}),
        Slip("The gradients come out N times too small. The tokens of all ranks are the only "
             "divisor of the mean. Who else divides, and what in your loss undoes that?",
             {"dist.get_world_size() * summed": "summed"},
             {"dist.get_world_size() * ": "", ".clamp(min=1)": ""}),
        Slip("You divided by the number of ranks, and DDP does so again: the gradients come out N² "
             "times too small. How often does N divide in the mean over all tokens?",
             {"dist.get_world_size() * summed": "summed / dist.get_world_size()"}),
        Slip("The gradients come out N times too large: the factor N is in the loss twice. (A "
             "count *averaged* over the ranks holds it already.)",
             {"dist.get_world_size() * summed": "dist.get_world_size() ** 2 * summed"}),
        Slip("This is N times the mean over this rank's own tokens: all ranks still have the same "
             "weight, and the gradients are about N times too large. By what must the sum over a "
             "rank's tokens be divided? (If you do divide by that: an all-reduce overwrites its "
             "tensor. Is this rank's own count still there?)", {"dist.all_reduce(total)": ""},
             {"(own / all_ranks) * ": ""}),
        Slip("This is right where each rank has tokens. On a rank without any, the mean is 0/0, "
             "which is nan, and a weight of 0 does not help: 0 · nan is nan. What of such a rank "
             "is 0 without a division?", {".clamp(min=1)": ""}),
        Slip("You counted padding too. The loss leaves out targets of -100, so count those that "
             "are not -100.",
             {"total = (targets != -100).sum()": "total = torch.tensor(targets.numel())"},
             {"own = (targets != -100).sum()": "own = torch.tensor(targets.numel())",
              "each.sum()": "own / (targets != -100).sum() * each.sum()"}),
        Slip("Two things: you counted padding too, so count the targets that are not -100. And "
             "DDP's average divides once more: what in your loss undoes that?",
             {"total = (targets != -100).sum()": "total = torch.tensor(targets.numel())",
              "dist.get_world_size() * summed": "summed"}),
        Slip("You divided by the number of positions, padding too, and by this rank's alone. Count "
             "the targets that are not -100, on all ranks.",
             {"dist.get_world_size() * summed / total": "summed / targets.numel()"}),
        Slip("You leave out the token 0, or do not count it. It is a token like others; what is "
             "left out is -100.", {"total = (targets != -100)": "total = (targets > 0)"},
             {"total = (targets": "targets = targets.masked_fill(targets == 0, -100)\n"
                                  "total = (targets"}),
        Slip("You counted the targets that are not 0. Padding is -100 here, and 0 is a token like "
             "others: count the targets that are not -100.",
             {"total = (targets != -100)": "total = (targets != 0)"}),
        Slip("No gradient reaches the model: what you return is cut off from the graph. `.item()`, "
             "`.detach()`, `torch.tensor(loss)` and `no_grad` do that.",
             {"summed / total": "summed.detach() / total"},
             {"summed / total": "summed.item() / total.item()"}),
        Slip("You return the sum over this rank's tokens. DDP's average divides by the number of "
             "ranks, and nobody divides by the number of tokens.",
             {"dist.get_world_size() * summed / total": "summed"}),
        Slip("You undid DDP's division by N, so this is the sum over the tokens of all ranks. A "
             "mean also divides by their number.", {"summed / total": "summed"}),
        Slip("You count sequences. The mean is over tokens: count the targets that are not -100.",
             {"total = (targets != -100).sum()": "total = torch.tensor(len(targets))"},
             {"own / all_ranks": "len(targets) / reduced(torch.tensor(len(targets)))",
              ".clamp(min=1)": ""},
             {"own / all_ranks": "len(targets) / reduced(torch.tensor(len(targets)))"}),
        Slip("You gave the *sum* over this rank's tokens the weight of its share. The share is for "
             "the mean; of the sum, divide by the tokens of all ranks.",
             {"each.sum() / own.clamp(min=1)": "each.sum()"}),
        Slip("This is the mean over sequences of their means, so that a token in a short sequence "
             "counts more. Sum over all tokens first, and divide once.",
             *({"each.sum() / own.clamp(min=1)":
                "(each.sum(dim=1) / (targets != -100).sum(dim=1)).mean()",
                "dist.get_world_size() * (own / all_ranks) *": weight}
               for weight in ("", "dist.get_world_size() * len(targets) / "
                                  "reduced(torch.tensor(len(targets))) *"))),
        Slip("You divided as if every rank had as many tokens as the one with the most, or by that "
             "count alone. Sum the ranks' own counts.",
             *({"dist.all_reduce(total)": "dist.all_reduce(total, op=dist.ReduceOp.MAX)",
                "dist.get_world_size() * summed": summed}
               for summed in ("summed", "dist.get_world_size() * summed"))),
        Slip("You divide by a mean count that was rounded to a whole number. Divide by the exact "
             "one: `/` in place of `//`.",
             {"dist.get_world_size() * summed / total":
              "summed / (total // dist.get_world_size())"}),
        Slip("`reduce` gives the total to rank 0 alone; the others divide by something else. Every "
             "rank needs it: `all_reduce`.",
             {"dist.all_reduce(total)": "dist.reduce(total, dst=0)"}),
        Slip("Your loss has the value of all ranks' tokens, but autograd does not see what other "
             "ranks send: `backward` follows this rank's own tokens, and DDP's average makes that "
             "N times too small. What has to come from other ranks, and needs no gradient?",
             {"dist.get_world_size() * summed": "reduced(summed)"}),
        Slip("The gradients are right, and the value is N times too large: you summed the losses "
             "over the ranks, and multiplied that by N. The mean over the ranks of N times their "
             "own sums is the sum already.",
             {"* summed /": "* reduced(summed) /"}),
        Slip("You averaged the ranks' means. That changes the value, but autograd does not see "
             "what other ranks send: `backward` follows this rank's own mean, its weight as wrong "
             "as before. What has to come from other ranks, and needs no gradient?",
             {"dist.get_world_size() * (own / all_ranks) * mean":
              "reduced(mean) / dist.get_world_size()", ".clamp(min=1)": ""},
             {"dist.get_world_size() * (own / all_ranks) * mean":
              "reduced(mean) / dist.get_world_size()"}),
        Slip("A rank without tokens leaves before the all-reduce of the counts, and the others "
             "wait for it. It has a count, which is 0, and makes every call all the same.",
             {"total = (targets != -100).sum()":
              "total = (targets != -100).sum()\nif total == 0:\n    return 0 * logits.sum()"}),
        Slip("The rank without tokens returns a zero that does not come from its model. DDP "
             "averages from inside `backward`, and this rank's `backward` never reaches the model: "
             "the others wait for its gradients. Return a zero that comes from the logits: the "
             "summed loss of no tokens is such a zero.",
             {"return dist": "if summed == 0:\n    return torch.zeros((), requires_grad=True)\n"
                             "return dist"}),
    )


def after_backward(model, loss):
    """The gradients, and the mean over the ranks of their losses: in one process, the loss."""
    loss.backward()
    logged = loss.detach().squeeze()
    if dist.is_initialized():
        logged = reduced(logged.clone()) / dist.get_world_size()
    return {**gradients(model), "the mean over the ranks of what they return": logged}


def language_model():
    torch.manual_seed(6)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))


def text_of(rank):
    """Rank r's sequences, tokens and the ones that follow them; padded behind their ends.

    Rank 2's have no token, and rank 3 has no sequence.
    """
    lengths = ((8, 4, 1), (2, 5), (0, 0), ())[rank]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(1, 11, (len(lengths), max(lengths, default=0) + 3), generator=generator)
    ids[:, 0] = 0  # a start that all share, so that no gradient begins with zeros
    ids[:1, 1] = 0  # and a target
    targets = ids[:, 1:].clone()
    for row, length in zip(targets, lengths, strict=True):
        row[length:] = -100
    return ids[:, :-1], targets


def of_ranks(world_size, model):
    """By rank: its number of tokens, and the sum over them."""
    texts = [text_of(rank) for rank in range(world_size)]
    return ([(targets != -100).sum().item() for _, targets in texts],
            [F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
             for inputs, targets in texts])
