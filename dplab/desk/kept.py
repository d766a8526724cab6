"""The reader's own parts, as files that can be read: ``mine/<slug>.py`` beside their progress."""

import contextlib
import datetime
import hashlib
import linecache
from pathlib import Path

from dplab.desk import record
from dplab.desk.definition import CannotWrite, written_down
from dplab.desk.files import write_whole

_given: list[tuple[object, str]] = []  # what `dplab.mine` has returned here, and its slug


class Broken(Exception):
    """A kept file that cannot be used. The text says why, in one line."""


class Kept:
    """A kept source on its way to the ranks, where it arrives as what it defines.

    Ranks are fresh processes. They get the source alone, and none of the notebook's names.
    """

    def __init__(self, source: str, name: str, file: Path):
        self._parts = source, name, file

    def __reduce__(self):
        return define, self._parts

    def __call__(self, *args, **kwargs):
        """For exercises that call the attempt in the notebook's process."""
        return define(*self._parts)(*args, **kwargs)


def folder() -> Path:
    """Where the reader's own source lies, a file for each exercise."""
    return record.folder() / "mine"


def place(slug: str) -> Path:
    return folder() / f"{slug}.py"


def source_of(attempt, name: str, slug: str) -> str:
    """The file's text for this attempt. Raises `CannotWrite`."""
    def from_mine(value):
        if slug_of(value) == slug:
            raise CannotWrite("it uses what `dplab.mine` gave you for this very exercise.")
        return slug_of(value)

    today = datetime.date.today()
    return (f'# `{name}`, as you wrote it for exercise "{slug}" of dplab. It passed on {today}.\n'
            f'# dplab.mine("{slug}") gives it to you. If you edit it, it is checked again.\n\n'
            f"{written_down(attempt, name, from_mine)}")


def write(slug: str, source: str) -> None:
    """Keeps the source. Raises OSError."""
    write_whole(place(slug), source)


def read(slug: str) -> str | None:
    """The kept source, or None. Raises `Broken` for a file that cannot be read."""
    try:
        return place(slug).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Broken(f"{place(slug)}: {_in_one_line(error)}") from error


def without_header(source: str) -> str:
    lines = source.splitlines()
    while lines and (not lines[0] or lines[0].startswith("# ")):
        del lines[0]
    return "\n".join(lines)


def set_aside(slug: str) -> Path | None:
    """Takes the file out of use, as no code is ever deleted: the name that it has now, or None."""
    stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    with contextlib.suppress(OSError):
        return place(slug).rename(place(slug).with_suffix(f".{stamp}.txt"))
    return None


def define(source: str, name: str, file: Path):
    """The value of ``name`` after the source has been run by itself. Raises `Broken`."""
    linecache.cache[str(file)] = len(source), None, source.splitlines(keepends=True), str(file)
    # Ranks get what belongs to `__main__` by value, as they get all that a notebook defines.
    names: dict = {"__name__": "__main__", "__file__": str(file)}
    try:
        exec(compile(source, str(file), "exec", dont_inherit=True), names)
    except (Exception, SystemExit) as error:
        raise Broken(f"{file}: {_in_one_line(error)}") from error
    if not callable(names.get(name)):
        raise Broken(f"{file} defines no `{name}`")
    return names[name]


def given(value, slug: str):
    """``value``, from now on known as that which `dplab.mine` returned for this slug."""
    if slug_of(value) != slug:
        _given.append((value, slug))
    return value


def slug_of(value) -> str | None:
    """The slug for which `dplab.mine` returned this very value, if it did."""
    return next((slug for each, slug in reversed(_given) if each is value), None)


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _in_one_line(error):
    words = str(error).splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
