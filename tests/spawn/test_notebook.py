"""The launcher in a real notebook kernel: `%%ranks`, its display, the ■ button, the kernel's death.
"""

import json
import os
import re
import time

import pytest
from kernel import Kernel, descendants, is_server, wait_for, wait_until_gone

SOON = 15  # seconds, on the slowest of days
SETUP = """
%load_ext dplab
import os, sys, threading, time, warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
import dplab
from dplab import RankError, run
from dplab.spawn.parent import supervise
def folder():
    with open("/proc/self/maps") as maps:
        return next(os.path.dirname(line.split()[-1]) for line in maps if "/calls-" in line)
"""
HANG = """
def hang():
    dist.barrier()
    if dist.get_rank():
        dist.barrier()
    while True: pass"""
WORKERS = """
class Slow(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        time.sleep(1000)
def hang():
    list(DataLoader(Slow(), num_workers=2))
"""


@pytest.fixture(scope="module")
def shared():
    with Kernel() as kernel:
        assert kernel.run(SETUP).status == "ok"
        yield kernel


@pytest.fixture
def kernel(shared):
    """A kernel that other tests use too; afterwards no rank is left, and the next run works."""
    yield shared
    assert not descendants(shared.process, below_server=True)
    assert shared.run("run(lambda: dist.get_rank(), 3)").value == "[0, 1, 2]"


def test_classes_of_the_notebook(kernel):
    kernel.run("""
class Net(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(size, size)
    def forward(self, x): return self.layer(x)

class Squares(Dataset):
    def __len__(self): return 5
    def __getitem__(self, index): return torch.tensor(index ** 2)

def work(net, path):
    torch.save(net, f"{path}-{dist.get_rank()}")
    again = torch.load(f"{path}-{dist.get_rank()}", weights_only=False)
    return again, torch.cat(list(DataLoader(Squares(), num_workers=2))).tolist()
""")
    reply = kernel.run("""
import tempfile
torch.set_num_threads(4)
net = Net(300)
net(torch.ones(200, 300)).sum().backward()  # the kernel's own threads
net = Net(3)
with tempfile.TemporaryDirectory() as path:
    values = run(work, 2, net, path + "/net")
[(type(back) is Net, torch.equal(back.layer.weight, net.layer.weight), squares)
 for back, squares in values]""")
    assert reply.value == "[(True, True, [0, 1, 4, 9, 16]), (True, True, [0, 1, 4, 9, 16])]", reply


@pytest.mark.parametrize(("defined", "cell", "value"), [
    ("scale, unused = 10, threading.Lock()\ndef helper(x): return x * scale",
     "mine = torch.tensor([float(helper(dist.get_rank() + 1))])\ndist.all_reduce(mine)\n"
     "display(mine.item())\ndist.get_rank(), mine.item()", "[(0, 60.0), (1, 60.0), (2, 60.0)]"),
    ("grad = (i for i in 'ab')",  # a name that the cell has for an attribute alone
     "x = torch.full((2,), 1.0 + dist.get_rank(), requires_grad=True)\nx.sum().backward()\n"
     "x.grad[0].item()", "[1.0, 1.0, 1.0]"),
    ("base = 5", "base = base + dist.get_rank()\nbase", "[5, 6, 7]"),
    ("factor = 3", "def scaled(x):\n    return lambda: x * factor\nscaled(dist.get_rank())()",
     "[0, 3, 6]"),
    ("", "dist.get_rank();", ""), ("", "y = 1", ""),
], ids=["function", "attribute", "bound", "nested", "semicolon", "statement"])
def test_a_cell_takes_along_what_it_reads_and_brings_back_its_last_value(
        kernel, defined, cell, value):
    kernel.run(defined)
    reply = kernel.run(f"%%ranks 3 --timeout 30\n{cell}")
    assert (reply.status, reply.value) == ("ok", value), reply
    if "display" in cell:
        assert reply.text.startswith("\n[rank 0] 60.0\n[rank 1] 60.0\n[rank 2] 60.0\n")
        assert kernel.run("_").value == value
        assert kernel.run("'mine' in globals()").value == "False"


FAILS = [  # rank 1's code, and what is said: of it, of the others, and as advice
    ("1 // 0", "RankError: rank 1 of 2 raised ZeroDivisionError", ""),
    ("lock.acquire()", "RankError: the notebook's names['lock'], a _thread.lock, cannot be pickled",
     "Make it on the ranks"),
    ("half + 1", "RankError: rank 1 of 2 raised NameError: name 'half' is not defined",
     "Each run starts fresh processes, so nothing is left of an earlier %%ranks cell. If `half`"),
    ("get_ipython()", "RankError: rank 1 of 2 raised NameError: name 'get_ipython'", ""),
    ("exit(9)", "RankError: rank 1 of 2 called sys.exit(9) before it returned", ""),
]


@pytest.mark.parametrize(("code", "says", "advice"), FAILS, ids=[code for code, *_ in FAILS])
def test_a_failure_names_the_cell_and_the_line(kernel, code, says, advice):
    kernel.run("lock = threading.Lock()")
    kernel.run("%%ranks 2\nhalf = dist.get_rank() / 2")
    number = kernel.run("len(In)").value
    reply = kernel.run(f"%%ranks 2\nif dist.get_rank() == 1:\n    {code}\ndist.barrier()")
    assert reply.status == "error" and reply.error.startswith(says), reply
    assert not re.search(r"Traceback|dplab|site-packages", reply.error), reply.error
    lines = reply.error.strip().splitlines()
    assert lines[-1].startswith(advice)
    assert ("fresh processes" in reply.error) == advice.startswith("Each run")
    if "lock" not in code:
        assert f"  cell In[{number}], in <module>" in lines and f"  →   3     {code}" in lines
        assert (f"  rank 0 waits in barrier number 1: cell In[{number}], line 4: dist.barrier()"
                in lines)


def test_a_failure_that_is_meant(kernel):
    reply = kernel.run("%%ranks 2 --fails\n1 // dist.get_rank()")
    assert reply.status == "ok" and "RankError: rank 0 of 2" in reply.text, reply
    assert kernel.run("failure.kind, failure.rank").value == "('raised', 0)"
    reply = kernel.run("%%ranks 2 --fails\n1")
    assert reply.status == "error" and "meant to fail" in reply.error


@pytest.mark.parametrize(("line", "body", "what", "shown", "at"), [
    *[(line, "1", what, "", 0) for line, what in (
        ("", "required: N"), ("two", "'two'"), ("121", "must be 1 to 120, not 121"),
        ("2 --timeout five", "'five'"), ("2 --timeout 0", "positive number of seconds"),
        ("2 --quick", "--quick"), ("2 3", "3"))],
    ("2", "x = 1\ny = = 2", "Error: invalid syntax, in line 3 of this cell", "y = = 2", 4),
    ("2", "x = 2\nreturn x", "Error: 'return' outside function, in line 3 of this cell",
     "return x", 0),
])
def test_a_cell_that_cannot_start_says_why_without_a_frame(kernel, line, body, what, shown, at):
    reply = kernel.run(f"%%ranks {line}\n{body}")
    assert reply.status == "error" and not reply.displays and not reply.text.strip()
    assert not re.search(r"Traceback|File |site-packages|dplab", reply.error), reply.error
    head, *rest = reply.error.strip().splitlines()
    assert head.startswith("CellError: ") and what in head
    if shown:
        _, source, caret = rest
        assert source.strip() == shown
        assert caret.index("^") == source.index(shown) + at
    else:
        assert not rest


# What is displayed

def test_output_is_one_display_in_rank_order_and_cut_where_it_is_much(kernel):
    reply = kernel.run("""%%ranks 4
time.sleep(0.2 * (3 - dist.get_rank()))
print("first from", dist.get_rank())
time.sleep(0.1)
print("second from", dist.get_rank())""")
    assert len(reply.displays) == len(reply.history) == 1  # DPLAB_LIVE=0
    assert reply.text.strip().splitlines() == [
        f"[rank {rank}] {which} from {rank}" for rank in range(4) for which in ("first", "second")]

    reply = kernel.run("""%%ranks 2
for number in range(100_000):
    print(f"{number:7d} " + "x" * 66)""")
    (data,) = reply.displays.values()
    assert len(json.dumps(data)) < 400_000 and "overflow:auto" in data["text/html"]
    lines = reply.text.strip().splitlines()
    for rank in range(2):
        of_rank = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert of_rank[0].startswith(f"[rank {rank}]       0 x")
        assert of_rank[-1].startswith(f"[rank {rank}]   99999 x")
        assert sum("MB not shown" in line for line in of_rank) == 1

    kernel.run("supervise.SILENCE = 0.2")  # of where silent ranks are, nothing is shown either
    assert kernel.run("run(time.sleep, 2, 1.0)").history == []
    kernel.run("supervise.SILENCE = 5.0\ndef warns(): warnings.warn('each cell anew')")
    for runs in (1, 2):
        reply = kernel.run("run(warns, 2)\n" * runs)
        assert reply.text.count("[ranks 0-1] UserWarning: each cell anew (cell In[") == 1


SILENT = """%%ranks 3 --timeout 30
print("hello <b>", flush=True)
warnings.warn(f"of rank {dist.get_rank()}")
time.sleep(1)  # the display is refreshed meanwhile
dist.barrier()
while dist.get_rank() == 1:
    pass
dist.barrier()"""


@pytest.mark.slow
def test_what_is_shown_while_ranks_work_and_the_stop_button():
    """Their output, and where they are that say nothing for long; of the latter nothing stays."""
    with Kernel(DPLAB_LIVE="1") as kernel:
        kernel.run(f"{SETUP}\nsupervise.SILENCE = 1.5")
        kernel.start(SILENT)
        assert "hello &lt;b&gt;" in kernel.until_displayed("hello")["text/html"]
        says = kernel.until_displayed("rank 1 was running: cell In[")["text/plain"].splitlines()
        assert says[0].endswith(" s …")
        assert says[1].startswith("rank 0 waits in barrier number 2: cell In[")
        assert says[2].endswith(("while dist.get_rank() == 1:", "pass"))
        kernel.interrupt()
        reply = kernel.finish()
    assert "stopped by you" in reply.error
    assert list(reply.displays.values()).count({}) == 1 and reply.text.count("was running") == 0
    assert reply.text.count("UserWarning: of rank") == 3


# The end from outside

@pytest.mark.parametrize("how", ["loop", "recv"])
def test_the_stop_button(kernel, how):
    kernel.run(HANG if how == "loop" else HANG.replace("while True: pass",
                                                       "dist.recv(torch.ones(1), 1)"))
    kernel.start("run(hang, 4)")
    kernel.ranks(4)
    time.sleep(0.5)
    pressed = time.monotonic()
    kernel.interrupt()
    reply = kernel.finish()
    assert time.monotonic() - pressed < SOON and reply.status == "error"
    assert "stopped by you" in reply.error and "dplab" not in reply.error
    for rank in range(1, 4):
        assert f"rank {rank} waits in barrier number 2: cell In[" in reply.error
    assert f"rank 0 {'was running' if how == 'loop' else 'waits in recv'}" in reply.error


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["idle", "loading", "collective", "workers"])
def test_the_kernel_is_killed(doing, tmp_path):
    with Kernel() as kernel:
        if doing == "loading":
            kernel.start("from dplab import run\nrun(print, 2)")
            wait_for(lambda: any(map(is_server, descendants(kernel.process))))
            folders = wait_for(lambda: {
                os.path.dirname(area.path) for area in kernel.process.memory_maps()
                if "/calls-" in area.path})
        else:
            kernel.run(SETUP + {"collective": HANG, "workers": WORKERS,
                                "idle": "def hang(): pass"}[doing])
            path = tmp_path / "folders"
            kernel.run(f"""
def work():
    open(f"{path}-{{dist.get_rank()}}", "w").write(folder())
    hang()""")
            kernel.start("run(work, 2)")
            if doing == "idle":
                kernel.finish()
            else:
                kernel.ranks({"workers": 6}.get(doing, 2))
                time.sleep(0.5)
            folders = {path.with_name(f"folders-{rank}").read_text() for rank in range(2)}
        below = descendants(kernel.process)
        assert any(map(is_server, below))
        kernel.kill()
        wait_until_gone([kernel.process, *below], SOON)
        wait_for(lambda: not any(map(os.path.exists, folders)), 5)
