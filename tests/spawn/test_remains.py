"""What runs leave behind: nothing, however they end. And how the process they are forked from does.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from socket import AF_INET

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from kernel import descendants, kill_server, no_ranks_left, server_of, wait_for, wait_until_gone
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dplab import RankError, run
from dplab.spawn.between.errors import Interrupted
from dplab.spawn.parent import ranks
from dplab.spawn.server import start

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def nothing_left():
    """The folders that the test's runs make. Afterwards nothing is left of them: no folder,
    process, descriptor, mapping or handler, though an interrupted run's error is kept."""
    run(int, 2, "7")
    me, made, listens = psutil.Process(), [], True

    def traces():
        with open("/proc/self/maps") as maps:
            return me.num_fds(), "/calls-" in maps.read(), signal.getsignal(signal.SIGINT)

    before = traces()
    sys.addaudithook(lambda event, details: listens and event == "tempfile.mkdtemp"
                     and made.append(details[0]))
    yield made
    listens = False
    assert made and not [folder for folder in made if os.path.exists(folder)]
    wait_for(lambda: not server_of().children(recursive=True), 5)  # what a new server still starts
    assert traces() == before
    assert run(lambda: dist.get_rank(), 2) == [0, 1]
    no_ranks_left()


def fails(how):
    dist.barrier()
    if dist.get_rank() == 1:
        how()
    dist.barrier()


def test_many_runs_leave_nothing_and_failures_neither(nothing_left):
    run(lambda: torch.optim.SGD.__name__, 2)  # the server has loaded everything
    server = server_of()
    descriptors = server.num_fds()
    for _ in range(30):  # no collective: the ranks return while their peers still connect
        assert run(int, 2, "7") == [7, 7]
    for how in (lambda: 1 // 0, lambda: os._exit(1), lambda: os.abort()) * 2:
        with pytest.raises(RankError):
            run(fails, 2, how)
    assert len({*nothing_left}) == 37 and server_of() == server
    assert server.num_fds() == descriptors


@pytest.mark.slow
def test_grandchildren_are_ended_too(tmp_path):
    """A DataLoader's workers, a child, and one in a session of its own; of a run that fails."""
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            (tmp_path / f"worker-{os.getpid()}").touch()
            time.sleep(1000)

    def work():
        for apart in (False, True):
            child = subprocess.Popen(["sh", "-c", "sleep 1000; true"], start_new_session=apart)
            (tmp_path / f"child-{child.pid}").touch()
        if dist.get_rank() == 0:
            list(DataLoader(Slow(), num_workers=2))
        os.setsid() if os.getpgrp() != os.getpid() else os.setpgid(0, os.getppid())
        wait_for(lambda: len(list(tmp_path.iterdir())) == 6)
        raise ValueError

    with pytest.raises(RankError, match="rank 1 of 2 raised ValueError"):
        run(work, 2)
    pids = [int(path.name.split("-")[1]) for path in tmp_path.iterdir()]
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), 5)
    no_ranks_left()


def test_ranks_listen_on_the_loopback_alone(monkeypatch):
    # where the notebook asks for another interface, and where the host's name leads to one
    outward = [name for name, addresses in psutil.net_if_addrs().items() for address in addresses
               if address.family == AF_INET and not address.address.startswith("127.")]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", (outward or ["none0"])[0])

    def work():
        model = DistributedDataParallel(nn.Linear(2, 2))
        group = dist.new_group([0, 1])
        model(torch.ones(1, 2)).sum().backward()
        dist.all_reduce(torch.ones(3), group=group)
        family = [psutil.Process(), *psutil.Process().parents()[:1]]  # itself and the server
        return [(socket.status, socket.laddr.ip, socket.raddr.ip if socket.raddr else None)
                for process in family for socket in process.net_connections("inet")]

    sockets = [socket for value in run(work, 2) for socket in value]
    assert any(status == psutil.CONN_LISTEN for status, _, _ in sockets)
    assert {address for _, *both in sockets for address in both} <= {
        "127.0.0.1", "::1", "::ffff:127.0.0.1", None}


# An interrupt at the worst of moments

MOMENTS = [(tempfile, "mkdtemp", 1), (ranks, "start_ranks", 2), (ranks, "CallReader", 2),
           (ranks.Ranks, "start", 1), (ranks.Ranks, "stop", 2), (start._Forked, "end", 1)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("where", "name", "presses"), MOMENTS)
def test_the_stop_button_at_a_bad_moment(nothing_left, monkeypatch, where, name, presses, when):
    original = getattr(where, name)

    def interrupted(*args, **kwargs):
        if when == "before":
            press()
        value = original(*args, **kwargs)
        if when == "after":
            press()
        return value

    def press():
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(where, name, interrupted)
    with pytest.raises(Interrupted, match="stopped by you") as kept:
        run(lambda: dist.barrier(), 2)
    monkeypatch.undo()
    assert "rank 1 " in str(kept.value)


@contextlib.contextmanager
def press_after(seconds):
    """Presses ■ then, unless the block is left before: another test's run is not to be struck."""
    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def test_the_stop_button_while_much_is_sent_to_a_new_server_and_while_much_comes_back(nothing_left):
    kill_server()
    started = time.monotonic()
    with press_after(0.5), pytest.raises(Interrupted, match="rank 1 was still starting"):
        run(lambda tensor: tensor.sum(), 2, torch.ones(3_000_000))
    assert time.monotonic() - started < 10
    for moment in (0.1, 0.3):
        with press_after(moment), pytest.raises(KeyboardInterrupt):
            run(lambda: torch.full((1 << 26,), 1.0 + dist.get_rank()), 2)
            time.sleep(60)


# The process that ranks are forked from

def total(x):
    tensor = torch.tensor([float(x + dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor.item()


def test_servers_that_died_are_replaced(nothing_left, monkeypatch, tmp_path):
    def dies(self, *args):
        """Before it forks."""
        monkeypatch.undo()
        server_of().suspend()
        try:
            return fork(self, *args)
        finally:
            kill_server()

    kill_server()
    assert run(total, 2, 1) == [3.0, 3.0]
    fork = start._Server.fork
    monkeypatch.setattr(start._Server, "fork", dies)
    assert run(total, 2, 3) == [7.0, 7.0]

    def work():  # in whose run it dies
        (tmp_path / f"{os.getpid()}").touch()
        time.sleep(1000)

    def kill():
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
        server_of().kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match="ranks are forked from has ended: without a word"):
        run(work, 2)
    killer.join()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), 5)
    assert run(total, 2, 3) == [7.0, 7.0]


def python(code):
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True,
                          timeout=100, cwd=ROOT)


def test_a_server_that_cannot_start_says_why(tmp_path):
    # torch loads it, and only the server imports it: the parent's torch is there already
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('this torch is broken')\n")
    done = python(f"""
import os, torch
from dplab.spawn import run
os.environ["PYTHONPATH"] = {str(tmp_path)!r}
import dplab.spawn.server.start as start
start._with_this_package = lambda: os.environ["PYTHONPATH"]
run(print, 2)""")
    assert done.returncode == 1
    assert "ServerEnded: the process that ranks are forked from has ended" in done.stderr
    assert "ImportError: this torch is broken" in done.stderr


@pytest.mark.slow
def test_the_server_starts_when_it_is_asked_to_and_the_first_ranks_wait_for_what_they_name():
    done = python("""
import os, sys
import psutil, dplab.predict, dplab.spawn
from dplab import RankError, device, run, warm_up
children = lambda: len(psutil.Process().children())
counts = [children()]
for name in ("TORCHELASTIC_RUN_ID", "DPLAB_START"):
    os.environ[name] = "spawn"
    warm_up()
    counts.append(children())
    del os.environ[name]
plain = lambda: "torch._dynamo" in sys.modules
trains = lambda: (plain(), __import__("torch").optim.SGD.__name__, "dplab.parallel" in sys.modules)
print(run(plain, 2), run(trains, 2))
print(*counts, children())""")
    assert done.stdout.split("\n")[:2] == [
        "[False, False] [(True, 'SGD', True), (True, 'SGD', True)]", "0 0 0 1"], done


# The end of a script, and ranks that are each a fresh Python, as on macOS

@pytest.mark.slow
@pytest.mark.parametrize(("how", "ends"), [
    ("fork", "by itself"), ("fork", "by a signal"), ("spawn", "by a signal")])
def test_a_script_that_ends_leaves_nothing(how, ends, tmp_path):
    code = f"""
import time, torch.distributed as dist
from dplab import run
def work():
    open({str(tmp_path)!r} + f"/{{dist.get_rank()}}", "w").close()
    time.sleep({0.5 if ends == "by itself" else 1000})
run(work, 3)"""
    script = psutil.Popen([sys.executable, "-c", code], cwd=ROOT,
                          env={**os.environ, "DPLAB_START": how})
    wait_for(lambda: len(list(tmp_path.iterdir())) == 3, 60)
    below = descendants(script)
    folders = {os.path.dirname(area.path) for area in script.memory_maps() if "calls-" in area.path}
    assert len(below) == (4 if how == "fork" else 3) and len(folders) == 1
    if ends == "by a signal":
        script.terminate()
    script.wait(20)
    wait_until_gone(below, 15)
    wait_for(lambda: not any(map(os.path.exists, folders)), 5)


@pytest.mark.slow
def test_ranks_that_are_not_forked(monkeypatch, capsys):
    monkeypatch.setenv("DPLAB_START", "spawn")
    children = {*psutil.Process().children()}

    def work(end):
        mine = torch.tensor([dist.get_rank() + 0.5])
        dist.all_reduce(mine)
        print("total", mine.item())
        if end and dist.get_rank() == 0:
            time.sleep(0.5)
            os.kill(*{"killed": (os.getpid(), signal.SIGKILL),
                      "pressed": (os.getppid(), signal.SIGINT)}[end])
            time.sleep(100)
        dist.barrier()
        return mine.item(), torch.rand(1).item(), torch.get_num_threads()

    drawn = [torch.rand(1, generator=torch.Generator().manual_seed(rank)).item() for rank in (0, 1)]
    assert run(work, 2, "") == [(2.0, each, 1) for each in drawn]
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[rank 0] total 2.0", "[rank 1] total 2.0"]
    with pytest.raises(RankError, match=r"^rank 0 of 2 was killed \(SIGKILL\)") as caught:
        run(work, 2, "killed")
    assert caught.value.reports[0].endswith("dist.barrier()")
    with pytest.raises(Interrupted, match="rank 1 waits in barrier number 2: test_"):
        run(work, 2, "pressed")
    assert {*psutil.Process().children()} == children
