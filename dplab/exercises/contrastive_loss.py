"""A contrastive loss over the global batch: each query looks for its key among all ranks' keys."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import gradients, seeded
from dplab.exercises.sum_over_ranks import SumOverRanks
from dplab.exercises.weighted_mean import after_backward

MySum = SumOverRanks  # the chapter's name for it


def contrastive_loss(queries, keys, temperature):
    rank, b = dist.get_rank(), len(keys)
    parts = [torch.zeros_like(keys)] * dist.get_world_size()
    parts[rank] = keys  # (k₀, 0, 0) + (0, k₁, 0) + (0, 0, k₂) = (k₀, k₁, k₂)
    all_keys = MySum.apply(torch.cat(parts))
    labels = rank * b + torch.arange(b, device=keys.device)
    logits = queries @ all_keys.T / temperature
    return F.cross_entropy(logits, labels)


def in_rows_of_its_own(queries, keys, temperature):
    """The same with the keys put into one tensor, and the cross-entropy written out."""
    rank, ranks, b = dist.get_rank(), dist.get_world_size(), len(keys)
    rows = torch.arange(rank * b, (rank + 1) * b)
    placed = keys.new_zeros(ranks * b, keys.shape[1])
    placed[rows] = keys
    logits = queries @ MySum.apply(placed).T / temperature
    right = logits[torch.arange(b), rows]
    return (logits.logsumexp(dim=1) - right).mean()


def of_all_queries(queries, keys, temperature):
    """Every rank computes the loss of all ranks' queries."""
    def gathered(rows):
        parts = [torch.zeros_like(rows)] * dist.get_world_size()
        parts[dist.get_rank()] = rows
        return MySum.apply(torch.cat(parts))

    scores = gathered(queries) @ gathered(keys).T / temperature
    return F.cross_entropy(scores, torch.arange(len(scores)))


class ContrastiveLoss(Exercise):
    number = "2.4"
    title = "A contrastive loss over the global batch"
    minutes = 15
    solution = staticmethod(contrastive_loss)
    also_right = (in_rows_of_its_own, of_all_queries)

    def trial(self, attempt):
        model = DistributedDataParallel(TwoTowers())
        loss = attempt(*model(pairs_of(dist.get_rank())), 0.3)
        return after_backward(model.module, loss)

    def expected(self, world_size):
        model = TwoTowers()
        queries, keys = of_ranks(world_size, model)
        return after_backward(model, sum(losses_of(queries, keys)) / world_size)

    def quantities(self, world_size, rank):
        return {"the ranks": world_size, "a rank's queries": 5}

    def parts(self, world_size, rank):
        """Of each rank's loss, what goes to the queries, and what to each rank's keys."""
        parts = {}
        for asking in range(world_size):
            for asked in range(world_size):
                model = TwoTowers()
                queries, keys = of_ranks(world_size, model)
                keys = [each if other == asked else each.detach()
                        for other, each in enumerate(keys)]
                (losses_of(queries, keys)[asking] / world_size).backward()
                for fact, gradient in gradients(model).items():
                    way = f" through rank {asked}'s keys" if "keys" in fact else ""
                    name = f"the part of rank {asking}'s loss{way}"
                    parts.setdefault(fact, {})[name] = gradient
        return parts

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
    slips = (
        Slip("Your negatives are this rank's own keys: with N ranks, each query sees one N-th of "
             "them. That is another loss, and no weight repairs it.",
             {"MySum.apply(torch.cat(parts))": "keys", "rank * b + ": ""}),
        Slip("Every rank's labels name the first b columns, where rank 0's keys stand. In which "
             "columns do this rank's keys stand?", {"rank * b + ": ""}),
        Slip("The labels are shifted, and not by the right number. How many keys stand in front "
             "of rank r's?",
             {"rank * b + ": "rank + "}, {"rank * b + ": "rank * dist.get_world_size() + "}),
        Slip("All ranks put their keys into the same rows, where they are added up, and the other "
             "rows stay zero. Each rank's keys need rows of their own.",
             {"parts[rank]": "parts[0]"}, {"parts[rank]": "parts[0]", "rank * b + ": ""}),
        Slip("The keys stand in another order than your labels say: query i's own key is not in "
             "the column of its label. Look where you put rank r's key i.",
             {"parts[rank]": "parts[-1 - rank]"}, {"placed[rows]": "placed[rank::ranks]"}),
        Slip("The products are N times too small, as if the gathered keys were averaged. Every row "
             "has one owner and zeros from all others: their sum is the key itself.",
             {"all_keys.T": "all_keys.T / dist.get_world_size()"}),
        Slip("You compare the queries with the queries of all ranks. Gather the keys.",
             {"parts[rank] = keys": "parts[rank] = queries"}),
        Slip("The keys were gathered without their gradients, this rank's own included: the key "
             "encoder learns nothing. `dist.all_gather` is invisible to autograd.",
             {"parts[rank] = keys": "parts[rank] = keys.detach()"}),
        Slip("You added the ranks' keys up: b rows that are nobody's keys. A sum gathers only if "
             "each rank's keys have rows of their own, which are zeros on all other ranks.",
             {"MySum.apply(torch.cat(parts))": "MySum.apply(keys)", "rank * b + ": ""}),
        Slip("Row i of rank 0 and row i of rank 1 belong to two different queries, and you added "
             "them up. A query needs its products with the keys of the *other* ranks too: what has "
             "to travel?",
             *({"logits.logsumexp(dim=1)":
                f"{add}((queries @ keys.T / temperature).exp().sum(dim=1)).log()"}
               for add in ("MySum.apply", "reduced")),
             {"queries @ all_keys.T / temperature": "MySum.apply(queries @ keys.T / temperature)",
              "rank * b + ": ""}),
        Slip("`torch.zeros` makes float32, and the queries and keys have another dtype here. "
             "`keys.new_zeros(…)` takes the dtype and the device of the keys.",
             {"keys.new_zeros(": "torch.zeros("}),
        Slip("This rank's own keys stand among all ranks' keys a second time, as negatives of "
             "themselves. Take the gathered keys alone; the labels say which are the own.",
             {"MySum.apply(torch.cat(parts))": "torch.cat([keys, MySum.apply(torch.cat(parts))])",
              "rank * b + ": ""}),
        Slip("The right key is missing from the sum below: all keys of the batch stand there, the "
             "query's own included, as in a cross-entropy.",
             {"logits.logsumexp(dim=1)":
              "logits.scatter(1, rows[:, None], float('-inf')).logsumexp(dim=1)"}),
        Slip("Only this rank's own keys carry a gradient; those of other ranks count as constants. "
             "(A plain collective has no backward of its own.) But a key takes part in *every* "
             "rank's loss as a negative, and these gradients are lost: gather in a way that "
             "autograd sees.",
             {"all_keys = MySum.apply(torch.cat(parts))":
              "all_keys = torch.cat(parts)\ndist.all_reduce(all_keys)"}),
        Slip("A key gets a gradient as the right key of its own query, above, and none from the "
             "sum below, where all gathered keys count as constants, this rank's own too. "
             "(`dist.all_gather` has no gradient.) Every query's sum depends on every key: gather "
             "in a way that autograd sees.",
             {"MySum.apply(placed)": "MySum.apply(placed).detach()",
              "logits[torch.arange(b), rows]": "(queries * keys).sum(dim=1) / temperature"}),
        Slip("Every rank computes the whole loss, with only its own rows carrying a gradient. "
             "These are right, but each rank brings its own part only, so DDP's average makes the "
             "gradients N times too small. Compute this rank's queries against all keys, with a "
             "gather that autograd sees.",
             {"return MySum.apply(torch.cat(parts))":
              "whole = torch.cat(parts)\ndist.all_reduce(whole)\nreturn whole"}),
        Slip("The gradients are right. But every rank computes the loss of all queries, and "
             "returns N times its value. Compute this rank's queries alone, against all keys, with "
             "a gather that autograd sees.",
             {"return MySum.apply(torch.cat(parts))":
              "whole = torch.cat(parts)\ndist.all_reduce(whole)\nreturn whole",
              "F.cross_entropy(scores": "dist.get_world_size() * F.cross_entropy(scores"}),
        Slip("You summed over the queries. The loss is their mean: the gradients are as many times "
             "too large as a rank has queries.",
             {"(logits, labels)": '(logits, labels, reduction="sum")'}),
        Slip("The loss is N times too large, by a factor or by a sum over the ranks. The global "
             "loss is the plain mean of the ranks' means, and DDP takes that mean.",
             {"return F.cross_entropy(logits":
              "return dist.get_world_size() * F.cross_entropy(logits"}),
        Slip("You divided by the number of ranks, and DDP does so again: the gradients are N times "
             "too small.",
             {"return F.cross_entropy(logits":
              "return 1 / dist.get_world_size() * F.cross_entropy(logits"}),
        Slip("The products are not divided by the temperature.",
             {"all_keys.T / temperature": "all_keys.T"}),
        Slip("You multiplied the products by the temperature. Divide them by it.",
             {"all_keys.T / temperature": "all_keys.T * temperature"}),
        Slip("You compare each key with all queries. Here each query looks for its key: this "
             "rank's queries, all ranks' keys.",
             {"parts[rank] = keys": "parts[rank] = queries", "queries @": "keys @"}),
        Slip("You gathered the queries. Every query needs the keys of all ranks, and you compare "
             "it with this rank's alone: gather the keys.",
             {"parts[rank] = keys": "parts[rank] = queries",
              "queries @ all_keys": "all_keys @ keys",
              "rank * b + torch.arange(b, device=keys.device)":
              "torch.arange(b).repeat(dist.get_world_size())"}),
        Slip("This is the mean of both directions, as for images and their texts. Here queries "
             "look for keys, and no more.",
             {"return F.cross_entropy(scores, torch.arange(len(scores)))":
              "labels = torch.arange(len(scores))\n"
              "return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2"}),
    )


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.of_queries, self.of_keys = (nn.Linear(6, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, pairs):
        return (F.normalize(self.of_queries(pairs[:, :6]), dim=1),
                F.normalize(self.of_keys(pairs[:, 6:]), dim=1))


def pairs_of(rank):
    """Rank r's five pairs of related vectors, a query's input beside its key's."""
    first, noise = seeded(f"rank {rank}'s pairs", 2, 5, 6, dtype=torch.float64)
    return torch.cat([first, first + 0.3 * noise], dim=1)


def of_ranks(world_size, model):
    """All ranks' queries, and their keys, a tensor for each rank."""
    return zip(*(model(pairs_of(rank)) for rank in range(world_size)), strict=True)


def losses_of(queries, keys):
    """Each rank's loss: the mean over its queries."""
    labels = torch.arange(5 * len(keys)).split(5)
    return [F.cross_entropy(mine @ torch.cat(list(keys)).T / 0.3, right)
            for mine, right in zip(queries, labels, strict=True)]
