"""The demo of DDP by hand as a reader starts it. What it prints is parsed."""

import re

import pytest
from demos import MODULE, SCRIPT, TORCHRUN, run

import dplab
from dplab.demos import simple_ddp


def check_facts(text, ranks):
    """Every fact stands there once, and they fit together."""
    def number(pattern):
        found = re.findall(pattern + r"\s+(-?[\d.]+(?:e[+-]\d+)?)", text)
        assert len(found) == 1, (pattern, text)
        return float(found[0])

    assert re.match(rf"{ranks} ranks on \d+ cores\n", text)
    assert number("ManualDDP to torch DDP") < 1e-6
    assert number("between ranks, ManualDDP") == 0.0
    assert number("accuracy, ManualDDP") == number("accuracy, torch DDP")
    rows = re.findall(r"^  (ManualDDP|torch DDP) ((?: +\d+\.\d+){4})$", text, re.MULTILINE)
    assert [name for name, _ in rows] == ["ManualDDP", "torch DDP"]
    by_hand, by_ddp = ([float(each) for each in times.split()] for _, times in rows)
    assert by_hand[2] > by_ddp[2]  # DDP has no communication after backward


@pytest.mark.slow
def test_as_a_module():
    done = run(*MODULE, "--ranks", 3, "--steps", 24)  # 256 samples are no multiple of 3
    assert (done.returncode, done.stderr) == (0, "")
    check_facts(done.stdout, ranks=3)


@pytest.mark.slow
def test_under_torchrun_it_prints_once():
    done = run(*TORCHRUN, 2, SCRIPT, "--steps", 24)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    check_facts(done.stdout, ranks=2)


def test_exit_status_tells_of_a_disagreement(monkeypatch, capsys):
    agreed = dplab.run(simple_ddp.train, 1, simple_ddp.load_digits(), 22)
    agreed[0]["ManualDDP"]["parameters"][7] += 0.01
    monkeypatch.setattr(dplab, "run", lambda *args, **kwargs: agreed)
    assert simple_ddp.main(["--ranks", "1"]) == 1
    assert "1.0e-02" in capsys.readouterr().out
