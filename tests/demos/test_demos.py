"""The demos as a reader starts them, as modules and under torchrun. What they print is parsed."""

import re
import subprocess
import sys

import matplotlib.image
import pytest
import torch
from torch.nn import functional as F

import dplab
from dplab.demos import gradient_sync_visualizer as visualizer
from dplab.demos import simple_ddp

MODULE = [sys.executable, "-m", "dplab.demos.simple_ddp"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=180)


# --- simple_ddp -----------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize(("command", "ranks"), [
    ([*MODULE, "--ranks", 3], 3), ([*TORCHRUN, 2, simple_ddp.__file__], 2)])
def test_simple_ddp_prints_each_fact_once_and_they_fit_together(command, ranks):
    def number(pattern):
        found = re.findall(pattern + r"\s+(-?[\d.]+(?:e[+-]\d+)?)", text)
        assert len(found) == 1, (pattern, text)
        return float(found[0])

    done = run(*command, "--steps", 24)  # 256 samples are no multiple of 3
    text = done.stdout
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert not done.stderr or "torch.distributed.run" in command  # which may warn
    assert re.match(rf"{ranks} ranks on \d+ cores\n", text)
    assert number("ManualDDP to torch DDP") < 1e-6
    assert number("between ranks, ManualDDP") == 0.0
    assert number("accuracy, ManualDDP") == number("accuracy, torch DDP")
    rows = re.findall(r"^  (ManualDDP|torch DDP) ((?: +\d+\.\d+){4})$", text, re.MULTILINE)
    assert [name for name, _ in rows] == ["ManualDDP", "torch DDP"]
    by_hand, by_ddp = ([float(each) for each in times.split()] for _, times in rows)
    assert by_hand[2] > by_ddp[2]  # DDP has no communication after backward


def test_the_exit_status_tells_of_a_disagreement(monkeypatch, capsys):
    agreed = dplab.run(simple_ddp.train, 1, simple_ddp.load_digits(), 22)
    agreed[0]["ManualDDP"]["parameters"][7] += 0.01
    monkeypatch.setattr(dplab, "run", lambda *args, **kwargs: agreed)
    assert simple_ddp.main(["--ranks", "1"]) == 1
    assert "1.0e-02" in capsys.readouterr().out


# --- gradient_sync_visualizer ---------------------------------------------------------------------

RANKS, SAMPLES = 3, visualizer.SAMPLES


@pytest.fixture(scope="module")
def facts():
    digits = visualizer.load_digits()
    link = visualizer.LINK
    return visualizer.summarize(
        dplab.run(visualizer.synchronize, RANKS, digits, 3, link=link), link)


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def gradients_of(chosen):
    digits, model = visualizer.load_digits(), visualizer.small_network()
    F.cross_entropy(model(digits.train_images[chosen]), digits.train_labels[chosen]).backward()
    return flat(visualizer.gradients(model))


@pytest.mark.slow
def test_each_rank_has_its_own_gradients_before_and_their_mean_after(facts):
    for rank, found in enumerate(facts["before"]):
        expected = gradients_of(slice(rank, RANKS * SAMPLES, RANKS))
        torch.testing.assert_close(flat(found), expected, rtol=0, atol=1e-6)
    before = torch.stack([flat(rank) for rank in facts["before"]])
    assert (before[0] - before[1]).abs().max() > 0.05
    whole = gradients_of(slice(RANKS * SAMPLES))
    for name, row in facts["ways"].items():
        after = torch.stack([flat(rank) for rank in facts["after"][name]])
        assert torch.equal(after, after[:1].expand_as(after))
        error = ((after - before.mean(0)).abs().max() / whole.abs().max()).item()
        assert row["error"] == pytest.approx(error, abs=1e-6)
        low, high = (1e-5, 2e-3) if name == "DDP, fp16" else (0.0, 1e-6)
        assert low <= error < high, name
        torch.testing.assert_close(after[0], whole, rtol=0, atol=max(high, 1e-6))


def test_collectives_bytes_and_seconds_are_those_of_the_ways(facts):
    rows = facts["ways"]
    assert [row["collectives"] for row in rows.values()] == [9, 3, 3, 3, 3]
    ring = 2 * (RANKS - 1) / RANKS * len(flat(facts["before"][0])) / 1e3
    # Others may use the loopback meanwhile, so it may be more.
    assert all(row["kB sent"] > 0.98 * ring * (2 if name == "DDP, fp16" else 4)
               for name, row in rows.items())
    assert rows["per parameter"]["ms exposed"] > 1e3 * 8 * 2 * (RANKS - 1) * visualizer.LINK.latency
    figure = visualizer.draw(facts)
    before, after = [torch.from_numpy(axes.collections[0].get_array().data)
                     for axes in figure.axes]
    first = torch.stack([rank["linear.bias"] for rank in facts["before"]])
    torch.testing.assert_close(before[:, :10].float(), first)
    torch.testing.assert_close(after[:, :10].float(), first.mean(dim=0).expand(RANKS, 10))


@pytest.mark.slow
def test_the_visualizer_over_an_emulated_link(tmp_path, capsys):
    picture = tmp_path / "picture.png"
    assert visualizer.main(["--ranks", "2", "--save", str(picture)]) == 0
    assert capsys.readouterr().out.startswith("2 ranks; emulated link: 0.05 GB/s, 500 µs")
    assert min(matplotlib.image.imread(picture).shape[:2]) > 250


@pytest.mark.slow
def test_the_visualizer_under_torchrun():
    done = run(*TORCHRUN, 2, "-m", "dplab.demos.gradient_sync_visualizer")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.startswith("2 ranks; real link")
