"""The reader's copy of the course: made once, kept, and brought up to date.

A copy is a folder with the files of the course at their paths (``chapters/``, ``figures/``, …), so
that the links between them work. In ``.course`` lies what the command keeps:

- ``base``: for each file, the course's version that the reader's file was made from. What differs
  from it is the reader's.
- ``jupyter``: settings, and the layout of JupyterLab's windows.

A file that the reader has not touched follows the course; one that left the course stays where it
is. Another one waits for their word. Then the course's version takes its place, with the reader's
answers in its stubs, and the whole old file stays beside it under a dated name. (Guesses need no
place in the file: `dplab.desk.record` has them by slug.) Each file is written whole under another
name and then renamed, so that a stop or a full disk leaves the old one as it was.
"""

import contextlib
import datetime
from dataclasses import dataclass, field
from pathlib import Path

from dplab.desk.files import write_whole
from dplab.lab import notebook
from dplab.lab.answers import answers_in, stubs_in, with_answers
from dplab.lab.course_files import Course


@dataclass
class Changes:
    """What one start of the command did and found; all are paths in the copy."""

    created: bool = False
    added: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)  # the reader had not touched them
    newer: list[str] = field(default_factory=list)  # in the course; wait for the reader's word


class WorkingCopy:
    """The copy in the folder ``place`` of a ``course``."""

    def __init__(self, place: Path, course: Course):
        self.place = place
        self.course = course
        self.kept = place / ".course"

    def refresh(self) -> Changes:
        """Adds what is missing, and brings up to date what the reader has not touched."""
        changes = Changes(created=not self.kept.exists())
        self.kept.mkdir(parents=True, exist_ok=True)
        broken = self.broken()
        for name, content in self.course.files.items():
            base = self._base(name)
            if not (self.place / name).exists():
                self._put(name, content)
                changes.added.append(name)
            elif base is None:  # a file of the reader's, or the folder .course was deleted
                write_whole(self.kept / "base" / name, content)
            elif base != content and name not in broken:
                if self._is_untouched(name):
                    self._put(name, content)
                    changes.replaced.append(name)
                else:
                    changes.newer.append(name)
        return changes

    def update(self, name: str, *, bare: bool = False) -> Path | None:
        """Brings the course's version over; where the old one is kept.

        In a notebook's stubs stands what the reader wrote there, unless it is to be ``bare``.
        """
        content = self.course.files[name]
        if name.endswith(".ipynb") and not bare:
            answers = answers_in(notebook.read(self.place / name), self._stubs_of_base(name))
            new = notebook.read(self.course.root / name, content)
            content = notebook.dumps(with_answers(new, answers))
        kept = self._keep(name)
        self._put(name, content)
        return kept

    def broken(self) -> dict[str, str]:
        """Why a notebook of the copy cannot be read, by its name."""
        found = {}
        for name in self._notebooks():
            try:
                if (self.place / name).exists():
                    notebook.read(self.place / name)
            except notebook.UnreadableNotebook as error:
                found[name] = str(error)
        return found

    def answers_from(self, folder: Path) -> dict[str, bytes]:
        """Notebooks of this copy, with answers from those of a folder in stubs that are bare.

        The newest file wins. Names those alone that would change.
        """
        outside: dict[str, str] = {}
        paths = [*folder.glob("*.ipynb"), *folder.glob("chapters/*.ipynb")]
        for path in sorted(paths, key=lambda path: path.stat().st_mtime):
            with contextlib.suppress(notebook.UnreadableNotebook):
                outside |= answers_in(notebook.read(path), {})
        found, broken = {}, self.broken()
        for name in self._notebooks():
            if (self.place / name).exists() and name not in broken:
                here, bare = notebook.read(self.place / name), self._stubs_of_base(name)
                answers = {slug: outside[slug] for slug, stub in stubs_in(here).items()
                           if slug in outside and stub == bare.get(slug) != outside[slug]}
                if answers:
                    found[name] = notebook.dumps(with_answers(here, answers))
        return found

    def take(self, name: str, content: bytes) -> Path | None:
        """Puts what `answers_from` found into the copy; where the old file is kept."""
        kept = self._keep(name)
        write_whole(self.place / name, content)
        return kept

    def _notebooks(self):
        return [name for name in self.course.files if name.endswith(".ipynb")]

    def _base(self, name):
        path = self.kept / "base" / name
        return path.read_bytes() if path.is_file() else None

    def _stubs_of_base(self, name):
        base = self._base(name)
        return {} if base is None else stubs_in(notebook.read(self.kept / "base" / name))

    def _is_untouched(self, name):
        """Whether the file is as the course had it. A notebook that ran is the reader's."""
        base, data = self._base(name), (self.place / name).read_bytes()
        if data == base or base is None or not name.endswith(".ipynb"):
            return data == base
        try:
            here = notebook.read(self.place / name)
        except notebook.UnreadableNotebook:
            return False
        return (notebook.sources(here) == notebook.sources(notebook.read(self.kept / "base" / name))
                and not notebook.has_outputs(here))

    def _put(self, name, content):
        write_whole(self.place / name, content)
        write_whole(self.kept / "base" / name, self.course.files[name])

    def _keep(self, name):
        """A second file with the same content beside the file, under a dated name; None where the
        reader has not touched it.
        """
        if self._is_untouched(name):
            return None
        path = self.place / name
        stem, count = f"{path.stem}.before-{datetime.date.today().isoformat()}", 1
        kept = path.with_stem(stem)
        while kept.exists() and kept.read_bytes() != path.read_bytes():
            count += 1
            kept = path.with_stem(f"{stem}-{count}")
        write_whole(kept, path.read_bytes())
        return kept
