"""Chapter 02's sick jobs, beyond what test_each_job.py holds each to."""

import pytest
from drill_jobs import faults_of, fitting, healthy_run_of, seeds_of
from symptoms import symptoms_of

from dplab.drills.wrong_gradients import LIMIT, WrongGradient


@pytest.mark.slow
def test_a_healthy_job_has_the_gradient_of_one_process_and_no_suspect_fits():
    _, readings = healthy_run_of(WrongGradient, faults_of(WrongGradient, "e")[0])
    assert fitting(WrongGradient, readings) == []
    assert symptoms_of(readings) == {"right loss"}
    assert readings.against_one(readings.ranks)[0] < 1e-12
    assert readings.against_one(readings.single)[0] < 1e-5
    length = sum(each.square().sum().item() for each in readings.one.gradients.values()) ** 0.5
    assert length < LIMIT, "in one process nothing is clipped"


@pytest.mark.slow
def test_no_warning_of_torch_gives_a_job_away(capfd):
    job = WrongGradient(*seeds_of(WrongGradient, faults_of(WrongGradient, "e")[0]))
    job._run(job._sick_part())
    said = capfd.readouterr()
    assert "Warning" not in said.out + said.err


@pytest.mark.slow
def test_a_rank_that_is_nearly_right_is_not_printed_as_right(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    job = WrongGradient(1862)  # with private statistics, and 0.125002 in place of 3/24
    job.losses()
    assert "0.12500\n" not in capsys.readouterr().out


def test_each_complaint_is_made_of_several_suspects():
    suspects = {}
    for case in WrongGradient.cases:
        for fault in case.faults:
            for complaint in (fault.complaint, *fault.also):
                suspects.setdefault(complaint, set()).add(case.suspect)
    assert all(len(each) > 2 for each in suspects.values())
