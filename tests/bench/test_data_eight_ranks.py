"""The traces of chapter 06's capstone: what was put in is what the course's attribution finds."""

import json
import statistics

import cloudpickle
import eight_ranks
import pytest
from eight_ranks import RANKS, SIZES
from sandbox import ROOT

from dplab.exercises.attribute_the_loss import length, lost_gpus, recorded_job

cloudpickle.register_pickle_by_value(eight_ranks)
DATA = ROOT / "chapters" / "data" / "eight_ranks.json"


def test_the_job_is_about_five_times_as_fast_and_the_losses_add_up():
    alone, ranks = recorded_job(DATA)
    speed_up = RANKS * length([alone]) / length(ranks)
    assert speed_up == pytest.approx(5, abs=0.15)
    assert sum(lost_gpus(alone, ranks).values()) == pytest.approx(RANKS - speed_up, abs=0.05)


def test_each_cause_is_found_as_it_was_put_in():
    alone, ranks = recorded_job(DATA)
    found = lost_gpus(alone, ranks)
    for cause, seconds in eight_ranks.lost().items():
        assert found[cause] == pytest.approx(RANKS * seconds / length(ranks), abs=0.15), cause


def test_the_file_says_what_was_put_in():
    recorded = json.loads(DATA.read_text(encoding="utf-8"))
    assert recorded["put_in"] == pytest.approx(eight_ranks.lost())
    for name, ranks in (("alone", 1), ("together", RANKS)):
        assert len(recorded[name]) == eight_ranks.STEPS
        assert all(len(step) == ranks for step in recorded[name])


def test_a_repair_returns_something_else_than_its_share_of_the_timeline():
    recorded = json.loads(DATA.read_text(encoding="utf-8"))
    usual = {cause: statistics.median(steps) for cause, steps in recorded["repaired"].items()}
    assert set(usual) == {"nothing", *eight_ranks.lost()}
    assert all(len(steps) == eight_ranks.REPAIRED_STEPS for steps in recorded["repaired"].values())
    saved = {cause: usual["nothing"] - seconds for cause, seconds in usual.items()}
    lost = eight_ranks.lost()
    assert saved["kernels"] < 0.2 * lost["kernels"]
    assert saved["straggler"] < 0.6 * lost["straggler"]
    assert saved["data"] == pytest.approx(lost["data"], rel=0.1)
    assert saved["exposed"] < 0.75 * lost["exposed"]


def test_without_a_fault_a_part_is_healthy(monkeypatch):
    class Worker:
        buckets, kernels = range(eight_ranks.SIZES.layers), []

        def kernel(self, name, seconds):
            self.kernels.append(seconds)

    monkeypatch.setattr(eight_ranks.dist, "get_rank", lambda: eight_ranks.SLOW_RANK)
    for faults, layer in ((eight_ranks.Faults(), SIZES.forward + eight_ranks.STRAGGLER / 16),
                          (eight_ranks.Faults(straggler=0.0), SIZES.forward)):
        Worker.kernels.clear()
        faults.forward(Worker())
        assert Worker.kernels == pytest.approx([layer] * SIZES.layers)


@pytest.mark.slow
def test_it_runs_on_this_machine(monkeypatch, capsys):
    monkeypatch.setattr(eight_ranks, "STEPS", 1)
    monkeypatch.setattr(eight_ranks, "REPAIRED_STEPS", 1)
    monkeypatch.setattr(eight_ranks, "WARM_UP", 1)
    saved = {}
    monkeypatch.setattr(eight_ranks, "save", lambda name, **parts: saved.update(parts))
    eight_ranks.main()
    assert "times as fast" in capsys.readouterr().out
    assert [len(step) for step in saved["together"]] == [RANKS]
    [[spans]] = [eight_ranks.without_calls(step) for step in eight_ranks.measure(
        1, eight_ranks.Parts())]
    assert [span.name for span in spans].count("backward") == SIZES.layers
