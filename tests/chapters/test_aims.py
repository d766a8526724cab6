"""Chapters keep to what a reader can take in: what is shown, what is folded, what time it takes.

A chapter leaves `TO_BE_REWRITTEN` when the second edition has rewritten it.
"""

import re

import aims
import notebooks
import pytest
from sandbox import ROOT

PATHS = sorted((ROOT / "chapters").glob("*.ipynb"))
TO_BE_REWRITTEN = {
    "07_training_at_large_batch",
    "08_zero_by_hand", "09_fsdp", "10_choosing_and_scaling", "13_communicate_less",
}
REWRITTEN = [path for path in PATHS if path.stem not in TO_BE_REWRITTEN]
STATED = re.compile(r"\babout (\d+) minutes\b")

each_chapter = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
each_rewritten = pytest.mark.parametrize("path", REWRITTEN, ids=lambda path: path.stem)


def test_the_chapters_to_be_rewritten_are_there():
    assert {path.stem for path in PATHS} >= TO_BE_REWRITTEN


@each_chapter
def test_folded_cells_hide_plumbing_only(path):
    assert list(aims.faults_of_folds(aims.Chapter(path))) == []


@each_rewritten
def test_a_rewritten_chapter_keeps_to_the_aims(path):
    chapter = aims.Chapter(path)
    assert chapter.over() == {}
    assert aims.long_cells(chapter) == []


@each_rewritten
def test_the_stated_time_is_the_computed_one(path):
    from dplab.checks import every_exercise

    chapter = aims.Chapter(path)
    stated = int(STATED.search(chapter.cells[0].source)[1])
    computed = chapter.minutes({exercise.slug: exercise.minutes for exercise in every_exercise()})
    assert abs(stated - computed) <= 0.1 * computed, f"computed: {computed} minutes"


SAMPLE = '''\
# %% [markdown] id=the-question
# # A title
#
# It takes about 12 minutes.

# %% id=imports
import os
import torch
from dplab import run

# %% id=shown
number = 1
print(number, limit)

# %% id=on-ranks
#! %%ranks 2
print(drawn)

# %% id=stub tags=exercise exercise=rows-to-hide
def rows_to_hide():
    raise NotImplementedError
'''


@pytest.fixture
def chapter(tmp_path):
    def chapter(folded=""):
        path = tmp_path / "03_sample.ipynb"
        draft = f"{SAMPLE}\n# %% id=folded tags=hide-input\n{folded}\n" if folded else SAMPLE
        path.write_text(notebooks.normalise(notebooks.from_percent(draft)), encoding="utf-8")
        return aims.Chapter(path)
    return chapter


def test_a_fold_is_one_for_jupyterlab_and_for_the_book(chapter):
    sample = chapter("# draws\nshow(number)")
    assert list(aims.faults_of_folds(sample)) == []
    sample.folded[0].metadata["jupyter"]["source_hidden"] = False
    assert len(list(aims.faults_of_folds(sample))) == 1
    sample.folded[0].metadata["jupyter"]["source_hidden"] = True
    sample.folded[0].metadata["tags"] = []
    assert len(list(aims.faults_of_folds(sample))) == 1


@pytest.mark.parametrize(("source", "fault"), [
    ("show(number)", "first line"),
    ("# measures\nrun(print, 2)", "run("),
    ("# sums\ndist.all_reduce(number)", "all_reduce"),
    ("# trains\nloss.backward()", "backward"),
    ("# defines\nlimit = 3", "limit"),
    ("# defines what ranks need\ndrawn = 3", "drawn"),
])
def test_a_fold_that_hides_what_matters_is_found(chapter, source, fault):
    [found] = aims.faults_of_folds(chapter(source))
    assert fault in found


def test_an_appendix_has_half_of_each_aim(chapter):
    sample = chapter()
    sample.shown[0].source += "\nprint(number)" * (aims.AIMS["shown lines"] // 2)
    assert set(sample.over()) == set()
    sample.path = sample.path.with_name("appendix_rounding.ipynb")
    assert set(sample.over()) == {"shown lines"}


def test_what_a_chapter_asks_of_its_reader_is_counted(chapter):
    sample = chapter("# draws\n\nshow(number)\nshow(number)")
    assert sample.counts() == {"words": 8, "shown cells": 3, "shown lines": 7, "guesses": 0,
                               "drill cells": 0, "folded lines": 2}
    assert sample.minutes({"rows-to-hide": 10}) == 12
    sample.cells[0].source += " word" * 1800
    assert sample.minutes({"rows-to-hide": 10}) == 22
    assert set(sample.over()) == set()
    sample.cells[2].source += "\nprint(number)" * aims.LONGEST_CELL
    assert len(aims.long_cells(sample)) == 1
