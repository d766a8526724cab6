"""Exercise 7.4: the outer step of DiLoCo."""

import torch
import torch.distributed as dist

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import seeded
from dplab.exercises.batch_norm_over_ranks import _total
from dplab.exercises.noise_scale import _mean_over_ranks
from dplab.measure import CallLog

ROUNDS, OUTER_RATE, OUTER_MOMENTUM = 3, 0.7, 0.9


def outer_step(parameters, anchor, velocity):
    for parameter, start, speed in zip(parameters, anchor, velocity, strict=True):
        gradient = (start - parameter) / dist.get_world_size()
        dist.all_reduce(gradient)
        speed.mul_(0.9).add_(gradient)
        start -= 0.7 * (gradient + 0.9 * speed)
        parameter.copy_(start)


def _outer(gradient=lambda start, end: _mean_over_ranks(start - end), *,
           speed=lambda old, gradient: OUTER_MOMENTUM * old + gradient, keep=True, rate=OUTER_RATE,
           direction=lambda gradient, old, new: gradient + OUTER_MOMENTUM * new,
           origin=lambda start, end: start,
           finish=lambda anchor, parameters, place, new: (anchor[place].copy_(new),
                                                          parameters[place].copy_(new))):
    """The outer step with one thing wrong."""

    def attempt(parameters, anchor, velocity):
        for place, (end, start, old) in enumerate(zip(parameters, anchor, velocity, strict=True)):
            outer = gradient(start, end)
            new = speed(old, outer)
            target = origin(start, end) - rate * direction(outer, old.clone(), new)
            if keep:
                old.copy_(new)
            finish(anchor, parameters, place, target)

    return attempt


def _average_kept(to_anchor):
    """The outer step from the anchor, while the parameters hold the ranks' average."""

    def attempt(parameters, anchor, velocity):
        for parameter, start, speed in zip(parameters, anchor, velocity, strict=True):
            parameter.copy_(_mean_over_ranks(parameter))
            outer = start - parameter
            speed.mul_(OUTER_MOMENTUM).add_(outer)
            if to_anchor:
                start -= OUTER_RATE * (outer + OUTER_MOMENTUM * speed)

    return attempt


class OuterStep(Exercise):
    number = "7.4"
    title = "The outer step of DiLoCo"
    minutes = 15
    hints = (
        "The outer gradient is the mean over the ranks of anchor − parameter: where all ranks "
        "moved along, it points the other way, as a gradient does. One all-reduce a tensor.",
        "Nesterov momentum as in `torch.optim.SGD(nesterov=True)`: v ← 0.9 v + g, and then a step "
        "of −0.7 (g + 0.9 v), with the *new* v, from the anchor.",
        "Write in place: `speed.mul_(0.9).add_(gradient)`, `start -= …`, `parameter.copy_(start)`. "
        "The parameters and the anchor hold the same values afterwards, in memory of their own.",
    )
    solution = staticmethod(outer_step)
    mistakes = (
        Mistake(_outer(lambda start, end: start - end), "The outer gradient is this rank's own: "
                "nothing was communicated, and the ranks drift apart."),
        Mistake(_outer(lambda start, end: _total(start - end)), "You summed the differences and "
                "did not divide by the world size: the outer step is N times too long."),
        Mistake(_outer(lambda start, end: _mean_over_ranks(end - start)), "The sign is wrong: a "
                "gradient points away from where the ranks went, anchor − parameter. You step "
                "back from what they found."),
        Mistake(_outer(direction=lambda gradient, old, new: gradient, rate=1.0), "This is the "
                "average of the ranks' parameters: local SGD. DiLoCo's outer optimizer, with its "
                "learning rate and momentum, is missing."),
        *(Mistake(_average_kept(to_anchor), "The parameters hold the ranks' average, and the outer "
                  "step's result does not reach them. Parameters and anchor get it, in place: "
                  "`copy_`; `start = …` only gives a name to a new tensor.")
          for to_anchor in (True, False)),
        Mistake(_outer(finish=lambda *_: None), "The outer step's result reaches neither the "
                "parameters nor the anchor. Write it into both, in place: `copy_`; `start = …` "
                "only gives a name to a new tensor."),
        Mistake(_outer(direction=lambda gradient, old, new: gradient), "You have no momentum: the "
                "step is −0.7 (g + 0.9 v), and v carries the earlier rounds."),
        Mistake(_outer(direction=lambda gradient, old, new: new), "This is ordinary momentum, a "
                "step of −0.7 v. Nesterov's is −0.7 (g + 0.9 v)."),
        Mistake(_outer(keep=False), "The velocity is forgotten after each round: write the new one "
                "into `velocity`, in place."),
        Mistake(_outer(origin=lambda start, end: end), "The step starts from this rank's own "
                "parameters, so the ranks end in different places. It starts from the anchor."),
        Mistake(_outer(finish=lambda anchor, parameters, place, new: anchor[place].copy_(new)),
                "The parameters are still those of this rank's inner steps: the next round has to "
                "begin at the new anchor, on all ranks."),
        Mistake(_outer(finish=lambda anchor, parameters, place, new: parameters[place].copy_(new)),
                "The anchor is still that of the first round. The next outer gradient is the "
                "difference to where that round began, so copy the parameters into it."),
        Mistake(_outer(finish=lambda anchor, parameters, place, new: anchor.__setitem__(
                place, parameters[place].copy_(new))), "Anchor and parameter are now the same "
                "tensor, so the next inner steps move both and the difference is 0. Copy the "
                "values: `copy_`."),
        Mistake(_outer(speed=lambda old, gradient: _mean_over_ranks(OUTER_MOMENTUM * old + gradient
                )), "The values are right, but you sent twice the bytes: the velocity is the same "
                "on all ranks already, since the outer gradient is."),
    )

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
        optimizer = torch.optim.SGD(parameters, lr=OUTER_RATE, momentum=OUTER_MOMENTUM,
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


def _at_start():
    return [seeded("weight", 2, 4), seeded("bias", 5)]


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
