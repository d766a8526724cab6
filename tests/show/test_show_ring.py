"""The picture of a ring all-reduce shows what its chunks hold, and which one moves."""

import math
import random

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from pictures import assert_readable

from dplab import show


def ring_states(parts):
    """``[step][rank][chunk]`` of a ring all-reduce of ``parts[rank][chunk]``, chunk by chunk."""
    size = len(parts)
    states = [[list(chunks) for chunks in parts]]
    for step in range(2 * (size - 1)):
        states.append([list(chunks) for chunks in states[-1]])
        for chunk in range(size):
            to = (chunk + 2 + step) % size
            arriving = states[-2][to - 1][chunk]
            states[-1][to][chunk] = arriving + (states[-2][to][chunk] if step < size - 1 else 0)
    return states


def parts_of(size):
    return [[10**rank * (chunk + 1) for chunk in range(size)] for rank in range(size)]


AWKWARD = random.Random(0)
RINGS = {
    **{f"{size} ranks": parts_of(size) for size in (1, 2, 3, 8)},
    "awkward": [[AWKWARD.gauss(0, 10**rank) for _ in range(5)] for rank in range(-4, 6, 2)],
    "zeros": [[0.0] * 3] * 3,
}


def cells_of(figure, size):
    """``[rank][chunk]``: the text of a cell and its colour."""
    axes = figure.axes[0]
    texts = [text for text in axes.texts if text.get_text()[-1].isdigit()
             and not text.get_text().startswith(("rank", "chunk"))
             and text.get_position()[1] > 140]
    rows = sorted({round(text.get_position()[1], 3) for text in texts})
    cells = [sorted((t for t in texts if round(t.get_position()[1], 3) == row),
                    key=lambda text: text.get_position()[0]) for row in rows]
    assert [len(row) for row in cells] == [size] * size
    return [[(text.get_text(), text.get_color()) for text in row] for row in cells]


@pytest.mark.slow
@pytest.mark.parametrize("parts", RINGS.values(), ids=RINGS)
def test_a_ring_is_drawn_as_given_with_texts_apart(parts):
    states, size = ring_states(parts), len(parts)
    total = np.sum(parts, axis=0)
    # of a large ring the turn from one half to the other, and the end
    steps = range(len(states)) if size < 4 else (size - 1, size, len(states) - 1)
    for step in steps:
        ranks, figure = states[step], show.ring_step(states, step)
        assert_readable(figure, points=0.75 * 13, margin=4)
        cells = cells_of(figure, size)
        for rank, (row, numbers) in enumerate(zip(cells, ranks, strict=True)):
            for (text, color), held, own, whole in zip(row, numbers, parts[rank], total,
                                                       strict=True):
                assert float(text) == pytest.approx(held, rel=0.06)
                assert (color == "white") == math.isclose(held, whole, rel_tol=1e-6)
                assert color == "white" or (color == show.rank_color(rank)) == (held == own)
        assert f"{[color for row in cells for _, color in row].count('white')} of {size**2}" in (
            figure.alt)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_a_ring_holds_is_known_from_what_it_sends(size):
    right = ring_states(parts_of(size))
    sent = [[right[step][rank][(rank - 1 - step) % size] for step in range(2 * (size - 1))]
            for rank in range(size)]
    assert show.ring_states(parts_of(size), sent) == right


def test_a_ring_writes_whole_numbers_out():
    [first, *_] = cells_of(show.ring_step(ring_states([[1, 123456], [2.5, 0.1]]), 0), 2)
    assert [text for text, _ in first] == ["1", "123456"]


def test_the_arrows_of_a_ring_go_where_the_chunks_go():
    states = ring_states(parts_of(4))
    for step in range(7):
        axes = show.ring_step(states, step).axes[0]
        columns = {text.get_text(): text.get_position()[0] for text in axes.texts}
        arrows = {(patch.get_edgecolor(), round(patch._posA_posB[0][0]))
                  for patch in axes.patches if hasattr(patch, "_posA_posB")}
        moved = [(to, chunk) for to in range(4) for chunk in range(4)
                 if step and states[step][to][chunk] != states[step - 1][to][chunk]]
        assert len(moved) == (4 if step else 0)
        assert arrows == {((*to_rgb(show.rank_color((to - 1) % 4)), 1.0),
                           round(columns[f"chunk {chunk}"])) for to, chunk in moved}


def test_a_ring_says_in_words_what_it_shows():
    states = ring_states(parts_of(3))
    alt = show.ring_step(states, 2).alt
    assert alt.startswith("After step 2 of 4, 3 of 9 chunks are complete.")
    assert "reduce-scatter, step 2 of 2" in alt and "each rank has sent 2 of 4 chunks" in alt
    assert "Rank 0 holds 111 (complete), 202, 3, after sending chunk 1 to rank 1." in alt
    assert "all-gather, step 1 of 2" in show.ring_step(states, 3).alt
    assert "sending" not in show.ring_step(states, 0).alt


@pytest.mark.parametrize(("states", "step"), [
    (ring_states(parts_of(3)), 5), ([], 0), ([[[1, 2], [3]]], 0), ([[[0] * 9] * 9], 0)])
def test_a_ring_that_cannot_be_drawn_is_an_error(states, step):
    with pytest.raises(ValueError, match=rf"N ranks with N chunks.*step {step} among"):
        show.ring_step(states, step)
