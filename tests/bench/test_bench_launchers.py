"""The launchers beside which dplab is measured, and what is said of one that fails."""

import argparse

import pytest

from dplab.bench import launchers

OPTIONS = argparse.Namespace(ranks=2, rounds=2, peer_rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("cells", [launchers.DPLAB, *launchers.PEERS.values()],
                         ids=["dplab", *launchers.PEERS])
def test_a_launch_is_timed(cells):
    [seconds] = launchers.seconds_of(cells, 2, rounds=1)
    assert seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("body, said", [
    ("raise OSError('no such thing')", "OSError: no such thing"),
    ("return [3.0, 2.0]", "AssertionError: [3.0, 2.0]")], ids=["raises", "wrong"])
def test_a_launcher_that_fails_or_gives_other_values_is_said_to(body, said):
    with pytest.raises(RuntimeError) as failed:
        launchers.seconds_of([f"all_reduce_once = None\ndef launch(*_):\n    {body}"], 2, rounds=1)
    assert str(failed.value) == said


def test_times_are_compared_with_dplab_s_own(monkeypatch, capsys):
    def seconds_of(cells, ranks, rounds, function=""):
        if cells == launchers.PEERS["torchrun"]:
            raise RuntimeError("no port is free")
        return [0.5, 0.25, 1.0] if cells == launchers.DPLAB and ranks == 2 else [2.0, 1.0]

    monkeypatch.setattr(launchers, "seconds_of", seconds_of)
    monkeypatch.setattr(launchers, "_first_call", lambda pause, ranks: 0.5)
    launchers.main(OPTIONS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["dplab.run", "0.500", "(0.250", "to", "1.000)", "1.0×"]
    assert lines[-2].split() == ["torch.multiprocessing.spawn", "1.500", "(1.000", "to", "2.000)",
                                 "3.0×"]
    assert lines[-1].split(maxsplit=1) == ["torchrun", "failed: no port is free"]
