"""The demo of the gradients before and after synchronisation; what it prints is parsed."""

import copy
import re
import sys
from xml.etree import ElementTree

import matplotlib.image
import pytest
import torch
from demos import TORCHRUN, VISUALIZER, run

import dplab
from dplab.demos import gradient_sync_visualizer as visualizer
from dplab.predict import cost

RANKS = 3
DIGITS = visualizer.load_digits()


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
    assert facts["between_ranks"] > 0.05
    average = torch.stack([flat(rank) for rank in facts["before"]]).mean(dim=0)
    whole = slice(RANKS * size)
    at_once = gradients_of(DIGITS.train_images[whole], DIGITS.train_labels[whole])
    for strategy in visualizer.EXACT:
        assert len(facts["after"][strategy]) == RANKS
        for rank in facts["after"][strategy]:
            torch.testing.assert_close(flat(rank), average, rtol=0, atol=1e-7)
            torch.testing.assert_close(flat(rank), flat(at_once), rtol=0, atol=1e-6)
        assert facts["strategies"][strategy]["error"] < visualizer.ROUNDING


def test_compressed_gradients_are_equal_on_all_ranks_and_about_the_average(facts):
    average = torch.stack([flat(rank) for rank in facts["before"]]).mean(dim=0)
    for strategy, low, high in ((visualizer.FP16, 1e-5, 2e-3), (visualizer.LARGEST, 2e-3, 0.5)):
        first, *others = (flat(rank) for rank in facts["after"][strategy])
        assert all(torch.equal(first, other) for other in others)
        error = ((first - average).abs().max() / average.abs().max()).item()
        assert low < error < high
        assert facts["strategies"][strategy]["error"] == pytest.approx(error)
    kept = (flat(facts["after"][visualizer.LARGEST][0]) != 0).float().mean()
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
    sizes = {name: values.numel() for name, values in facts["before"][0].items()}
    numbers = sum(sizes.values())
    assert [name for bucket in facts["buckets"] for name in bucket] == list(sizes)[::-1]
    assert len(facts["buckets"]) == 3

    rows = facts["strategies"]
    flags = 4 * len(sizes)  # which parameters were used: a number for each
    counted = {name: (row["calls"], row["bytes"]) for name, row in rows.items()}
    assert counted[visualizer.PER_PARAMETER] == (len(sizes) + 1, 4 * numbers + flags)
    assert counted[visualizer.BUCKETS] == (3, 4 * numbers + flags)
    assert counted[visualizer.OVERLAPPED] == (3, 4 * numbers + flags)
    assert counted[visualizer.TORCH] == (3, 4 * numbers)
    assert counted[visualizer.FP16] == (3, 2 * numbers)
    assert counted[visualizer.LARGEST][0] == 3
    assert counted[visualizer.LARGEST][1] == pytest.approx(2 * 4 * visualizer.KEPT * numbers, 0.01)

    ring, gather = 2 * (RANKS - 1) / RANKS, RANKS - 1
    for name, row in rows.items():  # others may use the loopback meanwhile, so it may be more
        factor = gather if name == visualizer.LARGEST else ring
        assert row["sent"] > 0.98 * factor * row["bytes"]


def test_exposed_is_at_least_what_the_link_takes_after_the_last_gradient(facts):
    link, rows = visualizer.LINK, facts["strategies"]

    def seconds(numbers):
        return cost.seconds("ring all-reduce", RANKS, 4 * numbers,
                            cost.Link("", link.bandwidth, link.latency))

    sizes = {name: values.numel() for name, values in facts["before"][0].items()}
    buckets = [sum(sizes[name] for name in bucket) for bucket in facts["buckets"]]
    assert rows[visualizer.PER_PARAMETER]["exposed"] > sum(map(seconds, sizes.values()))
    assert rows[visualizer.BUCKETS]["exposed"] > sum(map(seconds, buckets))
    for name in (visualizer.OVERLAPPED, visualizer.TORCH):
        assert rows[name]["exposed"] > seconds(buckets[-1])
    assert all(row["step"] > row["exposed"] for row in rows.values())


def check_visualizer(text, ranks, link):
    """The table that is printed; returns its rows, as numbers."""
    assert text.startswith(f"{ranks} ranks on ") and link in text.splitlines()[0]
    before, after = re.findall(r"^  (?:before synchronisation|after) +(\S+)$", text, re.MULTILINE)
    assert float(before) > 0.05 and float(after) == 0.0
    rows = {}
    for name in visualizer.SYNC_STRATEGIES:
        line, = re.findall(rf"^  {name} +(\d.*)$", text, re.MULTILINE)
        rows[name] = [float(number.replace(",", "")) for number in re.findall(r"[\d.,e+-]+", line)]
    assert [row[0] for row in rows.values()] == [9, 3, 3, 3, 3, 3]
    assert [row[1] for row in rows.values()] == [387, 387, 387, 387, 193, 77]
    return rows


@pytest.mark.slow
def test_the_visualizer_as_a_module(tmp_path):
    picture = tmp_path / "picture.png"
    done = run(sys.executable, *VISUALIZER, "--ranks", 2, "--save", picture)
    assert (done.returncode, done.stderr) == (0, "")
    check_visualizer(done.stdout, 2, "emulated link: 0.05 GB/s, 500 µs")
    image = matplotlib.image.imread(picture)
    assert image.shape[0] > 400 and image.shape[1] > 600


@pytest.mark.slow
def test_the_visualizer_under_torchrun(tmp_path):
    done = run(*TORCHRUN, 2, *VISUALIZER, "--save", tmp_path / "picture.svg")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    rows = check_visualizer(done.stdout, 2, "real link")
    assert all(row[2] > 0.98 * row[1] for row in rows.values())  # two send what they hand over
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_visualizer_draws_what_it_found(facts):
    figure = visualizer.draw(facts)
    for name, row in facts["strategies"].items():
        assert re.search(rf"{name} {row['calls']}\b", figure.alt)
    first = torch.stack([rank["linear.bias"] for rank in facts["before"]])
    before, after, compressed = [torch.from_numpy(mesh.get_array().data).float()
                                 for mesh in figure.axes[0].collections][::8]
    torch.testing.assert_close(before, first)
    torch.testing.assert_close(after, first.mean(dim=0).expand(RANKS, 10))
    assert torch.equal(compressed, compressed[:1].expand(RANKS, 10))


def test_a_wrong_average_is_told_by_the_exit_status(facts, monkeypatch, capsys):
    results = [(facts["buckets"], copy.deepcopy(before), {
        name: row | {"after": copy.deepcopy(facts["after"][name][rank]),
                     "exposed": [row["exposed"]], "step": [row["step"]]}
        for name, row in facts["strategies"].items()})
        for rank, before in enumerate(facts["before"])]
    monkeypatch.setattr(dplab, "run", lambda *args, **kwargs: results)
    assert visualizer.main([]) == 0
    capsys.readouterr()
    results[1][2][visualizer.OVERLAPPED]["after"]["conv1.bias"][3] += 0.01
    assert visualizer.main([]) == 1
    assert "after                   1.0e-02" in capsys.readouterr().out
