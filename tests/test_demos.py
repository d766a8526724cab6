"""The demos as a reader starts them: as a module, and under torchrun. What they print is parsed."""

import copy
import re
import subprocess
import sys
from xml.etree import ElementTree

import matplotlib.image
import pytest
import torch

import dplab
from dplab.demos import gradient_sync_visualizer as visualizer
from dplab.demos import simple_ddp
from dplab.predict import cost

SCRIPT = simple_ddp.__file__
MODULE = [sys.executable, "-m", "dplab.demos.simple_ddp"]
VISUALIZER = ["-m", "dplab.demos.gradient_sync_visualizer"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=180)


def check_facts(text, ranks):
    """Every fact stands there once, and they fit together."""
    def number(pattern):
        found = re.findall(pattern + r"\s+(-?[\d.]+(?:e[+-]\d+)?)", text)
        assert len(found) == 1, (pattern, text)
        return float(found[0])

    assert re.match(rf"{ranks} ranks on \d+ cores, \w+ on \w+; ", text)
    assert number("ManualDDP to torch DDP") < 1e-6
    assert number("between ranks, ManualDDP") == 0.0
    by_hand, by_ddp = number("accuracy, ManualDDP"), number("accuracy, torch DDP")
    assert by_hand == by_ddp and 0 <= by_hand <= 100

    rows = {name.strip(): values.split("  ") for name, values in re.findall(
        r"^  ([\w ,]{20})((?: +(?:[\d.]+|in backward|none)){5})$", text, re.MULTILINE)}
    rows = {name: [value.strip() for value in values if value.strip()]
            for name, values in rows.items()}
    assert list(rows) == ["ManualDDP", "torch DDP", "torch DDP, no_sync"]
    assert [row[2] for row in rows.values()][1:] == ["in backward", "none"]
    for *parts, total in rows.values():
        parts = [float(part) for part in parts if part not in ("in backward", "none")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(float(total), abs=0.003)

    _, _, communication, _, total = map(float, rows["ManualDDP"])
    shares = re.findall(r"^  (ManualDDP|torch DDP)   (-?[\d.]+) ms, (-?[\d.]+) % of the step",
                        text, re.MULTILINE)
    assert [name for name, *_ in shares] == ["ManualDDP", "torch DDP"]
    (_, *of_hand), (_, *of_ddp) = shares
    assert float(of_hand[0]) == communication
    assert float(of_hand[1]) == pytest.approx(100 * communication / total, abs=0.2)
    hidden = float(rows["torch DDP"][1]) - float(rows["torch DDP, no_sync"][1])
    assert float(of_ddp[0]) == pytest.approx(hidden, abs=0.002)
    assert float(of_ddp[1]) == pytest.approx(100 * hidden / float(rows["torch DDP"][4]), abs=0.5)


def test_as_a_module(tmp_path):
    done = run(*MODULE, "--ranks", 2, "--steps", 12, "--plot", tmp_path / "shares.png")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    check_facts(done.stdout, ranks=2)
    image = matplotlib.image.imread(tmp_path / "shares.png")
    assert image.shape[0] > 100 and image.shape[1] > 300
    assert len({tuple(pixel) for row in image[::5, ::5] for pixel in row}) > 4


def test_under_torchrun_it_prints_once(tmp_path):
    done = run(*TORCHRUN, 2, SCRIPT, "--steps", 12, "--plot", tmp_path / "shares.svg")
    assert done.returncode == 0, done.stderr
    check_facts(done.stdout, ranks=2)
    assert "Traceback" not in done.stderr
    root = ElementTree.parse(tmp_path / "shares.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_from_python_with_a_batch_that_does_not_divide(capsys):
    assert simple_ddp.main(["--ranks", "3", "--steps", "6", "--batch", "10"]) == 0
    check_facts(capsys.readouterr().out, ranks=3)


def test_local_batches_share_the_global_one_out_and_weigh_it():
    digits = simple_ddp.load_digits()

    def draw():
        return [(labels, weight) for _, labels, weight
                in simple_ddp.local_batches(digits, 2, 11, seed=4)]

    for step in zip(*dplab.run(draw, 4), strict=True):
        assert [len(labels) for labels, _ in step] == [3, 3, 3, 2]
        assert [weight for _, weight in step] == [12 / 11, 12 / 11, 12 / 11, 8 / 11]
    (_, whole), = [dplab.run(draw, 1)[0]]
    assert len(whole[0]) == 11 and whole[1] == 1.0
    parts = torch.cat([labels for labels, _ in step])
    assert torch.equal(parts.sort().values, whole[0].sort().values)


@pytest.mark.parametrize("arguments, complaint", [
    ("--ranks 0", "--ranks: needs a whole number of at least 1, not '0'"),
    ("--ranks -1", "--ranks: needs a whole number of at least 1, not '-1'"),
    ("--ranks two", "--ranks: needs a whole number of at least 1, not 'two'"),
    ("--ranks 2.0", "--ranks: needs a whole number of at least 1, not '2.0'"),
    ("--steps 0", "--steps: needs a whole number of at least 1"),
    ("--seed -1", "--seed: needs a whole number of at least 0"),
    ("--ranks 4 --batch 3", "--batch: 3 is not from 4 (one sample for each rank) to 1439"),
    ("--batch 1440", "--batch: 1440 is not from 4"),
    ("--plot .", "neither in .png nor in .svg"),
    ("--plot missing/folder/shares.png", "'missing/folder/shares.png' cannot be written"),
    ("--speed 3", "unrecognized arguments: --speed 3"),
])
def test_arguments_that_make_no_sense(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as exit:
        simple_ddp.main(arguments.split())
    out, err = capsys.readouterr()
    assert exit.value.code == 2
    assert complaint in err and err.count("\n") == 1 and out == ""


def test_a_folder_is_no_figure(tmp_path, capsys):
    (tmp_path / "shares.png").mkdir()
    with pytest.raises(SystemExit):
        simple_ddp.main(["--plot", str(tmp_path / "shares.png")])
    assert "cannot be written" in capsys.readouterr().err


def test_torchrun_contradicted():
    done = run(*TORCHRUN, 2, SCRIPT, "--ranks", 3)
    assert done.returncode == 1
    assert done.stderr.count("simple_ddp: argument --ranks: 3, but torchrun started 2") == 1
    assert done.stdout == ""


def test_exit_status_tells_of_a_disagreement_and_of_a_failed_rank(monkeypatch, capsys):
    arguments = ["--ranks", "1", "--steps", "2"]
    agreed = dplab.run(simple_ddp.train, 1, simple_ddp.load_digits(), 2, 256, 0, None)
    agreed[0][2]["ManualDDP"]["parameters"][7] += 0.01
    monkeypatch.setattr(dplab, "run", lambda *args, **kwargs: agreed)
    assert simple_ddp.main(arguments) == 1
    assert "1.0e-02" in capsys.readouterr().out

    def fail(*args, **kwargs):
        raise dplab.RankError("rank 0 raised KeyError")

    monkeypatch.setattr(dplab, "run", fail)
    assert simple_ddp.main(arguments) == 1
    assert capsys.readouterr().err == "simple_ddp: rank 0 raised KeyError\n"


def test_help_explains_itself(capsys):
    with pytest.raises(SystemExit) as exit:
        simple_ddp.main(["--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--ranks", "--steps", "--batch", "--seed", "--plot"))
    assert "torchrun" in text and "default: 256" in text


# The gradients before and after synchronisation

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


def test_before_each_rank_has_the_gradients_of_its_own_digits(facts):
    size = visualizer.SAMPLES
    for rank, found in enumerate(facts["before"]):
        mine = slice(rank, RANKS * size, RANKS)
        expected = gradients_of(DIGITS.train_images[mine], DIGITS.train_labels[mine])
        assert found.keys() == expected.keys()
        torch.testing.assert_close(flat(found), flat(expected), rtol=0, atol=1e-6)
    assert facts["between_ranks"] > 0.05


@pytest.mark.parametrize("strategy", visualizer.EXACT)
def test_afterwards_each_rank_has_the_average_of_those_before(facts, strategy):
    average = torch.stack([flat(rank) for rank in facts["before"]]).mean(dim=0)
    whole = slice(RANKS * visualizer.SAMPLES)
    at_once = gradients_of(DIGITS.train_images[whole], DIGITS.train_labels[whole])
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
    assert re.match(rf"{ranks} ranks on \d+ cores, \w+ on \w+; {link}", text)
    before, after = re.findall(r"^  (?:before synchronisation|after) +(\S+)$", text, re.MULTILINE)
    assert float(before) > 0.05 and float(after) == 0.0
    rows = {}
    for name in visualizer.STRATEGIES:
        line, = re.findall(rf"^  {name} +(\d.*)$", text, re.MULTILINE)
        rows[name] = [float(number.replace(",", "")) for number in re.findall(r"[\d.,e+-]+", line)]
    assert [row[0] for row in rows.values()] == [9, 3, 3, 3, 3, 3]
    assert [row[1] for row in rows.values()] == [387, 387, 387, 387, 193, 77]
    assert text.count("exposed, step: " + link) == 1
    return rows


def is_a_picture(path):
    image = matplotlib.image.imread(path)
    return image.shape[0] > 400 and image.shape[1] > 600 and len(
        {tuple(pixel) for row in image[::7, ::7] for pixel in row}) > 50


def test_the_visualizer_as_a_module(tmp_path):
    picture = tmp_path / "picture.png"
    done = run(sys.executable, *VISUALIZER, "--ranks", 2, "--save", picture)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    check_visualizer(done.stdout, 2, "emulated link: 0.05 GB/s, 500 µs")
    assert done.stdout.endswith(f"Saved {picture}\n") and is_a_picture(picture)


def test_the_visualizer_under_torchrun(tmp_path):
    done = run(*TORCHRUN, 2, *VISUALIZER, "--save", tmp_path / "picture.svg")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    rows = check_visualizer(done.stdout, 2, "real link, gloo")
    assert all(row[2] > 0.98 * row[1] for row in rows.values())  # two send what they hand over
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert [path.name for path in tmp_path.iterdir()] == ["picture.svg"]


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


@pytest.mark.parametrize("arguments, complaint", [
    ("--ranks 0", "--ranks: '0' is no whole number above 0: try --ranks 2"),
    ("--ranks -1", "--ranks: '-1' is no whole number above 0: try --ranks 2"),
    ("--ranks two", "--ranks: 'two' is no whole number above 0: try --ranks 2"),
    ("--link slow", "--link: invalid choice: 'slow' (choose from 'emulated', 'real')"),
    ("--save a.jpg", "--save: 'a.jpg' ends neither in .png nor in .svg: try a.png"),
    ("--save missing/a.png", "--save: there is no folder 'missing': make it first, or try a.png"),
])
def test_what_the_visualizer_cannot_do_it_says_with_what_to_try(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as exit:
        visualizer.main(arguments.split())
    out, err = capsys.readouterr()
    assert exit.value.code == 2
    assert complaint in err and err.count("\n") == 1 and out == ""


def test_the_visualizer_writes_over_no_folder_and_takes_121_ranks_for_too_many(tmp_path, capsys):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(SystemExit):
        visualizer.main(["--save", str(tmp_path / "a.png")])
    assert f"is a folder: try {tmp_path / 'a.png' / 'picture.png'}" in capsys.readouterr().err
    assert visualizer.main(["--ranks", "121"]) == 1
    assert "world_size must be 1 to 120, not 121" in capsys.readouterr().err


def test_torchrun_emulates_no_link():
    done = run(*TORCHRUN, 2, *VISUALIZER, "--link", "emulated")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("argument --link: torchrun's job has its own link") == 1


def test_a_wrong_average_is_told_by_the_exit_status(facts, monkeypatch, capsys):
    results = [("gloo", "cpu", facts["buckets"], copy.deepcopy(before), {
        name: row | {"after": copy.deepcopy(facts["after"][name][rank]),
                     "exposed": [row["exposed"]], "step": [row["step"]]}
        for name, row in facts["strategies"].items()})
        for rank, before in enumerate(facts["before"])]
    monkeypatch.setattr(dplab, "run", lambda *args, **kwargs: results)
    assert visualizer.main([]) == 0
    capsys.readouterr()
    results[1][4][visualizer.OVERLAPPED]["after"]["conv1.bias"][3] += 0.01
    assert visualizer.main([]) == 1
    assert "after                   1.0e-02" in capsys.readouterr().out
