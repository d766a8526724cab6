"""The demo of the gradients before and after synchronisation; what it prints is parsed."""

import re
import sys

import matplotlib.image
import pytest
import torch
from demos import TORCHRUN, VISUALIZER, run

import dplab
from dplab.demos import gradient_sync_visualizer as visualizer

RANKS = 3
DIGITS = visualizer.load_digits()
EXACT = ("per parameter", "buckets", "overlapped", "torch DDP")


@pytest.fixture(scope="module")
def facts():
    link = visualizer.LINK
    results = dplab.run(visualizer.synchronize, RANKS, DIGITS, 3, link=link)
    return visualizer.summarize(results, link)


def gradients_of(images, labels):
    model = visualizer.small_network()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    return visualizer.gradients(model)


def flat(gradients):
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


@pytest.mark.slow
def test_each_rank_has_its_own_gradients_before_and_their_average_after(facts):
    size = visualizer.SAMPLES
    for rank, found in enumerate(facts["before"]):
        mine = slice(rank, RANKS * size, RANKS)
        expected = gradients_of(DIGITS.train_images[mine], DIGITS.train_labels[mine])
        torch.testing.assert_close(flat(found), flat(expected), rtol=0, atol=1e-6)
    own = torch.stack([flat(rank) for rank in facts["before"]])
    assert (own[0] - own[1]).abs().max() > 0.05
    average = torch.stack([flat(rank) for rank in facts["before"]]).mean(dim=0)
    whole = slice(RANKS * size)
    at_once = gradients_of(DIGITS.train_images[whole], DIGITS.train_labels[whole])
    for strategy in EXACT:
        assert len(facts["after"][strategy]) == RANKS
        for rank in facts["after"][strategy]:
            torch.testing.assert_close(flat(rank), average, rtol=0, atol=1e-7)
            torch.testing.assert_close(flat(rank), flat(at_once), rtol=0, atol=1e-6)
        assert facts["strategies"][strategy]["error"] < 1e-6


def test_compressed_gradients_are_equal_on_all_ranks_and_about_the_average(facts):
    average = torch.stack([flat(rank) for rank in facts["before"]]).mean(dim=0)
    for strategy, low, high in (("DDP, fp16", 1e-5, 2e-3), ("DDP, top 10 %", 2e-3, 0.5)):
        first, *others = (flat(rank) for rank in facts["after"][strategy])
        assert all(torch.equal(first, other) for other in others)
        error = ((first - average).abs().max() / average.abs().max()).item()
        assert low < error < high
        assert facts["strategies"][strategy]["error"] == pytest.approx(error)
    kept = (flat(facts["after"]["DDP, top 10 %"][0]) != 0).float().mean()
    assert visualizer.KEPT <= kept < RANKS * visualizer.KEPT


def test_the_hook_adds_up_what_each_rank_has_kept():
    class Bucket:
        def __init__(self, flat):
            self.flat = flat

        def buffer(self):
            return self.flat

    def kept():
        rank = torch.distributed.get_rank()
        own = torch.randn(31, generator=torch.Generator().manual_seed(rank))
        return own, visualizer.keep_largest(None, Bucket(own.clone())).wait()

    results = dplab.run(kept, 3)
    expected = torch.zeros(31)
    for own, _ in results:
        threshold = own.abs().sort(descending=True).values[2]  # a tenth of 31 is 3
        expected += torch.where(own.abs() >= threshold, own, 0) / 3
    for _, found in results:
        torch.testing.assert_close(found, expected)


def test_collectives_and_bytes_are_those_of_the_strategies(facts):
    rows = facts["strategies"]
    assert [row["calls"] for row in rows.values()] == [9, 3, 3, 3, 3, 3]
    numbers = sum(values.numel() for values in facts["before"][0].values())
    ring = 2 * (RANKS - 1) / RANKS
    # Others may use the loopback meanwhile, so it may be more.
    assert rows["torch DDP"]["sent"] > 0.98 * ring * 4 * numbers
    assert rows["DDP, fp16"]["sent"] > 0.98 * ring * 2 * numbers
    assert rows["DDP, top 10 %"]["sent"] > 0.98 * (RANKS - 1) * 8 * visualizer.KEPT * numbers
    assert rows["per parameter"]["exposed"] > 8 * 2 * (RANKS - 1) * visualizer.LINK.latency


@pytest.mark.slow
def test_the_visualizer_as_a_module(tmp_path):
    picture = tmp_path / "picture.png"
    done = run(sys.executable, *VISUALIZER, "--ranks", 2, "--save", picture)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 ranks; emulated link: 0.05 GB/s, 500 µs")
    image = matplotlib.image.imread(picture)
    assert image.shape[0] > 400 and image.shape[1] > 600


@pytest.mark.slow
def test_the_visualizer_under_torchrun():
    done = run(*TORCHRUN, 2, *VISUALIZER)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.startswith("2 ranks; real link")


def test_the_visualizer_draws_what_it_found(facts):
    figure = visualizer.draw(facts)
    for name, row in facts["strategies"].items():
        assert re.search(rf"{name} {row['calls']}\b", figure.alt)
    before, after, compressed = [torch.from_numpy(axes.collections[0].get_array().data)
                                 for axes in figure.axes if axes.collections]
    first = torch.stack([rank["linear.bias"] for rank in facts["before"]])
    torch.testing.assert_close(before[:, :10].float(), first)
    torch.testing.assert_close(after[:, :10].float(), first.mean(dim=0).expand(RANKS, 10))
    assert torch.equal(compressed, compressed[:1].expand_as(compressed))
