"""The course as its reader sees it: the chapters, their files, and the cells of an exercise.

The key of a chapter is its number, that of an appendix its letter.
"""

import functools
import json
import re
from pathlib import Path

Key = int | str

# The notebooks of the appendices, by letter.
APPENDICES = {"A": "appendix_rounding", "B": "appendix_other_cuts", "C": "appendix_switches",
              "D": "appendix_whole_matrices"}

# As the notebooks' headings and README have them; a test compares.
TITLES: dict[Key, str] = {
    0: "Start here",
    1: "Split the batch, copy the model",
    2: "Why averaging gradients is right",
    3: "All-reduce",
    4: "DDP by hand",
    5: "Buckets and overlap",
    6: "Where the time goes",
    7: "How many GPUs still pay?",
    8: "ZeRO by hand",
    9: "ZeRO-3 by hand",
    10: "FSDP",
    11: "What would you rent?",
    12: "Does it survive tonight?",
    13: "Communicate less",
    "A": "Rounding or a mistake?",
    "B": "Other cuts",
    "C": "Precision, compile, and DDP's switches",
    "D": "Whole matrices",
}

def key_of(stem: str) -> Key | None:
    """The key of the chapter or appendix whose notebook has this name, without its ending; of
    another notebook, None.
    """
    if number := re.match(r"(\d\d)_", stem):
        return int(number[1])
    return next((letter for letter, name in APPENDICES.items() if name == stem), None)


def place(key: Key) -> tuple:
    """Sorts keys as the course goes: chapters by number, then appendices by letter."""
    return isinstance(key, str), key


def label(key: Key) -> str:
    """The key as a reader sees it: ``04`` or ``B``."""
    return key if isinstance(key, str) else f"{key:02d}"


def heading(key: Key) -> str:
    """The first line of the notebook: ``04 · DDP by hand`` or ``Appendix B · Other cuts``."""
    return f"{'Appendix ' * isinstance(key, str)}{label(key)} · {TITLES[key]}"


def notebooks(chapters: Path) -> dict[Key, Path]:
    """The notebooks of a folder in the order of the course, by key; others are left out."""
    found = {key: path for path in chapters.glob("*.ipynb")
             if (key := key_of(path.stem)) is not None}
    return {key: found[key] for key in sorted(found, key=place)}


def folder() -> Path | None:
    """The course's own notebooks, or None where dplab was installed without them."""
    chapters = Path(__file__).resolve().parents[2] / "chapters"
    return chapters if chapters.is_dir() else None


@functools.cache
def code_cells(chapter: Key) -> list[dict]:
    """The code cells of the course's own notebook, each ``source`` one text, without outputs; []
    where it is not here.
    """
    chapters = folder()
    path = notebooks(chapters).get(chapter) if chapters else None
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path else []
    return [{**cell, "source": "".join(cell["source"]), "outputs": []} for cell in cells
            if cell["cell_type"] == "code"]


def guesses() -> dict[Key, list[str]]:
    """The slugs of the guesses that each chapter asks for, in its order."""
    found = {key: re.findall(r'\bguess\(\s*"([^"]+)"',
                             "\n".join(cell["source"] for cell in code_cells(key)))
             for key in TITLES}
    return {key: slugs for key, slugs in found.items() if slugs}


def link_to(chapter: Key, slug: str) -> str:
    """An address that opens the exercise's heading; every notebook lies beside the others."""
    chapters = folder()
    notebook = notebooks(chapters).get(chapter) if chapters else None
    return f"{notebook.name}#cell-id=exercise-{slug}" if notebook else ""


def stub_of(chapter: Key, slug: str) -> str | None:
    """The source of the cell in which the exercise is posed, or None where it is not found."""
    return next((cell["source"] for cell in code_cells(chapter)
                 if cell["metadata"].get("dplab", {}).get("exercise") == slug), None)
