"""How a demo runs with ``python -m`` as well as under torchrun."""

import argparse
import gc
import os

import torch.distributed as dist

UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that knows ``--ranks``, which torchrun decides if it started this process."""
    made = argparse.ArgumentParser(name, description=description,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int,
                      default=int(os.environ["WORLD_SIZE"]) if UNDER_TORCHRUN else 4,
                      help="how many processes (default: 4; under torchrun: its own)")
    return made


def prints() -> bool:
    """Whether this is the one process that prints."""
    return not UNDER_TORCHRUN or os.environ["RANK"] == "0"


def leave() -> None:
    """Leaves torchrun's job, if this is one."""
    if dist.is_initialized():
        gc.collect()  # a DDP lies in a cycle, and one that outlives its group may abort the process
        dist.destroy_process_group()
