"""The course as its reader sees it: the chapters, their files, and the cells of an exercise."""

import json
from pathlib import Path

# As the notebooks' headings and README have them; a test compares.
TITLES: dict[int, str] = {
    0: "Start here",
    1: "Split the batch, copy the model",
    2: "Why averaging gradients is right",
    3: "All-reduce",
    4: "DDP by hand",
    5: "Buckets and overlap",
    6: "Where the time goes",
    7: "Training at large batch",
    8: "ZeRO by hand",
    9: "FSDP",
    10: "Choosing and scaling",
}

# The slugs of each chapter's guesses, in its order; a test compares.
GUESSES: dict[int, tuple[str, ...]] = {
    0: ("counter-after-ranks", "four-fresh-ranks", "two-halves"),
    3: ("rank-0-receives-first", "bytes-of-a-ring", "messages-of-a-tree", "the-real-crossover"),
    4: ("ddp-child-processes", "leave-outs-that-agree", "padded-draws",
        "accuracy-with-repeats", "forgotten-in-a-checkpoint"),
}


def folder() -> Path | None:
    """The course's own notebooks, or None where dplab was installed without them."""
    chapters = Path(__file__).resolve().parents[2] / "chapters"
    return chapters if chapters.is_dir() else None


def notebook_of(chapter: int) -> Path | None:
    """The course's notebook of this chapter, or None where it is not here."""
    chapters = folder()
    return next(chapters.glob(f"{chapter:02d}_*.ipynb"), None) if chapters else None


def link_to(chapter: int, slug: str) -> str:
    """An address that opens the exercise's heading; every notebook lies beside the others."""
    notebook = notebook_of(chapter)
    return f"{notebook.name}#cell-id=exercise-{slug}" if notebook else ""


def stub_of(chapter: int, slug: str) -> str | None:
    """The source of the cell in which the exercise is posed, or None where it is not found."""
    notebook = notebook_of(chapter)
    if notebook is None:
        return None
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["metadata"].get("dplab", {}).get("exercise") == slug:
            return "".join(cell["source"])
    return None
