"""The committed pictures are what their scripts draw, can be read, and show what really happens."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import assert_readable

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


@pytest.fixture
def load(monkeypatch):
    """What a script defines; some draw with another one's functions."""
    monkeypatch.syspath_prepend(str(FIGURES))
    return lambda name: runpy.run_path(str(FIGURES / f"{name}.py"))


@pytest.mark.slow
def test_drawing_again_gives_the_same_bytes_whatever_the_readers_settings(tmp_path):
    (tmp_path / "matplotlibrc").write_text(HOSTILE_SETTINGS)
    for script in SCRIPTS:
        shutil.copy(script, tmp_path)
    draw_all = ("import glob, runpy\n"
                "for script in sorted(glob.glob('*.py')):\n"
                "    runpy.run_path(script, run_name='__main__')\n")
    subprocess.run([sys.executable, "-c", draw_all], cwd=tmp_path, check=True, timeout=120)
    committed, again = ({svg.name: svg.read_bytes() for svg in folder.glob("*.svg")}
                        for folder in (FIGURES, tmp_path))
    assert committed.keys() == again.keys() == {f"{script.stem}.svg" for script in SCRIPTS}
    assert not [name for name in committed if committed[name] != again[name]], "run the scripts"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_texts_can_be_read_at_900_pixels(script, load):
    module = load(script.stem)
    canvas = module["draw"]()
    assert canvas.width == 900 and module["ALT"] == canvas.figure.alt
    assert canvas.title == module["TITLE"] and len(module["ALT"]) > 100
    assert_readable(canvas.figure, points=0.75 * 13, margin=8)


def test_the_collectives_pictures_show_what_the_collectives_do(load):
    module = load("collectives")
    whole = np.arange(1, 5) * 10 ** np.arange(3, -1, -1)[:, None]
    total, own, everyone = whole.sum(axis=0), np.diag(whole), np.ones((4, 1), int)

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
            assert [[0 if cell is None else total[cell[1]] if cell[0] == module["SUM"]
                     else whole[cell] for cell in row] for row in cells] == [*map(list, held)], name


def test_the_pictures_of_a_step_show_real_steps(load):
    module = load("one_step")
    np.testing.assert_allclose(module["UPDATED"], np.array(module["WEIGHTS"])
                               - module["LEARNING_RATE"] * np.mean(module["GRADIENTS"], axis=0))

    module = load("six_stages")
    weights, inputs, targets = (torch.tensor(module[name]) for name in (
        "WEIGHTS", "INPUTS", "TARGETS"))
    weights.requires_grad_()
    losses = ((inputs @ weights - targets) ** 2).mean(dim=1)
    slopes = [torch.autograd.grad(loss, weights, retain_graph=True)[0] for loss in losses]
    [mean] = torch.autograd.grad(losses.mean(), weights)
    for name, right in (("LOSSES", losses.detach()), ("GRADIENTS", torch.stack(slopes)),
                        ("MEAN", mean),
                        ("UPDATED", weights.detach() - module["LEARNING_RATE"] * mean)):
        np.testing.assert_allclose(module[name], right, err_msg=name)
    assert [stage in module["COLLECTIVES"] for stage in range(6)] == [1, 0, 0, 0, 1, 0]

    module = load("ring_steps")
    assert module["WAY"] == [3, 0, 1, 2, 3, 0]
    assert module["STATES"][-1] == [4 * [frozenset(range(4))]] * 4
