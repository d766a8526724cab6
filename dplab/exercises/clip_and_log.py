"""What an average does not pass through: the clipping of a gradient, and a perplexity."""

import torch
import torch.distributed as dist

from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded


def clip_and_log(gradient, summed, tokens, limit):
    mean = gradient.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    scale = min(1, limit / mean.norm())
    sums = torch.stack([summed, tokens])
    dist.all_reduce(sums)
    return mean * scale, (sums[0] / sums[1]).exp()


LONG, SHORT, PERPLEXITY = "a gradient to clip", "a gradient below the limit", "the perplexity"
OWN_GRADIENT = "that the rank's own gradient stays as it is"
OWN_COUNTS = "that the rank's own sum and number of tokens stay as they are"
TOKENS = 40.0, 10.0, 300.0, 90.0  # of each rank
SCALE = "scale = min(1, limit / mean.norm())"


class ClipAndLog(Exercise):
    number = "2.2"
    title = "The end of a training step"
    minutes = 8
    solution = staticmethod(clip_and_log)

    def trial(self, attempt):
        given, again = of_rank(dist.get_rank()), of_rank(dist.get_rank())
        long, perplexity = attempt(*given, 0.5)
        kept = [torch.equal(*each) for each in zip(given, again, strict=True)]
        short, _ = attempt(*again, 100.0)
        return {LONG: long, SHORT: short, PERPLEXITY: perplexity,
                OWN_GRADIENT: kept[0], OWN_COUNTS: all(kept[1:])}

    def expected(self, world_size):
        gradients, summed, tokens = zip(*map(of_rank, range(world_size)), strict=True)
        mean = torch.stack(gradients).mean(dim=0)
        return {LONG: 0.5 * mean / mean.norm(), SHORT: mean,
                PERPLEXITY: (sum(summed) / sum(tokens)).exp(),
                OWN_GRADIENT: True, OWN_COUNTS: True}

    hints = (
        "What would one process do that has the whole batch? Write its steps down in order. Which "
        "of them need all ranks?",
        "For each number ask whether a mean before it is the same as a mean behind it. It is where "
        "the step between is a factor or a sum, the same on every rank.",
        "Average the gradient first, and scale it then by `min(1, limit / norm)`. Sum the "
        "cross-entropies and the tokens over the ranks, divide, and take `exp` last.",
    )
    slips = (
        Slip("Each rank clips its own gradient, and you average what is left. A rank whose "
             "gradient is long then says less than its part, and the mean points elsewhere. One "
             "process clips once: what?",
             {"mean = gradient.clone()": "mean = gradient * min(1, limit / gradient.norm())",
              SCALE: "scale = 1"}),
        Slip("You scale the average by the length of this rank's own gradient. Every rank takes "
             "another scale, and their models part.", {"mean.norm()": "gradient.norm()"}),
        Slip("You took the root of the sum of the squares of the ranks' lengths. That is right "
             "where each rank holds another part of one gradient. Here each rank has all elements "
             "of the mean, and so its length.",
             *({SCALE: f"square = {own}.norm() ** 2\ndist.all_reduce(square)\n"
                       "scale = min(1, limit / square.sqrt())"} for own in ("gradient", "mean"))),
        Slip("You scale by the mean of the ranks' lengths. The mean of the gradients is shorter "
             "than that, because they point in different directions.",
             {SCALE: "length = gradient.norm()\ndist.all_reduce(length)\n"
                     "scale = min(1, limit * dist.get_world_size() / length)"}),
        Slip("You scale up, too, where the gradient is shorter than `limit`. The scale is at most "
             "1.", {SCALE: "scale = limit / mean.norm()"}),
        Slip("You clip the sum of the ranks' gradients. Where it is clipped nobody sees that: the "
             "length is `limit` all the same. Where it is not, it is N times too long, and it is "
             "clipped too often.", {"mean /= dist.get_world_size()": ""}),
        Slip("You divided the gradient by tokens. `loss_for_ddp` has done that already: it divides "
             "by the tokens of all ranks. What does DDP do with the gradients of this loss?",
             {"mean = gradient.clone()": "mean = gradient / tokens"},
             {"mean = gradient.clone()": "mean = gradient / tokens",
              "mean /= dist.get_world_size()": ""},
             *({"mean /= dist.get_world_size()":
                f"count = tokens.clone()\ndist.all_reduce(count)\nmean /= count{also}"}
               for also in ("", " * dist.get_world_size()"))),
        Slip("You weighed the ranks' gradients by their tokens. `loss_for_ddp` has done that "
             "already: it sums over this rank's tokens, and few of them make a small loss. What "
             "does DDP do with the gradients of this loss?",
             {"mean = gradient.clone()": "mean = gradient * tokens",
              "mean /= dist.get_world_size()":
              "count = tokens.clone()\ndist.all_reduce(count)\nmean /= count"}),
        Slip("You limit each element. That turns the gradient: all its elements are scaled by one "
             "number.", {"mean * scale": "mean.clamp(-limit, limit)"}),
        Slip("This is the mean of the ranks' perplexities. `exp` bends upwards, so that their mean "
             "is too large where the losses differ, and the ranks have unequal tokens besides.",
             {"dist.all_reduce(sums)": "each = (summed / tokens).exp()\ndist.all_reduce(each)",
              "(sums[0] / sums[1]).exp()": "each / dist.get_world_size()"}),
        Slip("You weigh the ranks' perplexities by their tokens. That mean is still too large, "
             "because `exp` bends upwards. Of what has the mean to be taken?",
             {".exp()": "",
              "torch.stack([summed, tokens])":
                  "torch.stack([(summed / tokens).exp() * tokens, tokens])"}),
        Slip("You take `exp` last, but of the mean of the ranks' means: a token of a rank with few "
             "counts too much. Exercise 2.1 had this in its loss.",
             {"torch.stack([summed, tokens])": "torch.stack([summed / tokens, torch.ones(())])"}),
        Slip("This is the perplexity of this rank's own tokens, another one on each rank.",
             {"dist.all_reduce(sums)": ""}),
        Slip("This is the mean cross-entropy. The perplexity is e to it.", {".exp()": ""}),
        Slip("You overwrite the rank's own gradient: an all-reduce works in place. Take a copy.",
             {"gradient.clone()": "gradient"}),
        Slip("You overwrite this rank's own sum or its number of tokens: an all-reduce works in "
             "place. Take copies.",
             {"sums = torch.stack([summed, tokens])": "sums = summed, tokens",
              "dist.all_reduce(sums)": "dist.all_reduce(summed)\ndist.all_reduce(tokens)"}),
    )


def of_rank(rank):
    """Its gradient, the sum of its cross-entropies, and its number of tokens."""
    tokens = torch.tensor(TOKENS[rank])
    return (1 + rank) * seeded(f"gradient of rank {rank}", 12), (1 + 0.5 * rank) * tokens, tokens
