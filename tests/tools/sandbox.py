"""The pytest plugin, named in pyproject.toml, that all tests and all notebooks run under.

It is no conftest.py, since `pytest chapters` would not load one that lies here.
"""

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

import pytest
from nbval.plugin import IPyNbCell

HOME = pytest.StashKey[Path]()
ROOT = Path(__file__).resolve().parents[2]
DOOR, ROOM = ROOT / "README.md", ROOT / "pyproject.toml"  # any two files serve as locks


def pytest_configure(config):
    folder = tempfile.TemporaryDirectory(prefix="dplab-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    config.stash[HOME] = Path(folder.name)
    os.environ["DPLAB_LIVE"] = "0"


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


def pytest_itemcollected(item):
    """Gives cells a number: nbval takes a cell without one for a cell that never ran.

    The numbers that reports quote are not compared: in nbval's kernel, every cell is In[0].
    """
    if isinstance(item, IPyNbCell):
        item.cell.execution_count = 1
        item.parent.sanitize_patterns[r"cell In\[\d+\]"] = "cell In[N]"
