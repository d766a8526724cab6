"""What the reader sees of an exercise, and what is kept of it: cards, hints, progress."""

import html
import json
import re

import pytest
from attempts import raises, stub
from pictures import contrast

import dplab
from dplab.exercises import cards, every_exercise, find, record
from dplab.exercises.cards import TITLES
from dplab.exercises.exercise import NOT_ATTEMPTED, PASSED, WRONG

EXERCISES = every_exercise()


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))


@pytest.mark.parametrize("background", ["#FFFFFF", "#212121", "#111111"])
def test_the_colour_of_a_card_is_seen_on_light_and_on_dark(background):
    faint = {outcome: color for outcome, color in cards._COLORS.items()
             if contrast(color, background) < 3}
    assert not faint


@pytest.mark.slow
def test_cards_in_plain_text(capsys):
    dplab.check("4.2", stub)
    assert capsys.readouterr().out.startswith("Exercise 4.2: not attempted\n")
    dplab.check("4.2", find("4.2").solution)
    assert capsys.readouterr().out.startswith(
        "Exercise 4.2: passed\nRight on 1, 2, 3 and 4 ranks.")
    dplab.check("4.2", find("4.2").mistakes[0].attempt)
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
    dplab.check("4.2", find("4.2").solution)
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
