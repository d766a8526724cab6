"""What a machine may lack, or have in the way: what then works all the same, or what is said."""

import ast
import errno
import gc
import itertools
import os
import resource
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from dplab import RankError, needs, run
from dplab.spawn.between.errors import advice_on

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).resolve().parents[1]
RUN = """
import torch, torch.distributed as dist, dplab
def total():
    x = torch.ones(1); dist.all_reduce(x); return x.item()
print(dplab.run(total, {ranks}))
"""


def python(code, *before, **environment):
    """A fresh Python that runs ``code``; ``before``: words in front of its command line."""
    return subprocess.run([*before, sys.executable, "-c", code], cwd=ROOT, text=True, timeout=120,
                          capture_output=True, env={**os.environ, **environment})


def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


# What is said at import, or at the first use


@pytest.mark.parametrize(("before", "said"), [
    ("sys.version_info = (3, 9, 2, 'final', 0); import dplab.predict",
     "ImportError: dplab needs Python 3.11 or newer, and this is 3.9: make the environment with a "
     "newer one, python3.11 -m venv --clear .venv"),
    ("sys.platform = 'win32'; import dplab.predict", "On Windows, install WSL 2 (wsl --install)"),
    # Without pip too, as uv makes environments.
    ("sys.path = [path for path in sys.path if 'site-packages' not in path]; "
     "import dplab, dplab.show; dplab.run", "uv sync --extra cpu"),
], ids=["old Python", "Windows", "no package"])
def test_a_system_that_will_not_do_is_told_what_to_do(before, said):
    done = python(f"import sys; {before}")
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1], done.stderr


def test_what_is_said_is_of_the_project_and_old_pythons_can_read_it():
    for path in (ROOT / "dplab/__init__.py", ROOT / "dplab/needs.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 6))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">={}.{}"'.format(*needs.PYTHON) in project
    assert '"torch>={}.{}"'.format(*needs.TORCH) in project


def test_an_old_torch_is_told_with_a_command_to_paste(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/srv/my courses/.venv/bin/python")
    for version in ("2.13.0+cpu", "3.0.0"):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        needs.check_torch()
    monkeypatch.setattr(metadata, "version", lambda _: "2.9.1+cu128")
    with pytest.raises(ImportError, match=r"needs torch 2\.13 or newer.* 2\.9\.1\+cu128") as caught:
        needs.check_torch()
    assert f"{shlex.quote(sys.executable)} -m pip install -r requirements.txt" in str(caught.value)


# Limits


@pytest.mark.slow
@pytest.mark.parametrize("left", [30, 70])  # some logs of the 40 ranks; all, and some pipes
def test_too_few_descriptors_are_named_and_none_is_lost(left):
    assert run(total, 2) == [2.0, 2.0]
    descriptors = os.listdir("/dev/fd")
    free = (number for number in itertools.count() if str(number) not in descriptors)
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, left, None)), most))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="Too many open files: 40 ranks take about 210") as no:
                run(total, 40)
            assert no.value.errno == errno.EMFILE and "ulimit -n 4096" in str(no.value)
            del no  # which holds sockets, in the frames of its traceback
            gc.collect()
            assert os.listdir("/dev/fd") == descriptors
        assert run(total, 2) == [2.0, 2.0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_a_rank_that_meets_a_limit_is_reported_with_advice():
    def no_thread():
        raise RuntimeError("can't start new thread")

    with pytest.raises(RankError, match="raised RuntimeError: can't start new thread") as caught:
        run(no_thread, 2)
    assert str(caught.value).endswith("or raise the limit.")
    assert "--pids-limit" in advice_on("BlockingIOError: [Errno 11] Resource temporarily "
                                       "unavailable")
    assert "--shm-size=1g" in advice_on("RuntimeError: unable to allocate shared mem")
    assert advice_on("ValueError: x") == ""


# Containers


@pytest.fixture
def namespace():
    """Words in front of a command, by which it sees mounts, a host's name and a network alone."""
    words = ["unshare", "--mount", "--net", "--uts"]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"]).returncode:
        pytest.skip("needs root on Linux, and unshare")
    return [*words, "sh", "-ec"]


ROUGH = """
ip link set lo up
echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true
hostname nobody-knows-this-name
mount --bind /dev/null /etc/hosts
mount --bind /dev/null /etc/resolv.conf
mount -t tmpfs -o size=16m tmpfs /dev/shm
exec "$@"
"""
FULL = """
mkdir -p "$TMPDIR"
mount -t tmpfs -o size=64k tmpfs "$TMPDIR"
mount -t tmpfs -o size=64k tmpfs /dev/shm
ip link set lo up
status=0; "$@" || status=$?
ls -A "$TMPDIR" /dev/shm
exit $status
"""


@pytest.mark.slow
def test_a_container_with_little_memory_no_names_and_a_proxy(namespace):
    done = python(RUN.format(ranks=16), *namespace, ROUGH, "sh", HTTP_PROXY="http://127.0.0.1:9",
                  http_proxy="http://127.0.0.1:9", all_proxy="socks5://127.0.0.1:9")
    assert done.stdout.strip() == str([16.0] * 16), done.stderr


@pytest.mark.slow
def test_no_space_is_said_and_leaves_nothing(namespace, tmp_path):
    done = python(RUN.format(ranks=2), *namespace, FULL, "sh", TMPDIR=str(tmp_path / "full"))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "No space left on device: the call logs of 2 ranks take 2 MB" in last
    assert "set TMPDIR" in last and "--shm-size=1g" in last
    assert "dplab-" not in done.stdout
