"""The pytest plugin, named in pyproject.toml, that all tests and all notebooks run under.

It is no conftest.py, since `pytest chapters` would not load one that lies here.
"""

import contextlib
import copy
import fcntl
import os
import re
import tempfile
from pathlib import Path

import pytest
from nbval.plugin import IPyNbCell, IPyNbFile

HOME = pytest.StashKey[Path]()
ROOT = Path(__file__).resolve().parents[2]
DOOR, ROOM = ROOT / "README.md", ROOT / "pyproject.toml"  # any two files serve as locks

QUICK_CHAPTER = "00_start_here"  # a run of any other takes half a minute or more

CHECK = re.compile(r"""\bcheck\(\s*["']([a-z0-9-]+)["']""")
VERDICT = re.compile(r"Exercise [\dA-Z.]+: (.*)")  # how the plain text of each check begins


def pytest_configure(config):
    folder = tempfile.TemporaryDirectory(prefix="dplab-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    config.stash[HOME] = Path(folder.name)
    os.environ["DPLAB_LIVE"] = "0"
    # Two workers share the cores. Torch's threads in one of them would wait for each other by
    # spinning, and keep the other from the core that they wait for: a loop takes 100 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """Whatever belongs to no other tier is quick, so that no list has to be kept."""
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in ("slow", "nightly", "gpu")):
            item.add_marker("quick")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Two workers run the tests; one that is marked `alone` has the machine to itself.

    Whoever wants to be alone keeps the door until the room is empty, and then has the room.
    """
    with contextlib.ExitStack() as room:
        with locked(DOOR, fcntl.LOCK_EX):
            alone = item.get_closest_marker("alone")
            room.enter_context(locked(ROOM, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)


@contextlib.contextmanager
def locked(path, how):
    with open(path) as file:
        fcntl.flock(file, how)
        yield


@pytest.hookimpl(tryfirst=True)  # before nbval starts the kernel, which inherits the environment
def pytest_runtest_setup(item):
    """Gives each notebook and each test file a home, and so a progress, of its own."""
    home = item.config.stash[HOME] / item.path.stem
    home.mkdir(exist_ok=True)
    os.environ["DPLAB_HOME"] = str(home)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """Collects a notebook as a `Chapter` where nbval would collect it as its own kind of file."""
    found = yield
    return [Chapter.from_parent(parent, path=file_path) if type(each) is IPyNbFile else each
            for each in found]


class Chapter(IPyNbFile):
    """A notebook: its cells as they stand, and after each check the solution and the check again.

    All of them run in one kernel. So one run shows that the notebook as committed runs and agrees
    with its marked outputs, that every solution passes the chapter's own check, and that the cells
    after it run with the solution in place.
    """

    def setup(self):
        super().setup()
        # The numbers that reports quote are not compared: in nbval's kernel, every cell is In[0].
        self.sanitize_patterns[r"cell In\[\d+\]"] = "cell In[N]"

    def collect(self):
        if self.path.stem != QUICK_CHAPTER:
            self.add_marker("slow")
        for item in super().collect():
            # nbval takes a cell without a number for a cell that never ran.
            item.cell.execution_count = 1
            checked = CHECK.search(item.cell.source)
            if "check" not in item.cell.metadata.get("tags", []) or not checked:
                yield item
                continue
            for kind in (Check, OfExercise, SolvedCheck):
                yield kind.from_parent(self, name=f"{checked[1]} {kind.word}", exercise=checked[1],
                                       cell_num=item.cell_num, cell=copy.deepcopy(item.cell),
                                       options=item.options)


class OfExercise(IPyNbCell):
    """A cell at a check: the check itself, or the solution, as a reader would write it."""

    word = "solution"

    def __init__(self, *, exercise, **of_nbval):
        super().__init__(**of_nbval)
        self.exercise = exercise

    def reportinfo(self):
        return self.path, 0, f"{self.path.name}::{self.name}"

    def setup(self):
        from dplab.checks import solution_source

        super().setup()
        if self.word == "solution":
            self.cell.source = solution_source(self.exercise).strip("\n")


class Check(OfExercise):
    """The cell that checks an exercise, as it stands behind the stub."""

    word = outcome = "not attempted"

    def runtest(self):
        super().runtest()
        shown = [output.data.get("text/plain", "") for output in self.test_outputs
                 if "data" in output]
        if [found[1] for text in shown if (found := VERDICT.match(text))] != [self.outcome]:
            self.raise_cell_error(f"this should say {self.outcome!r}, and shows "
                                  + "\n".join(shown))


class SolvedCheck(Check):
    """The check once more. The progress that it writes is kept from cells that show progress."""

    word, outcome = "solved", "passed"

    def setup(self):
        super().setup()
        home = self.config.stash[HOME]
        self.cell.source = (f"%env DPLAB_HOME={home / 'solved'}\n{self.cell.source}\n"
                            f"%env DPLAB_HOME={home / self.path.stem}")
