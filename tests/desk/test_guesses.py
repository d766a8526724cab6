"""A guess is taken, kept, and shown beside its result; without one, only the result is shown."""

import ast
import collections
import json
import re
from pathlib import Path

import notebooks
import numpy as np
import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager
from kernel import Kernel

import dplab
from dplab.desk import course, guesses, record

ROOT = Path(__file__).resolve().parents[2]
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


def test_without_a_guess_the_result_stands_alone_in_one_line(said):
    made = share()
    assert "Which share" in said()
    made.reveal(37)
    assert said() == "Result: 37 %\n"
    made = way()
    question = said()
    assert all(choice in question for choice in WAYS)
    made.reveal("a ring")
    assert said() == "Result: a ring\n"
    assert record.entries("guesses") == {}


def test_a_page_without_widgets_says_how_to_answer(said):
    share()
    assert "answer=" in said()
    share("25 %")
    assert "Your guess: 25 %" in said()
    assert kept("share")["answer"] == "25 %" and kept("share")["value"] == 25


@pytest.mark.parametrize(("unit", "answer", "measured", "good", "factor"), [
    ("%", "10 %", 37, False, "3.7 times your guess"),
    ("%", "20 %", 37, True, "1.9 times your guess"),
    ("%", "50 %", 99, False, "2 times your guess"),  # 49 percentage points
    ("ms", "3000", 1500, True, "2 times the result"),
    ("ms", "3000 ms", 1490, False, "2 times the result"),
    ("times", "2 times", 2.04, True, "within 5 %"),
    (None, "5", 0, False, "5 less than your guess"),
    (None, "0", 0, True, "exactly right"),
    (None, "-2", -5, False, "2.5 times your guess"),
    ("s", "2", float("nan"), False, "not a finite number"),
])
def test_a_number_beside_its_result(said, unit, answer, measured, good, factor):
    made = dplab.guess("number", "How much?", answer, unit=unit)
    said()
    made.reveal(measured)
    first, second = said().splitlines()
    assert first == (f"Your guess: {guesses.written(made._value, unit)} · "
                     f"Result: {guesses.written(measured, unit)}")
    assert factor in second
    assert ("Close" in second or "right" in second) == good == kept("number")["good"]


@pytest.mark.parametrize(("answer", "good"), [
    ("a ring", True), ("A RING", True), ("a r", True), ("a tree", False), ("gather", False)])
def test_a_choice_beside_its_result(said, answer, good):
    made = way(answer)
    said()
    made.reveal("a ring")
    head, sentence = said().splitlines()
    assert head.endswith("Result: a ring") and made._value in head
    assert ("right" in sentence, "wrong" in sentence) == (good, not good)
    assert kept("way")["good"] is good


@pytest.mark.parametrize("measured", [np.int64(4), torch.tensor([4.0], requires_grad=True)])
def test_choices_may_be_numbers_and_results_scalars_of_numpy_or_torch(said, measured):
    made = dplab.guess("ranks", "On how many ranks?", 4, choices=[2, 4, 8])
    said()
    made.reveal(measured)
    assert "Your guess: 4 · Result: 4" in said() and kept("ranks")["good"]


def test_choices_may_have_words_of_their_own(said):
    made = dplab.guess("uneven", "What happens?", choices={"raised": "an error", "stuck": "a wait"})
    assert "an error | a wait" in said()
    made.note("a wait")
    made.reveal("raised")
    assert said().startswith("Your guess: a wait · Result: an error\n")
    assert kept("uneven")["measured"] == "an error"


def test_an_answer_that_is_not_understood_is_asked_about_and_not_kept(said):
    share("0.1")
    assert "0.1 % or 10 %?" in said()
    assert kept("share") is None
    made = share("much")
    made.note("12 %")
    said()
    made.show()
    assert "?" not in said().replace(made.question, "")
    made.note("much")
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
    assert made.reveal(37) is None and kept("share") == first
    share("37 %").note("38 %")
    said()
    share("36 %").reveal(37)
    assert "Your guess: 40 % · Result: 37 %" in said()
    assert kept("share") == first


def test_an_answer_that_no_longer_fits_the_question_is_asked_for_again(said):
    way("a tree").reveal("a ring")
    said()
    made = dplab.guess("way", "Which way?", choices=["a ring", "a star"])
    assert "answer=" in said()
    made.reveal("a ring")
    assert said() == "Result: a ring\n"
    made.note("a star")
    assert set(kept("way")) == {"answer", "value", "when"}


def test_a_guess_that_cannot_be_written_down_is_said_to_be_lost(home, monkeypatch, said):
    (home / "file").write_text("")
    monkeypatch.setenv("DPLAB_HOME", str(home / "file" / "below"))
    made = share("10 %")
    assert "DPLAB_HOME" in said()
    made.reveal(37)
    assert "Your guess: 10 % · Result: 37 %" in said()


def test_a_result_that_is_none_of_the_choices_is_said_to_be_none(said):
    way("a tree").reveal("a star")
    assert said().endswith("Result: a star\nThis is none of the choices.\n")
    assert "good" not in kept("way")


def test_scores_are_by_chapter(monkeypatch):
    monkeypatch.setattr(course, "GUESSES", {3: ("way", "share", "open"), 4: ("other",)})
    assert guesses.scores() == {3: (3, 0, 0, 0), 4: (1, 0, 0, 0)}
    way("a ring").reveal("a ring")
    share("10 %")
    dplab.guess("of-no-chapter", "How many?", 3).reveal(3)
    assert guesses.scores() == {3: (3, 2, 1, 1), 4: (1, 0, 0, 0)}
    share().reveal(37)
    score = guesses.scores()[3]
    assert (score.asked, score.answered, score.revealed, score.good) == (3, 2, 2, 1)


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem) for path in course.notebooks(ROOT / "chapters").values()
    if course.key_of(path.stem) in course.GUESSES])
def test_a_result_is_revealed_by_names_that_no_other_cell_changes(path):
    """So that a guess that is answered after Run All meets its own result."""
    cells = [cell for cell in notebooks.read(path).cells if cell.cell_type == "code"]
    names = [notebooks.names(cell.source) for cell in cells]
    defined = collections.Counter(
        name for cell, (defines, _) in zip(cells, names, strict=True) for name in defines
        if "exercise" not in cell.metadata.get("tags", []))
    needed = {(cell.id, name) for cell, (defines, uses) in zip(cells, names, strict=True)
              for name in uses - defines if ".reveal(" in cell.source}
    assert needed
    assert not [(cell, name) for cell, name in needed if defined[name] > 1]


def slugs_in(cells):
    """The slugs of the guesses that code cells ask for, in order."""
    for source in filter(re.compile(r"\bguess\(").search, cells):
        for node in ast.walk(ast.parse(TransformerManager().transform_cell(source))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("guess", "dplab.guess"):
                yield ast.literal_eval(node.args[0])


def test_the_course_lists_the_guesses_of_its_chapters():
    found = {}
    for chapter, path in course.notebooks(ROOT / "chapters").items():
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found[chapter] = tuple(
            slugs_in("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    assert len(found) >= 11
    assert {chapter: slugs for chapter, slugs in found.items() if slugs} == course.GUESSES
    every = [slug for slugs in found.values() for slug in slugs]
    assert len(every) == len(set(every))
    assert [slug for slug in every if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug)] == []


WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.slow
def test_a_notebook_that_runs_without_answers(home):
    with Kernel(DPLAB_HOME=str(home)) as kernel:
        shown = kernel.run("import dplab\nway = dplab.guess('way', 'Which `way`, a < b?', "
                           f"choices={WAYS!r})\nway")
        data, in_place = shown.displays.values()
        assert "Run this cell again to answer" in in_place["text/html"]
        assert shown.value == "" and shown.status == "ok"
        assert "<code>way</code>, a &lt; b?" in data["text/html"]
        for page in (data["text/html"], data["text/plain"]):
            assert all(choice in page for choice in WAYS) and "answer=" in page
        assert WIDGET in data
        data, _ = kernel.run("way").displays.values()
        assert WIDGET in data  # in a cell of its own, the question once more
        [result] = kernel.run("way.reveal('a ring')").displays.values()
        assert result["text/plain"] == "Result: a ring"
        assert kernel.run("way._box.result.layout.display").value == "'none'"
        [in_place] = kernel.run("way._box.field.value = 'a tree'").displays.values()
        assert "Your guess: a tree" in in_place["text/html"]
        assert kept("way")["value"] == "a tree" and "good" not in kept("way")
        assert kernel.run("way._box.result.layout.display").value == ""
        kernel.run("way._box.result.click()")
        assert kept("way")["measured"] == "a ring" and kept("way")["good"] is False
        assert kernel.run("way._box.field.disabled").value == "True"
        _, result = kernel.run("way.reveal('a ring')").displays.values()
        assert "Your guess: a tree" in result["text/plain"]
