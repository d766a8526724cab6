"""The page that derives a step's time by hand; the tool itself checks that its parts add up."""

import one_step


def test_the_page_is_what_the_simulator_says_today():
    text = one_step.PAGE.read_text(encoding="utf-8")
    assert text == one_step.page(), "python tests/tools/one_step.py writes it anew"
