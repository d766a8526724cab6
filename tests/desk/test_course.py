"""Where chapters and appendices stand in the course, and what their notebooks hold."""

import re

from dplab.desk import course


def test_notebooks_come_in_the_order_of_the_course_and_others_are_left_out(tmp_path):
    for name in ("appendix_other_cuts.ipynb", "04_ddp_by_hand.ipynb", "10_choosing.ipynb",
                 "Untitled.ipynb", "appendix_rounding.ipynb", "00_start_here.ipynb",
                 "appendix_of_a_reader.ipynb", "04_ddp_by_hand.md"):
        (tmp_path / name).touch()
    assert [(key, path.name) for key, path in course.notebooks(tmp_path).items()] == [
        (0, "00_start_here.ipynb"), (4, "04_ddp_by_hand.ipynb"), (10, "10_choosing.ipynb"),
        ("A", "appendix_rounding.ipynb"), ("B", "appendix_other_cuts.ipynb")]
    assert [(course.label(key), course.heading(key)) for key in (4, 10, "B")] == [
        ("04", "04 · DDP by hand"), ("10", "10 · FSDP"), ("B", "Appendix B · Other cuts")]


def test_guesses_have_slugs_of_their_own():
    found = course.guesses()
    assert list(found) == list(course.TITLES)  # each chapter and appendix asks for some
    code = "\n".join(cell["source"] for key in course.TITLES for cell in course.code_cells(key))
    every = [slug for slugs in found.values() for slug in slugs]
    assert len(every) == len({*every}) == len(re.findall(r"\bguess\(", code))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug) for slug in every)
