"""The reader's copy of the course: made once, kept, and brought up to date.

A copy is a folder with the files of the course at their paths (``chapters/``, ``figures/``, …), so
that the links between them work. In ``.course`` lies what the command keeps:

- ``base``: for each file, the course's version that the reader's file was made from. What differs
  from it is the reader's.
- ``before``: files that were replaced and held nothing of the reader's.
- ``jupyter``: settings, and the layout of JupyterLab's windows.

Each file is written whole under another name and then renamed, so that a stop or a full disk leaves
the old one as it was. A file is replaced only after a copy of it is kept.
"""

import contextlib
import datetime
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from dplab.desk.files import write_whole
from dplab.lab import merging, notebook
from dplab.lab.course_files import Course, committed_notebook, earlier_notebooks

NOTE_OF_IMPORT = "You wrote this outside of this copy. Here stands something else."


@dataclass
class Changes:
    """What one start of the command did and found; all are paths in the copy."""

    created: bool = False
    added: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)  # they held nothing of the reader's
    newer: list[str] = field(default_factory=list)  # in the course; wait for the reader's word
    gone: list[str] = field(default_factory=list)  # from the course; the reader wrote in them


class WorkingCopy:
    """The copy in the folder ``place`` of a ``course``."""

    def __init__(self, place: Path, course: Course):
        self.place = place
        self.course = course
        self.kept = place / ".course"
        self.unreadable = [course.root / name for name in course.unreadable]

    def refresh(self, *, only_add: bool = False) -> Changes:
        """Adds what is missing, and brings up to date what the reader has not touched.

        ``only_add``: the files that are there stay, and those that are newer or gone wait.
        """
        changes = Changes(created=not self.kept.exists())
        self.kept.mkdir(parents=True, exist_ok=True)
        broken = self.broken()
        for name, content in self.course.files.items():
            target, base = self.place / name, self._base(name)
            if not target.exists():
                self._put(name, self._with_answers_of_others(name, content))
                changes.added.append(name)
            elif base is None:  # a file of the reader's, or the folder .course was deleted
                write_whole(self.kept / "base" / name, content)
            elif base != content and name not in broken:
                if not only_add and _is_untouched(target, base):
                    self._replace(name, self._with_answers_of_others(name, content))
                    changes.replaced.append(name)
                else:
                    changes.newer.append(name)
        for name in self._names_of_base():
            if name not in self.course.files and name not in self.course.unreadable:
                if (self.place / name).exists() and (only_add or not self._is_untouched(name)):
                    changes.gone.append(name)
                elif not only_add:
                    self._retire(name)
        return changes

    def update(self, name: str) -> Path | None:
        """Brings the course's version over, with what the reader wrote; where the old one is kept.

        For a file that is gone from the course: puts it aside under the name returned.
        """
        content, base = self.course.files.get(name), self._base(name)
        if not name.endswith(".ipynb") or base is None:
            return self._retire(name) if content is None else self._replace(name, content)
        old, mine = notebook.loads(base), self._read(name)
        new = {**old, "cells": []} if content is None else notebook.loads(content)
        stay = merging.stubs_of(new)
        self._hand_on({slug: answer for slug, answer
                       in merging.answers_to_exercises(old, mine).items() if slug not in stay})
        if content is None:
            return self._retire(name)
        come = {slug: answer for slug, answer in self._answers_of_others(name).items()
                if slug not in merging.stubs_of(old)}
        return self._replace(name, notebook.dumps(merging.merge(old, mine, new, elsewhere=come)))

    def start_anew(self, name: str) -> Path:
        """Brings the course's version over, without what the reader wrote; where that is kept."""
        return self._replace(name, self.course.files[name])

    def broken(self) -> dict[str, str]:
        """Why a notebook of the copy cannot be read, by its name."""
        found = {}
        for name in self._notebooks():
            try:
                if (self.place / name).exists():
                    notebook.loads((self.place / name).read_bytes())
            except notebook.UnreadableNotebook as error:
                found[name] = str(error)
        return found

    def answers_outside(self, folder: Path | None = None) -> dict[str, bytes]:
        """Notebooks of this copy with the answers that stand in other notebooks of the course.

        ``folder``: where these lie; by default the clone's own ``chapters``, where those count
        that differ from the last commit. Names those alone that would change.
        """
        found, broken = {}, self.broken()
        for name in self._notebooks():
            path = self._outside(name, folder)
            if (path is None or not path.is_file() or not (self.place / name).exists()
                    or name in broken):
                continue
            try:
                theirs = notebook.loads(path.read_bytes())
            except notebook.UnreadableNotebook:
                self.unreadable.append(path)
                continue
            here = self._read(name)
            course = notebook.loads(self._base(name) or self.course.files[name])
            base = self._base_outside(path) or committed_notebook(path.parent, path.name)
            if base is None:
                versions = [course, *earlier_notebooks(self.course.root, name)]
                base = max(versions, key=lambda version: _cells_in_common(version, theirs))
                # A stub of a version that is not known is no line of the reader's.
                theirs = {**theirs, "cells": [
                    cell for cell in theirs["cells"] if not merging.exercise_of(cell)
                    or merging.is_answer(cell, base)]}
            # An answer that was committed is the reader's too.
            base = {**base, "cells": [cell for cell in base["cells"]
                                      if not merging.is_answer(cell, course)]}
            merged = merging.merge(base, theirs, here, course=course, note=NOTE_OF_IMPORT)
            if notebook.sources(merged) != notebook.sources(here):
                found[name] = notebook.dumps(merged)
        return found

    def take(self, name: str, content: bytes) -> Path | None:
        """Puts what `answers_outside` found into the copy; where the old file is kept."""
        return self._replace(name, content, new_base=False)

    def _outside(self, name, folder):
        if folder is None:
            return self.course.root / name if name in self.course.edited else None
        paths = (folder / PurePosixPath(name).name, folder / name)
        return next((path for path in paths if path.is_file()), None)

    def _base_outside(self, path):
        """What the notebook was made from, where it lies in another copy."""
        base = path.parent.parent / ".course/base/chapters" / path.name
        with contextlib.suppress(OSError, notebook.UnreadableNotebook):
            return notebook.loads(base.read_bytes())
        return None

    def _notebooks(self):
        return [name for name in self.course.files if name.endswith(".ipynb")]

    def _read(self, name):
        try:
            return notebook.loads((self.place / name).read_bytes())
        except notebook.UnreadableNotebook as error:
            raise notebook.UnreadableNotebook(f"{self.place / name}: {error}") from None

    def _base(self, name):
        path = self.kept / "base" / name
        return path.read_bytes() if path.is_file() else None

    def _names_of_base(self):
        folder = self.kept / "base"
        return sorted(path.relative_to(folder).as_posix()
                      for path in folder.rglob("*") if path.is_file())

    def _is_untouched(self, name):
        return _is_untouched(self.place / name, self._base(name))

    def _answers_of_others(self, name):
        """Answers in the copy's other notebooks: an exercise may have moved between chapters."""
        found = self._answers_of_chapters_put_aside()
        for other in self._names_of_base():
            if other != name and other.endswith(".ipynb") and (self.place / other).exists():
                with contextlib.suppress(notebook.UnreadableNotebook):
                    base = notebook.loads(self._base(other))
                    answers = merging.answers_to_exercises(base, self._read(other))
                    stubs = merging.stubs_of(base)
                    # What stands aside in a chapter is older than what stands in a stub.
                    found |= {slug: answer for slug, answer in answers.items()
                              if slug in stubs or slug not in found}
        return found

    def _answers_of_chapters_put_aside(self):
        """Answers in notebooks that `_keep` left beside the chapters, of chapters that are gone."""
        found = {}
        for path in sorted((self.place / "chapters").glob("*.before-*.ipynb")):
            name = f"chapters/{path.name.split('.before-')[0]}.ipynb"
            if name not in self.course.files:
                with contextlib.suppress(notebook.UnreadableNotebook):
                    found |= merging.answers_to_exercises(
                        {"cells": []}, merging.without_stubs(notebook.loads(path.read_bytes())))
        return found

    def _hand_on(self, answers):
        """Answers of exercises that leave a chapter, to chapters that have them as bare stubs."""
        for other in self._notebooks():
            course = notebook.loads(self.course.files[other])
            if not answers.keys() & merging.stubs_of(course) or not (self.place / other).exists():
                continue
            with contextlib.suppress(notebook.UnreadableNotebook):
                here = self._read(other)
                nothing = {**here, "cells": []}
                merged = merging.merge(nothing, nothing, here, course=course, elsewhere=answers)
                if notebook.sources(merged) != notebook.sources(here):
                    self.take(other, notebook.dumps(merged))

    def _with_answers_of_others(self, name, content):
        if not name.endswith(".ipynb"):
            return content
        new = notebook.loads(content)
        nothing = {**new, "cells": []}
        merged = merging.merge(nothing, nothing, new, elsewhere=self._answers_of_others(name))
        return notebook.dumps(merged)

    def _put(self, name, content):
        write_whole(self.place / name, content)
        write_whole(self.kept / "base" / name, self.course.files[name])

    def _replace(self, name, content, *, new_base=True):
        kept = self._keep(name)
        if new_base:
            self._put(name, content)
        else:
            write_whole(self.place / name, content)
        return kept

    def _retire(self, name):
        kept = None
        if (self.place / name).exists():
            kept = self._keep(name)
            (self.place / name).unlink()
        (self.kept / "base" / name).unlink(missing_ok=True)
        return kept

    def _keep(self, name):
        """A second file with the same content: beside it where the reader wrote in it."""
        data = (self.place / name).read_bytes()
        path = self.place / name
        if not self._holds_lines_of_reader(name):
            path = self.kept / "before" / name
        today = datetime.date.today().isoformat()
        stem, count = f"{path.stem}.before-{today}", 1
        kept = path.with_name(stem + path.suffix)
        while kept.exists() and kept.read_bytes() != data:
            count += 1
            kept = path.with_name(f"{stem}-{count}{path.suffix}")
        if not kept.exists():
            write_whole(kept, data)
        return kept

    def _holds_lines_of_reader(self, name):
        base = self._base(name)
        if base is None:
            return True
        if not name.endswith(".ipynb"):
            return (self.place / name).read_bytes() != base
        try:
            return merging.holds_lines_of_reader(notebook.loads(base), self._read(name))
        except notebook.UnreadableNotebook:
            return True


def _cells_in_common(one, other):
    return len(set(notebook.sources(one)) & set(notebook.sources(other)))


def _is_untouched(path, base):
    """Whether the file is as the course had it. A notebook that ran is the reader's."""
    data = path.read_bytes()
    if data == base or path.suffix != ".ipynb":
        return data == base
    try:
        mine = notebook.loads(data)
    except notebook.UnreadableNotebook:
        return False
    return (notebook.sources(mine) == notebook.sources(notebook.loads(base))
            and not notebook.has_outputs(mine))
