"""Exercise 2.2: the backward of a sum over ranks."""

import torch
import torch.distributed as dist

from dplab.checks.exercise import Exercise, Mistake
from dplab.exercises.weighted_mean import of_all_ranks


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
    number = "2.2"
    title = "The backward of a sum over ranks"
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
