"""A guess is taken, kept, and shown beside its result; without one, only the result is shown."""

import collections

import notebooks
import pytest
import torch

import dplab
from dplab.desk import course, guesses, record
from dplab.desk.quantities import NotUnderstood, read, written

WAYS = ["gather and broadcast", "a tree", "a ring"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def said(capsys):
    """What was printed since the last call."""
    def said():
        return capsys.readouterr().out
    said()
    return said


def kept(slug):
    return record.entries("guesses").get(slug)


def share(answer=None):
    return dplab.guess("share", "Which share is communication?", answer, unit="%")


def way(answer=None):
    return dplab.guess("way", "Which way sends least?", answer, choices=WAYS)


@pytest.mark.parametrize(("text", "unit", "value"), [
    (" 7. ", None, 7), ("−3", None, -3), ("1e-7", None, 1e-7), (".5", None, 0.5), ("~5", None, 5),
    ("10", "%", 10), ("0", "%", 0), ("1 byte", "bytes", 1), ("3 kib", "KiB", 3),
    ("1,500", None, "commas"), ("0.1", "%", "0.1 % or 10 %"), ("3 m", "ms", "in ms"),
    ("3 MB", "MiB", "in MiB"), ("3 ms", None, "alone"), ("1e999", None, "alone")])
def test_a_number_is_read_as_people_write_it_or_asked_about(text, unit, value):
    if isinstance(value, str):
        with pytest.raises(NotUnderstood, match=value) as asked:
            read(text, unit)
        assert "?" in str(asked.value)
    else:
        assert read(text, unit) == value


@pytest.mark.parametrize(("value", "unit", "text"), [
    (0, None, "0"), (37.123, "%", "37.1 %"), (999.6, None, "1,000"), (1.26e-7, None, "1.26e-07"),
    (3 * 2 ** 20, "bytes", "3,145,728 bytes")])
def test_a_number_is_written_briefly(value, unit, text):
    assert written(value, unit) == text


def test_without_a_guess_the_result_stands_alone_and_a_page_says_how_to_answer(said):
    made = share()
    question = said()
    assert "Which share" in question and "answer=" in question
    made.reveal(37)
    assert said() == "Result: 37 %\n"
    made = way()
    question = said()
    assert all(choice in question for choice in WAYS)
    made.reveal("a ring")
    assert said() == "Result: a ring\n" and record.entries("guesses") == {}


@pytest.mark.parametrize(("unit", "answer", "measured", "good", "factor"), [
    ("%", "10 %", 37, False, "3.7 times your guess"),
    ("%", "50 %", 99, False, "2 times your guess"),  # 49 percentage points
    ("ms", "3000", 1500, True, "2 times the result"),
    ("ms", "3000 ms", 1490, False, "2 times the result"),
    ("times", "2 times", 2.04, True, "within 5 %"),
    (None, "5", 0, False, "5 less than your guess"),
    (None, "-2", -5, False, "2.5 times your guess"),
    ("s", "2", float("nan"), False, "not a finite number"),
    (WAYS, "a ring", "a ring", True, "right"), (WAYS, "A R", "a ring", True, "right"),
    (WAYS, "gather", "a ring", False, "wrong"),
    ([2, 4, 8], 4, torch.tensor([4.0], requires_grad=True), True, "right"),
    ({"raised": "an error", "stuck": "a wait"}, "a wait", "raised", False, "wrong")])
def test_a_guess_beside_its_result(said, unit, answer, measured, good, factor):
    """Choices may be numbers, or have words of their own; results may be scalars."""
    options = {"unit": unit} if unit is None or isinstance(unit, str) else {"choices": unit}
    made = dplab.guess("it", "How much?", answer, **options)
    said()
    made.reveal(measured)
    first, second = said().splitlines()
    entry = kept("it")
    shown = [each if isinstance(each, str) else written(each, unit)
             for each in (entry["value"], entry["measured"])]
    assert first == "Your guess: {} · Result: {}".format(*shown)
    assert factor in second and entry["answer"] == str(answer)
    assert ("Close" in second or "right" in second) == good == entry["good"]
    assert isinstance(unit, dict) is (entry["measured"] == "an error")


def test_an_answer_that_is_not_understood_is_asked_about_and_not_kept(said):
    share("0.1")
    assert "0.1 % or 10 %?" in said() and kept("share") is None
    made = share("much")
    made.note("12 %")
    said()
    made.show()
    assert "?" not in said().replace(made.question, "")
    made.note("much")
    made.show()
    assert "Noted so far: 12 %" in said()
    way("a").reveal("a ring")
    assert kept("share")["value"] == 12 and kept("way") is None
    assert said().endswith("Result: a ring\n")


def test_a_guess_can_be_changed_until_the_result_is_shown(said):
    made = share("10 %")
    made.note("40 %")
    made.note(" ")
    assert kept("share")["value"] == 40
    made.reveal(37)
    first = kept("share")
    share("37 %").note("38 %")
    said()
    share("36 %").reveal(37)
    assert "Your guess: 40 % · Result: 37 %" in said() and kept("share") == first
    way("a tree").reveal("a ring")
    said()
    made = dplab.guess("way", "Which way?", choices=["a ring", "a star"])  # another question now
    assert "answer=" in said()
    made.reveal("a comet")
    assert said() == "Result: a comet\nThis is none of the choices.\n"
    made.note("a star")
    assert set(kept("way")) == {"answer", "value", "when"}


def test_a_guess_that_cannot_be_written_down_is_said_to_be_lost(home, monkeypatch, said):
    (home / "file").write_text("")
    monkeypatch.setenv("DPLAB_HOME", str(home / "file" / "below"))
    made = share("10 %")
    assert "DPLAB_HOME" in said()
    made.reveal(37)
    assert "Your guess: 10 % · Result: 37 %" in said()


def test_scores_are_by_chapter(monkeypatch):
    monkeypatch.setattr(course, "guesses", lambda: {3: ["way", "share", "open"], 4: ["other"]})
    assert guesses.scores() == {3: (3, 0, 0, 0), 4: (1, 0, 0, 0)}
    way("a ring").reveal("a ring")
    share("10 %")
    dplab.guess("of-no-chapter", "How many?", 3).reveal(3)
    assert guesses.scores() == {3: (3, 2, 1, 1), 4: (1, 0, 0, 0)}
    share().reveal(37)
    score = guesses.scores()[3]
    assert (score.asked, score.answered, score.revealed, score.good) == (3, 2, 2, 1)


@pytest.mark.parametrize("key", course.guesses())
def test_a_result_is_revealed_by_names_that_no_other_cell_changes(key):
    """So that a guess that is answered after Run All meets its own result."""
    cells = [(cell, *notebooks.names(cell["source"])) for cell in course.code_cells(key)]
    defined = collections.Counter(
        name for cell, defines, _ in cells for name in defines
        if "exercise" not in cell["metadata"].get("tags", []))
    needed = {(cell["id"], name) for cell, defines, uses in cells for name in uses - defines
              if ".reveal(" in cell["source"]}
    assert needed and not [each for each in needed if defined[each[1]] > 1]
