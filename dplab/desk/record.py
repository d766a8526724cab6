"""What is kept of the reader's work, in a small file of their own: ``~/.dplab/progress.json``.

It holds entries of three kinds, by slug: ``exercises``, ``guesses``, and ``drills``. A damaged file
is set aside as ``progress-damaged-1.json`` or the next number that is free.
"""

import contextlib
import fcntl
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

from dplab.desk import cards
from dplab.desk.files import write_whole

EDITION = 2
KINDS = ("exercises", "guesses", "drills")


def folder() -> Path:
    """Where the file lies; the environment variable DPLAB_HOME names another folder."""
    if named := os.environ.get("DPLAB_HOME"):
        return Path(named)
    try:
        return Path.home() / ".dplab"
    except RuntimeError:  # a container's user without a name, and no HOME
        return Path(os.sep, ".dplab")


def entries(kind: str) -> dict[str, dict]:
    """All that is kept of this kind, by slug."""
    with contextlib.suppress(OSError):
        kept = _load()
        if _is_ours(kept):
            return kept.get(kind, {})
        with _locked():
            pass  # that sets it aside
    return {}


def update(kind: str, slug: str, change: Callable[[dict], object]) -> bool:
    """Lets ``change`` edit the entry in place; returns whether it could be written down.

    Two notebooks may do this at once: one waits for the other.
    """
    with contextlib.suppress(OSError), _locked() as kept:
        change(kept[kind].setdefault(slug, {}))
        _write(kept)
        return True
    return False


def forget(kind: str, slug: str) -> bool:
    """Removes the entry; returns whether there was one."""
    with contextlib.suppress(OSError), _locked() as kept:
        if kept[kind].pop(slug, None) is not None:
            _write(kept)
            return True
    return False


def _is_ours(kept):
    """Whether there is nothing yet, or the record of this version of the course."""
    return not kept or kept.get("edition") == EDITION


def _load():
    """The file's content; {} where there is none, and an edition of its own if it is damaged."""
    try:
        kept = json.loads((folder() / "progress.json").read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        kept = None
    return kept if isinstance(kept, dict) and kept else {"edition": None}


def _write(kept):
    text = json.dumps({"edition": EDITION, **kept}, indent=1, sort_keys=True)
    write_whole(folder() / "progress.json", text)


def _set_aside():
    """Gives the damaged file another name, so that nothing overwrites it, and says so."""
    numbered = (folder() / f"progress-damaged-{number}.json" for number in itertools.count(1))
    aside = next(path for path in numbered if not path.exists())
    os.rename(folder() / "progress.json", aside)
    cards.card("Your progress could not be read",
               "Its file is damaged, or of a later version of the course. It is kept as "
               f"`{aside}`, and your progress begins anew. Your answers are where they were: each "
               "exercise that you check again counts again.", color=cards.ORANGE)


@contextlib.contextmanager
def _locked():
    folder().mkdir(parents=True, exist_ok=True)
    with open(folder() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        kept = _load()
        if not _is_ours(kept):
            _set_aside()
            kept = {}
        yield {kind: kept.get(kind, {}) for kind in KINDS}
