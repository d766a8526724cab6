"""The soak of the launcher: a short slice of it is right, and it sees what is wrong."""

import re

import pytest
import soak
from soak.plan import Ends, Plan
from soak.run import Attempt, Place

pytestmark = pytest.mark.slow

FEW = ("healthy", "raise", "exit", "SIGKILL", "deadlock", "closed output", "two faults",
       "interrupt")


@pytest.fixture(scope="module")
def place():
    with Place() as place:
        yield place


def complaints(place, plan, allowance=30.0):
    return "\n".join(Attempt(place, plan, allowance).complaints())


def test_a_slice_is_right(monkeypatch, capsys):
    monkeypatch.setattr(soak, "CASES", {case: soak.CASES[case] for case in FEW})
    soak.main(["--runs", "8", "--allowance", "30"])  # exits if one is wrong
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == ["all", "8", "8"]


def test_a_wrong_end_is_seen(place):
    assert complaints(place, Plan(2, fault="1 // rank", ends=[
        Ends("raised", 0, ("rank 0 of 2 raised ZeroDivisionError", "1 // rank"))])) == ""
    found = complaints(place, Plan(2, fault="1 // rank"))
    assert "raised, rank 0" in found and "outcome='values'" in found
    assert "values, rank None" in complaints(place, Plan(2, ends=[Ends("died", 1)]))
    assert "and not" in complaints(place, Plan(2, ends=[Ends("raised", 1, ("1 // rank",))],
                                               fault="1 // rank"))


def test_a_disturbed_bystander_is_seen():
    with Place() as place:
        assert place.disturbed() == []
        place._files[0].write_text("")
        place._process.kill()
        place._process.wait()
        assert len(place.disturbed()) == 2


def test_what_is_left_is_seen(place):
    fault = "open(os.environ['TMPDIR'] + f'/mine-{rank}', 'w')"
    assert "mine-0 in the temporary folder" in complaints(place, Plan(1, fault=fault))


@pytest.mark.parametrize(("plan", "seen"), [
    (Plan(2, pause=0.6, bound=1.0), "s at most|no end after"),
    (Plan(1, fault="os.kill(os.getppid(), signal.SIGSTOP)", bound=1.0), "no end after"),
], ids=["slow", "hang"])
def test_too_long_is_seen(place, plan, seen):
    assert re.search(seen, complaints(place, plan, allowance=0.0))
