"""What both demos do alike: their arguments, and how they behave under torchrun."""

import argparse
import functools
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

import dplab
from dplab import show


class Parser(argparse.ArgumentParser):
    """Complains in one line; under torchrun on rank 0 alone."""

    def __init__(self, name: str, description: str):
        super().__init__(name, description=description,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        if prints():
            self.exit(2, f"{self.prog}: {message}\n")
        time.sleep(60)  # a rank that left first would have torchrun end rank 0 before it speaks
        self.exit(2)

    def add_ranks(self) -> None:
        self.add_argument("--ranks", type=at_least(1), default=job_size() or 4,
                          help="how many processes (default: 4; under torchrun: its own)")

    def add_figure(self, flag: str, what: str) -> None:
        self.add_argument(flag, type=writable_figure, metavar="FILE",
                          help=f"save {what} as a .png or .svg")

    def parse(self, argv: list[str] | None) -> argparse.Namespace:
        """The arguments; their ranks are those of torchrun's job, if this is one."""
        args = self.parse_args(argv)
        if job_size() not in (None, args.ranks):
            self.error(f"argument --ranks: {args.ranks}, but torchrun started {job_size()}: "
                       "leave --ranks out")
        return args


def at_least(smallest: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number of at least ``smallest``."""
    def whole_number(text):
        if not text.removeprefix("-").isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(
                f"needs a whole number of at least {smallest}, not {text!r}")
        return int(text)

    return whole_number


def writable_figure(text: str) -> Path:
    """The type of an argument that names a figure to write; complains with what to try."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(
            f"{text!r} ends neither in .png nor in .svg: try {path.stem or 'picture'}.png")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: try {path / 'picture.png'}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"there is no folder {str(path.parent)!r}: make it first, or try {path.name}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: try another folder")
    return path


def job_size() -> int | None:
    """How many ranks torchrun started; None if it did not start this process."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def prints() -> bool:
    """Whether this is the one process that prints."""
    return job_size() is None or os.environ["RANK"] == "0"


def complains_as(name: str):
    """Decorates a ``main``: a rank, a value or a file that fails is one line, and status 1.

    However ``main`` ends, the process leaves torchrun's job, if it is in one.
    """
    def decorate(main):
        @functools.wraps(main)
        def wrapped(argv=None):
            try:
                return main(argv)
            except (dplab.RankError, ValueError, OSError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 1
            finally:
                leave_job()

        return wrapped

    return decorate


def leave_job() -> None:
    """Leaves torchrun's job, if this is one."""
    if dist.is_initialized():
        gc.collect()  # a DDP lies in a cycle, and one that outlives its group may abort the process
        dist.destroy_process_group()


def on_one_machine() -> bool:
    """Whether all ranks of this group run on this machine."""
    ranks = str(dist.get_world_size())
    return os.environ.get("LOCAL_WORLD_SIZE", ranks) == ranks


def save(figure: show.CourseFigure, path: Path) -> None:
    """Writes the figure, with its text alternative where the format has one, and says so."""
    svg = path.suffix.lower() == ".svg"
    path.write_bytes(show.to_svg(figure) if svg else show.to_png(figure))
    print(f"\nSaved {path}")


def terminal_name() -> str | None:
    """The terminal that shows this process's errors, if rank 0 can open it by its name."""
    try:
        name = os.ttyname(sys.stderr.fileno())
    except (OSError, AttributeError):
        return None
    return name if os.access(name, os.W_OK) else None
