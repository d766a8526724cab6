"""Exercise C.1: all ranks skip, or none."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.measure import CallLog

LR, SCALE, ELEMENTS = 0.5, 2.0**16, 901

# By step: what stands at which elements of the scaled gradient of the whole model.
BROKEN = {2: {900: float("-inf")}, 5: {899: float("nan")},
          11: {400: float("-inf"), 900: float("inf")}, 14: {0: float("inf")}}

STEPS = 14


def scaled_step(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    dist.all_reduce(unusable)
    if unusable > 0:
        return scale / 2, 0
    weight -= lr / scale * gradient
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


# Known mistakes


def decides_alone(weight, gradient, scale, good, lr):
    if not gradient.isfinite().all():
        return scale / 2, 0
    weight -= lr / scale * gradient
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def tells_only_if_broken(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    if unusable > 0:
        dist.all_reduce(unusable)
        return scale / 2, 0
    weight -= lr / scale * gradient
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def leaves_before_the_call(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    if unusable > 0:
        return scale / 2, 0
    dist.all_reduce(unusable)
    weight -= lr / scale * gradient
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def agrees_on_the_scale_alone(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    if unusable == 0:
        weight -= lr / scale * gradient
    dist.all_reduce(unusable)
    if unusable > 0:
        return scale / 2, 0
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def agrees_on_the_step_alone(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    mine = unusable.clone()
    dist.all_reduce(unusable)
    if unusable == 0:
        weight -= lr / scale * gradient
    if mine > 0:
        return scale / 2, 0
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def skips_if_all_are_broken(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    dist.all_reduce(unusable, op=dist.ReduceOp.MIN)
    if unusable > 0:
        return scale / 2, 0
    weight -= lr / scale * gradient
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def asks_rank_0(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    dist.broadcast(unusable, src=0)
    if unusable > 0:
        return scale / 2, 0
    weight -= lr / scale * gradient
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def tells_rank_0(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    dist.reduce(unusable, dst=0)
    if unusable > 0:
        return scale / 2, 0
    weight -= lr / scale * gradient
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def looks_for(broken):
    """The solution, with another question to the gradient."""
    def attempt(weight, gradient, scale, good, lr):
        unusable = broken(gradient).sum()
        dist.all_reduce(unusable)
        if unusable > 0:
            return scale / 2, 0
        weight -= lr / scale * gradient
        return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)

    return attempt


def sums_the_gradient(weight, gradient, scale, good, lr):
    total = gradient.sum()
    dist.all_reduce(total)
    if total.isinf():
        return scale / 2, 0
    weight -= lr / scale * gradient
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def takes_the_largest(weight, gradient, scale, good, lr):
    largest = gradient.abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if not largest.isfinite():
        return scale / 2, 0
    weight -= lr / scale * gradient
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def multiplies_by_zero(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    dist.all_reduce(unusable)
    weight -= lr / scale * gradient * (unusable == 0)
    if unusable > 0:
        return scale / 2, 0
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def drops_the_broken_elements(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    dist.all_reduce(unusable)
    weight -= lr / scale * gradient.where(gradient.isfinite(), 0)
    if unusable > 0:
        return scale / 2, 0
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def steps_and_adapts(update=lambda weight, gradient, scale, lr: weight.sub_(lr / scale * gradient),
                     skipped=lambda scale, good: (scale / 2, 0),
                     taken=lambda scale, good: (2 * scale, 0) if good + 1 == 4
                     else (scale, good + 1)):
    """The solution, with another update or another rule for the scale."""
    def attempt(weight, gradient, scale, good, lr):
        unusable = (~gradient.isfinite()).sum()
        dist.all_reduce(unusable)
        if unusable > 0:
            return skipped(scale, good)
        update(weight, gradient, scale, lr)
        return taken(scale, good)

    return attempt


def divides_by_the_next_scale(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    dist.all_reduce(unusable)
    if unusable > 0:
        return scale / 2, 0
    scale, good = (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)
    weight -= lr / scale * gradient
    return scale, good


def returns_nothing(weight, gradient, scale, good, lr):
    scaled_step(weight, gradient, scale, good, lr)


class SkipTogether(Exercise):
    number = "C.1"
    title = "All ranks skip, or none"
    minutes = 15
    hints = (
        "Rank 1's piece holds an infinity. What does rank 0 see of it? In a step in which every "
        "piece is finite, what does rank 0 have to know before it may go on?",
        "Every rank makes the same collective call in every step, before it decides anything. One "
        "number is enough.",
        "Count: `unusable = (~gradient.isfinite()).sum()`. All-reduce the count, and let every "
        "rank branch on the sum. Divide by the scale that came in, and then find the next one.",
    )
    solution = staticmethod(scaled_step)
    mistakes = (
        Mistake(decides_alone, "Each rank decides by its own piece. Where one piece overflows, "
                "this rank skips and the others step: the pieces are from different models then."),
        Mistake(tells_only_if_broken, "Only a rank whose piece has overflowed calls the "
                "collective, and the others never do. Call it on every rank in every step, then "
                "branch.", hangs=True),
        Mistake(leaves_before_the_call, "A rank whose piece has overflowed returns before "
                "the collective, and the others wait in it. Call it on every rank, then branch.",
                hangs=True),
        Mistake(agrees_on_the_scale_alone, "The ranks agree on the scale, but each takes the "
                "step by its own piece. Ask the others first, then step."),
        Mistake(agrees_on_the_step_alone, "The ranks agree on the step, but each finds its next "
                "scale by its own piece. Then their losses are scaled differently."),
        Mistake(skips_if_all_are_broken, "You skip only if every rank's piece has overflowed. One "
                "is enough."),
        Mistake(asks_rank_0, "All do what rank 0's piece says. An overflow on another rank is not "
                "heard of."),
        Mistake(tells_rank_0, "`reduce` tells rank 0 alone. The others decide by something else: "
                "use a collective that leaves the same number on all."),
        Mistake(looks_for(torch.isinf), "You look for infinities. A NaN is no number to step with "
                "either."),
        Mistake(looks_for(torch.isnan), "You look for NaN. An overflow leaves an infinity."),
        Mistake(looks_for(lambda gradient: gradient == float("inf")), "You look for +infinity. A "
                "negative element overflows to -infinity, and NaN equals nothing."),
        Mistake(sums_the_gradient, "You sum the gradient and ask whether the sum is infinite. With "
                "NaN, or with +infinity and -infinity, the sum is NaN. Ask each element."),
        Mistake(takes_the_largest, "You send the largest element with MAX. A comparison with NaN "
                "is false, so MAX can lose a NaN on its way. Send a finite count or flag."),
        Mistake(multiplies_by_zero, "You multiply the update by zero. Infinity times zero is NaN: "
                "leave the update out."),
        Mistake(drops_the_broken_elements, "You leave out the elements that overflowed and step "
                "with the others. In such a step no weight moves."),
        Mistake(steps_and_adapts(lambda weight, gradient, scale, lr: weight.sub_(lr * gradient)),
                "The update is too large by the scale: the gradient is that of the scaled loss."),
        Mistake(steps_and_adapts(
            lambda weight, gradient, scale, lr: weight.sub_(lr * scale * gradient)),
            "You multiply by the scale. The loss was multiplied by it, so divide."),
        Mistake(steps_and_adapts(
            lambda weight, gradient, scale, lr: weight.add_(lr / scale * gradient)),
            "You go up the gradient: subtract the update."),
        Mistake(steps_and_adapts(
            lambda weight, gradient, scale, lr: weight.sub_(
                lr / scale / dist.get_world_size() * gradient)),
            "You divide by the number of ranks. The gradient is a mean over them already."),
        Mistake(steps_and_adapts(
            lambda weight, gradient, scale, lr: weight - lr / scale * gradient),
            "`weight` is as before the step: change it in place. An assignment to its name leaves "
            "the caller's tensor alone."),
        Mistake(divides_by_the_next_scale, "You find the next scale first and then divide by it. "
                "This gradient has the scale that came in."),
        Mistake(steps_and_adapts(skipped=lambda scale, good: (scale, 0)), "A skipped step leaves "
                "the scale as it was. The next one overflows again: halve it."),
        Mistake(steps_and_adapts(skipped=lambda scale, good: (2 * scale, 0)), "A skipped step "
                "doubles the scale. The gradient was too large: halve it."),
        Mistake(steps_and_adapts(skipped=lambda scale, good: (scale / 2, good)), "A skipped step "
                "does not end the row. Good steps are counted in a row: start again at 0."),
        Mistake(steps_and_adapts(skipped=lambda scale, good: (scale / 2, good + 1)), "You count a "
                "skipped step as a good one."),
        Mistake(steps_and_adapts(taken=lambda scale, good: (scale, good + 1)), "The scale only "
                "falls. After the fourth good step in a row it doubles."),
        Mistake(steps_and_adapts(taken=lambda scale, good: (2 * scale, good + 1) if good + 1 >= 4
                                 else (scale, good + 1)), "After the scale has doubled, the count "
                "goes on. It starts again at 0."),
        Mistake(steps_and_adapts(taken=lambda scale, good: (2 * scale, 0) if good == 4
                                 else (scale, good + 1)), "You double after the fifth good step in "
                "a row. `good` does not count this step yet."),
        Mistake(steps_and_adapts(taken=lambda scale, good: (2 * scale, 0) if good == 2
                                 else (scale, good + 1)), "You double after the third good step in "
                "a row, one too early."),
        Mistake(returns_nothing, "Your function does not return two values: the scale and the "
                "count for the next step."),
    )

    def trial(self, attempt):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        weight = pieces_of(torch.ones(ELEMENTS), world_size)[rank]
        scale, good, facts = SCALE, 0.0, {}
        for number in range(1, STEPS + 1):
            gradient = pieces_of(scaled_gradient(number, scale), world_size)[rank]
            with CallLog() as log:
                returned = attempt(weight, gradient, scale, good, LR)
            is_pair = isinstance(returned, tuple | list) and len(returned) == 2
            scale, good = map(float, returned) if is_pair else (scale, good)
            facts |= facts_of(number, weight.clone(), scale, good, log.bytes(), is_pair)
        return facts

    def expected(self, world_size):
        weight, scale, good = torch.ones(ELEMENTS), SCALE, 0.0
        ranks = [{} for _ in range(world_size)]
        few = AtMost(64, "one number says it")
        for number in range(1, STEPS + 1):
            gradient = scaled_gradient(number, scale)
            if number in BROKEN:
                scale, good = scale / 2, 0.0
            else:
                weight = weight - LR * gradient / scale
                scale, good = (2 * scale, 0.0) if good == 3 else (scale, good + 1)
            for facts, piece in zip(ranks, pieces_of(weight, world_size), strict=True):
                facts |= facts_of(number, piece, scale, good, few)
        return ranks


def facts_of(number, weight, scale, good, nbytes, is_pair=True):
    return {f"that step {number} returns two values": is_pair,
            f"the weight after step {number}": weight, f"the scale after step {number}": scale,
            f"the count after step {number}": good,
            f"the bytes handed to collectives in step {number}": nbytes}


def scaled_gradient(number, scale):
    gradient = scale * torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(number))
    for element, value in BROKEN.get(number, {}).items():
        gradient[element] = value
    return gradient


def pieces_of(whole, world_size):
    """As equal as can be; of four ranks the last has none, as with few parameters to share."""
    full = 3 if world_size == 4 else world_size
    return [piece.clone() for piece in whole.tensor_split(full)] + \
        [torch.empty(0)] * (world_size - full)
