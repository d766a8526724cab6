"""What a reader sees of the exercises, what is kept of it, and a teacher's tables of a class."""

import html
import json
import re

import pytest
import torch
import torch.distributed as dist

import dplab
from dplab import checks
from dplab.checks import classroom, every_exercise, find
from dplab.checks.exercise import NOT_ATTEMPTED, PASSED, WRONG
from dplab.desk import cards, course, record
from dplab.desk.course import heading

EXERCISES = every_exercise()


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "home"))


def noted(kind, slug, **entries):
    record.update(kind, slug, lambda entry: entry.update(entries))


def stub(values):
    raise NotImplementedError


def global_mean(values):
    return values.mean()


def prints_and_is_right(values):
    sums = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(sums)
    print("sums", sums.tolist())
    return sums[0] / sums[1]


@pytest.mark.slow
def test_a_check_shows_its_outcome_and_a_pass_stays(capsys):
    def shown(answer):
        dplab.check("0.2", answer)
        return capsys.readouterr().out

    assert shown(stub).startswith("Exercise 0.2: not attempted\nWrite `global_mean`.")
    assert record.entries("exercises") == {}
    assert "raised AttributeError" in shown(lambda values: values.nothing)
    wrong = shown(global_mean)
    assert wrong.startswith("Exercise 0.2: wrong\n") and "on 3 ranks, rank 0: " in wrong
    right = shown(prints_and_is_right)
    assert "Exercise 0.2: passed\nRight on 1, 2, 3 and 4 ranks. It is kept" in right
    parts = re.split(r"Your code printed, on (\d) ranks?:\n", right.partition("Exercise")[0])
    for size, printed in zip(parts[1::2], parts[2::2], strict=True):
        assert set(re.findall(r"^\[rank (\d)\] sums", printed, re.M)) == set("0123"[:int(size)])
    assert parts[1::2] == [str(size) for size in find("0.2").world_sizes]
    shown(global_mean)
    kept = record.entries("exercises")["global-mean"]
    assert (kept["outcome"], kept["tries"]) == (PASSED, 3)


def test_what_is_asked_for_is_found_or_guessed(capsys):
    assert find("average-gradients") is find("4.2") is find(4.2)
    assert capsys.readouterr().out == "" and find("9.9") is None
    assert "There is no exercise `9.9`. There are `gather-by-" in capsys.readouterr().out
    for misspelt in "Average-Gradients", "average-gradient", "averages_gradients":
        dplab.hint(misspelt)
        assert "Did you mean `average-gradients`" in capsys.readouterr().out
        with pytest.raises(ValueError, match="Did you mean `average-gradients`"):
            dplab.mine(misspelt)
    dplab.check(stub)
    assert "name comes first" in capsys.readouterr().out
    dplab.check("rows-to-hide", global_mean)
    said = capsys.readouterr().out
    assert "1.3: not attempted" in said and "answer to exercise 0.2" in said
    assert not record.entries("exercises")


def test_a_card_leads_to_the_next_exercise_and_into_no_appendix():
    last, *ends = (each.chapter for each in EXERCISES if checks._after(each) is None)
    assert last == max(each.chapter for each in EXERCISES if isinstance(each.chapter, int))
    assert {*ends} == {*course.APPENDICES} & {each.chapter for each in EXERCISES}


def test_hints_come_one_at_a_time_and_a_reset_forgets_them(capsys):
    for number in (1, 2, 3):
        dplab.hint("4.2")
        said = capsys.readouterr().out
        assert f"hint {number} of 3" in said and find("4.2").hints[number - 1] in said
        assert ("dplab.solution" in said) == (number == 3)
    dplab.hint("4.2")
    out = capsys.readouterr().out
    assert "no more hints" in out and 'dplab.solution("average-gradients")' in out
    assert all(hint in out for hint in find("4.2").hints)
    assert record.entries("exercises")["average-gradients"]["hints"] == 3
    dplab.solution("4.2")
    assert find("4.2").solution_source() in capsys.readouterr().out
    noted("exercises", "broadcast-weights", outcome=WRONG)
    dplab.reset("4.2")
    assert set(record.entries("exercises")) == {"broadcast-weights"}
    assert course.stub_of(4, "average-gradients") in capsys.readouterr().out


def test_a_record_that_cannot_be_written_is_mentioned(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "file" / "below"))
    dplab.check("rows-to-hide", lambda *numbers: 1 / 0)
    assert "Progress could not be written" in capsys.readouterr().out


# Progress


@pytest.fixture
def progress(monkeypatch):
    """Shows progress; returns its plain text and its HTML."""
    def show():
        shown = []
        monkeypatch.setattr(cards, "show", lambda *texts: shown.append(texts))
        dplab.progress()
        return shown[0]
    return show


def test_progress_is_by_chapter(progress):
    passed, wrong = EXERCISES[:2]
    noted("exercises", passed.slug, outcome=PASSED)
    noted("exercises", wrong.slug, outcome=WRONG)
    noted("exercises", "of-another-course", outcome=PASSED)
    good, bad = course.guesses()[0][:2]
    noted("guesses", good, answer="0", good=True)
    noted("guesses", bad, answer="0", good=False)
    for tries, slug in enumerate("abd", start=1):
        noted("drills", f"04/{slug}", tries=tries, solved=tries < 3)
    noted("drills", "04/e", tries=1, solved=True)
    plain, rich = progress()
    lines = plain.splitlines()
    assert lines[0] == f"1 of {len(EXERCISES)} exercises passed"
    heads = [line for line in lines if re.match(r"(\d\d|Appendix [A-Z]) · ", line)]
    chapters = dict.fromkeys(each.chapter for each in EXERCISES)
    assert [line.split("  ")[0] for line in heads] == list(map(heading, chapters))
    count = [each.chapter for each in EXERCISES].count
    assert heads[0].endswith(f"  1 of {count(0)}") and heads[4].endswith(f"  0 of {count(4)}")
    expected = {each.number: {passed: PASSED, wrong: WRONG}.get(each, NOT_ATTEMPTED)
                for each in EXERCISES if each.chapter in (0, 4)}
    assert dict(re.findall(r"^ +(\d+\.\d+)  .*?  +(\S.*)$", plain, re.M)) == expected
    assert re.findall(r">(\d+\.\d+)<", rich) == list(expected)
    assert html.escape(passed.title) in rich and cards.GREY in rich
    assert re.findall(r"Guesses +(\d.*)", plain) == ["1 of 2 good"]
    assert re.findall(r"Sick jobs +(.*)", plain) == [
        "0 of 6 solved", "3 of 8 solved, 2 at the first try"]


@pytest.mark.parametrize(("outcomes", "following"), [
    ({}, ["0.1"]), ({"0.1": PASSED, "0.2": WRONG}, ["0.2"]), ({"4.1": PASSED}, ["4.2"]),
    ({"0.1": PASSED, "0.2": PASSED, "0.3": PASSED}, ["1.1"]),
    ({exercise.number: PASSED for exercise in EXERCISES}, [])])
def test_progress_names_the_next_exercise(outcomes, following, progress):
    for number, outcome in outcomes.items():
        noted("exercises", find(number).slug, outcome=outcome)
    assert re.findall(r"^Next: (\S+) .*\((\S+)\)$", progress()[0], re.M) == [
        (number, find(number).slug) for number in following]


# A class


@pytest.fixture
def handed_in(tmp_path, monkeypatch):
    """The files of Ada, of Ben, and of Cem, who has not begun."""
    def of_ada():
        noted("exercises", "rows-to-hide", outcome=PASSED, tries=1)
        noted("exercises", "gather-by-adding", outcome=WRONG, tries=3)
        noted("drills", "04/a", solved=True)
        noted("drills", "04/b", taken=1)
        noted("guesses", "ring-time", answer="3 ms")
        dplab.hint("average-gradients")
        dplab.hint("average-gradients")
        dplab.solution("global-mean")

    files = []
    for name, learn in (("ada", of_ada), ("cem", lambda: None), ("ben", lambda: noted(
            "exercises", "average-gradients", outcome=PASSED, tries=2))):
        monkeypatch.setenv("DPLAB_HOME", str(tmp_path / f"home of {name}"))
        learn()
        files.append(str(tmp_path / f"{name}.json"))
        dplab.progress(export=files[-1])
    return files


def rows_of(text):
    """The words of each line of a table, by its first word."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def test_exported_files_become_two_tables_and_a_broken_one_is_named(handed_in, tmp_path, capsys):
    exported = json.loads((tmp_path / "ada.json").read_text())
    assert [row["exercise"] for row in exported["exercises"]] == [each.slug for each in EXERCISES]
    assert exported["guesses"] == {"ring-time": {"answer": "3 ms"}}
    capsys.readouterr()
    assert classroom.main(handed_in) == 0
    students, exercises = capsys.readouterr().out.split("Exercises that were begun")
    rows = rows_of(students)
    for name, chapter in (("ada", "01"), ("ben", "04")):
        passed = dict(zip(["00", *rows["00"]], rows[name], strict=False))
        assert next(label for label, count in passed.items() if count == "1") == chapter
    # all passed, hints, solutions, sick jobs
    assert [rows[name][-4:] for name in ("ada", "ben", "cem")] == [
        ["1", "2", "1", "1"], ["1", "0", "0", "0"], ["0", "0", "0", "0"]]
    # begun, passed, median of tries, hints, solutions; those that fewest passed come first
    counts = {number: words[-5:] for number, words in rows_of(exercises).items()
              if re.match(r"\d+\.\d", number)}
    assert list(counts.items()) == [
        (find("gather-by-adding").number, ["1", "0", "3", "0", "0"]),
        (find("global-mean").number, ["1", "0", "0", "0", "1"]),
        (find("average-gradients").number, ["2", "1", "1", "2", "0"]),
        (find("rows-to-hide").number, ["1", "1", "1", "0", "0"])]


@pytest.mark.parametrize(("content", "said"), [
    ("{", "cannot be read"), ('{"0.1": {"outcome": "passed"}}', "no progress of this edition")])
def test_a_file_that_cannot_be_read_is_named_and_the_others_are_shown(
        handed_in, tmp_path, capsys, content, said):
    broken = tmp_path / "dan.json"
    broken.write_text(content)
    assert classroom.main([str(broken), *handed_in]) == 1
    shown = capsys.readouterr()
    assert "ada" in shown.out and "dan " not in shown.out
    assert str(broken) in shown.err and said in shown.err
    assert classroom.main([str(broken)]) == 1 and classroom.main([]) == 1
    assert capsys.readouterr().out == ""
