"""The weights' gradients of two layers, whose rows lie on many ranks."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.measure import CallLog, sent_bytes


def data_parallel_backward(x, hidden, w2, to_logits):
    to_w2 = hidden.T @ to_logits
    to_hidden = to_logits @ w2.T
    to_sums = to_hidden * (1 - hidden**2)  # of which tanh makes `hidden`
    to_w1 = x.T @ to_sums
    for gradient in (to_w1, to_w2):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return to_w1, to_w2


INPUTS = ("x", "hidden", "w2", "to_logits")
REDUCED, DIVIDED = "dist.all_reduce(gradient)", "gradient /= dist.get_world_size()"
OF_ALL = """def of_all(own):
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts)
x, hidden, to_logits = """


def averaged(name):
    """Lines that average what has this name over the ranks."""
    return f"{name} = {name}.clone()\ndist.all_reduce({name})\n{name} /= dist.get_world_size()\n"


class DataParallelBackward(Exercise):
    number = "1.1"
    title = "The backward of two layers, on many ranks"
    minutes = 20
    solution = staticmethod(data_parallel_backward)
    rows, sizes = 50, (9, 8, 6)

    def trial(self, attempt):
        inputs = layers_of(dist.get_rank())
        before = [tensor.clone() for tensor in inputs]
        with torch.no_grad(), CallLog() as log:
            to_w1, to_w2 = attempt(*inputs)
        # One rank alone has nothing to send, so that the gradients on two ranks speak first.
        alone = dist.get_world_size() == 1
        same = map(torch.equal, before, inputs)
        return {"the gradient of `w1`": to_w1, "the gradient of `w2`": to_w2,
                **{f"that `{name}` is as it was": each
                   for name, each in zip(INPUTS, same, strict=True)},
                "the number of bytes that this rank sends": sum(map(sent_bytes, log.calls)),
                "the number of collectives": 0 if alone else log.count()}

    def expected(self, world_size):
        x, _, w2, to_logits = zip(*map(layers_of, range(world_size)), strict=True)
        w1, w2 = weights()[0].requires_grad_(), w2[0].requires_grad_()
        # The loss is linear in the logits here, so that its gradient is to_logits.
        logits = torch.tanh(torch.cat(x) @ w1) @ w2
        (logits * torch.cat(to_logits) / world_size).sum().backward()
        return {"the gradient of `w1`": w1.grad, "the gradient of `w2`": w2.grad,
                **{f"that `{name}` is as it was": True for name in INPUTS},
                "the number of bytes that this rank sends": AtMost(
                    2 * (w1.grad.nbytes + w2.grad.nbytes), "one all-reduce of each gradient sends "
                    "no more than that, on however many ranks", exact=False),
                "the number of collectives": AtMost(
                    2, "one all-reduce of each whole gradient is enough, and no barrier is needed",
                    exact=False)}

    def parts(self, world_size, rank):
        """Each rank's gradients; and this rank's rows beside the `to_logits` of others' rows."""
        x, hidden, w2, _ = layers_of(rank)
        held = {}
        for other in range(world_size):
            theirs = layers_of(other)
            held[f"rank {other}'s gradient"] = own_backward(*theirs)
            if other != rank:
                mixed = own_backward(x, hidden, w2, theirs[3])
                held[f"what rank {rank}'s rows and rank {other}'s `to_logits` make"] = mixed
        return {fact: {name: both[place] / world_size for name, both in held.items()}
                for place, fact in enumerate(("the gradient of `w1`", "the gradient of `w2`"))}

    def quantities(self, world_size, rank):
        return {"the rows": self.rows} | ({"the ranks": world_size} if world_size > 1 else {})

    hints = (
        "First forget the other ranks. `logits = hidden @ w2`: which two tensors does the gradient "
        "of `w2` depend on, and which product of them has the shape of `w2`?",
        "Back through the layers: `w2`'s gradient is `hidden.T @ to_logits`. The gradient goes on "
        "as `to_logits @ w2.T`, times the slope of tanh, which is `1 - hidden**2`. Now write one "
        "element of each weight's gradient as a sum. Which terms of it does this rank not have?",
        "Compute both gradients from this rank's rows, all-reduce each, and divide by "
        "`dist.get_world_size()`: a mean over N times as many rows is the mean of the ranks' N "
        "means.",
    )
    slips = (
        Slip("These are the gradients of this rank's own rows. The rows of the other ranks belong "
             "to the global batch too.", {REDUCED: "pass", DIVIDED: "pass"}),
        Slip("You added the ranks' gradients, and the sum that you return is not divided. Each "
             "belongs to a *mean* over its rank's rows, and the mean over all rows is the mean of "
             "these.", {DIVIDED: "pass"}),
        Slip("You divided by the world size twice.",
             {"/= dist.get_world_size()": "/= dist.get_world_size() ** 2"}),
        Slip("You divided by the number of rows. `to_logits` belongs to a mean over this rank's "
             "rows, so that division is in it already.",
             {DIVIDED: f"{DIVIDED} * len(x)"}),
        Slip("You divided by the number of rows, and not by the number of ranks. `to_logits` "
             "belongs to a mean over this rank's rows, so that division is in it already.",
             {DIVIDED: "gradient /= len(x)"}),
        Slip("Only one of the two gradients is averaged over the ranks. Both are sums over the "
             "rows, and each rank has only its own rows.",
             {"in (to_w1, to_w2)": "in (to_w1,)"}, {"in (to_w1, to_w2)": "in (to_w2,)"},
             {REDUCED: f"if gradient is to_w1:\n    {REDUCED}"},
             {REDUCED: f"if gradient is to_w2:\n    {REDUCED}"}),
        Slip("You summed both gradients over the ranks, and divided only one by the world size.",
             {DIVIDED: f"if gradient is to_w1:\n    {DIVIDED}"},
             {DIVIDED: f"if gradient is to_w2:\n    {DIVIDED}"}),
        Slip("You summed a tensor that has one line for each *row* over the ranks. Row 0 of rank 0 "
             "and row 0 of rank 1 are different samples, so their gradients do not add up to "
             "anything. Finish the products first: their results have no rows any more.",
             {"to_w2 = hidden": averaged("to_logits") + "to_w2 = hidden",
              "in (to_w1, to_w2)": "in ()"},
             {"to_sums = ": averaged("to_hidden") + "to_sums = ",
              "in (to_w1, to_w2)": "in (to_w2,)"},
             {"to_sums = ": averaged("to_hidden") + "to_sums = "},
             {"to_w1 = x.T": averaged("to_sums") + "to_w1 = x.T",
              "in (to_w1, to_w2)": "in (to_w2,)"}),
        Slip("The gradient of `w1` is divided by the world size twice, and that of `w2` once. On "
             "the way back through the layers nothing is divided: only the sum over the ranks is.",
             {"x.T @ to_sums": "x.T @ to_sums / dist.get_world_size()"}),
        Slip("The gradients are right, but every rank received those of all others, one by one. "
             "Only their sum is needed: an all-reduce sends no more than twice the gradient, on "
             "however many ranks.",
             {REDUCED: "parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]"
                       "\ndist.all_gather(parts, gradient)\ngradient.copy_(sum(parts))"}),
        Slip("The gradients are right, but every rank received the whole batch and did all the "
             "work: nothing is parallel. What has to travel has the shape of the weights.",
             {"to_w2 = ": f"{OF_ALL}of_all(x), of_all(hidden), of_all(to_logits)\nto_w2 = ",
              REDUCED: "pass"},
             {"to_w2 = ": f"{OF_ALL}of_all(torch.cat([x, hidden, to_logits], 1)).split("
                          "[9, 8, 6], 1)\nto_w2 = ", REDUCED: "pass"}),
        Slip("Autograd does not record here: write the products of backward yourself.",
             {"to_w2 = hidden.T @ to_logits": "weights = w2.detach().requires_grad_()\n"
              "(hidden @ weights).backward(to_logits)\nto_w2 = weights.grad"}),
        Slip("The first weights' gradient lacks the slope of tanh. It is 1 − tanh², and `hidden` "
             "is the tanh already: `1 - hidden**2`.", {" * (1 - hidden**2)": ""}),
        Slip("You did not square `hidden` in the slope of tanh. It is 1 − tanh², and `hidden` is "
             "the tanh already: `1 - hidden**2`.", {"hidden**2": "hidden"}),
        Slip("You took tanh² for the slope of tanh. It is 1 − tanh², and `hidden` is the tanh "
             "already: `1 - hidden**2`.", {"(1 - hidden**2)": "hidden**2"}),
        Slip("You took the tanh of `hidden`, which is a tanh already. The slope is "
             "`1 - hidden**2`.", {"hidden**2": "torch.tanh(hidden) ** 2"}),
        Slip("Your gradients are transposed: each must have the shape of its weights, `(d, h)` and "
             "`(h, f)`.", {"return to_w1, to_w2": "return to_w1.T, to_w2.T"}),
        Slip("You return the second layer's gradient first. The order is that of the layers: "
             "`to_w1, to_w2`.", {"return to_w1, to_w2": "return to_w2, to_w1"}),
        Slip("You all-reduced copies: the sums never reach the gradients that you return.",
             {REDUCED: "dist.all_reduce(gradient.clone())", DIVIDED: "pass"},
             {REDUCED: "dist.all_reduce(gradient.clone())"}),
        Slip("`reduce` gives the sum to rank 0 alone. Every rank updates its own copy of the "
             "weights, so every rank needs the gradients: `all_reduce`.",
             {REDUCED: "dist.reduce(gradient, dst=0)"}),
        Slip("Every rank gets rank 0's gradients, so the rows of the others teach nobody anything. "
             "Combine all ranks' gradients.",
             {REDUCED: "dist.broadcast(gradient, src=0)", DIVIDED: "pass"}),
        Slip("You summed over the ranks once more after the mean: the ranks' means are equal by "
             "then, and their sum is N times as large.", {DIVIDED: f"{DIVIDED}\n{REDUCED}"}),
        Slip("Only rank 0 calls the all-reduce, and waits for ever. A collective is called by "
             "every rank.", {REDUCED: f"if dist.get_rank() == 0:\n    {REDUCED}"}, hangs=True),
    )


def own_backward(x, hidden, w2, to_logits):
    """The gradients of these rows, without those of other ranks."""
    return x.T @ (to_logits @ w2.T * (1 - hidden**2)), hidden.T @ to_logits


def weights():
    d, h, f = DataParallelBackward.sizes
    return seeded("w1", d, h) / d**0.5, seeded("w2", h, f)


def layers_of(rank):
    """Rank r's x, hidden, w2 and to_logits."""
    rows, (d, _, f) = DataParallelBackward.rows, DataParallelBackward.sizes
    w1, w2 = weights()
    x = seeded(f"x of rank {rank}", rows, d)
    to_logits = seeded(f"to_logits of rank {rank}", rows, f) / rows
    return x, torch.tanh(x @ w1), w2, to_logits
