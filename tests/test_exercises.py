"""Every exercise: its solution passes, and each known mistake is named. Then the mechanism."""

import json
import re

import pytest
import torch
import torch.distributed as dist

import dplab
from dplab.exercises import every_exercise, record, solution_source
from dplab.exercises.compare import (
    COMMUNICATED,
    AtMost,
    agree,
    first_difference,
    same_outcome,
)
from dplab.exercises.exercise import CRASHED, NOT_ATTEMPTED, PASSED, WRONG

EXERCISES = every_exercise()
MISTAKES = [pytest.param(exercise, mistake, id=f"{exercise.id}-{index}")
            for exercise in EXERCISES for index, mistake in enumerate(exercise.mistakes)]


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))


def by_id(id):
    return next(exercise for exercise in EXERCISES if exercise.id == id)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_the_solution_passes(exercise):
    verdict = exercise.judge(exercise.solution)
    assert verdict.outcome == PASSED, f"{verdict.why}\n{verdict.detail}"
    assert verdict.world_sizes == [1, 2, 3, 4]


@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES)
def test_a_known_mistake_is_named(exercise, mistake):
    verdict = exercise.judge(mistake.attempt)
    assert (verdict.outcome, verdict.why) == (WRONG, mistake.why), verdict.detail
    assert verdict.detail, "the evidence is missing"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_an_exercise_is_complete(exercise):
    assert re.fullmatch(r"\d+\.\d+", exercise.id)
    assert len(exercise.hints) >= 2
    assert len({mistake.why for mistake in exercise.mistakes}) >= 3
    source = exercise.solution_source()
    assert source.startswith((f"def {exercise.name}(", f"class {exercise.name}"))
    compile(source, "solution", "exec")


def test_ids_are_unique_and_in_order():
    ids = [tuple(map(int, exercise.id.split("."))) for exercise in EXERCISES]
    assert ids == sorted(set(ids))


def stub(model):
    """All-reduce the gradients."""
    raise NotImplementedError("write me")


def test_a_stub_is_not_attempted():
    assert by_id("4.2").judge(stub).outcome == NOT_ATTEMPTED


def test_code_to_repair_is_not_attempted_until_it_changes():
    exercise = by_id("4.4")
    namespace = {}
    exec(source_of_stub(exercise), {"F": torch.nn.functional}, namespace)
    assert exercise.judge(namespace["train_steps"]).outcome == NOT_ATTEMPTED


def source_of_stub(exercise):
    import inspect

    return inspect.getsource(exercise.stub).replace(exercise.stub.__name__, exercise.name)


def unforeseen(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5
            dist.all_reduce(parameter.grad)
            parameter.grad += 0.125 * dist.get_rank()


def test_without_a_known_mistake_the_first_difference_is_shown():
    verdict = by_id("4.2").judge(unforeseen)
    assert (verdict.outcome, verdict.why) == (WRONG, "")
    assert re.search(r"on 1 rank, rank 0: the gradient of `0.weight` is not as expected: it is "
                     r"0.5 times the reference\n  expected  \[.*\]\n  got       \[", verdict.detail)


def raises(model):
    return model.no_such_thing


def hangs(model):
    if dist.get_rank() == dist.get_world_size() - 1 > 0:
        while True:
            pass
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def test_an_error_of_the_readers_is_shown_with_their_line():
    verdict = by_id("4.2").judge(raises)
    assert verdict.outcome == CRASHED
    assert "AttributeError" in verdict.detail
    assert "return model.no_such_thing" in verdict.detail


def test_a_hang_ends_at_the_time_limit_and_shows_who_waits():
    exercise = by_id("4.2")
    exercise.seconds = 2.0
    verdict = exercise.judge(hangs)
    assert verdict.outcome == CRASHED
    assert "rank 1 did not come to all_reduce number 1" in verdict.detail
    assert "while True" in verdict.detail


def test_too_many_collectives_do_not_pass():
    def wasteful(model):
        by_id("4.2").solution(model)
        for _ in range(9):
            dist.barrier()

    verdict = by_id("4.2").judge(wasteful)
    assert verdict.outcome == WRONG
    assert "the number of collectives" in verdict.detail


def does_nothing(model):
    pass


def does_not_wait(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, async_op=True)


def passes_on_without_waiting(tensor):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(ranks)
    for step in range(ranks - 1):
        growing = chunks[(rank - 2 - step) % ranks]
        arriving = torch.zeros_like(growing)
        dist.isend(chunks[(rank - 1 - step) % ranks], (rank + 1) % ranks)
        dist.irecv(arriving, (rank - 1) % ranks)
        growing += arriving
    return chunks[rank]


def in_nanoseconds(gradients, bytes_each, world_size, gigabits, microseconds):
    return 1.0, 2.0


def leaves_it_to_ddp(model, optimizer, images, labels, batches):
    model = torch.nn.parallel.DistributedDataParallel(model)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    by_id("4.4").solution(model, optimizer, images, labels, [each[rank::ranks] for each in batches])


def hangs_on_more_than_two(model):
    if dist.get_world_size() < 3:
        by_id("4.2").mistakes[0].attempt(model)
    elif dist.get_rank() == 0:
        dist.barrier()


def test_an_attempt_that_fails_only_at_a_larger_world_size_is_still_judged():
    verdict = by_id("4.2").judge(hangs_on_more_than_two)
    assert (verdict.outcome, verdict.why) == (WRONG, "")
    assert "it is 2 times the reference" in verdict.detail


@pytest.mark.parametrize(("id", "attempt", "said"), [
    ("4.1", does_nothing, "Nothing was communicated"),
    ("4.2", does_not_wait, "keep the handle"),
    ("3.1", passes_on_without_waiting, "With `irecv` a call returns at once: keep the handle"),
    ("4.3", leaves_it_to_ddp, "a collective of your own"),
])
def test_what_is_seen_without_a_known_mistake(id, attempt, said):
    verdict = by_id(id).judge(attempt)
    assert verdict.outcome == WRONG
    assert said in verdict.why + verdict.detail


def test_an_exercise_without_communication_does_not_ask_for_it():
    verdict = by_id("3.3").judge(in_nanoseconds)
    assert (verdict.outcome, verdict.why) == (WRONG, "")


@pytest.mark.parametrize(("mine", "theirs", "alike"), [
    (3, 3, True), (2, 4, True), (4, 5, False), (5, 5, True), (5, 6, False)])
def test_counts_within_their_limit_do_not_tell_mistakes_apart(mine, theirs, alike):
    def facts(count):
        return [{"calls": count, COMMUNICATED: True}]

    expected = [{"calls": AtMost(4, "four are enough")}]
    assert same_outcome(facts(mine), facts(theirs), expected, 1e-5) is alike


@pytest.mark.parametrize("objects", [(), (3,), (None,), (raises, raises)])
def test_a_wrong_call_says_how_to_call(objects):
    verdict = by_id("4.2").judge(*objects)
    assert verdict.outcome == CRASHED
    assert 'dplab.check("4.2", average_gradients)' in verdict.why


def test_unpicklable_code_is_explained():
    import threading

    lock = threading.Lock()

    def locked(model):
        with lock:
            pass

    verdict = by_id("4.2").judge(locked)
    assert verdict.outcome == CRASHED
    assert "`lock`" in verdict.detail


@pytest.mark.parametrize(("expected", "got", "right"), [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6]), True),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), False),
    (torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0]]), False),
    (torch.tensor([1.0]), torch.tensor([float("nan")]), False),
    (torch.tensor([3]), torch.tensor([3]), True),
    (torch.tensor([3]), torch.tensor([4]), False),
    (torch.tensor([3]), torch.tensor([3.0]), False),
    (torch.tensor([1.0]), None, False),
    (AtMost(4, ""), 4, True),
    (AtMost(4, ""), 5, False),
    (7, 7, True),
    (7, 8, False),
    (0.5, 0.5000001, True),
    (0.5, 0.51, False),
])
def test_agreement(expected, got, right):
    assert agree(expected, got, 1e-5) is right


def test_the_first_rank_and_fact_that_differ_are_named():
    right = [{"a": torch.ones(2), "b": 1}] * 2
    got = [{"a": torch.ones(2), "b": 1}, {"a": torch.ones(2), "b": 2}]
    difference = first_difference(right, got, 1e-5)
    assert (difference.rank, difference.fact) == (1, "b")
    assert first_difference(right, [right[0], {"a": torch.ones(2)}], 1e-5).fact == "b"


def test_cards_in_plain_text(capsys):
    dplab.check("4.2", stub)
    assert capsys.readouterr().out.startswith("Exercise 4.2: not attempted\n")
    dplab.check("4.2", by_id("4.2").solution)
    assert capsys.readouterr().out.startswith(
        "Exercise 4.2: passed\nRight on 1, 2, 3 and 4 ranks.")
    dplab.check("4.2", by_id("4.2").mistakes[0].attempt)
    out = capsys.readouterr().out
    assert out.startswith("Exercise 4.2: wrong\nYou summed")
    assert "it is 2 times the reference" in out
    dplab.check("9.9", stub)
    assert "There is no exercise 9.9" in capsys.readouterr().out


def test_hints_come_one_at_a_time(capsys):
    for number in (1, 2, 3, 3):
        dplab.hint("4.2")
        assert f"hint {number} of 3" in capsys.readouterr().out
    dplab.solution("4.2")
    assert "def average_gradients(model):" in capsys.readouterr().out


def test_progress_is_kept_and_a_pass_stays(capsys, tmp_path):
    dplab.check("4.2", by_id("4.2").solution)
    dplab.check("4.2", raises)
    dplab.check("4.1", stub)
    capsys.readouterr()
    dplab.progress()
    out = capsys.readouterr().out
    assert out.startswith(f"1 of {len(EXERCISES)} exercises passed")
    assert re.search(r"4\.2 .*passed", out)
    assert re.search(r"4\.1 .*not attempted", out)
    assert json.loads((tmp_path / "progress.json").read_text()) == {"4.2": {"outcome": "passed"}}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"4.2": 3}', "\0"])
def test_a_damaged_record_starts_over(tmp_path, content):
    (tmp_path / "progress.json").write_text(content)
    assert record.outcomes() == {}
    assert record.save_outcome("4.2", "wrong")
    assert record.outcomes() == {"4.2": "wrong"}


def test_a_record_that_cannot_be_written_is_mentioned(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "file" / "below"))
    dplab.check("4.2", raises)
    assert "Progress could not be written" in capsys.readouterr().out


def test_solution_source_is_that_of_the_name():
    assert solution_source("4.4").startswith("def train_steps(")
