"""What a reader wrote moves into a newer version of a chapter, and no line is lost."""

import copy
import random
import re

import pytest
from small_course import ANSWER, STUB, book, by_id, cell, chapter, sources, text

from dplab.lab.guess_answers import answers, with_answers
from dplab.lab.merging import Answer, answers_to_exercises, merge


def edited(notebook, changes):
    """A copy with other texts in the cells that ``changes`` names by id."""
    notebook = copy.deepcopy(notebook)
    for id, source in changes.items():
        by_id(notebook["cells"], id)["source"] = source
    return notebook


NEW = edited(chapter(), {"question": "# All-reduce, newer", "last": "print(ranks, 'ranks')"})


def merged(changes, new=NEW):
    return merge(chapter(), edited(chapter(), changes), new)


def test_an_answer_replaces_the_stub_and_the_rest_is_the_new_version():
    result = merged({"stub-total": ANSWER})
    assert sources(result) == sources(edited(NEW, {"stub-total": ANSWER}))
    assert [each["id"] for each in result["cells"]] == [each["id"] for each in NEW["cells"]]


def test_outputs_stay_where_the_text_stays_alone():
    shown = [{"output_type": "stream", "name": "stdout", "text": ["4"]}]
    new = copy.deepcopy(NEW)
    for each in new["cells"][1:]:
        each["outputs"] = shown
    mine = edited(chapter(), {"stub-total": ANSWER})
    mine["cells"].append(cell("mine", "x = 1", outputs=shown))
    result = merge(chapter(), mine, new)["cells"]
    assert {each["id"] for each in result if each.get("outputs")} == {
        "setup", "check-total", "guess-bytes", "last"}


def test_an_answer_of_the_first_edition_finds_its_exercise_by_number():
    old = book(cell("old-stub", STUB, slug="4.2"))
    new = book(text("title", "# New"), cell("another-id", STUB, slug="average-gradients"))
    assert ANSWER in sources(merge(old, edited(old, {"old-stub": ANSWER}), new))


def test_an_answer_follows_its_slug_to_another_cell_and_place():
    new = copy.deepcopy(NEW)
    stub = new["cells"].pop(2)
    new["cells"].append({**stub, "id": "stub-of-another-name"})
    assert sources(merged({"stub-total": ANSWER}, new))[-1] == ANSWER


def test_an_unanswered_stub_becomes_the_new_stub():
    new = edited(NEW, {"stub-total": STUB.replace("sum", "mean")})
    assert sources(merged({}, new)) == sources(new)


def test_below_a_stub_with_another_name_the_answer_stands_and_still_runs():
    new = edited(NEW, {"stub-total": STUB.replace("total", "sum_of_ranks")})
    [source] = [each for each in sources(merged({"stub-total": ANSWER}, new)) if ANSWER in each]
    names = {}
    exec(source, names)
    assert names["total"]([1, 2]) == 3
    with pytest.raises(NotImplementedError):
        names["sum_of_ranks"]([1, 2])


def test_a_stub_with_another_docstring_gives_way_to_the_answer():
    new = edited(NEW, {"stub-total": STUB.replace("all ranks", "the ranks of the group")})
    assert ANSWER in sources(merged({"stub-total": ANSWER}, new))


def test_an_edited_cell_of_the_course_is_kept_where_the_course_left_it_as_it_was():
    result = merged({"setup": "ranks = 3  # fewer"})
    assert sources(result) == sources(edited(NEW, {"setup": "ranks = 3  # fewer"}))


def test_an_edited_cell_that_the_course_changed_too_stands_below_it_and_does_not_run():
    result = merged({"last": "print(ranks + 1)"})["cells"]
    place = [each["id"] for each in result].index("last")
    assert result[place]["source"] == "print(ranks, 'ranks')"
    assert result[place + 1]["cell_type"] == "raw"
    assert result[place + 1]["source"].endswith("\n\nprint(ranks + 1)")


def test_an_edited_cell_that_is_gone_from_the_course_is_kept():
    new = copy.deepcopy(NEW)
    del new["cells"][1]
    result = merged({"setup": "ranks = 3"}, new)["cells"]
    assert [each["cell_type"] for each in result if "ranks = 3" in each["source"]] == ["raw"]


def test_a_cell_that_became_prose_does_not_become_code_again():
    mine = chapter()
    by_id(mine["cells"], "setup").update(text("setup", "Four ranks are enough for me."))
    result = merge(chapter(), mine, NEW)["cells"]
    assert {each["cell_type"] for each in result if "enough for me" in each["source"]} == {
        "markdown"}
    assert by_id(result, "setup")["source"] == "ranks = 4"


def test_added_cells_stand_behind_the_cell_that_they_followed():
    mine = chapter()
    mine["cells"].insert(0, text("note-1", "my first note"))
    mine["cells"].insert(4, cell("note-2", "try = 1"))
    mine["cells"].insert(5, cell("note-3", "try = 2"))
    ids = [each["id"] for each in merge(chapter(), mine, NEW)["cells"]]
    assert ids == ["note-1", "question", "setup", "stub-total", "note-2", "note-3", "check-total",
                   "guess-bytes", "last"]


def test_a_deleted_cell_comes_back():
    mine = chapter()
    del mine["cells"][1]
    assert sources(merge(chapter(), mine, NEW)) == sources(NEW)


def test_an_answer_in_two_cells_stays_in_two_cells_and_travels_again():
    mine = edited(chapter(), {"stub-total": "import math"})
    mine["cells"].insert(3, cell("second", ANSWER, slug="total-of-ranks"))
    once = merge(chapter(), mine, NEW)
    assert sources(once)[2:4] == ["import math", ANSWER]
    newer = edited(NEW, {"question": "# Newer still"})
    assert sources(merge(NEW, once, newer))[2:4] == ["import math", ANSWER]


def test_cells_whose_ids_a_program_has_changed_are_known_by_their_text():
    mine = edited(chapter(), {"stub-total": ANSWER})
    for number, each in enumerate(mine["cells"]):
        each["id"] = f"other-{number}"
    result = merge(chapter(), mine, NEW)
    assert sources(result) == sources(edited(NEW, {"stub-total": ANSWER}))


def test_ids_stay_unique():
    mine = chapter()
    mine["cells"].insert(2, cell("new-in-the-course", "mine = 1"))
    new = copy.deepcopy(NEW)
    new["cells"].append(cell("new-in-the-course", "theirs = 1"))
    ids = [each["id"] for each in merge(chapter(), mine, new)["cells"]]
    assert len(set(ids)) == len(ids) == 8


def test_an_answer_that_the_copy_has_already_stays_and_the_other_stands_aside():
    here = edited(NEW, {"stub-total": "def total(values):\n    return values"})
    result = merge(chapter(), edited(chapter(), {"stub-total": ANSWER}), here, course=NEW)
    kinds = {each["cell_type"] for each in result["cells"] if ANSWER in each["source"]}
    assert sources(result)[2] == sources(here)[2] and kinds == {"raw"}
    again = merge(chapter(), edited(chapter(), {"stub-total": ANSWER}), result, course=NEW)
    assert sources(again) == sources(result)


def test_an_answer_from_another_notebook_fills_the_stub():
    old = book(cell("a", STUB, slug="total-of-ranks"))
    found = answers_to_exercises(old, edited(old, {"a": ANSWER}))
    assert found.keys() == {"total-of-ranks"} and isinstance(found["total-of-ranks"], Answer)
    nothing = book()
    assert sources(merge(nothing, nothing, NEW, elsewhere=found))[2] == ANSWER
    assert answers_to_exercises(old, old) == {}


GUESS = 'dplab.guess("bytes-moved", "How many bytes?", unit="MB")'


def test_the_answer_of_a_guess_moves_into_the_new_question():
    newer = edited(NEW, {"guess-bytes": 'dplab.guess("bytes-moved", "How many MB?", unit="MB")'})
    result = merged({"guess-bytes": GUESS[:-1] + ", answer=12.5)"}, newer)
    assert sources(result)[4] == (
        'dplab.guess("bytes-moved", "How many MB?", unit="MB", answer=12.5)')
    assert len(result["cells"]) == len(newer["cells"])


@pytest.mark.parametrize(("source", "answered"), [
    ('guess("é", "…",\n      choices=["a", "b"],\n      )', 'guess("é", "…",\n      '
     'choices=["a", "b"], answer="b")'),
    ('g = dplab.guess("é", "ü?", None); h = dplab.guess("b", "?", answer=3)',
     'g = dplab.guess("é", "ü?", "b"); h = dplab.guess("b", "?", answer=3)'),
    ('guess("é", "?"); guess("z", "?"); guess("é", "?")',
     'guess("é", "?", answer="b"); guess("z", "?", answer=9); guess("é", "?", answer="b")'),
    ('dplab.guess("é", "?", answer=None)', 'dplab.guess("é", "?", answer="b")'),
    ('dplab.guess("é", "?", answer="a")', 'dplab.guess("é", "?", answer="a")'),
    ('%%ranks 2\ndplab.guess("é", "?")', '%%ranks 2\ndplab.guess("é", "?")'),
])
def test_an_answer_goes_into_the_guess_of_its_slug_and_nowhere_else(source, answered):
    result = with_answers(source, {"é": '"b"', "z": "9"})
    assert "".join(result.split()) == "".join(answered.split())


def test_answers_are_found_by_slug():
    assert answers('dplab.guess("a", "?", answer=[1,\n 2]); guess("b", "?", 3)\nguess("c", "?")'
                   ) == {"a": "[1,\n 2]", "b": "3"}


def test_a_comment_in_a_cell_that_the_course_changed_is_kept():
    result = merged({"last": "print(ranks)  # why four?"})
    assert any("# why four?" in source for source in sources(result))


def test_a_comment_in_a_stub_that_is_gone_is_kept():
    new = copy.deepcopy(NEW)
    del new["cells"][2]
    result = merged({"stub-total": STUB + "\n    # first add, then send"}, new)
    assert any("# first add, then send" in source for source in sources(result))


@pytest.mark.parametrize("slug", ["bytes-moved", "bytes-sent"])
@pytest.mark.parametrize("ending", [", answer=12.5)  # as in chapter 02",
                                    ",  # as in chapter 02\n    answer=12.5)"])
def test_a_reason_behind_the_answer_of_a_guess_is_kept(slug, ending):
    newer = edited(NEW, {"guess-bytes": f'dplab.guess("{slug}", "How many MB?", unit="MB")'})
    result = sources(merged({"guess-bytes": GUESS[:-1] + ending}, newer))
    assert any("# as in chapter 02" in source for source in result)
    assert (result[4].endswith("answer=12.5)")) == (slug == "bytes-moved")


def test_the_answer_of_a_guess_that_is_gone_is_kept():
    newer = edited(NEW, {"guess-bytes": "print('no guess')"})
    result = merged({"guess-bytes": GUESS[:-1] + ", answer=12.5)"}, newer)
    assert any("answer=12.5" in source for source in sources(result))


def test_the_same_answer_of_a_guess_is_taken_once():
    mine = edited(chapter(), {"guess-bytes": GUESS[:-1] + ", answer=12.5)"})
    newer = edited(NEW, {"guess-bytes": 'dplab.guess("bytes-moved", "How many MB?", unit="MB")'})
    once = merge(chapter(), mine, newer)
    assert sources(merge(chapter(), mine, once, course=newer)) == sources(once)


def some_edit(rng, cells, who, number):
    """One edit of a list of cells, as a reader or an author might make it."""
    way = rng.choice(["edit", "comment", "answer", "add", "delete", "split", "move", "paste"])
    at = rng.randrange(len(cells))
    line = f"{who}_{number} = {rng.randrange(1000)}"
    if way == "edit":
        cells[at]["source"] += f"\n{line}"
    elif way == "comment":
        cells[at]["source"] += f"  # {line}"
    elif way == "answer":
        for each in cells:
            if each["source"].endswith('unit="MB")'):
                each["source"] = f'{each["source"][:-1]}, answer={rng.randrange(99)})  # {line}'
    elif way == "add":
        cells.insert(at, cell(f"{who}-{number}", line))
    elif way == "delete" and len(cells) > 2:
        del cells[at]
    elif way == "split":
        first, _, rest = cells[at]["source"].partition("\n")
        cells[at]["source"] = first
        cells.insert(at + 1, {**copy.deepcopy(cells[at]), "id": f"{who}-{number}", "source": rest})
    elif way == "move":
        cells.insert(rng.randrange(len(cells)), cells.pop(at))
    else:
        cells.insert(rng.randrange(len(cells)),
                     {**copy.deepcopy(cells[at]), "id": f"{who}-{number}"})


@pytest.mark.parametrize("seed", range(4))
def test_no_line_of_the_reader_is_ever_lost(seed):
    rng = random.Random(seed)
    for _ in range(100):
        mine, new = chapter(), chapter()
        for number in range(rng.randrange(1, 9)):
            some_edit(rng, mine["cells"], "reader", number)
        for number in range(rng.randrange(9)):
            some_edit(rng, new["cells"], "author", number)
        result = merge(chapter(), mine, new)
        written = set(re.findall(r"reader_\d = \d+", "\n".join(sources(mine))))
        assert written <= set(re.findall(r"reader_\d = \d+", "\n".join(sources(result))))
        ids = [each["id"] for each in result["cells"]]
        assert len(set(ids)) == len(ids)
