"""Source in colour: the same characters, in colours that can be read, folded until wanted."""

import html
import re

import pytest
from pictures import contrast

from dplab.desk.highlight import COLORS, colored, folded

SOURCE = '''@cache
def ring(tensor, n=3):  # a <b> & 'c'
    """Sum."""
    if not None and tensor < 0x1F:
        return [f"{each!r}" for each in range(n)]
'''


@pytest.mark.parametrize("background", ["#FFFFFF", "#F0F2F4", "#212121", "#111111"])
def test_colours_are_seen_on_light_and_on_dark(background):
    assert not {color for _, color in COLORS.values() if contrast(color, background) < 3.2}


def test_the_characters_are_those_of_the_source():
    for source in (SOURCE, SOURCE.strip(), "\n\n x = 1\n\n", ""):
        assert html.unescape(re.sub("<[^>]*>", "", colored(source))) == source


def test_words_of_one_kind_have_one_colour():
    style = {word: re.search(rf'<span style="([^"]*)">{word}', colored(SOURCE))[1]
             for word in ("def", "if", "return", "ring", "# a", "&quot;&quot;&quot;Sum", "0x1F")}
    assert style["def"] == style["if"] == style["return"]
    assert len({style[word] for word in ("def", "ring", "# a", "&quot;&quot;&quot;Sum")}) == 4
    assert ">tensor" not in colored(SOURCE)


def test_it_is_folded_until_wanted():
    assert folded("A < b", SOURCE).startswith("<details ")
    assert "<summary" in folded("A < b", SOURCE) and "A &lt; b" in folded("A < b", SOURCE)
    assert " open" not in folded("A < b", SOURCE).split("</summary>")[0]
