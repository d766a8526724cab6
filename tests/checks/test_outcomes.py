"""What the reader sees of an exercise, and what is kept of it: cards, hints, progress."""

import html
import json
import re

import pytest
from attempts import raises, stub
from pictures import contrast

import dplab
from dplab import checks, drills
from dplab.checks import every_exercise, find
from dplab.checks.exercise import NOT_ATTEMPTED, PASSED, WRONG, Exercise
from dplab.desk import cards, course, record
from dplab.desk.course import TITLES, heading

EXERCISES = every_exercise()


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))


@pytest.mark.parametrize("background", ["#FFFFFF", "#212121", "#111111"])
def test_the_colour_of_a_card_is_seen_on_light_and_on_dark(background):
    faint = [color for color in (cards.GREEN, cards.ORANGE, cards.RED, cards.GREY)
             if contrast(color, background) < 3]
    assert not faint


def test_a_card_leads_on_and_into_no_appendix(monkeypatch):
    def numbered(number):
        kind = type("Numbered", (Exercise,), {"number": number})
        return kind()

    listed = [numbered(number) for number in ("10.2", "11.1", "11.2", "A.1", "A.2", "B.1")]
    monkeypatch.setattr(checks, "every_exercise", lambda: tuple(listed))
    following = [checks._after(each) for each in listed]
    assert [each and each.number for each in following] == [
        "11.1", "11.2", None, "A.2", None, None]


def test_an_exercise_is_found_by_slug_and_by_number(capsys):
    assert find("average-gradients") is find("4.2") is find(4.2)
    assert capsys.readouterr().out == ""
    assert find("9.9") is None
    out = capsys.readouterr().out
    assert "There is no exercise" in out and "average-gradients" in out


@pytest.mark.parametrize("asked", ["Average-Gradients", "average-gradient", "averages_gradients"])
def test_a_misspelt_exercise_is_guessed(asked, capsys):
    dplab.hint(asked)
    assert "Did you mean" in (out := capsys.readouterr().out) and "average-gradients" in out
    with pytest.raises(ValueError, match="Did you mean"):
        dplab.mine(asked)
    assert capsys.readouterr().out == ""


def test_a_function_in_place_of_the_name_is_asked_about(capsys):
    dplab.check(stub)
    assert "name comes first" in capsys.readouterr().out


@pytest.mark.slow
def test_cards_in_plain_text(capsys):
    dplab.check("average-gradients", stub)
    assert capsys.readouterr().out.startswith("Exercise 4.2: not attempted\n")
    dplab.check("4.2", find("4.2").solution)
    assert capsys.readouterr().out.startswith(
        "Exercise 4.2: passed\nRight on 1, 2, 3 and 4 ranks.")
    dplab.check("average-gradients", find("4.2").known_mistakes.all[0].attempt)
    out = capsys.readouterr().out
    assert out.startswith("Exercise 4.2: wrong\nYou summed")
    assert "it is 2 times the reference" in out
    dplab.check("9.9", stub)
    assert "There is no exercise `9.9`" in capsys.readouterr().out


def prints_and_averages(model, group=None):
    print("average of", sum(parameter.numel() for parameter in model.parameters()))
    find("4.2").solution(model, group)


@pytest.mark.slow
def test_what_an_attempt_prints_stands_below_a_heading_for_each_world_size(capfd):
    dplab.check("4.2", prints_and_averages)
    lines = capfd.readouterr().out.splitlines()
    heads = [index for index, line in enumerate(lines) if line.startswith("Your code printed")]
    assert [re.search(r"on (\d) rank", lines[index])[1] for index in heads] == list("2341")
    for size, index, end in zip((2, 3, 4, 1), heads, [*heads[1:], len(lines)], strict=True):
        ranks = re.findall(r"^\[rank (\d)\] average of", "\n".join(lines[index:end]), re.MULTILINE)
        assert set(ranks) == {str(rank) for rank in range(size)}


def test_hints_come_one_at_a_time(capsys):
    for number in (1, 2, 3):
        dplab.hint("4.2")
        assert f"hint {number} of 3" in capsys.readouterr().out
    dplab.hint("4.2")
    out = capsys.readouterr().out
    assert "no more hints" in out and 'dplab.solution("average-gradients")' in out
    assert all(hint in out for hint in find("4.2").hints)
    assert record.entries("exercises")["average-gradients"]["hints"] == 3
    dplab.solution("4.2")
    assert "def average_gradients(model, group=None):" in capsys.readouterr().out


@pytest.mark.slow
def test_progress_is_kept_and_a_pass_stays(capsys):
    dplab.check("4.2", raises)
    dplab.check("4.2", find("4.2").solution)
    dplab.check("4.2", raises)
    dplab.check("4.1", stub)
    capsys.readouterr()
    dplab.progress()
    out = capsys.readouterr().out
    assert out.startswith(f"1 of {len(EXERCISES)} exercises passed")
    assert re.search(r"4\.2 .*passed", out)
    assert re.search(r"4\.1 .*not attempted", out)  # of a chapter that is begun
    kept = record.entries("exercises")
    assert set(kept) == {"average-gradients"}
    assert (kept["average-gradients"]["outcome"], kept["average-gradients"]["tries"]) == (PASSED, 2)


def test_reset_forgets_the_record_and_shows_the_stub(capsys):
    record.update("exercises", "average-gradients", lambda entry: entry.update(outcome=PASSED))
    record.update("exercises", "broadcast-weights", lambda entry: entry.update(outcome=WRONG))
    dplab.reset("4.2")
    assert set(record.entries("exercises")) == {"broadcast-weights"}
    assert course.stub_of(4, "average-gradients") in capsys.readouterr().out


def test_an_instructor_collects_progress_from_a_file(tmp_path, capsys):
    record.update("exercises", "average-gradients",
                  lambda entry: entry.update(outcome=PASSED, tries=3, hints=1))
    record.update("guesses", "ring-time", lambda entry: entry.update(answer="3 ms"))
    dplab.progress(export=tmp_path / "mine.json")
    written = json.loads((tmp_path / "mine.json").read_text())
    rows = {row["exercise"]: row for row in written["exercises"]}
    assert list(rows) == [exercise.slug for exercise in EXERCISES]
    mine, other = rows["average-gradients"], rows["broadcast-weights"]
    assert (mine["passed"], mine["tries"], mine["hints"]) == (True, 3, 1)
    assert (other["passed"], other["tries"], other["hints"]) == (False, 0, 0)
    assert written["guesses"] == {"ring-time": {"answer": "3 ms"}}


@pytest.fixture
def progress(monkeypatch):
    """Shows progress with these outcomes; returns its plain text's lines, and its HTML."""
    def show(outcomes):
        shown = []
        monkeypatch.setattr(cards, "show", lambda *texts: shown.append(texts))
        for slug, outcome in outcomes.items():
            record.update("exercises", slug, lambda entry, outcome=outcome: entry.update(
                outcome=outcome))
        dplab.progress()
        [(plain, rich)] = shown
        return plain.splitlines(), rich
    return show


def test_progress_is_by_chapter(progress):
    passed, wrong = EXERCISES[0], EXERCISES[1]
    lines, rich = progress({passed.slug: PASSED, wrong.slug: WRONG, "of-another-course": PASSED})
    assert lines[0] == f"1 of {len(EXERCISES)} exercises passed"
    begun, other = ([each for each in EXERCISES if each.chapter == chapter] for chapter in (0, 4))
    chapters = list(dict.fromkeys(exercise.chapter for exercise in EXERCISES))
    heads = [line for line in lines if re.match(r"(\d\d|Appendix [A-Z]) · ", line)]
    assert [line.split("  ")[0] for line in heads] == list(map(heading, chapters))
    assert heads[0].endswith(f"  1 of {len(begun)}") and heads[4].endswith(f"  0 of {len(other)}")
    shown = {found[1]: found[2] for line in lines
             if (found := re.match(r" +(\d+\.\d+)  .*?  +(\S.*)$", line))}
    expected = {exercise.number: {passed: PASSED, wrong: WRONG}.get(exercise, NOT_ATTEMPTED)
                for exercise in EXERCISES if exercise.chapter in (passed.chapter, wrong.chapter)}
    assert shown == expected
    assert re.findall(r">(\d+\.\d+)<", rich) == list(expected)
    for text in (passed.title, TITLES[4], NOT_ATTEMPTED):
        assert html.escape(text) in rich


def test_progress_of_a_finished_course_is_green(progress):
    for chapter, slugs in course.GUESSES.items():
        for slug in slugs:
            record.update("guesses", slug, lambda entry, chapter=chapter: entry.update(
                answer=str(chapter), good=True))
    for chapter, score in drills.scores().items():
        for case in drills._kind(chapter).cases:
            record.update("drills", drills.key(chapter, case), lambda entry: entry.update(
                solved=True))
        assert drills.scores()[chapter].solved == score.total
    lines, rich = progress({exercise.slug: PASSED for exercise in EXERCISES})
    assert lines[0] == f"{len(EXERCISES)} of {len(EXERCISES)} exercises passed"
    assert set(re.findall(r"color:(#\w+)", rich)) == {cards.GREEN}


def test_progress_says_how_good_guesses_are_and_which_jobs_are_solved(capsys):
    right, wrong = course.GUESSES[0][:2]
    record.update("guesses", right, lambda entry: entry.update(answer="0", good=True))
    record.update("guesses", wrong, lambda entry: entry.update(answer="0", good=False))
    dplab.progress()
    out = capsys.readouterr().out
    assert re.findall(r"Guesses +(.*)", out) == ["1 of 2 good"]
    # Of chapter 04 none is solved and no exercise begun; in chapter 00 there are guesses.
    assert re.findall(r"Sick jobs +(.*)", out) == ["0 of 6 solved"]
    for tries, slug in enumerate("abd", start=1):
        record.update("drills", f"04/{slug}", lambda entry, tries=tries: entry.update(
            tries=tries, solved=tries < 3))
    record.update("drills", "04/e", lambda entry: entry.update(tries=1, solved=True))
    record.update("drills", "04/f", lambda entry: entry.update(tries=1, diagnosed=True))
    dplab.progress()
    out = capsys.readouterr().out
    assert re.findall(r"Sick jobs +(.*)", out)[1] == "3 of 8 solved, 2 at the first try"


def test_progress_of_an_unfinished_course_is_not(progress):
    assert cards.GREY in progress({EXERCISES[0].slug: PASSED})[1]


def test_a_record_that_cannot_be_written_is_mentioned(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "file" / "below"))
    dplab.check("4.2", raises)
    assert "Progress could not be written" in capsys.readouterr().out
