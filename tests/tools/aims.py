"""What a chapter asks of its reader: words, cells, lines, guesses, folds, and minutes.

    python tests/tools/aims.py        # a line for each chapter

An appendix has half of each aim.
"""

import ast
import re
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


class Chapter:
    """A notebook, its cells by what a reader does with them; ``shown``: code to read."""

    def __init__(self, path):
        self.path = path
        self.cells = [cell for cell in notebooks.read(path).cells if cell.id != colab.ID]
        self.prose = [cell for cell in self.cells if cell.cell_type == "markdown"]
        self.code = [cell for cell in self.cells if cell.cell_type == "code"]
        self.folded = [cell for cell in self.code if FOLDED in tags(cell)]
        self.shown = [cell for cell in self.code
                      if not {FOLDED, "exercise", "check"} & set(tags(cell))]

    def counts(self):
        source = "\n".join(cell.source for cell in self.code)
        return {"words": sum(len(cell.source.split()) for cell in self.prose),
                "shown cells": len(self.shown), "shown lines": sum(map(lines, self.shown)),
                "guesses": len(re.findall(r"\bguess\(", source)),
                "drill cells": sum("drill(" in cell.source or "diagnose(" in cell.source
                                   for cell in self.code),
                "folded lines": sum(map(lines, self.folded))}

    def over(self):
        """The counts that are more than their aims, as (count, aim) by name."""
        half = 2 if self.path.stem in course.APPENDICES.values() else 1
        counts = self.counts()
        return {name: (counts[name], aim // half) for name, aim in AIMS.items()
                if counts[name] > aim // half}

    def minutes(self, exercises):
        """That a reader needs; ``exercises``: the minutes of each, by slug."""
        counts = self.counts()
        pictures = sum(cell.source.count("](../figures/") for cell in self.prose) + sum(
            any("image/png" in output.get("data", {}) for output in cell.outputs)
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


def faults_of_cells(chapter):
    """What is wrong with its folded cells and with long ones, a sentence each."""
    used = {name for cell in chapter.code if FOLDED not in tags(cell)
            for name in notebooks.names(re.sub(r"\A%%ranks.*\n", "", cell.source))[1]}
    for cell in chapter.folded:
        if not cell.source.startswith("# "):
            yield f"{cell.id}: its first line says what the cell does"
        if found := NOT_FOLDED.search(cell.source):
            yield f"{cell.id}: calls {found[0]!r} out of sight"
        if hidden := notebooks.names(cell.source)[0] & used:
            yield f"{cell.id}: a shown cell needs {', '.join(sorted(hidden))}"
    for cell in chapter.shown:
        if lines(cell) > LONGEST_CELL and not is_imports(cell):
            yield f"{cell.id}: {lines(cell)} lines are more than a reader takes in at once"


def is_imports(cell):
    """Whether the cell only imports: then it may be long."""
    code = "\n".join(line for line in cell.source.splitlines() if not line.startswith(("%", "!")))
    return all(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(code).body)


def main():
    from dplab.checks import every_exercise

    minutes = {exercise.slug: exercise.minutes for exercise in every_exercise()}
    for path in course.notebooks(ROOT / "chapters").values():
        chapter = Chapter(path)
        counts = "   ".join(f"{count:>5,} {name}" for name, count in chapter.counts().items())
        print(f"{path.stem:30} {counts}   {chapter.minutes(minutes):>4} minutes"
              f"   over: {', '.join(chapter.over()) or 'nothing'}")


if __name__ == "__main__":
    main()
