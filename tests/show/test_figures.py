"""The committed pictures are what their scripts draw, and they can be read."""

import itertools
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pictures import assert_read_on_either_page, assert_readable

import dplab.parallel

FIGURES = Path(__file__).parents[2] / "figures"
SCRIPTS = sorted(FIGURES.glob("*.py"))

HOSTILE_SETTINGS = """
font.size: 30
font.family: serif
savefig.bbox: tight
svg.fonttype: none
axes.facecolor: black
lines.linewidth: 9
lines.antialiased: False
patch.antialiased: False
"""


def named(script):
    return script.stem


def test_every_script_has_its_picture_and_every_picture_its_script():
    assert SCRIPTS
    assert {s.stem for s in SCRIPTS} == {svg.stem for svg in FIGURES.glob("*.svg")}


@pytest.fixture(scope="module")
def drawn_again(tmp_path_factory):
    """A folder in which all scripts have drawn, under settings that a reader may have."""
    folder = tmp_path_factory.mktemp("figures")
    (folder / "matplotlibrc").write_text(HOSTILE_SETTINGS)
    for script in SCRIPTS:
        shutil.copy(script, folder)
    draw_all = ("import glob, runpy\n"
                "for script in sorted(glob.glob('*.py')):\n"
                "    runpy.run_path(script, run_name='__main__')\n")
    subprocess.run([sys.executable, "-c", draw_all], cwd=folder, check=True, timeout=120)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_drawing_again_gives_the_same_bytes_whatever_the_readers_settings(script, drawn_again):
    again = drawn_again / f"{script.stem}.svg"
    same = again.read_bytes() == script.with_suffix(".svg").read_bytes()
    assert same, f"{script.stem}.svg is not what {script.name} draws: run the script"


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_texts_can_be_read_at_900_pixels(script, monkeypatch):
    monkeypatch.syspath_prepend(str(FIGURES))
    module = runpy.run_path(str(script))
    canvas = module["draw"]()
    assert canvas.width == 900 and module["ALT"] == canvas.figure.alt
    assert canvas.title == module["TITLE"] and len(module["ALT"]) > 100
    assert_readable(canvas.figure, points=0.75 * 13, margin=8)
    assert_read_on_either_page(canvas.figure)


def test_the_collectives_pictures_show_what_the_collectives_do(monkeypatch):
    monkeypatch.syspath_prepend(str(FIGURES))  # one of the two draws with the other
    module = runpy.run_path(str(FIGURES / "collectives.py"))
    whole = np.arange(1, 5) * 10 ** np.arange(3, -1, -1)[:, None]
    total, own, everyone = whole.sum(axis=0), np.diag(whole), np.ones((4, 1), int)

    def numbers(cells):
        return [[0 if cell is None else total[cell[1]] if cell[0] == module["SUM"] else whole[cell]
                 for cell in row] for row in cells]

    def on_rank_0(held, others=()):
        return [list(held), *[list(others)] * 3]

    expected = {
        "broadcast": (whole, everyone * whole[0]),
        "reduce": (whole, on_rank_0(total, [0] * 4)),
        "scatter": (on_rank_0(whole[0]), whole[0][:, None]),
        "gather": (own[:, None], on_rank_0(own)),
        "all-gather": (own[:, None], everyone * own),
        "reduce-scatter": (whole, total[:, None]),
        "all-reduce": (whole, everyone * total),
        "all-to-all": (whole, whole.T),
    }
    drawn = {name: (before, after) for name, _, before, after in module["COLLECTIVES"]}
    assert drawn.keys() == expected.keys()
    for name, states in drawn.items():
        for cells, held in zip(states, expected[name], strict=True):
            assert numbers(cells) == [list(row) for row in held], name


def test_the_step_picture_shows_a_real_step():
    module = runpy.run_path(str(FIGURES / "one_step.py"))
    gradients = np.array(module["GRADIENTS"])
    assert len({tuple(gradient) for gradient in gradients}) == len(gradients) == 4
    updated = np.array(module["WEIGHTS"]) - module["LEARNING_RATE"] * gradients.mean(axis=0)
    np.testing.assert_allclose(module["UPDATED"], updated)
    assert np.abs(updated).max() <= 1


def test_the_stages_picture_shows_a_real_step():
    module = runpy.run_path(str(FIGURES / "six_stages.py"))
    weights, inputs, targets = (module[name] for name in ("WEIGHTS", "INPUTS", "TARGETS"))

    def loss(weights, inputs, targets):
        return ((inputs @ weights - targets) ** 2).mean()

    def slopes(inputs, targets):
        moves = 1e-4 * np.eye(len(weights))
        return [(loss(weights + move, inputs, targets) - loss(weights - move, inputs, targets))
                / 2e-4 for move in moves]

    for rank in range(module["RANKS"]):
        assert module["LOSSES"][rank] == pytest.approx(loss(weights, inputs[rank], targets[rank]))
        np.testing.assert_allclose(module["GRADIENTS"][rank], slopes(inputs[rank], targets[rank]))
    whole = slopes(inputs.reshape(-1, len(weights)), targets.reshape(-1))
    np.testing.assert_allclose(module["MEAN"], whole, err_msg="the global batch's gradient")
    np.testing.assert_allclose(module["UPDATED"],
                               weights - module["LEARNING_RATE"] * module["MEAN"])
    shown = [weights, *module["GRADIENTS"], module["MEAN"], module["UPDATED"]]
    assert np.abs(shown).max() <= 1
    assert len(set(module["LOSSES"].round(2))) == len(module["LOSSES"])
    talks = [stage in module["COLLECTIVES"] for stage in range(6)]
    assert talks == [True, False, False, False, True, False]


def test_the_picture_of_three_cuts_divides_a_product_into_what_gives_the_whole():
    module = runpy.run_path(str(FIGURES / "three_cuts.py"))
    sizes = {"b": 10, "d": 4, "f": 2}
    draw = np.random.default_rng(0)
    whole = {"x": draw.normal(size=(10, 4)), "w": draw.normal(size=(4, 2))}
    whole["y"] = whole["x"] @ whole["w"]

    def cut(matrix, part, rank):
        axis = {"rows": 0, "columns": 1}.get(part)
        return matrix if axis is None else np.split(matrix, 2, axis)[rank]

    sent = {}
    for name, how, _, copied, ranks, forward, backward in module["WAYS"]:
        summands = []
        for rank, (a, b, c) in enumerate(ranks):
            left, right = (cut(whole[m[0]], m[4], rank) for m in (a, b))
            assert whole[a[0]].shape == (sizes[a[1]], sizes[a[2]])
            product = left @ right
            if c[0] in whole:
                np.testing.assert_allclose(product, cut(whole[c[0]], c[4], rank), err_msg=how)
            else:
                summands.append(product)
            whose = {m[0] for m in (a, b, c) if m[3] == module["COPY"]}
            assert whose == ({copied} if copied in whole else set())
            assert all(m[3] in (module["COPY"], rank) for m in (a, b, c))
        assert not summands or np.allclose(sum(summands), whole["y"])
        sent[name] = module["sent"](forward)[1], module["sent"](backward)[1]
    assert sent == {"cut b": ("", "d × f = 2.1 M"), "cut d": ("b × f = 5.2 M", ""),
                    "cut f": ("", "b × d = 10.5 M")}
    for _, letters, summed in module["PRODUCTS"]:
        inputs, output = letters.split("→")
        assert set(inputs) - {","} - set(output) == {summed}
    assert [way[0] for way in module["WAYS"]] == sorted(
        f"cut {summed}" for *_, summed in module["PRODUCTS"])


def tensors_in_between():
    """This rank's tensor before each step of the ring, and at the end."""
    tensor = torch.full((4,), 10 ** dist.get_rank())
    states, batch = [], dist.batch_isend_irecv

    def recording_batch(operations):
        states.append(tensor.tolist())
        return batch(operations)

    dist.batch_isend_irecv = recording_batch
    dplab.parallel.ring_all_reduce(tensor)
    dist.batch_isend_irecv = batch
    return [*states, tensor.tolist()]


def test_the_ring_picture_shows_what_the_ring_does():
    module = runpy.run_path(str(FIGURES / "ring_steps.py"))
    receives = [(rank + 1) % 4 for rank in module["WAY"]]
    assert receives == [0, 1, 2, 3, 0, 1]  # chunk 2 starts at rank 3
    assert receives[:3] == [next(rank for rank in range(4) if after[rank][2] != before[rank][2])
                            for before, after in itertools.pairwise(module["STATES"][:4])]

    ran = dplab.run(tensors_in_between, 4, backend="gloo")
    sums = [[[sum(10**rank for rank in parts) for parts in chunks] for chunks in ranks]
            for ranks in module["STATES"]]
    assert sums == [list(ranks) for ranks in zip(*ran, strict=True)]
