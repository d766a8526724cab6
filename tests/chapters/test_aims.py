"""Chapters keep to what a reader can take in: what is shown, what is folded, what time it takes.
"""

import re

import aims
import pytest
from sandbox import ROOT

from dplab.checks import every_exercise

PATHS = sorted((ROOT / "chapters").glob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_folded_cells_hide_plumbing_only(path):
    assert list(aims.faults_of_folds(aims.Chapter(path))) == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_chapter_keeps_to_the_aims_and_states_its_time(path):
    chapter = aims.Chapter(path)
    assert chapter.over() == {}
    assert aims.long_cells(chapter) == []
    stated = int(re.search(r"\babout (\d+) minutes\b", chapter.cells[0].source)[1])
    computed = chapter.minutes({exercise.slug: exercise.minutes for exercise in every_exercise()})
    assert abs(stated - computed) <= 0.1 * computed, f"computed: {computed} minutes"
