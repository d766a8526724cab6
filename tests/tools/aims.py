"""What a chapter asks of its reader: words, cells, lines, guesses, folds, and minutes.

    python tests/tools/aims.py        # a line for each chapter

An appendix has half of each aim.
"""

import ast
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import colab
import notebooks
from notebooks import FOLDED

from dplab import drills
from dplab.desk import course

ROOT = Path(__file__).resolve().parents[2]
# Words have no limit: a sentence keeps its "because". A chapter that is too long drops a topic.
AIMS = {"shown cells": 45, "shown lines": 260, "guesses": 6, "drill cells": 2,
        "folded lines": 120}
LONGEST_CELL = 12  # lines, of a shown cell
WORDS_A_MINUTE, LINES_A_MINUTE, MINUTES_OF_A_PICTURE = 180, 12, 0.5
# A folded cell runs nothing that a reader came for.
NOT_FOLDED = re.compile(r"\brun\(|%%ranks|\bdist\.\w+\(|\.backward\(|autograd")


@dataclass
class Chapter:
    path: Path
    cells: list = field(init=False)

    def __post_init__(self):
        self.cells = [cell for cell in notebooks.read(self.path).cells if cell.id != colab.ID]

    @property
    def code(self):
        return [cell for cell in self.cells if cell.cell_type == "code"]

    @property
    def prose(self):
        return [cell for cell in self.cells if cell.cell_type == "markdown"]

    @property
    def folded(self):
        return [cell for cell in self.code if FOLDED in tags(cell)]

    @property
    def shown(self):
        """Cells to read; those of exercises are the reader's own."""
        return [cell for cell in self.code if not {FOLDED, "exercise", "check"} & set(tags(cell))]

    def counts(self):
        source = "\n".join(cell.source for cell in self.code)
        return {"words": sum(len(cell.source.split()) for cell in self.prose),
                "shown cells": len(self.shown), "shown lines": sum(map(lines, self.shown)),
                "guesses": len(re.findall(r"\bguess_\w+ *= *None|\bguess\(", source)),
                "drill cells": sum("drill(" in cell.source or "diagnose(" in cell.source
                                   for cell in self.code),
                "folded lines": sum(map(lines, self.folded))}

    def over(self):
        """The counts that are more than their aims, as (count, aim) by name."""
        half = 2 if self.path.stem in course.APPENDICES.values() else 1
        return {name: (count, AIMS[name] // half) for name, count in self.counts().items()
                if name in AIMS and count > AIMS[name] // half}

    def minutes(self, exercises):
        """That a reader needs; ``exercises``: the minutes of each, by slug."""
        counts = self.counts()
        pictures = sum(cell.source.count("](../figures/") for cell in self.prose) + sum(
            any("image/png" in output.get("data", {}) for output in cell.get("outputs", ()))
            for cell in self.code)
        own = sum(exercises[cell.metadata["dplab"]["exercise"]]
                  for cell in self.code if "exercise" in tags(cell))
        drilled = any("drill(" in cell.source for cell in self.code)
        drill = drills.minutes(course.key_of(self.path.stem)) if drilled else 0
        return round(counts["words"] / WORDS_A_MINUTE + counts["shown lines"] / LINES_A_MINUTE
                     + counts["guesses"] + MINUTES_OF_A_PICTURE * pictures + own
                     + drill + 1)  # the cells themselves run a minute


def tags(cell):
    return cell.metadata.get("tags", [])


def lines(cell):
    """Lines that are neither empty nor a comment alone."""
    return sum(bool(line.strip()) and not line.lstrip().startswith("#")
               for line in cell.source.splitlines())


def faults_of_folds(chapter):
    """What is wrong with its folded cells, a sentence each."""
    for cell in chapter.code:
        folded = bool(cell.metadata.get("jupyter", {}).get("source_hidden"))
        if folded != (FOLDED in tags(cell)):
            yield f"{cell.id}: a fold in JupyterLab goes with the tag {FOLDED}"
    used = {name for cell in chapter.code if FOLDED not in tags(cell)
            for name in notebooks.names(body(cell))[1]}
    for cell in chapter.folded:
        if not cell.source.startswith("# "):
            yield f"{cell.id}: its first line says what the cell does"
        if found := NOT_FOLDED.search(cell.source):
            yield f"{cell.id}: calls {found[0]!r} out of sight"
        if hidden := notebooks.names(cell.source)[0] & used:
            yield f"{cell.id}: a shown cell needs {', '.join(sorted(hidden))}"


def body(cell):
    """The cell's code, that for ranks too."""
    return re.sub(r"\A%%ranks.*\n", "", cell.source)


def long_cells(chapter):
    """Shown cells of more lines than a reader takes in at once; a list of imports may be long."""
    return [f"{cell.id}: {lines(cell)} lines" for cell in chapter.shown
            if lines(cell) > LONGEST_CELL and not is_imports(cell)]


def is_imports(cell):
    """Whether the cell only imports."""
    code = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))
    try:
        return all(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(code).body)
    except SyntaxError:
        return False


def main():
    from dplab.checks import every_exercise

    minutes = {exercise.slug: exercise.minutes for exercise in every_exercise()}
    for path in course.notebooks(ROOT / "chapters").values():
        chapter = Chapter(path)
        counts = "   ".join(f"{count:>5,} {name}" for name, count in chapter.counts().items())
        print(f"{path.stem:30} {counts}   {chapter.minutes(minutes):>4} minutes"
              f"   over: {', '.join(chapter.over()) or 'nothing'}")


if __name__ == "__main__":
    sys.exit(main())
