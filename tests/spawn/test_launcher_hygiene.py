"""What the launcher leaves behind: no process, descriptor, folder or socket, run after run."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from socket import AF_INET

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from kernel import (
    descendants,
    folder_of_this_rank,
    kill_server,
    no_ranks_left,
    server_of,
    wait_for,
    wait_until_gone,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dplab import RankError, run
from dplab.spawn.between import calls
from dplab.spawn.rank.recording import CallRecorder
from dplab.spawn.server import start

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).resolve().parents[2]


def traces(process):
    """What may grow: descriptors, mappings of logs, children."""
    with open(f"/proc/{process.pid}/maps") as maps:
        logs = sum("/calls-" in line for line in maps)
    return process.num_fds(), logs, len(process.children(recursive=True))


def total(x):
    tensor = torch.tensor([float(x + dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor.item(), folder_of_this_rank()


def fails(how):
    dist.barrier()
    if dist.get_rank() == 1:
        how()
    dist.barrier()


@pytest.mark.slow
def test_many_runs_leave_nothing_and_failures_neither():
    run(lambda: torch.optim.SGD.__name__, 2)  # the server has loaded everything
    me, server = psutil.Process(), server_of()
    before, folders = (traces(me), traces(server)), set()
    for number in range(5):
        values = run(total, 2, number)
        assert [value for value, _ in values] == [2 * number + 1.0] * 2
        folders.add(values[0][1])
    for _ in range(30):  # no collective: the ranks return while their peers still connect
        assert run(int, 2, "7") == [7, 7]
    for how in (lambda: 1 // 0, lambda: os._exit(1), lambda: os.abort()) * 2:
        with pytest.raises(RankError):
            run(fails, 2, how)
    assert len(folders) == 5
    assert not [folder for folder in folders if os.path.exists(folder)]
    assert server_of() == server
    assert (traces(me), traces(server)) == before


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
    assert len(pids) == 6
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
        dist.barrier()
        family = [psutil.Process(), *psutil.Process().parents()[:1]]  # itself and the server
        return [(socket.status, socket.laddr.ip, socket.raddr.ip if socket.raddr else None)
                for process in family for socket in process.net_connections("inet")]

    sockets = [socket for value in run(work, 2) for socket in value]
    assert any(status == psutil.CONN_LISTEN for status, _, _ in sockets)
    assert {address for _, *both in sockets for address in both} <= {
        "127.0.0.1", "::1", "::ffff:127.0.0.1", None}


@pytest.mark.slow
def test_servers_that_died_are_replaced_and_leave_no_descriptor(monkeypatch):
    me, counts, servers = psutil.Process(), [], set()
    for number in range(2):
        assert [value for value, _ in run(total, 2, number)] == [2 * number + 1.0] * 2
        counts.append(me.num_fds())
        servers.add(server_of().pid)
        kill_server()

    def dies(self, *args):
        """Before it forks."""
        monkeypatch.undo()
        server_of().suspend()
        try:
            return fork(self, *args)
        finally:
            kill_server()

    run(total, 2, 0)
    fork = start._Server.fork
    monkeypatch.setattr(start._Server, "fork", dies)
    assert [value for value, _ in run(total, 2, 3)] == [7.0, 7.0]
    assert {*counts, me.num_fds()} == {counts[0]} and len(servers) == 2, counts


def test_no_room_for_the_second_log_leaves_no_folder(monkeypatch, tmp_path):
    made = []

    def create(path):
        if made:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(path)
        return map_log(path)

    run(int, 2, "7")
    map_log, before = calls.map_log, psutil.Process().num_fds()
    monkeypatch.setattr(calls, "map_log", create)
    with pytest.raises(OSError, match="No space left on device") as kept:
        run(int, 2, "7")
    assert not os.path.exists(os.path.dirname(made[0])), kept
    assert psutil.Process().num_fds() == before
    monkeypatch.undo()
    assert run(int, 2, "7") == [7, 7]


@pytest.mark.slow
def test_the_server_dies_during_a_run(tmp_path):
    def work(path):
        open(f"{path}/{dist.get_rank()}", "w").write(f"{os.getpid()} {folder_of_this_rank()}")
        time.sleep(1000)

    def kill():
        wait_for(lambda: len(texts := [p.read_text() for p in tmp_path.iterdir()]) == 2
                 and all(texts))
        server_of().kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match="ranks are forked from has ended: without a word"):
        run(work, 2, str(tmp_path))
    killer.join()
    for path in tmp_path.iterdir():
        pid, folder = path.read_text().split()
        wait_for(lambda pid=pid: not psutil.pid_exists(int(pid)), 5)
        assert not os.path.exists(folder)
    assert [value for value, _ in run(total, 2, 3)] == [7.0, 7.0]


def python(code, *, timeout=100, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, timeout=timeout, cwd=ROOT,
        env={**os.environ, **environment})


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
@pytest.mark.parametrize(("code", "started", "environment"), [
    ("import dplab.predict, dplab.spawn; from dplab import RankError, device, run", 0, {}),
    ("from dplab import warm_up; warm_up()", 1, {}),
    ("from dplab import warm_up; warm_up()", 0, {"TORCHELASTIC_RUN_ID": "job"}),
    ("from dplab import warm_up; warm_up()", 0, {"DPLAB_START": "spawn"}),
])
def test_what_starts_the_server(code, started, environment):
    done = python(f"{code}\nimport psutil\nprint(len(psutil.Process().children()))", **environment)
    assert done.stdout.strip() == str(started), done.stderr


@pytest.mark.slow
def test_the_first_ranks_wait_only_for_what_they_name():
    """The server loads torch, serves, and loads the rest when it is idle, or when it is asked."""
    done = python("""
import sys
from dplab import run
plain = lambda: "torch._dynamo" in sys.modules
trains = lambda: (plain(), __import__("torch").optim.SGD.__name__)
print(run(plain, 2), run(trains, 2))""")
    assert done.stdout.strip() == "[False, False] [(True, 'SGD'), (True, 'SGD')]", done.stderr


@pytest.mark.slow
def test_a_copy_of_the_launcher_is_a_library(tmp_path):
    """Under another name, where there is no dplab; handed a module to load, and a colour."""
    shutil.copytree(ROOT / "dplab/spawn", tmp_path / "launcher")
    (tmp_path / "handed_in.py").write_text("import os\nloaded_in = os.getpid()\n")
    (tmp_path / "script.py").write_text("""
import os, sys
sys.modules["dplab"] = None  # an import of it would fail
import launcher
import torch, torch.distributed as dist

def total():
    import handed_in
    mine = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(mine)
    return mine.item(), str(launcher.device()), handed_in.loaded_in == os.getppid()

def fails():
    if dist.get_rank() == 1:
        raise ValueError("lost")
    dist.barrier()

launcher.configure(preload=("handed_in",))
print(launcher.run(total, 3))
with launcher.expect_failure() as failure:
    launcher.run(fails, 2)
print(failure.rank, failure.kind)
""")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, text=True,
                          capture_output=True, timeout=100,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert str([(6.0, "cpu", True)] * 3) in done.stdout, done.stderr
    assert done.stdout.endswith("1 raised\n") and "script.py, in fails" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["by itself", "by a signal"])
def test_a_script_that_ends_leaves_nothing(ends, tmp_path):
    seconds = 0.5 if ends == "by itself" else 1000
    code = f"""
import time
from dplab import run
run(lambda: (open({str(tmp_path / 'sign')!r}, "w").close(), time.sleep({seconds})), 3)"""
    script = psutil.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_for((tmp_path / "sign").exists, 60)
    below = descendants(script)
    folders = {os.path.dirname(area.path) for area in script.memory_maps() if "calls-" in area.path}
    assert len(below) == 4 and len(folders) == 1
    if ends == "by a signal":
        script.terminate()
    script.wait(20)
    assert wait_until_gone(below, 15) < 15
    wait_for(lambda: not any(map(os.path.exists, folders)), 5)


def test_the_call_log_holds_any_call(tmp_path):
    group = type("Group", (), {"group_name": "a" * 64, "size": lambda self: 1000})()
    path = str(tmp_path / "calls")
    recorder, reader = CallRecorder(calls.map_log(path)), calls.CallReader(path)
    tensor = torch.empty((10**4,) * 2 + (1,) * 7, device="meta", dtype=torch.complex128)
    name = str(tmp_path / ("漢字" * 60 + ".py"))
    code = compile("all_reduce(group, 'reduce_scatter', [tensor] * 9, 'PREMUL_SUM', 999)",
                   name, "exec")
    for _ in range(3_000):
        exec(code, {"all_reduce": lambda *call: recorder.record(*call), "group": group,
                    "tensor": tensor})
    found = reader.new_calls()
    assert 2000 < len(found) <= 2048
    assert [call.number for call in found] == list(range(3_001 - len(found), 3_001))
    last = found[-1]
    assert (last.operation, last.dtype, last.reduce_operation, last.peer, last.line) == (
        "reduce_scatter", "complex128", "PREMUL_SUM", 999, 1)
    assert last.bytes == 9 * 16 * 10**8
    assert name.endswith(last.file) and last.file.endswith("漢字.py")
