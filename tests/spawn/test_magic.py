"""`%%ranks`: what a cell takes along from the notebook, and why one cannot start, in short."""

import re

import pytest
from kernel import Kernel, descendants

SETUP = """
%load_ext dplab
import sys, threading
import torch
import torch.distributed as dist
"""


@pytest.fixture(scope="module")
def shared():
    with Kernel() as kernel:
        assert kernel.run(SETUP).status == "ok"
        yield kernel


@pytest.fixture
def kernel(shared):
    """A kernel that other tests use too; afterwards no rank is left, and the next cell works."""
    yield shared
    assert not descendants(shared.process, below_server=True)
    assert shared.run("%%ranks 3\ndist.get_rank()").value == "[0, 1, 2]"


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
    ("offset = 4", "[offset + i for i in range(dist.get_rank())]", "[[], [4], [4, 5]]"),
    ("class Base: size = 7", "class Base(Base): pass\nBase.size", "[7, 7, 7]"),
], ids=["attribute", "attribute of its own", "bound here", "read, then bound", "nested",
        "comprehension", "base class"])
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
