"""The launcher in a real notebook kernel: the ■ button, the kernel's death, its output; and
`%%ranks`: what a cell takes along from the notebook, and why one cannot start, in short.
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
import os, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
import dplab
from dplab import RankError, run
"""
FOLDER = """
def folder():
    with open("/proc/self/maps") as maps:
        return next(os.path.dirname(line.split()[-1]) for line in maps if "/calls-" in line)
"""
COLLECTIVE = "def hang():\n    dist.barrier()\n    if dist.get_rank(): dist.barrier()\n    else: "
LOOP = "\n        while True: pass"
WAIT = "\n        dist.recv(torch.ones(1), 1)"
CHILDREN = """
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
        assert kernel.run(SETUP + FOLDER).status == "ok"
        yield kernel


@pytest.fixture
def kernel(shared):
    """A kernel that other tests use too; afterwards no rank is left, and the next run works."""
    yield shared
    assert not descendants(shared.process, below_server=True)
    assert shared.run("run(lambda: dist.get_rank(), 4)").value == "[0, 1, 2, 3]"


def says(reply, *parts):
    for part in parts:
        assert part in reply.text + reply.error, reply
    return reply


@pytest.mark.slow
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


def test_ranks_cell(kernel):
    kernel.run("scale, unused = 10, threading.Lock()\ndef helper(x): return x * scale")
    reply = kernel.run("""%%ranks 2
mine = torch.tensor([float(helper(dist.get_rank() + 1))])
dist.all_reduce(mine)
print(f"I have {mine.item()}")
dist.get_rank(), mine.item()""")
    assert reply.value == "[(0, 30.0), (1, 30.0)]", reply
    says(reply, "[rank 0] I have 30.0\n[rank 1] I have 30.0")
    assert kernel.run("_").value == reply.value
    assert kernel.run("'mine' in globals()").value == "False"
    for last in ("dist.get_rank();", "y = 1"):
        assert kernel.run(f"%%ranks 2\n{last}").value == ""
    reply = says(kernel.run("%%ranks 2 --fails\n1 // dist.get_rank()"), "RankError: rank 0 of 2")
    assert reply.status == "ok"
    reply = says(kernel.run("%%ranks 2 --fails\n1"), "AssertionError", "meant to fail")
    assert reply.status == "error"


def test_failure_names_the_cell_and_the_line(kernel):
    kernel.run("def work():\n    x = dist.get_rank()\n    if x == 1:\n        1 // 0\n"
               "    dist.barrier()")
    defined = kernel.run("len(In) - 2").value
    reply = kernel.run("run(work, 2)")
    assert reply.status == "error"
    says(reply, "RankError: rank 1 of 2 raised ZeroDivisionError", f"cell In[{defined}], in",
         "→   4 ", "1 // 0", f"rank 0 waits in barrier number 1: cell In[{defined}], line ",
         "dist.barrier()")
    assert "dplab" not in reply.error and "Traceback" not in reply.error, reply.error


@pytest.mark.parametrize("how", [LOOP, WAIT], ids=["loop", "collective"])
def test_interrupt(kernel, how):
    kernel.run(COLLECTIVE + how)
    kernel.start("run(hang, 4)")
    kernel.ranks(4)
    time.sleep(0.5)
    pressed = time.monotonic()
    kernel.interrupt()
    reply = kernel.finish()
    assert time.monotonic() - pressed < SOON
    assert reply.status == "error"
    says(reply, "stopped by you", *[f"rank {rank} " for rank in range(4)], "cell In[",
         "rank 1 waits in barrier number 2")
    assert "dplab" not in reply.error


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["idle", "loading", "collective", "workers"])
def test_the_kernel_is_killed(doing, tmp_path):
    with Kernel() as kernel:
        if doing == "loading":
            kernel.start("from dplab import run\nrun(print, 2)")
            wait_for(lambda: any(map(is_server, descendants(kernel.process))))
            folders = wait_for(lambda: maps_of(kernel.process))
        else:
            code = {"collective": COLLECTIVE + LOOP, "workers": CHILDREN,
                    "idle": "def hang(): pass"}[doing]
            kernel.run(SETUP + FOLDER + code)
            path = tmp_path / "folders"
            kernel.run(f"run(lambda: None, 2)\npath = {str(path)!r}")
            kernel.run("""
def work():
    open(f"{path}-{dist.get_rank()}", "w").write(folder())
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
        assert wait_until_gone([kernel.process, *below], SOON) < SOON
        wait_for(lambda: not any(map(os.path.exists, folders)), 5)


def maps_of(process):
    return {os.path.dirname(area.path) for area in process.memory_maps() if "/calls-" in area.path}


def test_output_is_one_display_in_rank_order(kernel):
    reply = kernel.run("""%%ranks 4
time.sleep(0.2 * (3 - dist.get_rank()))
print("first from", dist.get_rank())
time.sleep(0.1)
print("second from", dist.get_rank())""")
    assert len(reply.displays) == 1
    assert reply.text.strip().splitlines() == [
        f"[rank {rank}] {which} from {rank}" for rank in range(4) for which in ("first", "second")]


def test_very_much_output_is_cut(kernel):
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


SILENT = """%%ranks 3 --timeout 30
print("hello <b>", flush=True)
warnings.warn(f"of rank {dist.get_rank()}")
time.sleep(1)  # the display is refreshed meanwhile
dist.barrier()
while dist.get_rank() == 1:
    pass
dist.barrier()"""


@pytest.mark.slow
def test_what_is_shown_while_ranks_work():
    """Their output, and where they are that say nothing for long; of the latter nothing stays."""
    with Kernel(DPLAB_LIVE="1") as kernel:
        kernel.run(SETUP + "import warnings\nfrom dplab.spawn.parent import supervise\n"
                   "supervise.SILENCE = 1.5")
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


def test_nothing_of_it_where_outputs_are_compared(kernel):  # DPLAB_LIVE=0
    kernel.run("from dplab.spawn.parent import supervise\nsupervise.SILENCE = 0.2")
    assert kernel.run("run(time.sleep, 2, 1.0)").history == []
    kernel.run("supervise.SILENCE = 5.0")


def refused(kernel, code) -> list[str]:
    """The lines of the error of a cell that does not start: none of them a frame."""
    reply = kernel.run(code)
    assert reply.status == "error" and not reply.displays and not reply.text.strip()
    lines = reply.error.strip().splitlines()
    assert lines[0].startswith("CellError: ")
    assert not re.search(r"Traceback|File |site-packages|dplab", reply.error), reply.error
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(("defined", "cell", "value"), [
    ("grad = (i for i in 'ab')",
     "x = torch.full((2,), 1.0 + dist.get_rank(), requires_grad=True)\nx.sum().backward()\n"
     "x.grad[0].item()", "[1.0, 1.0, 1.0]"),
    ("rank = threading.Lock()", "class Of:\n    rank = dist.get_rank()\nOf().rank", "[0, 1, 2]"),
    ("part = threading.Lock()", "part = dist.get_rank() * 2\npart", "[0, 2, 4]"),
    ("base = 5", "base = base + dist.get_rank()\nbase", "[5, 6, 7]"),
    ("factor = 3", "def scaled(x):\n    return lambda: x * factor\nscaled(dist.get_rank())()",
     "[0, 3, 6]"),
], ids=["attribute", "attribute of its own", "bound here", "read, then bound", "nested"])
def test_a_cell_takes_along_what_it_reads_as_a_name(kernel, defined, cell, value):
    kernel.run(defined)
    reply = kernel.run(f"%%ranks 3\n{cell}")
    assert reply.value == value, reply


def test_an_attribute_of_a_module_is_no_name_of_the_notebook(kernel):
    reply = kernel.run("%%ranks 2 --fails\nif dist.get_rank(): sys.exit(7)\ndist.barrier()")
    assert "rank 1 of 2 called sys.exit(7)" in reply.text, reply
    reply = kernel.run("%%ranks 2 --fails\nif dist.get_rank(): exit(9)\ndist.barrier()")
    assert "rank 1 of 2 called sys.exit(9)" in reply.text, reply


def test_a_name_that_cannot_be_taken_along_is_named(kernel):
    kernel.run("lock = threading.Lock()")
    reply = kernel.run("%%ranks 2\nlock.acquire()")
    assert "the notebook's names['lock'], a _thread.lock, cannot be pickled" in reply.error


@pytest.mark.parametrize("cell", [
    "lock = lock or 3", "def work():\n    return lock\nwork()\nlock = 3"], ids=["read", "function"])
def test_a_name_that_a_rank_reads_before_it_is_bound_is_not_said_to_be_missing(kernel, cell):
    kernel.run("lock = threading.Lock()")
    reply = kernel.run(f"%%ranks 2\n{cell}")
    assert "name 'lock' is not defined" in reply.error, reply
    assert "cannot be sent to the ranks" in reply.error.splitlines()[-1]
    assert "fresh" not in reply.error and "a _thread.lock," in reply.error


def test_ranks_have_no_notebook(kernel):
    reply = kernel.run("%%ranks 2\nget_ipython().run_line_magic('time', '1')")
    assert "raised NameError: name 'get_ipython' is not defined" in reply.error, reply
    assert "`get_ipython`" in reply.error and "fresh" not in reply.error


@pytest.mark.parametrize(("line", "what"), [
    ("", "required: N"), ("two", "'two'"), ("121", "must be 1 to 120, not 121"),
    ("2 --timeout five", "'five'"), ("2 --timeout 0", "positive number of seconds"),
    ("2 --quick", "--quick"), ("2 3", "3"),
])
def test_a_first_line_that_makes_no_sense_is_one_line(kernel, line, what):
    (only,) = refused(kernel, f"%%ranks {line}\n1")
    assert what in only


def test_the_number_of_ranks_may_be_a_name_of_the_notebook(kernel):
    kernel.run("count, fraction, none = 3, 1.5, 0")
    assert kernel.run("%%ranks count --timeout 30\ndist.get_world_size()").value == "[3, 3, 3]"
    for name, what in (("fraction", "'fraction'"), ("none", "1 to 120, not 0")):
        (only,) = refused(kernel, f"%%ranks {name}\n1")
        assert what in only


@pytest.mark.parametrize(("body", "what", "number", "shown", "at"), [
    ("x = 1\ny = = 2", "invalid syntax", 3, "y = = 2", 4),
    ("x = 2\nreturn x", "'return' outside function", 3, "return x", 0),
])
def test_a_syntax_error_shows_the_line_and_a_caret_below_it(kernel, body, what, number, shown, at):
    head, _, line, caret = refused(kernel, f"%%ranks 2\n{body}")
    assert f"Error: {what}, in line {number} of this cell" in head
    assert line.strip() == shown
    assert caret.index("^") == line.index(shown) + at


@pytest.mark.parametrize("line", ["!echo hi", "x = %time 3", "torch?", "?torch"])
def test_what_only_the_notebook_understands(kernel, line):
    lines = refused(kernel, f"%%ranks 2\nx = 1\n{line}")
    assert line in lines[2] and "without %%ranks" in lines[-1]
    assert "without %%ranks" not in refused(kernel, "%%ranks 2\nx = 5 %%% 3")[-1]


def test_a_name_of_an_earlier_cell_of_ranks(kernel):
    kernel.run("%%ranks 2\nhalf = dist.get_rank() / 2")
    reply = kernel.run("%%ranks 2\nhalf + 1")
    assert "raised NameError: name 'half' is not defined" in reply.error
    assert "fresh processes" in reply.error.splitlines()[-1] and "`half`" in reply.error
    kernel.run("half = 3")
    assert kernel.run("%%ranks 2\nhalf + dist.get_rank()").value == "[3, 4]"
    assert "fresh" not in kernel.run("%%ranks 2\n{}['half']").error


@pytest.mark.slow
def test_the_advice_on_a_timeout_fits_a_cell(kernel):
    reply = kernel.run("%%ranks 2 --timeout 1\nwhile dist.get_rank(): pass\ndist.barrier()")
    assert "--timeout SECONDS" in reply.error and "timeout=" not in reply.error, reply
    reply = kernel.run("import dplab\ndef work():\n    while True: pass\n"
                       "dplab.run(work, 2, timeout=1)")
    assert "timeout=SECONDS" in reply.error and "--timeout" not in reply.error, reply


def test_ranks_have_no_keyboard(kernel):
    reply = kernel.run("%%ranks 2\nif dist.get_rank() == 1:\n    input('your name? ')\n"
                       "dist.barrier()")
    assert "rank 1 of 2 raised EOFError: ranks have no keyboard" in reply.error
    assert "→   3     input('your name? ')" in reply.error
