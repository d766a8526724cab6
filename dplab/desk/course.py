"""The course as its reader sees it: the chapters, their files, and the cells of an exercise.

The key of a chapter is its number, that of an appendix its letter.
"""

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

# The slugs of each chapter's guesses, in its order; a test compares.
GUESSES: dict[Key, tuple[str, ...]] = {
    0: ("counter-after-ranks", "sum-on-rank-3", "sum-in-two-steps", "longest-in-the-call",
        "rank-to-blame", "both-send-first"),
    1: ("bytes-of-an-all-reduce", "messages-after-backward", "rows-of-wider-layers",
        "numbers-a-block-keeps", "limit-on-32-nodes"),
    2: ("line-that-breaks", "weight-of-a-token", "yes-or-no", "plain-all-reduce", "mean-of-a-sum",
        "gradient-of-open-clip"),
    3: ("rank-0-receives-first", "equal-bits", "halving-faster-from", "a-slow-machine"),
    4: ("equal-but-wrong", "accuracy-with-repeats", "forgotten-and-no-loss-differs"),
    5: ("longest-of-three-ways", "all-reduces-in-iteration-1", "one-step-of-two-heads"),
    6: ("strong-on-eight", "ill-on-a-gpu", "most-of-the-three", "kernels-repaired"),
    7: ("rate-on-four-ranks", "rule-that-loses-seeds", "steps-at-256-times",
        "rank-seconds-of-eight", "smallest-critical-batch", "largest-noise-scale"),
    8: ("line-that-runs-out", "bytes-of-zero-1", "time-of-zero-2", "least-with-micro-batches"),
    9: ("layers-held-after-forward", "zero-3-beside-ddp", "t5-as-one-unit", "hidden-by-one-ahead",
        "gap-to-fully-shard"),
    10: ("gathers-of-a-step", "blocks-held-at-the-peak", "where-405b-fits",
         "shards-with-one-seed"),
    11: ("tokens-on-2048-gpus", "money-on-512-gpus"),
    12: ("losses-on-one-rank", "minutes-between-saves", "where-the-hang-began",
         "flips-in-the-log"),
    13: ("largest-number-that-fits", "ranks-until-gathering-costs-as-much", "alone-in-equal-time"),
    "A": ("error-with-mixed-signs", "ones-on-four-ranks", "sure-gradient"),
    "B": ("product-that-cut-f-sums", "least-sent-at-two-depths", "cut-that-leaves-most-intensity"),
    "C": ("ranks-with-finite-weights", "early-when-uncut", "tied-under-both-names"),
    "D": ("all-gathers-of-muon", "matrices-in-turn", "torch-beside-owners"),
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


def notebook_of(chapter: Key) -> Path | None:
    """The course's notebook of this chapter, or None where it is not here."""
    chapters = folder()
    return notebooks(chapters).get(chapter) if chapters else None


def link_to(chapter: Key, slug: str) -> str:
    """An address that opens the exercise's heading; every notebook lies beside the others."""
    notebook = notebook_of(chapter)
    return f"{notebook.name}#cell-id=exercise-{slug}" if notebook else ""


def stub_of(chapter: Key, slug: str) -> str | None:
    """The source of the cell in which the exercise is posed, or None where it is not found."""
    notebook = notebook_of(chapter)
    if notebook is None:
        return None
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["metadata"].get("dplab", {}).get("exercise") == slug:
            return "".join(cell["source"])
    return None
