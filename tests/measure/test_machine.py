"""The cores that this process may use."""

import os

import pytest

from dplab.measure import machine


@pytest.mark.parametrize(("quota", "cores"), [
    ("50000 100000", 1), ("150000 100000", 2), ("max 100000", 6), (None, 6)])
def test_a_container_may_allow_less(monkeypatch, tmp_path, quota, cores):
    monkeypatch.setattr(machine, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert machine.available_cores() == cores
