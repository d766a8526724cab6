"""The step that ends a round of local steps: Nesterov momentum on the mean of the differences."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.measure import CallLog


def outer_step(parameters, anchor, velocity):
    for parameter, start, speed in zip(parameters, anchor, velocity, strict=True):
        gradient = (start - parameter) / dist.get_world_size()
        dist.all_reduce(gradient)
        speed.mul_(0.9).add_(gradient)
        start -= 0.7 * (gradient + 0.9 * speed)
        parameter.copy_(start)


ROUNDS = 3


class OuterStep(Exercise):
    number = "13.2"
    title = "The outer step of DiLoCo"
    minutes = 15
    solution = staticmethod(outer_step)

    def trial(self, attempt):
        parameters, anchor, velocity = _at_start(), _at_start(), [0 * each for each in _at_start()]
        own, facts = list(parameters), {}
        for number in range(ROUNDS):
            for parameter, moved in zip(own, _inner(dist.get_rank(), number), strict=True):
                parameter += moved
            with CallLog() as log:
                attempt(parameters, anchor, velocity)
            facts |= _of_round(number, own, anchor, log.bytes())
        return facts

    def expected(self, world_size):
        facts, parameters = {}, [torch.nn.Parameter(each) for each in _at_start()]
        optimizer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9,
                                    nesterov=True)
        size = sum(each.numel() for each in parameters)
        for number in range(ROUNDS):
            moved = [_inner(rank, number) for rank in range(world_size)]
            for parameter, of_ranks in zip(parameters, zip(*moved, strict=True), strict=True):
                parameter.grad = -torch.stack(of_ranks).mean(dim=0)
            optimizer.step()
            now = [parameter.detach().clone() for parameter in parameters]
            sent = AtMost(4 * size, "one all-reduce of the differences is enough")
            facts |= _of_round(number, now, now, sent)
        return facts

    def parts(self, world_size, rank):
        """The tensors have more elements than all changes of four ranks in three rounds."""
        parts, found = {}, [{"the weights at first": start} for start in _at_start()]
        for number in range(ROUNDS):
            for other in range(world_size):
                for held, moved in zip(found, _inner(other, number), strict=True):
                    held[f"rank {other}'s change in round {number + 1}"] = moved
            for place, held in enumerate(found):
                parts |= {f"`{name}[{place}]` after round {number + 1}": dict(held)
                          for name in ("parameters", "anchor")}
        return parts

    hints = (
        "The outer gradient is the mean over the ranks of anchor − parameter: where all ranks "
        "moved along, it points the other way, as a gradient does. One all-reduce a tensor.",
        "Nesterov momentum as in `torch.optim.SGD(nesterov=True)`: v ← 0.9 v + g, and then a step "
        "of −0.7 (g + 0.9 v), with the *new* v, from the anchor.",
        "Write in place: `speed.mul_(0.9).add_(gradient)`, `start -= …`, `parameter.copy_(start)`. "
        "The parameters and the anchor hold the same values afterwards, in memory of their own.",
    )
    slips = (
        # The outer gradient.
        Slip("The outer gradient is this rank's own: nothing was communicated, and the ranks "
             "drift apart.", {" / dist.get_world_size()": "", "dist.all_reduce(gradient)": "pass"}),
        Slip("You summed the differences and did not divide by the world size: the outer step is "
             "N times too long.", {" / dist.get_world_size()": ""}),
        Slip("The sign is wrong: a gradient points away from where the ranks went, anchor − "
             "parameter. You step back from what they found.",
             {"start - parameter": "parameter - start"}),
        # The outer step.
        Slip("This is the average of the ranks' parameters: local SGD. DiLoCo's outer optimizer, "
             "with its learning rate and momentum, is missing.",
             {"0.7 * (gradient + 0.9 * speed)": "gradient"}),
        Slip("You have no momentum: the step is −0.7 (g + 0.9 v), and v carries the earlier "
             "rounds.", {"(gradient + 0.9 * speed)": "gradient"}),
        Slip("This is ordinary momentum, a step of −0.7 v: g + 0.9 v with the old v is the new v. "
             "Nesterov's is −0.7 (g + 0.9 v) with the *new* v.",
             {"(gradient + 0.9 * speed)": "speed"}),
        Slip("The velocity is forgotten after each round: write the new one into `velocity`, in "
             "place.", {"speed.mul_(0.9).add_(gradient)": "speed = 0.9 * speed + gradient"}),
        Slip("The values are right, but you sent twice the bytes: the velocity is the same on all "
             "ranks already, since the outer gradient is.",
             {"start -= ": "speed /= dist.get_world_size()\ndist.all_reduce(speed)\nstart -= "}),
        Slip("The step starts from this rank's own parameters, so the ranks end in different "
             "places. It starts from the anchor.",
             {"start -= 0.7 *": "start[:] = parameter - 0.7 *"}),
        Slip("The step starts from the ranks' mean, which lies where the outer gradient leads "
             "already: its way counts once too often. It starts from the anchor.",
             {"start -= 0.7 *": "start[:] = start - gradient - 0.7 *"}),
        # What is changed in place.
        Slip("The parameters hold the ranks' average, and the outer step's result does not reach "
             "them. Parameters and anchor get it, in place: `copy_`; `start = …` only gives a "
             "name to a new tensor.",
             {"parameter.copy_(start)": "pass", "speed.mul_": "parameter.copy_(start - gradient)\n"
              "speed.mul_"},
             {"parameter.copy_(start)": "pass", "speed.mul_": "parameter.copy_(start - gradient)\n"
              "speed.mul_", "start -= ": "start = start - "}),
        Slip("The outer step's result reaches neither the parameters nor the anchor. Write it "
             "into both, in place: `copy_`; `start = …` only gives a name to a new tensor.",
             {"parameter.copy_(start)": "pass", "start -= ": "start = start - "}),
        Slip("The parameters are still those of this rank's inner steps: the next round has to "
             "begin at the new anchor, on all ranks.", {"parameter.copy_(start)": "pass"}),
        Slip("The anchor is still that of the first round. The next outer gradient is the "
             "difference to where that round began, so copy the parameters into it.",
             {"start -= ": "start = start - "}),
        Slip("Anchor and parameter are now the same tensor, so the next inner steps move both and "
             "the difference is 0. Copy the values: `copy_`.",
             {"for parameter, start, speed in zip(": "for place, (parameter, start, speed) in "
              "enumerate(zip(", "strict=True)": "strict=True))",
              "parameter.copy_(start)": "anchor[place] = parameter.copy_(start)"}),
    )


def _at_start():
    return [seeded("weight", 3, 7), seeded("bias", 17)]


def _inner(rank, number):
    """What the inner steps of a round change on rank r."""
    return [seeded(f"movement {place} of rank {rank} in round {number}", *start.shape)
            for place, start in enumerate(_at_start())]


def _of_round(number, parameters, anchor, sent):
    facts = {}
    for place, (parameter, start) in enumerate(zip(parameters, anchor, strict=True)):
        facts |= {f"`parameters[{place}]` after round {number + 1}": parameter.clone(),
                  f"`anchor[{place}]` after round {number + 1}": start.clone()}
    return facts | {f"the bytes in this rank's messages in round {number + 1}": sent}
