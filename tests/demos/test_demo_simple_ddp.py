"""The demo of DDP by hand as a reader starts it. What it prints is parsed."""

import re
from xml.etree import ElementTree

import matplotlib.image
import pytest
import torch
from demos import MODULE, SCRIPT, TORCHRUN, run

import dplab
from dplab.demos import simple_ddp


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


@pytest.mark.slow
def test_as_a_module(tmp_path):
    done = run(*MODULE, "--ranks", 2, "--steps", 12, "--plot", tmp_path / "shares.png")
    assert (done.returncode, done.stderr) == (0, "")
    check_facts(done.stdout, ranks=2)
    image = matplotlib.image.imread(tmp_path / "shares.png")
    assert image.shape[0] > 100 and image.shape[1] > 300


@pytest.mark.slow
def test_under_torchrun_it_prints_once(tmp_path):
    done = run(*TORCHRUN, 2, SCRIPT, "--steps", 12, "--plot", tmp_path / "shares.svg")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    check_facts(done.stdout, ranks=2)
    root = ElementTree.parse(tmp_path / "shares.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.slow
def test_from_python_with_a_batch_that_does_not_divide(capsys):
    assert simple_ddp.main(["--ranks", "3", "--steps", "6", "--batch", "10"]) == 0
    check_facts(capsys.readouterr().out, ranks=3)


@pytest.mark.slow
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


def test_exit_status_tells_of_a_disagreement(monkeypatch, capsys):
    agreed = dplab.run(simple_ddp.train, 1, simple_ddp.load_digits(), 2, 256, 0)
    agreed[0][1]["ManualDDP"]["parameters"][7] += 0.01
    monkeypatch.setattr(dplab, "run", lambda *args, **kwargs: agreed)
    assert simple_ddp.main(["--ranks", "1", "--steps", "2"]) == 1
    assert "1.0e-02" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "complaint"), [
    ("--ranks 0", "--ranks: needs a whole number of at least 1, not '0'"),
    ("--ranks 2.0", "--ranks: needs a whole number of at least 1, not '2.0'"),
    ("--ranks 4 --batch 3", "--batch: 3 is not from 4 (one sample for each rank) to 1439"),
    ("--batch 1440", "--batch: 1440 is not from 4"),
    ("--plot shares.jpg", "--plot: 'shares.jpg' is no name for a .png or an .svg"),
    ("--plot missing/folder/shares.png", "--plot: there is no folder 'missing/folder'"),
    ("--speed 3", "unrecognized arguments: --speed 3"),
])
def test_arguments_that_make_no_sense(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as exit:
        simple_ddp.main(arguments.split())
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and complaint in err and out == ""
