"""The cores and the memory that this process may use."""

import os

import pytest

from dplab.measure import machine


@pytest.mark.parametrize(("quota", "memory", "cores", "most"), [
    ("50000 100000", "1048576", 1, 1048576), ("150000 100000", "max", 2, None),
    ("max 100000", "max", 6, None), (None, None, 6, None)])
def test_a_container_may_allow_less(monkeypatch, tmp_path, quota, memory, cores, most):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for name, content in (("cpu.max", quota), ("memory.max", memory)):
        if content:
            (tmp_path / name).write_text(content + "\n")
    assert machine.available_cores() == cores
    assert machine.available_memory() == most or (most is None
                                                  and machine.available_memory() > 2**28)
