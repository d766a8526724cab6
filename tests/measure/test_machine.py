"""The cores and the memory that this process may use."""

import os
import subprocess
import sys

import pytest

from dplab.measure import machine


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cores_are_those_that_the_process_may_use():
    script = ("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
              "from dplab.measure import available_cores; print(available_cores())")
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE)
    assert done.stdout.strip() == b"1"


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
