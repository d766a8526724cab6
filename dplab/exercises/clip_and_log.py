"""What an average does not pass through: the clipping of a gradient, and a perplexity."""

import torch
import torch.distributed as dist

from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded


def clip_and_log(gradient, losses, limit):
    mean = gradient.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    scale = min(1, limit / mean.norm())
    sums = torch.tensor([losses.sum(), len(losses)])
    dist.all_reduce(sums)
    return mean * scale, (sums[0] / sums[1]).exp()


LONG, SHORT, PERPLEXITY = "a gradient to clip", "a gradient below the limit", "the perplexity"
OWN = "that the rank's own gradient and losses stay as they are"
TOKENS = 40, 10, 300, 90  # of each rank
SCALE = "scale = min(1, limit / mean.norm())"


class ClipAndLog(Exercise):
    number = "2.2"
    title = "The end of a training step"
    minutes = 8
    solution = staticmethod(clip_and_log)

    def trial(self, attempt):
        given, again = of_rank(dist.get_rank()), of_rank(dist.get_rank())
        long, perplexity = attempt(*given, 0.5)
        kept = all(torch.equal(*each) for each in zip(given, again, strict=True))
        short, _ = attempt(*again, 100.0)
        return {LONG: long, SHORT: short, PERPLEXITY: perplexity, OWN: kept}

    def expected(self, world_size):
        gradients, losses = zip(*map(of_rank, range(world_size)), strict=True)
        mean = torch.stack(gradients).mean(dim=0)
        return {LONG: 0.5 * mean / mean.norm(), SHORT: mean,
                PERPLEXITY: torch.cat(losses).mean().exp(), OWN: True}

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
             {"mean = gradient.clone()": "mean = gradient / len(losses)"},
             {"mean = gradient.clone()": "mean = gradient / len(losses)",
              "mean /= dist.get_world_size()": ""},
             *({"mean /= dist.get_world_size()":
                "count = torch.tensor(len(losses))\ndist.all_reduce(count)\n"
                f"mean /= count{also}"}
               for also in ("", " * dist.get_world_size()"))),
        Slip("You weighed the ranks' gradients by their tokens. `loss_for_ddp` has done that "
             "already: it sums over this rank's tokens, and few of them make a small loss. What "
             "does DDP do with the gradients of this loss?",
             {"mean = gradient.clone()": "mean = gradient * len(losses)",
              "mean /= dist.get_world_size()":
              "count = torch.tensor(len(losses))\ndist.all_reduce(count)\nmean /= count"}),
        Slip("You limit each element. That turns the gradient: all its elements are scaled by one "
             "number.", {"mean * scale": "mean.clamp(-limit, limit)"}),
        Slip("This is the mean of the ranks' perplexities. `exp` bends upwards, so that their mean "
             "is too large where the losses differ, and the ranks have unequal tokens besides.",
             {"dist.all_reduce(sums)": "each = losses.mean().exp()\ndist.all_reduce(each)",
              "(sums[0] / sums[1]).exp()": "each / dist.get_world_size()"}),
        Slip("You weigh the ranks' perplexities by their tokens. That mean is still too large, "
             "because `exp` bends upwards. Of what has the mean to be taken?",
             {".exp()": "",
              "losses.sum(),": "losses.mean().exp() * len(losses),"}),
        Slip("You take `exp` of each token's cross-entropy, and their mean. That mean is too "
             "large, because `exp` bends upwards. Of what has the mean to be taken?",
             {".exp()": "", "losses.sum(),": "losses.exp().sum(),"}),
        Slip("You take `exp` last, but of the mean of the ranks' means: a token of a rank with few "
             "counts too much. Exercise 2.1 had this in its loss.",
             {"losses.sum(), len(losses)": "losses.mean(), 1.0"}),
        Slip("This is the perplexity of this rank's own tokens, another one on each rank.",
             {"dist.all_reduce(sums)": ""}),
        Slip("This is the mean cross-entropy. The perplexity is e to it.", {".exp()": ""}),
        Slip("You overwrite the rank's own gradient: an all-reduce works in place. Take a copy.",
             {"gradient.clone()": "gradient"}),
        Slip("You divide as if every rank had as many tokens as this one. Sum their numbers.",
             {"sums[1]": "(len(losses) * dist.get_world_size())"}),
    )


def of_rank(rank):
    """Its gradient, and the cross-entropies of its tokens."""
    return ((1 + rank) * seeded(f"gradient of rank {rank}", 12),
            (1 + 0.5 * rank) * torch.linspace(0.5, 1.5, TOKENS[rank]))
