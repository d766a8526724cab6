"""Where chapters and appendices stand in the course, and how they are called."""

import pytest

from dplab.desk import course

NAMES = ["appendix_other_cuts.ipynb", "04_ddp_by_hand.ipynb", "10_choosing.ipynb", "Untitled.ipynb",
         "appendix_rounding.ipynb", "00_start_here.ipynb", "appendix_of_a_reader.ipynb",
         "04_ddp_by_hand.md"]


def test_notebooks_come_in_the_order_of_the_course_and_others_are_left_out(tmp_path):
    for name in NAMES:
        (tmp_path / name).touch()
    assert [(key, path.name) for key, path in course.notebooks(tmp_path).items()] == [
        (0, "00_start_here.ipynb"), (4, "04_ddp_by_hand.ipynb"), (10, "10_choosing.ipynb"),
        ("A", "appendix_rounding.ipynb"), ("B", "appendix_other_cuts.ipynb")]


@pytest.mark.parametrize(("key", "label", "heading"), [
    (4, "04", "04 · T"), (10, "10", "10 · T"), ("B", "B", "Appendix B · T")])
def test_what_a_reader_sees_of_a_key(monkeypatch, key, label, heading):
    monkeypatch.setattr(course, "TITLES", {key: "T"})
    assert (course.label(key), course.heading(key)) == (label, heading)
