"""How an attempt is judged, on a small exercise: which outcome, which reason, which evidence."""

import inspect
import os
import re
import threading
import warnings

import pytest
import torch
import torch.distributed as dist

from dplab.checks import find
from dplab.checks.attempt_code import unwaited
from dplab.checks.exercise import (
    CALLED_AGAIN,
    CRASHED,
    GIVES_NONE,
    NOT_ATTEMPTED,
    OVERWRITTEN,
    PASSED,
    SILENT,
    TAGGED,
    UNWAITED,
    WITHOUT_GROUP,
    WRONG,
    Exercise,
)
from dplab.checks.mistakes import AT_LEAST, SEVERAL, Slip
from dplab.checks.trials import seeded


def scaled_mean(values, weight, group=None):
    total = values.sum()
    dist.all_reduce(total, group=group)
    mean = total / dist.get_world_size(group)
    if weight > 1:
        mean = mean * weight
    return mean


def in_one_line(values, weight, group=None):
    return sum(values) * max(weight, 1)


UNDIVIDED = Slip("Divide by the number of ranks.", {" / dist.get_world_size(group)": ""})
UNWEIGHTED = Slip("Multiply by the weight.", {"mean * weight": "mean"})
NEGATIVE = Slip("The sign is wrong.", {"values.sum()": "-values.sum()"})
HANGS = Slip("One rank does not come.", {
    "dist.all_reduce": "if dist.get_rank() + 1 < dist.get_world_size():\n    dist.all_reduce"},
    hangs=True)
NOISY = Slip("It aborts.", {"dist.all_reduce": (
    "print('a mistake says this')\nos.write(2, b'words of a mistake')\nos.abort()\n"
    "dist.all_reduce")})

OF_CHANCE = Slip("It adds noise.", *({"total / dist.get_world_size(group)": (
    f"total / dist.get_world_size(group) + torch.rand({count}).sum()")} for count in (2, 1)))


class ScaledMean(Exercise):
    number, title, minutes, hints = "9.9", "A mean", 1, ("", "", "")
    world_sizes = (1, 2, 3, 4)
    solution = staticmethod(scaled_mean)
    slips = (UNDIVIDED, UNWEIGHTED, NEGATIVE, HANGS, NOISY, OF_CHANCE)
    seconds = 5.0
    with_groups = True

    def trial(self, attempt):
        values = seeded(f"values of rank {dist.get_rank()}", 5)
        facts = {weight: attempt(values.clone(), weight) for weight in (1, 3)}
        if dist.get_world_size() == 4 and self.with_groups:
            pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
            facts[2] = attempt(values.clone(), 2, pair)
        return {f"the mean with weight {weight}": mean for weight, mean in facts.items()}

    def expected(self, world_size):
        sums = torch.stack([seeded(f"values of rank {rank}", 5).sum()
                            for rank in range(world_size)])
        facts = {f"the mean with weight {weight}": weight * sums.mean() for weight in (1, 3)}
        if world_size < 4:
            return facts
        return [facts | {"the mean with weight 2": sums[first:first + 2].sum()}
                for first in (0, 0, 2, 2)]


EXERCISE = ScaledMean()  # one for all: the known mistakes run once


# Attempts, and what the check says of each


def with_a_local_name(values, weight, group=None):
    dist.all_reduce(values := values.sum(), group=group)
    return -values / dist.get_world_size(group) * max(1, weight)


def forgets_to_divide_and_weigh(values, weight, group=None):
    dist.all_reduce(own := values.sum(), group=group)
    return own


def forgets_all_three(values, weight, group=None):
    return -forgets_to_divide_and_weigh(values, weight, group)


def undivided_and_far_off_with_weight_3(values, weight, group=None):
    return forgets_to_divide_and_weigh(values, weight, group) + (weight == 3)


def adds_noise(values, weight, group=None):
    dist.all_reduce(total := values.sum(), group=group)
    return (total / dist.get_world_size(group) + torch.rand(1).sum()) * max(1, weight)


def half(values, weight, group=None):
    print("the attempt says this")
    return scaled_mean(values, weight, group) / 2


def root(values, weight, group=None):
    return scaled_mean(values, weight, group).abs().sqrt()


def without_the_others(values, weight, group=None):
    return values.sum() * weight


def without_the_group(values, weight, group=None):
    return scaled_mean(values, weight)


def does_not_wait(values, weight, group=None):
    total = values.sum()
    dist.all_reduce(total, group=group, async_op=True)
    return 0 * total


def uses_what_the_call_returns(values, weight, group=None):
    return dist.all_reduce(values.sum(), group=group) / dist.get_world_size(group)


def meets_no_tag(values, weight, group=None):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        dist.send(values, partner, tag=dist.get_rank())
        dist.recv(values, partner, tag=dist.get_rank())
    return scaled_mean(values, weight, group)


def receives_into_too_little(values, weight, group=None):
    print("the attempt says this")
    if dist.get_world_size() > 1 and dist.get_rank() < 2:
        pair = [dist.P2POp(dist.isend, values, 1 - dist.get_rank()),
                dist.P2POp(dist.irecv, torch.zeros(1), 1 - dist.get_rank())]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
    return scaled_mean(values, weight, group)


def raises(values, weight, group=None):
    return values.no_such_thing


def runs_for_ever_on_the_last_of_three(values, weight, group=None):
    while dist.get_rank() == 2:
        pass
    return scaled_mean(values, weight, group)


def undivided_on_two_and_stuck_on_three(values, weight, group=None):
    if dist.get_world_size() < 3:
        return weight * forgets_to_divide_and_weigh(values, weight, group)
    if dist.get_rank() == 0:
        dist.barrier()


def aborts(values, weight, group=None):
    os.write(2, b"native words of an attempt")
    os.abort()


def of_a_functional_collective(values, weight, group=None):
    from torch.distributed._functional_collectives import all_reduce

    total = all_reduce(values.sum(), "sum", group or dist.group.WORLD)
    warnings.warn("an older name", FutureWarning, stacklevel=1)
    return weight * total / dist.get_world_size(group)


def with_a_memory():
    """Within a function: as in a notebook, they travel to ranks with what they keep."""
    kept = {}

    def keeps_the_first_mean(values, weight, group=None):
        if (weight, group) not in kept:
            kept[weight, group] = scaled_mean(values, weight, group)
        return kept[weight, group]

    def writes_into_one_tensor(values, weight, group=None):
        result = kept.setdefault((weight, group), torch.empty(()))
        return result.copy_(scaled_mean(values, weight, group))

    def raises_the_second_time(values, weight, group=None):
        kept["calls"] = kept.get("calls", 0) + 1
        return scaled_mean(values, weight, group) / (1 if kept["calls"] < 4 else dist.nothing)

    return keeps_the_first_mean, writes_into_one_tensor, raises_the_second_time


keeps_the_first_mean, writes_into_one_tensor, raises_the_second_time = with_a_memory()


def unpicklable():
    own = threading.Lock()
    return lambda values, weight, group=None: own


@pytest.mark.parametrize(("attempt", "outcome", "why", "detail"), [
    (of_a_functional_collective, PASSED, "", ""),
    (with_a_local_name, WRONG, NEGATIVE.why, "already on 1 rank.*it is -1 times the reference"),
    (forgets_to_divide_and_weigh, WRONG, UNDIVIDED.why + SEVERAL + UNWEIGHTED.why, "weight 3"),
    (forgets_all_three, WRONG, "", "already on 1 rank"),
    (undivided_and_far_off_with_weight_3, WRONG, "", "weight 3"),
    (adds_noise, WRONG, OF_CHANCE.why, "already on 1 rank"),
    (half, WRONG, "", "so no other rank has a part in it.*0.5 times the reference\n  expected "),
    (root, WRONG, "", "already on 1 rank"),
    (without_the_others, WRONG, SILENT, "on 2 ranks, rank 0: the mean with weight 1"),
    (without_the_group, WRONG, WITHOUT_GROUP, "on 4 ranks, rank 0: the mean with weight 2"),
    (does_not_wait, WRONG, UNWAITED.format("async_op"), ""),
    (uses_what_the_call_returns, WRONG, GIVES_NONE.format("all_reduce"), "NoneType"),
    (meets_no_tag, WRONG, TAGGED, "rank 0 waits in send"),
    (receives_into_too_little, WRONG, Exercise.too_long, "rank"),
    (raises, CRASHED, "on 1 rank:", "AttributeError.*return values.no_such_thing"),
    (runs_for_ever_on_the_last_of_three, CRASHED, "on 3 ranks:",
     "rank 0 waits in all_reduce.*rank 2 was running.*while dist.get_rank"),
    (undivided_on_two_and_stuck_on_three, WRONG, AT_LEAST + UNDIVIDED.why, "on 2 ranks.*2 times"),
    (aborts, WRONG, NOISY.why, "SIGABRT"),
    (unpicklable(), CRASHED, "", "`own`"),
    (keeps_the_first_mean, WRONG, CALLED_AGAIN, "on 2 ranks, rank 0: the mean with weight 1"),
    (writes_into_one_tensor, WRONG, OVERWRITTEN, "on 2 ranks, rank 0"),
    (raises_the_second_time, CRASHED, f"{CALLED_AGAIN} on 2 ranks:", "AttributeError"),
])
def test_the_outcome_its_reason_and_the_evidence(attempt, outcome, why, detail, capfd):
    verdict = EXERCISE.judge(attempt)
    assert (verdict.outcome, verdict.why) == (outcome, why), verdict.detail
    assert re.search(detail, verdict.detail, re.DOTALL), verdict.detail
    assert "timeout=" not in verdict.detail  # which a check does not have
    assert ("last words" in verdict.detail) == (attempt is aborts)  # and not gloo's
    heard = "".join(capfd.readouterr())
    assert ("the attempt says" in heard) == (attempt in (half, receives_into_too_little))
    assert ("native words" in heard) == (attempt is aborts)
    for silent in ("of a mistake", "a mistake says", "enforce fail", "terminate called", "Warning"):
        assert silent not in heard


def test_a_pass_says_where_and_tells_each_step():
    steps = []
    assert EXERCISE.judge(scaled_mean, tell=steps.append).world_sizes == [1, 2, 3, 4]
    assert steps == [1, 2, 3, 4]
    assert EXERCISE.judge(root, tell=steps.append).world_sizes == []
    assert steps[4:] == [1, None]


def test_a_fault_of_the_course_is_said_to_be_one():
    class Broken(ScaledMean):
        def expected(self, world_size):
            return 1 / 0

    verdict = Broken().judge(scaled_mean)
    assert verdict.outcome == CRASHED and "fault of the course" in verdict.why
    assert "ZeroDivisionError" in verdict.detail


@pytest.mark.parametrize(("attempt", "said"), [
    (scaled_mean, ""), (root, "with 2 ranks, the mean with weight 1 is not as expected"),
    (raises, r"with 2 ranks, rank \d of 2 raised AttributeError"), (1, "with 2 ranks, ")])
def test_a_rerun_says_in_one_line_what_is_wrong(attempt, said):
    found = EXERCISE.rerun(attempt, (2, 4))
    assert re.match(said, found) and bool(found) == bool(said) and "\n" not in found


class OneRankLast(ScaledMean):
    world_sizes = (2, 3, 1)
    slips = (Slip("On one rank it is too much.", {"mean = total / dist.get_world_size(group)": (
        "mean = total / dist.get_world_size(group)\nmean += dist.get_world_size() == 1")}),
        Slip("It is a seventh.", {" / dist.get_world_size(group)": " / 7"}))


def alone(change):
    def attempt(values, weight, group=None):
        mean = scaled_mean(values, weight, group)
        return change(mean, max(weight, 1)) if dist.get_world_size() == 1 else mean

    return attempt


@pytest.mark.parametrize(("change", "outcome", "why"), [
    (lambda mean, weight: mean.nothing, CRASHED, "on 1 rank:"),
    (lambda mean, weight: mean + weight, WRONG, OneRankLast.slips[0].why),
    (lambda mean, weight: mean / 7, WRONG, "")])  # that slip is wrong where this attempt is right
def test_what_is_wrong_at_the_last_size_is_compared_there(change, outcome, why):
    verdict = OneRankLast().judge(alone(change))
    assert (verdict.outcome, verdict.why) == (outcome, why), verdict.detail


# What is no attempt yet


def unwritten(values, weight, group=None):
    raise NotImplementedError("your turn")


class Unwritten:
    @staticmethod
    def part(values):
        raise NotImplementedError


@pytest.mark.parametrize(("objects", "said"), [
    ((), 'dplab.check("test-verdicts", scaled_mean)'), ((3,), "dplab.check("),
    ((raises, raises), "dplab.check("), ((unwritten,), ""), ((Unwritten,), "cannot be called"),
    ((lambda values: 1,), "asks for the function `scaled_mean(values, weight, group=None)`")])
def test_what_cannot_be_judged_is_not_attempted(objects, said):
    verdict = EXERCISE.judge(*objects)
    assert verdict.outcome == NOT_ATTEMPTED and said in verdict.why


def test_a_stub_is_told_in_a_method_too_and_a_function_is_no_class():
    class OfAClass(ScaledMean):
        solution = Unwritten

    assert OfAClass().is_untouched(Unwritten) and not OfAClass().is_untouched(ScaledMean)
    assert "asks for the class `Unwritten`" in OfAClass().judge(lambda: 1).why


def test_code_to_repair_is_not_attempted_until_it_changes():
    exercise, names = find("repair-deadlock"), {}
    source = inspect.getsource(exercise.stub).replace(exercise.stub.__name__, exercise.name)
    exec(source, {"dist": dist}, names)
    assert exercise.is_untouched(names[exercise.name])
    exec(source.replace("dist.send", "dist.isend", 1), {"dist": dist}, names)
    assert not exercise.is_untouched(names[exercise.name])


# The code of an attempt


def waits_for_its_send_alone(tensor, neighbour):
    arriving = torch.empty_like(tensor)
    sending = dist.isend(tensor, neighbour)
    receiving = dist.irecv(arriving, neighbour)  # noqa: F841
    sending.wait()
    return arriving


def waits_for_all(tensor, neighbour):
    arriving = torch.empty_like(tensor)
    pending = [dist.isend(tensor, neighbour), dist.irecv(arriving, neighbour)]
    [each.wait() for each in pending]
    return dist.all_reduce(arriving, async_op=False)


def starts_an_all_reduce(tensor):
    dist.all_reduce(tensor, async_op=True)
    return dist.broadcast(tensor, 0, async_op=True).wait()


@pytest.mark.parametrize(("attempt", "call"), [
    (waits_for_its_send_alone, "irecv"), (waits_for_all, ""), (starts_an_all_reduce, "async_op"),
    (does_not_wait, "async_op"), (scaled_mean, "")])
def test_a_call_is_found_for_which_nobody_waits(attempt, call):
    assert unwaited(attempt) == call


# Known mistakes


def made(slip, *answers):
    return list(slip.made_in(answers or (scaled_mean, in_one_line)))


def test_a_mistake_is_made_in_each_right_answer_that_has_a_place_for_it():
    one, other = made(Slip("Weigh.", {"mean * weight": "mean"}, {" * max(weight, 1)": ""}))
    assert other.attempt(torch.tensor([1.0, 2.0]), 5) == 3.0
    assert in_one_line(torch.tensor([1.0, 2.0]), 5) == 15.0  # it is as it was
    assert one.edits == {"mean * weight": "mean"} and not one.hangs and made(HANGS)[0].hangs
    with pytest.raises(ValueError, match="median"):
        made(Slip("Nobody has written this.", {"median": "mean"}))
