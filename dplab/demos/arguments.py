"""What both demos share: their arguments, who prints, and how a figure is saved."""

import argparse
import gc
import os
from pathlib import Path

import torch.distributed as dist

from dplab import show


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that knows ``--ranks``, which torchrun decides if it started this process."""
    made = argparse.ArgumentParser(name, description=description,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=positive, default=job_size() or 4,
                      help="how many processes (default: 4; under torchrun: its own)")
    return made


def positive(text: str) -> int:
    """The type of an argument that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number of at least 1, not {text!r}")
    return int(text)


def figure_file(text: str) -> Path:
    """The type of an argument that names a figure to write; what cannot be is said at once."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg") or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no name for a .png or an .svg")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def job_size() -> int | None:
    """How many ranks torchrun started; None if it did not start this process."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def prints() -> bool:
    """Whether this is the one process that prints."""
    return job_size() is None or os.environ["RANK"] == "0"


def leave_job() -> None:
    """Leaves torchrun's job, if this is one."""
    if dist.is_initialized():
        gc.collect()  # a DDP lies in a cycle, and one that outlives its group may abort the process
        dist.destroy_process_group()


def save(figure: show.CourseFigure, path: Path) -> None:
    """Writes the figure, with its text alternative where the format has one, and says so."""
    svg = path.suffix.lower() == ".svg"
    path.write_bytes(show.to_svg(figure) if svg else show.to_png(figure))
    print(f"\nSaved {path}")
