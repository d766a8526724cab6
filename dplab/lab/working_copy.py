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
from pathlib import Path

from dplab.desk.files import write_whole
from dplab.lab import notebook
from dplab.lab.answers import answers_in, stubs_in, with_answers
from dplab.lab.course_files import Course


class WorkingCopy:
    """The copy in the folder ``place`` of a ``course``."""

    def __init__(self, place: Path, course: Course):
        self.place = place
        self.course = course
        self.kept = place / ".course"
        self.notebooks = [name for name in course.files if name.endswith(".ipynb")]

    def refresh(self) -> tuple[list[str], list[str], list[str]]:
        """Adds what is missing, and brings up to date what the reader has not touched.

        Returns the names of the added files, of those that were replaced, and of those that are
        newer in the course and wait for the reader's word.
        """
        added, replaced, newer = [], [], []
        broken = self.broken()
        for name, content in self.course.files.items():
            base = self._base(name)
            if not (self.place / name).exists():
                self._put(name, content)
                added.append(name)
            elif not base.exists():  # a file of the reader's, or the folder .course was deleted
                write_whole(base, content)
            elif base.read_bytes() != content and name not in broken:
                if self._is_untouched(name):
                    self._put(name, content)
                    replaced.append(name)
                else:
                    newer.append(name)
        return added, replaced, newer

    def update(self, name: str, *, bare: bool = False) -> Path | None:
        """Brings the course's version over; where the old one is kept.

        In a notebook's stubs stands what the reader wrote there, unless it is to be ``bare``.
        """
        content = self.course.files[name]
        if name in self.notebooks and not bare:
            answers = answers_in(notebook.read(self.place / name),
                                 stubs_in(notebook.read(self._base(name))))
            new = notebook.read(self.course.root / name, content)
            content = notebook.dumps(with_answers(new, answers))
        kept = self.replace(name, content)
        write_whole(self._base(name), self.course.files[name])
        return kept

    def replace(self, name: str, content: bytes) -> Path | None:
        """Puts other content in a file's place. Where the old one is kept: beside it, under a dated
        name; None where the reader has not touched it.
        """
        path, kept = self.place / name, None
        if not self._is_untouched(name):
            stem, count = f"{path.stem}.before-{datetime.date.today().isoformat()}", 1
            kept = path.with_stem(stem)
            while kept.exists() and kept.read_bytes() != path.read_bytes():
                count += 1
                kept = path.with_stem(f"{stem}-{count}")
            write_whole(kept, path.read_bytes())
        write_whole(path, content)
        return kept

    def broken(self) -> dict[str, str]:
        """Why a notebook of the copy cannot be read, by its name."""
        found = {}
        for name in self.notebooks:
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
        for name in set(self.notebooks) - broken.keys():
            here, bare = notebook.read(self.place / name), stubs_in(notebook.read(self._base(name)))
            answers = {slug: outside[slug] for slug, stub in stubs_in(here).items()
                       if slug in outside and stub == bare.get(slug) != outside[slug]}
            if answers:
                found[name] = notebook.dumps(with_answers(here, answers))
        return found

    def _base(self, name):
        return self.kept / "base" / name

    def _is_untouched(self, name):
        """Whether the file is as the course had it. A notebook that ran is the reader's."""
        data, base = (self.place / name).read_bytes(), self._base(name)
        if data == base.read_bytes() or name not in self.notebooks:
            return data == base.read_bytes()
        with contextlib.suppress(notebook.UnreadableNotebook):
            here = notebook.read(self.place / name)
            return (notebook.sources(here) == notebook.sources(notebook.read(base))
                    and not notebook.has_outputs(here))
        return False

    def _put(self, name, content):
        write_whole(self.place / name, content)
        write_whole(self._base(name), content)
