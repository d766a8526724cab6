"""Heat maps show the gradients that they are given, on one scale."""

import io
import itertools
import math

import numpy as np
import pytest
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from dplab import show

MAPS = {
    "one parameter, one rank": ([["w"]], {"w": (1,)}, 1),
    "more ranks than rows have room for": ([["b", "w"]], {"b": (3,), "w": (40, 2)}, 23),
    "three buckets": ([["d.weight"], ["c.bias", "c.weight"], ["a.bias"]],
                      {"d.weight": (7, 5), "c.bias": (4,), "c.weight": (2, 3, 4), "a.bias": (9,)},
                      4),
}


@pytest.mark.parametrize("case", MAPS.values(), ids=MAPS)
def test_heat_maps_are_drawn_as_given_on_one_scale_with_texts_apart(case):
    buckets, shapes, ranks = case
    random = np.random.default_rng(0)
    before = [{name: random.normal(size=shape) for name, shape in shapes.items()}
              for _ in range(ranks)]
    after = [{name: sum(rank[name] for rank in before) / ranks for name in shapes}] * ranks
    bars = {"calls": {"one by one": 9, "buckets": 3}, "ms exposed": {"one by one": 31.25,
                                                                    "buckets": None}}
    figure = show.heat_maps({"before": before, "after": after}, buckets, title="T", note="N",
                            bars=bars)
    axes = figure.axes[0]
    names = [name for bucket in buckets for name in bucket]
    meshes = [mesh for mesh in axes.collections if hasattr(mesh, "get_clim")]
    assert len(meshes) == 2 * len(names)
    for values, name, mesh in zip([before] * len(names) + [after] * len(names), 2 * names, meshes,
                                  strict=True):
        drawn = mesh.get_array()
        assert drawn.shape == (ranks, min(16, before[0][name].size))
        for rank, row in zip(values, drawn, strict=True):
            places = np.linspace(0, rank[name].size - 1, drawn.shape[1]).round().astype(int)
            assert np.array_equal(row, rank[name].ravel()[places])
    scales = {mesh.get_clim() for mesh in meshes}
    (low, high), = scales
    assert low == -high and high == max(abs(mesh.get_array()).max() for mesh in meshes)

    lengths = [bar.get_width() for bar in axes.patches if bar.get_facecolor()[3] == 1
               and bar.get_fill()]
    assert lengths[0] == pytest.approx(3 * lengths[1]) and lengths[3] == 0
    texts = [text for text in axes.texts if text.get_text()]
    said = [text.get_text() for text in texts]
    assert [f"bucket {number}" in said for number in range(len(buckets))] == [True] * len(buckets)
    assert {"9", "3", "31.2", "not counted", "rank 0"} <= set(said)
    assert "31.2" in figure.alt and "not counted" in figure.alt
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent().shrunk(0.98, 0.8) for text in texts]
    for one, other in itertools.combinations(range(len(boxes)), 2):
        assert not boxes[one].overlaps(boxes[other]), (said[one], said[other])
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


def test_in_a_notebook_heat_maps_leave_the_ranks_their_colors():
    random = np.random.default_rng(0)
    ranks = [{name: random.normal(size=64) for name in "abcdefgh"} for _ in range(4)]
    figure = show.heat_maps({"before": ranks, "after": ranks}, ["abcd", "efgh"], title="T")
    pixels = 255 * image.imread(io.BytesIO(show.to_png(figure)))[..., :3].reshape(-1, 3)
    for color in show.RANK_COLORS[:4]:
        assert abs(pixels - 255 * np.array(to_rgb(color))).sum(axis=1).min() < 25, color


def test_lines_part_the_buckets_where_a_new_one_begins():
    ranks = [{name: [1.0, -1.0] for name in "abc"}]
    figure = show.heat_maps({"p": ranks}, [["a", "b"], ["c"]], title="T")
    axes = figure.axes[0]
    a, b, c = [mesh.get_coordinates()[0, :, 0] for mesh in axes.collections]
    upright = [line.get_xdata()[0] for line in axes.lines if line.get_xdata()[0]
               == line.get_xdata()[1]]
    assert len(upright) == 1 and b[-1] < upright[0] < c[0]
    assert c[0] - b[-1] > 3 * (b[0] - a[-1]) > 0


@pytest.mark.parametrize("panels, buckets", [
    ({}, [["a"]]), ({"p": []}, [["a"]]), ({"p": [{"a": [1.0]}]}, []),
    ({"p": [{"a": [1.0, math.nan]}]}, [["a"]])])
def test_heat_maps_that_cannot_be_drawn_are_an_error(panels, buckets):
    with pytest.raises(ValueError, match="heat_maps"):
        show.heat_maps(panels, buckets, title="T")


def test_gradients_of_zero_are_drawn():
    figure = show.heat_maps({"p": [{"a": [0.0, 0.0]}]}, [["a"]], title="T")
    assert figure.axes[0].collections[0].get_array().tolist() == [[0.0, 0.0]]
    assert show.to_png(figure)
