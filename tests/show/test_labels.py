"""Labels stay apart and within their width, numbers keep three digits, and a table is Markdown."""

import itertools
import random

import pytest

from dplab import show
from dplab.show.labels import flow, number, spread, text_width, wrap


def test_numbers_keep_three_digits():
    values = (0, 0.0012, 0.0345, 1, 23.45, 999.9, 123456)
    assert [number(v) for v in values] == [
        "0", "0.0012", "0.0345", "1.00", "23.4", "1,000", "123,456"]


def test_spread_keeps_labels_apart_in_order_and_moves_only_what_it_must():
    draw = random.Random(0)
    for _ in range(300):
        sizes = [draw.uniform(1, 20) for _ in range(draw.randint(1, 9))]
        centers = [draw.choice([draw.uniform(-20, 220), 50.0]) for _ in sizes]
        high = sum(sizes) + 2 * len(sizes) + draw.uniform(0, 100)
        placed = spread(centers, sizes, 0, high, gap=2)
        order = sorted(range(len(sizes)), key=lambda i: centers[i])
        for i, j in itertools.pairwise(order):
            assert placed[j] - placed[i] >= (sizes[i] + sizes[j]) / 2 + 2 - 1e-9
        for place, size in zip(placed, sizes, strict=True):
            assert place - size / 2 >= -1e-9 and place + size / 2 <= high + 1e-9
    assert spread([10, 50, 90], [10, 10, 10], 0, 100) == pytest.approx([10, 50, 90])
    assert spread([50, 50, 90], [10, 10, 10], 0, 100) == pytest.approx([45, 55, 90])
    assert spread([0, 0], [10, 10], 0, 100) == pytest.approx([5, 15])
    with pytest.raises(ValueError, match="pt more"):
        spread([0, 0], [60, 60], 0, 100)


def test_flow_and_wrap_stay_within_their_width():
    assert flow([40, 40, 40, 90, 200], 100, 10) == [[0, 1], [2], [3], [4]]
    text = "every rank sees other data and takes the same step"
    lines = wrap(text, 10, 120).split("\n")
    assert len(lines) > 1 and " ".join(lines) == text
    assert all(text_width(line, 10) <= 120 for line in lines)


def test_a_table_has_its_rows_and_a_norm_does_not_end_a_cell():
    made = show.table(["|G|²", "bytes"], [1, 0], (2, "1.5 M"))
    assert made.data == "| \\|G\\|² | bytes |\n|:--|--:|\n| 1 | 0 |\n| 2 | 1.5 M |"
    with pytest.raises(ValueError, match="a row of 1 under a head of 2"):
        show.table(["ranks", "bytes"], [1])
