"""A sum over ranks that autograd sees: its backward is a sum over ranks too."""

import torch
import torch.distributed as dist

from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient):
        of_x = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(of_x)
        return of_x


SUM, GRADIENT = "the sum over the ranks", "the gradient of x"


class SumOverRanksExercise(Exercise):
    number = "2.3"
    title = "The backward of a sum over ranks"
    minutes = 8
    world_sizes = (2, 3, 4, 1)  # one rank last: there, each rank's gradient is the sum
    solution = SumOverRanks

    def trial(self, attempt):
        inputs, gradients = inputs_and_gradients(dist.get_world_size())
        own, gradient = inputs[dist.get_rank()], gradients[dist.get_rank()]
        x, handed = own.clone().requires_grad_() + 0, gradient.clone()  # x is no leaf
        x.retain_grad()
        total = attempt.apply(x)
        attempt.apply(-own)  # whose sum is another tensor
        seen, untouched = total.detach().clone(), torch.equal(x, own)
        if seen.shape == own.shape:
            total.backward(handed)
        return named(seen, untouched, x.grad, torch.equal(handed, gradient))

    def expected(self, world_size):
        inputs, gradients = inputs_and_gradients(world_size)
        return named(sum(inputs), True, sum(gradients), True)

    def quantities(self, world_size, rank):
        return {"the ranks": world_size}

    def parts(self, world_size, rank):
        inputs, gradients = inputs_and_gradients(world_size)
        either = {f"rank {other}'s x": x for other, x in enumerate(inputs)} | {
            f"the gradient of rank {other}'s loss": each for other, each in enumerate(gradients)}
        return {SUM: either, GRADIENT: either}

    hints = (
        "In the example, what is the gradient of rank 1's x, and of which two numbers is it made? "
        "Which of the two does rank 1 have when its `backward` is called?",
        "Each rank's loss depends on the total, and the total on this rank's x. So all ranks' "
        "losses have a part in the gradient of x, and rank r's `backward` is handed only the part "
        "of loss r.",
        "`backward` does with `gradient` what `forward` does with `x`: copy it, all-reduce the "
        "copy, return the copy. There is no factor.",
    )
    slips = (
        Slip("`backward` passes on this rank's own gradient. That is what this rank's loss wants "
             "of x. The other ranks' losses depend on the total too, and so on this x: their "
             "gradients are missing.", {"dist.all_reduce(of_x)": ""}),
        Slip("`backward` takes the mean of the ranks' gradients. The gradient asked for is that of "
             "the *sum* of the losses, and the total changes by as much as x does: there is "
             "nothing to divide by.", {"return of_x": "return of_x / dist.get_world_size()"}),
        Slip("`backward` multiplies this rank's gradient by N, as if all ranks had the same loss. "
             "Each has a loss of its own, and so a gradient of its own: they have to be "
             "communicated.", {"dist.all_reduce(of_x)": "of_x *= dist.get_world_size()"}),
        Slip("`backward` divides this rank's gradient by N. The total changes by as much as x "
             "does, not by an N-th of it. And the other ranks' losses depend on this x too: their "
             "gradients are missing.", {"dist.all_reduce(of_x)": "of_x /= dist.get_world_size()"}),
        Slip("`backward` returns what `forward` returned. It is handed the gradient of the total, "
             "and has to return the gradient of x, not a value.",
             {"return total": "context.total = total\nreturn total.clone()",
              "return of_x": "return context.total"}),
        Slip("`backward` returns zeros: no loss reaches x. Every rank's loss depends on the total, "
             "and the total on x.", {"return of_x": "return torch.zeros_like(of_x)"}),
        Slip("You added up the elements of this rank's gradient. Element i of the total depends on "
             "element i of each rank's x, and on no other element.",
             {"dist.all_reduce(of_x)": "of_x = of_x.sum().expand_as(of_x)"}),
        Slip("`backward` returns ones, which is the derivative of the total by x. By the chain "
             "rule this is multiplied by what arrives: the gradients of the losses by the total.",
             {"return of_x": "return torch.ones_like(of_x)"}),
        Slip("`backward` multiplies by x or by the total. That is the chain rule of a product or a "
             "square. A sum changes by as much as x does, whatever x is.",
             *({"return total": f"context.factor = {factor}\nreturn total",
                "dist.all_reduce(of_x)": summed, "return of_x": "return of_x * context.factor"}
               for factor in ("x", "total") for summed in ("dist.all_reduce(of_x)", ""))),
        Slip("`backward` returns None, so no gradient reaches x. (An all-reduce returns None too: "
             "it leaves the sum in the tensor that it gets.)", {"return of_x": ""}),
        Slip("`backward` overwrites the tensor that it was handed, and autograd gives the same "
             "tensor to other parts of the graph: theirs is wrong now. All-reduce a copy.",
             {"gradient.clone(memory_format=torch.contiguous_format)": "gradient"}),
        Slip("`forward` overwrites x, which belongs to the caller: an all-reduce works in place. "
             "All-reduce a copy.", {"x.clone(memory_format=torch.contiguous_format)": "x"}),
        Slip("`forward` returns None. An all-reduce returns None: it leaves the sum in the tensor "
             "that it gets. Return that tensor.", {"return total": ""}),
        Slip("`reduce` gives the sum to rank 0 alone. Every rank has an x, so every rank needs it: "
             "`all_reduce`.", {"dist.all_reduce(of_x)": "dist.reduce(of_x, dst=0)"},
             {"dist.all_reduce(total)": "dist.reduce(total, dst=0)"}),
        Slip("Every rank gets the gradient of rank 0's loss. The losses of the other ranks depend "
             "on the total too: sum the gradients, `all_reduce`.",
             {"dist.all_reduce(of_x)": "dist.broadcast(of_x, src=0)"}),
        Slip("Only rank 0 calls the collective in `backward`, and waits for ever. A collective is "
             "called by every rank.",
             {"dist.all_reduce(of_x)": "if dist.get_rank() == 0:\n    dist.all_reduce(of_x)"},
             hangs=True),
        Slip("`forward` divides by the number of ranks. The exercise asks for the sum.",
             {"return total": "return total / dist.get_world_size()"}),
    )


def named(total, untouched, gradient, handed_untouched):
    return {SUM: total, "that `forward` leaves its input as it is": untouched,
            GRADIENT: gradient,
            "that `backward` leaves the gradient that it is handed as it is": handed_untouched}


def inputs_and_gradients(world_size):
    """The ranks' x, and the gradients of their losses with respect to the total."""
    return ([seeded(f"rank {rank}'s {what}", 4, 5) for rank in range(world_size)]
            for what in ("x", "gradient"))
