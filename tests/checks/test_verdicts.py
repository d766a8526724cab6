"""How an attempt is judged: right, wrong, not attempted, or not to be run."""

import inspect
import os
import re

import pytest
import torch
import torch.distributed as dist
from attempts import raises, stub

from dplab.checks import find
from dplab.checks.attempt_code import unwaited
from dplab.checks.exercise import (
    CALLED_AGAIN,
    CRASHED,
    NOT_ATTEMPTED,
    OVERWRITTEN,
    PASSED,
    TAGGED,
    WRONG,
    Exercise,
)
from dplab.checks.known_mistakes import AT_LEAST
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded


def test_a_stub_is_not_attempted():
    assert find("4.2").judge(stub).outcome == NOT_ATTEMPTED


def test_code_to_repair_is_not_attempted_until_it_changes():
    exercise = find("0.3")
    namespace = {}
    exec(source_of_stub(exercise), {"dist": dist}, namespace)
    assert exercise.judge(namespace["swap"]).outcome == NOT_ATTEMPTED


def source_of_stub(exercise):
    return inspect.getsource(exercise.stub).replace(exercise.stub.__name__, exercise.name)


def unforeseen(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.3
            dist.all_reduce(parameter.grad)
            parameter.grad += 0.125 * dist.get_rank()


def test_without_a_known_mistake_the_first_difference_is_shown():
    verdict = find("4.2").judge(unforeseen)
    assert (verdict.outcome, verdict.why) == (WRONG, "")
    assert re.search(r"on 2 ranks, rank 0: the gradient of `0.weight` is not as expected: it is "
                     r"0.6 times the reference\n  expected  \[.*\]\n  got       \[", verdict.detail)


def hangs(model, group=None):
    if dist.get_rank() == dist.get_world_size() - 1 > 0:
        while True:
            pass
    find("4.2").solution(model, group)


def test_an_error_of_the_readers_is_shown_with_their_line():
    verdict = find("4.2").judge(raises)
    assert verdict.outcome == CRASHED
    assert "AttributeError" in verdict.detail
    assert "return model.no_such_thing" in verdict.detail


@pytest.mark.slow
def test_a_hang_ends_at_the_time_limit_and_shows_who_waits():
    exercise = type(find("4.2"))()
    exercise.seconds = 2.0
    verdict = exercise.judge(hangs)
    assert verdict.outcome == CRASHED
    assert re.search(r"rank 0 waits in send of .* to rank 1 and recv of .* from rank 1",
                     verdict.detail)
    assert "rank 1 was running" in verdict.detail
    assert "while True" in verdict.detail
    assert "timeout=" not in verdict.detail  # which a check does not have


def prints_and_receives_into_too_little(tensor, group=None):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    print("the attempt says this")
    if ranks > 1:
        pair = [dist.P2POp(dist.isend, tensor, (rank + 1) % ranks),
                dist.P2POp(dist.irecv, torch.zeros(1), (rank - 1) % ranks)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
    return tensor.tensor_split(ranks)[rank].clone()


@pytest.mark.slow
def test_what_the_attempt_printed_is_shown_without_gloos_last_words(capfd):
    verdict = find("3.2").judge(prints_and_receives_into_too_little)
    assert "longer than the tensor that receives it" in verdict.why
    assert "last words" not in verdict.detail
    heard = "".join(capfd.readouterr())
    assert "the attempt says this" in heard
    assert "enforce fail" not in heard and "terminate called" not in heard


def test_too_many_collectives_do_not_pass():
    def wasteful(model, group=None):
        find("4.2").solution(model, group)
        for _ in range(9):
            dist.barrier()

    verdict = find("4.2").judge(wasteful)
    assert verdict.outcome == WRONG
    assert "the number of torch's collectives" in verdict.detail


def does_nothing(model, group=None):
    pass


def does_not_wait(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, async_op=True)


def passes_on_without_waiting(flat, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = flat.clone().view(ranks, -1)
    for step in range(ranks - 1):
        growing = chunks[(rank - 2 - step) % ranks]
        arriving = torch.zeros_like(growing)
        dist.isend(chunks[(rank - 1 - step) % ranks], group_dst=(rank + 1) % ranks, group=group)
        dist.irecv(arriving, group_src=(rank - 1) % ranks, group=group)
        growing += arriving
    return chunks[rank].clone()


def in_nanoseconds(nbytes, ranks, bandwidth, latency):
    return 1.25


def leaves_it_to_ddp(model, optimizer, images, labels, batches, group=None):
    model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for batch in batches:
        mine = batch[rank::ranks]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()


def hangs_on_more_than_two(model, group=None):
    if dist.get_world_size() < 3:
        find("4.2").known_mistakes.all[0].attempt(model, group)
    elif dist.get_rank() == 0:
        dist.barrier()


@pytest.mark.slow
def test_an_attempt_that_fails_only_at_a_larger_world_size_is_still_judged():
    verdict = find("4.2").judge(hangs_on_more_than_two)
    doubled = find("4.2").known_mistakes.all[0]
    assert (verdict.outcome, verdict.why) == (WRONG, AT_LEAST + doubled.why)
    assert "it is 2 times the reference" in verdict.detail


def divides_by_one_rank_more(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group) + 1


def test_a_mistake_with_the_same_numbers_at_one_world_size_alone_is_not_named():
    """On one rank, two is a constant and one rank more."""
    verdict = find("4.2").judge(divides_by_one_rank_more)
    assert (verdict.outcome, verdict.why) == (WRONG, ""), verdict


@pytest.mark.slow
@pytest.mark.parametrize(("id", "attempt", "said"), [
    ("4.1", does_nothing, "Nothing was communicated"),
    ("4.2", does_not_wait, "keep the handle"),
    ("3.2", passes_on_without_waiting, "With `irecv` a call returns at once: keep the handle"),
    ("4.3", leaves_it_to_ddp, "yourself in every step"),
])
def test_what_is_seen_without_a_known_mistake(id, attempt, said):
    verdict = find(id).judge(attempt)
    assert verdict.outcome == WRONG
    assert said in verdict.why + verdict.detail


def an_attempt_that_aborts(model, group=None):
    os.write(2, b"Check failed: native words of an attempt")
    os.abort()


def test_an_attempt_that_aborts_is_heard(capfd):
    assert "SIGABRT" in find("4.2").judge(an_attempt_that_aborts).detail
    assert "native words of an attempt" in "".join(capfd.readouterr())


def a_functional_collective(x, w):
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x @ w, "sum", dist.group.WORLD)


def test_what_a_functional_collective_returns_is_waited_for():
    assert find("tensor-parallel-sum").judge(a_functional_collective).outcome == PASSED


def test_an_exercise_without_communication_does_not_ask_for_it():
    verdict = find("3.4").judge(in_nanoseconds)
    assert (verdict.outcome, verdict.why) == (WRONG, "")


@pytest.mark.parametrize("objects", [(), (3,), (None,), (raises, raises)])
def test_a_wrong_call_says_how_to_call(objects):
    verdict = find("4.2").judge(*objects)
    assert verdict.outcome == NOT_ATTEMPTED
    assert 'dplab.check("average-gradients", average_gradients)' in verdict.why


def test_unpicklable_code_is_explained():
    import threading

    lock = threading.Lock()

    def locked(model, group=None):
        with lock:
            pass

    verdict = find("4.2").judge(locked)
    assert verdict.outcome == CRASHED
    assert "`lock`" in verdict.detail


def every_second_number(tensor, group=None):
    return tensor.clone()[dist.get_rank()::dist.get_world_size()]


def test_an_answer_may_be_a_view_with_gaps():
    assert "this rank's chunk" in find("3.2").judge(every_second_number).detail


class SumOfRanks(Exercise):
    """Two calls of one trial give other numbers, and so do two trials."""

    number, title, minutes, hints = "9.9", "Sum", 1, ("", "", "")
    world_sizes = (1, 2, 3)

    @staticmethod
    def solution(numbers):
        dist.all_reduce(numbers)
        return numbers

    def trial(self, attempt):
        return {"the sum": attempt(seeded(f"rank {dist.get_rank()}", 7))}

    def expected(self, world_size):
        return {"the sum": sum(seeded(f"rank {rank}", 7) for rank in range(world_size))}


class SumsOfTwo(SumOfRanks):
    """Both sums are looked at behind the second call."""

    def trial(self, attempt):
        given = [seeded(f"{call} {dist.get_rank()}", 7) for call in ("first", "second")]
        sums = [attempt(numbers) for numbers in given]
        return dict(zip(("the first sum", "the second sum"), sums, strict=True))

    def expected(self, world_size):
        return {f"the {call} sum": sum(seeded(f"{call} {rank}", 7) for rank in range(world_size))
                for call in ("first", "second")}


class WithANoisyMistake(SumOfRanks):
    slips = (Slip("It aborts.", {
        "dist.all_reduce(numbers)": "print('a mistake says this')\n"
                                    "os.write(2, b'Check failed: native words of a mistake')\n"
                                    "os.abort()"}),)


def prints_and_is_half(numbers):
    print("the attempt says this")
    return SumOfRanks.solution(numbers) / 2


def test_only_the_attempt_is_heard(capfd):
    assert WithANoisyMistake().judge(prints_and_is_half).outcome == WRONG
    heard = "".join(capfd.readouterr())
    assert "the attempt says this" in heard
    assert "of a mistake" not in heard and "a mistake says" not in heard


def attempts_with_a_memory():
    """Within a function: as in a notebook, they travel to ranks with what they keep."""
    kept = {}

    def keeps_the_first_sum(numbers):
        if "sum" not in kept:
            kept["sum"] = SumOfRanks.solution(numbers)
        return kept["sum"]

    def writes_into_one_tensor(numbers):
        return kept.setdefault("sum", torch.empty(7)).copy_(SumOfRanks.solution(numbers))

    def fails_the_second_time(numbers):
        kept["calls"] = kept.get("calls", 0) + 1
        return SumOfRanks.solution(numbers) / (2 - kept["calls"])

    return keeps_the_first_sum, writes_into_one_tensor, fails_the_second_time


keeps_the_first_sum, writes_into_one_tensor, fails_the_second_time = attempts_with_a_memory()


@pytest.mark.parametrize(("attempt", "why"), [
    (keeps_the_first_sum, CALLED_AGAIN), (writes_into_one_tensor, OVERWRITTEN),
    (lambda numbers: numbers, "Nothing was communicated: no rank called a collective."),
    (lambda numbers: 2 * SumOfRanks.solution(numbers), "")])
def test_what_a_call_leaves_for_another_is_found_within_a_trial(attempt, why):
    verdict = SumsOfTwo().judge(attempt)
    assert (verdict.outcome, verdict.why) == (WRONG, why), verdict.detail


@pytest.mark.parametrize(("attempt", "outcome", "why"), [
    (SumOfRanks.solution, PASSED, ""),
    (keeps_the_first_sum, WRONG, CALLED_AGAIN),
    (writes_into_one_tensor, WRONG, OVERWRITTEN),
    (fails_the_second_time, WRONG, CALLED_AGAIN),
])
def test_a_right_attempt_is_called_again_with_other_data(attempt, outcome, why):
    verdict = SumOfRanks().judge(attempt)
    assert (verdict.outcome, verdict.why) == (outcome, why), verdict.detail


def sends_and_waits_for_that_alone(tensor, neighbour):
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
    (sends_and_waits_for_that_alone, "irecv"), (waits_for_all, ""),
    (starts_an_all_reduce, "async_op"), (does_not_wait, "async_op")])
def test_a_call_is_found_for_which_nobody_waits(attempt, call):
    assert unwaited(attempt) == call


def tags_with_its_own_number(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        arriving = torch.empty_like(tensor)
        sending = dist.isend(tensor, partner, tag=dist.get_rank())
        dist.recv(arriving, partner, tag=dist.get_rank())
        sending.wait()
        tensor.copy_(arriving)


def test_tags_that_never_meet_are_named():
    assert find("0.3").judge(tags_with_its_own_number).why == TAGGED
