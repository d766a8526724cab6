"""Each rank sees its own piece of the gradient alone, and all take the step, or none."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.measure import CallLog


def scaled_step(weight, gradient, scale, good, lr):
    unusable = (~gradient.isfinite()).sum()
    dist.all_reduce(unusable)
    if unusable > 0:
        return scale / 2, 0
    weight -= lr / scale * gradient
    return (2 * scale, 0) if good + 1 == 4 else (scale, good + 1)


def in_two_parts(weight, gradient, scale, good, lr):
    """The same: the step first, and then the next scale."""
    unusable = (~gradient.isfinite()).sum()
    dist.all_reduce(unusable)
    if unusable == 0:
        weight -= lr / scale * gradient
    if unusable > 0:
        return scale / 2, 0
    if good + 1 == 4:
        return 2 * scale, 0
    return scale, good + 1


LR, SCALE, ELEMENTS, STEPS = 0.5, 2.0**16, 901, 14
# By step: what stands at which elements of the scaled gradient of the whole model.
BROKEN = {2: {900: float("-inf")}, 5: {899: float("nan")},
          11: {400: float("-inf"), 900: float("inf")}, 14: {0: float("inf")}}

# As they stand in the right answers.
COUNTED, SUMMED = "unusable = (~gradient.isfinite()).sum()", "dist.all_reduce(unusable)"
BRANCH = "if unusable > 0:\n        return scale / 2, 0\n    weight"
UPDATE = "lr / scale * gradient"
IF_TAKEN = f"if unusable == 0:\n        weight -= {UPDATE}"
NEXT = "(2 * scale, 0) if good + 1 == 4 else (scale, good + 1)"


class SkipTogether(Exercise):
    number = "C.1"
    title = "All ranks skip, or none"
    minutes = 15
    solution = staticmethod(scaled_step)
    also_right = (in_two_parts,)

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

    hints = (
        "Rank 1's piece holds an infinity. What does rank 0 see of it? In a step in which every "
        "piece is finite, what does rank 0 have to know before it may go on?",
        "Every rank makes the same collective call in every step, before it decides anything. One "
        "number is enough.",
        "Count: `unusable = (~gradient.isfinite()).sum()`. All-reduce the count, and let every "
        "rank branch on the sum. Divide by the scale that came in, and then find the next one.",
    )
    slips = (
        # Who knows of it.
        Slip("Each rank decides by its own piece. Where one piece overflows, this rank skips and "
             "the others step: the pieces are from different models then.", {SUMMED: ""}),
        Slip("Only a rank whose piece has overflowed calls the collective, and the others never "
             "do. Call it on every rank in every step, then branch.",
             {SUMMED: f"if unusable > 0:\n    {SUMMED}"}, hangs=True),
        Slip("A rank whose piece has overflowed returns before the collective, and the others wait "
             "in it. Call it on every rank, then branch.",
             {SUMMED: f"if unusable > 0:\n    return scale / 2, 0\n{SUMMED}"}, hangs=True),
        Slip("The ranks agree on the scale, but each takes the step by its own piece. Ask the "
             "others first, then step.", {"if unusable == 0:": "if gradient.isfinite().all():"}),
        Slip("The ranks agree on the step, but each finds its next scale by its own piece. Then "
             "their losses are scaled differently.",
             {"if unusable == 0:": "if (unusable == 0):",
              "if unusable > 0:": "if not gradient.isfinite().all():"}),
        Slip("You skip only if every rank's piece has overflowed. One is enough.",
             {SUMMED: "dist.all_reduce(unusable, op=dist.ReduceOp.MIN)"}),
        Slip("All do what rank 0's piece says. An overflow on another rank is not heard of.",
             {SUMMED: "dist.broadcast(unusable, src=0)"}),
        Slip("`reduce` tells rank 0 alone. The others decide by something else: use a collective "
             "that leaves the same number on all.", {SUMMED: "dist.reduce(unusable, dst=0)"}),
        # What counts as broken.
        Slip("You look for infinities. A NaN is no number to step with either.",
             {"~gradient.isfinite()": "gradient.isinf()"}),
        Slip("You look for NaN. An overflow leaves an infinity.",
             {"~gradient.isfinite()": "gradient.isnan()"}),
        Slip("You look for +infinity. A negative element overflows to -infinity, and NaN equals "
             "nothing.", {"~gradient.isfinite()": "gradient == float('inf')"}),
        Slip("You sum the gradient and ask whether the sum is infinite. With NaN, or with "
             "+infinity and -infinity, the sum is NaN. Ask each element.",
             {COUNTED: "unusable = gradient.sum()",
              BRANCH: "if unusable.isinf():\n    return scale / 2, 0\nweight"}),
        Slip("You send the largest element with MAX. A comparison with NaN is false, so MAX can "
             "lose a NaN on its way. Send a finite count or flag.",
             *({COUNTED: f"unusable = {largest}",
                SUMMED: "dist.all_reduce(unusable, op=dist.ReduceOp.MAX)",
                BRANCH: "if not unusable.isfinite():\n    return scale / 2, 0\nweight"}
               for largest in ("gradient.abs().max()",
                               "gradient.abs().max() if len(gradient) else torch.zeros(())"))),
        # The step.
        Slip("You multiply the update by zero. Infinity times zero is NaN: leave the update out.",
             {IF_TAKEN: f"weight -= {UPDATE} * (unusable == 0)"}),
        Slip("You leave out the elements that overflowed and step with the others. In such a step "
             "no weight moves.",
             {IF_TAKEN: f"weight -= {UPDATE}.where(gradient.isfinite(), 0)"}),
        Slip("The update is too large by the scale: the gradient is that of the scaled loss.",
             {UPDATE: "lr * gradient"}),
        Slip("You multiply by the scale. The loss was multiplied by it, so divide.",
             {UPDATE: "lr * scale * gradient"}),
        Slip("You go up the gradient: subtract the update.", {"weight -=": "weight +="}),
        Slip("You divide by the number of ranks. The gradient is a mean over them already.",
             {UPDATE: "lr / scale / dist.get_world_size() * gradient"}),
        Slip("`weight` is as before the step: change it in place. An assignment to its name leaves "
             "the caller's tensor alone.", {"weight -=": "weight = weight -"}),
        Slip("You find the next scale first and then divide by it. This gradient has the scale "
             "that came in.",
             {f"weight -= {UPDATE}\n    return {NEXT}":
              f"scale, good = {NEXT}\nweight -= {UPDATE}\nreturn scale, good"}),
        # The next scale.
        Slip("A skipped step leaves the scale as it was. The next one overflows again: halve it.",
             {"scale / 2, 0": "scale, 0"}),
        Slip("A skipped step doubles the scale. The gradient was too large: halve it.",
             {"scale / 2, 0": "scale * 2, 0"}),
        Slip("A skipped step does not end the row. Good steps are counted in a row: start again at "
             "0.", {"scale / 2, 0": "scale / 2, good"}),
        Slip("You count a skipped step as a good one.", {"scale / 2, 0": "scale / 2, good + 1"}),
        Slip("The scale only falls. After the fourth good step in a row it doubles.",
             {NEXT: "scale, good + 1"}),
        Slip("After the scale has doubled, the count goes on. It starts again at 0.",
             {"(2 * scale, 0) if good + 1 ==": "(2 * scale, good + 1) if good + 1 >="}),
        Slip("You double after the fifth good step in a row. `good` does not count this step yet.",
             {"good + 1 == 4": "good == 4"}),
        Slip("You double after the third good step in a row, one too early.",
             {"good + 1 == 4": "good == 2"}),
        Slip("Your function does not return two values: the scale and the count for the next step.",
             {f"return {NEXT}": NEXT}),
    )


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
