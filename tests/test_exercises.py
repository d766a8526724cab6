"""Every exercise: its solution passes, and each known mistake is named. Then the mechanism."""

import ast
import fractions
import html
import json
import os
import re

import pytest
import torch
import torch.distributed as dist
from pictures import contrast

import dplab
from dplab.exercises import cards, every_exercise, record, solution_source
from dplab.exercises.compare import (
    COMMUNICATED,
    AtMost,
    agree,
    first_difference,
    same_outcome,
)
from dplab.exercises.evidence import explained
from dplab.exercises.exercise import CRASHED, NOT_ATTEMPTED, PASSED, WRONG, Exercise, Mistake
from dplab.exercises.titles import TITLES

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


@pytest.fixture(scope="module")
def seen():
    return {}


@pytest.fixture
def each_runs_once(monkeypatch, seen):
    """Here a known mistake is the attempt, and then what it is compared with: one run for both."""
    observe = Exercise._observe

    def once(self, attempt, world_size, **quiet):
        place = self.id, attempt, world_size
        if place not in seen:
            seen[place] = observe(self, attempt, world_size, **quiet)
        return seen[place]

    monkeypatch.setattr(Exercise, "_observe", once)


@pytest.mark.usefixtures("each_runs_once")
@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES)
def test_a_known_mistake_is_named(exercise, mistake):
    names_it(exercise, mistake)


@pytest.mark.parametrize(("exercise", "mistake"), [
    pytest.param(exercise, mistake, id=exercise.id) for exercise in EXERCISES
    for mistake in exercise.mistakes[-1:]])
def test_a_known_mistake_is_named_by_a_run_of_its_own(exercise, mistake):
    names_it(exercise, mistake)


def names_it(exercise, mistake):
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
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    helpers = {name for name in names - {"_"} if name.startswith("_")}
    assert not helpers, "the reader's notebook has no such helpers"


@pytest.mark.parametrize("background", ["#FFFFFF", "#212121", "#111111"])
def test_the_colour_of_a_card_is_seen_on_light_and_on_dark(background):
    faint = {outcome: color for outcome, color in cards._COLORS.items()
             if contrast(color, background) < 3}
    assert not faint


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


def prints_and_is_half(model):
    print("the attempt says this")
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5


def a_noisy_mistake(model):
    print("a mistake says this")
    os.write(2, b"Check failed: native words of a mistake")
    os.abort()


def test_only_the_attempt_is_heard(capfd):
    exercise = type(by_id("4.2"))()
    exercise.mistakes = (Mistake(a_noisy_mistake, "It aborts."),)
    assert exercise.judge(prints_and_is_half).outcome == WRONG
    heard = "".join(capfd.readouterr())
    assert "the attempt says this" in heard
    assert "of a mistake" not in heard and "a mistake says" not in heard


def test_an_attempt_that_aborts_is_heard(capfd):
    exercise = type(by_id("4.2"))()
    exercise.mistakes = ()
    assert "SIGABRT" in exercise.judge(a_noisy_mistake).detail
    assert "native words of a mistake" in "".join(capfd.readouterr())


def a_functional_collective(x, w):
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x @ w, "sum", dist.group.WORLD)


def test_what_a_functional_collective_returns_is_waited_for():
    assert by_id("1.2").judge(a_functional_collective).outcome == PASSED


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
    (0.5, torch.tensor(0.5), True),
    (0.5, torch.tensor([0.5, 0.5]), False),
    (0.5, fractions.Fraction(1, 2), True),
    (0.5, "0.5", False),
])
def test_agreement(expected, got, right):
    assert agree(expected, got, 1e-5) is right


def test_the_first_rank_and_fact_that_differ_are_named():
    right = [{"a": torch.ones(2), "b": 1}] * 2
    got = [{"a": torch.ones(2), "b": 1}, {"a": torch.ones(2), "b": 2}]
    difference = first_difference(right, got, 1e-5)
    assert (difference.rank, difference.fact) == (1, "b")
    assert first_difference(right, [right[0], {"a": torch.ones(2)}], 1e-5).fact == "b"


A, B = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])


@pytest.mark.parametrize(("expected", "got", "said"), [
    ((A, A), (B, B), ""),
    ((A, A), (A, B), "the ranks differ, and should all have the same"),
    ((A, B), (B, B), "it is what rank 1 should have"),
    ((A, A), (4 * A, B), "it is 4 times the reference"),
    ((A, A), (0 * A, A), "it is all zeros"),
    ((A[:1], A[:1]), (A[:1] * 1.3, A[:1] * 1.3), ""),
    ((A[:1], A[:1]), (A[:1] / 4, A[:1] / 4), "it is 0.25 times the reference"),
    ((A, A), (None, A), "it is None"),
    ((0.5, 0.5), (500.0, 500.0), "it is 1000 times the reference"),
    ((0.5, 0.5), (0.7, 0.7), ""),
    ((0.5, 0.5), (0.0, 0.0), ""),
])
def test_what_is_said_of_a_difference(expected, got, said):
    right, found = ([{"it": value} for value in values] for values in (expected, got))
    assert first_difference(right, found, 1e-5).note == said


QUANTITIES = {"the ranks": 2, "the slices": 5, "own": 3, "all": 7}
PARTS = [torch.tensor([1.0, 2.0, 5.0]), torch.tensor([10.0, 30.0, 90.0])]
SUM = PARTS[0] + PARTS[1]


@pytest.mark.parametrize(("got", "said"), [
    (5 * SUM, "it is 5 times the reference (the slices)"),
    (SUM / 5, "it is 0.2 times the reference (1 / the slices)"),
    (SUM * 3 / 7, "it is 0.4286 times the reference (own / all)"),
    (SUM / 4, "it is 0.25 times the reference (1 / (the ranks · the ranks))"),
    (SUM * 7 / 6, "it is 1.167 times the reference (all / (own · the ranks))"),
    (SUM * 10, "it is 10 times the reference (the ranks · the slices)"),
    (SUM * 1.234, "it is 1.234 times the reference"),
    (SUM + PARTS[0], "rank 0's part is in it twice"),
    (PARTS[1], "it holds rank 1's part alone"),
    (torch.cat([SUM[:2], PARTS[0][2:]]), "in chunk 1, it holds rank 0's part alone"),
    (SUM + 0.5, ""),
    (torch.tensor([7.0, 8.0, 9.0]), "it is what rank 0 alone would have"),
])
def test_what_a_wrong_tensor_is_made_of(got, said):
    difference = first_difference([{"it": SUM}], [{"it": got}], 1e-5)
    alone = {"it": torch.tensor([7.0, 8.0, 9.0])}
    assert explained(difference, alone, QUANTITIES, {"it": PARTS}, 1e-5).note == said


def test_digits_of_a_narrow_dtype_are_seen():
    right = torch.tensor([1.2345, 2.3456])
    for dtype in (torch.bfloat16, torch.float16):
        narrow = first_difference([{"it": right}], [{"it": right.to(dtype).float()}], 1e-5)
        assert str(dtype).removeprefix("torch.") in narrow.note
    assert first_difference([{"it": right}], [{"it": right + 0.01}], 1e-5).note == ""


def test_what_should_hold_is_said_as_such():
    difference = first_difference([{"that all is well": True}], [{"that all is well": False}], 0)
    assert str(difference) == "rank 0: this should hold, and does not: all is well"


def every_second_number(tensor):
    return tensor[dist.get_rank()::dist.get_world_size()]


def test_an_answer_may_be_a_view_with_gaps():
    assert "this rank's chunk" in by_id("3.1").judge(every_second_number).detail


def test_whole_numbers_are_shown_in_full():
    difference = first_difference([{"it": torch.tensor([33554433])}],
                                  [{"it": torch.tensor([33554432])}], 1e-5)
    assert "[33554433]" in str(difference) and "[33554432]" in str(difference)


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


@pytest.fixture
def progress(monkeypatch):
    """Shows progress with these outcomes; returns its plain text's lines, and its HTML."""
    def show(outcomes):
        shown = []
        monkeypatch.setattr(cards, "_display", lambda *texts: shown.append(texts))
        monkeypatch.setattr(record, "outcomes", lambda: outcomes)
        dplab.progress()
        [(plain, rich)] = shown
        return plain.splitlines(), rich
    return show


def test_progress_is_by_chapter(progress):
    passed, wrong = EXERCISES[0], EXERCISES[1]
    lines, rich = progress({passed.id: PASSED, wrong.id: WRONG, "99.1": PASSED})
    assert lines[0] == f"1 of {len(EXERCISES)} exercises passed"
    chapters = sorted({int(exercise.id.split(".")[0]) for exercise in EXERCISES})
    heads = [line for line in lines if re.match(r"\d\d · ", line)]
    assert [line.split("  ")[0] for line in heads] == [
        f"{number:02d} · {TITLES[number]}" for number in chapters]
    for number, head in zip(chapters, heads, strict=True):
        mine = [exercise for exercise in EXERCISES if exercise.id.startswith(f"{number}.")]
        count = sum(exercise is passed for exercise in mine)
        assert head.endswith(f"  {count} of {len(mine)}")
        below = lines[lines.index(head) + 1:][:len(mine)]
        for exercise, line in zip(mine, below, strict=True):
            outcome = {passed: PASSED, wrong: WRONG}.get(exercise, NOT_ATTEMPTED)
            assert re.fullmatch(rf" +{exercise.id}  {re.escape(exercise.title)} +{outcome}", line)
    assert len(lines) == 1 + 2 * len(chapters) + len(EXERCISES)
    assert rich.count("<tr") == len(chapters) + len(EXERCISES)
    for text in (passed.title, TITLES[0], "1 of 1", NOT_ATTEMPTED):
        assert html.escape(text) in rich
    ids = re.findall(r">(\d+\.\d+)<", rich)
    assert ids == [exercise.id for exercise in EXERCISES]


def test_progress_of_a_finished_course_is_green(progress):
    green = cards._COLORS[PASSED]
    lines, rich = progress({exercise.id: PASSED for exercise in EXERCISES})
    assert lines[0] == f"{len(EXERCISES)} of {len(EXERCISES)} exercises passed"
    assert set(re.findall(r"color:(#\w+)", rich)) == {green}
    assert cards._COLORS[NOT_ATTEMPTED] in progress({EXERCISES[0].id: PASSED})[1]


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
