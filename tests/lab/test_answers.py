"""What a reader answered moves by slug into a newer version of a chapter."""

import pytest
from small_course import ANSWER, STUB, book, cell, chapter, sources, text

from dplab.lab.answers import NOTE, answers_in, stubs_in, with_answers

STUBS = {"total-of-ranks": STUB}


def answered(*texts):
    """A notebook that has these texts in cells of the exercise."""
    return book(text("title", "# T"), *(cell(f"c{number}", source, slug="total-of-ranks")
                                        for number, source in enumerate(texts)), cell("own", "x"))


def test_an_answer_replaces_the_stub_wherever_the_slug_stands_and_nothing_else_changes():
    new = chapter()
    new["cells"].append(new["cells"].pop(2) | {"id": "another-id", "outputs": [{}]})
    result = with_answers(new, answers_in(answered(ANSWER), STUBS))
    assert sources(result) == [*sources(new)[:-1], ANSWER]
    assert [each["id"] for each in result["cells"]] == [each["id"] for each in new["cells"]]
    assert result["cells"][-1]["outputs"] == [] and result["cells"][1]["outputs"]
    assert sources(with_answers(new, {"another-slug": ANSWER})) == sources(new)


@pytest.mark.parametrize("texts", [[STUB], [], ["\n"], [STUB, " "]])
def test_a_stub_and_an_empty_cell_are_no_answer(texts):
    assert answers_in(answered(*texts), STUBS) == {}


def test_an_unfinished_answer_counts_where_the_stub_is_known():
    unfinished = STUB + "  # first add, then send"
    assert answers_in(answered(unfinished), STUBS) == {"total-of-ranks": unfinished}
    assert answers_in(answered(unfinished), {}) == {}
    assert answers_in(answered(ANSWER), {}) == {"total-of-ranks": ANSWER}


def test_an_answer_in_several_cells_becomes_one_cell_that_runs():
    found = answers_in(answered("import math", STUB, ANSWER), STUBS)
    [source] = [each for each in sources(with_answers(chapter(), found)) if ANSWER in each]
    assert source == f"import math\n\n\n{ANSWER}"


def test_a_second_cell_of_the_exercise_stays_as_the_course_has_it():
    new = answered(STUB, "more = 1")
    assert stubs_in(new) == STUBS
    assert sources(with_answers(new, {"total-of-ranks": ANSWER})) == ["# T", ANSWER, "more = 1",
                                                                      "x"]


@pytest.mark.parametrize(("old", "new", "replaced"), [
    ("all ranks", "the ranks of the group", True), ("total(values)", "total(values, group)", False),
    ("total", "sum_of_ranks", False)])
def test_below_a_stub_with_another_signature_the_answer_stands_and_still_runs(old, new, replaced):
    stub = STUB.replace(old, new)
    [_, source, _] = sources(with_answers(answered(stub), {"total-of-ranks": ANSWER}))
    assert source == (ANSWER if replaced else f"{stub}\n\n\n{NOTE}\n{ANSWER}")
    names = {}
    exec(source, names)
    assert names["total"]([1, 2]) == 3
