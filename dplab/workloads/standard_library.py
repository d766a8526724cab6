"""The source of Python's own standard library, byte by byte: text that every reader has.

It differs a little between versions of Python, so losses on it do, too.
"""

import sysconfig
from pathlib import Path

import torch

VOCABULARY = 256  # a token is a byte


def load_source() -> torch.Tensor:
    """The top-level modules in order of their names, one after another: uint8, some millions.

    Raises FileNotFoundError where Python came without its source.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    modules = sorted(folder.glob("*.py"))
    if not modules:
        raise FileNotFoundError(f"this Python has no source files of its library in {folder}")
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, modules))), dtype=torch.uint8)


def sample(source: torch.Tensor, batch: int, length: int,
           seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, int64 of (batch, length): windows of ``source``, and those one byte on.

    The same for the same seed; the caller's random state is left alone.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - length, (batch, 1), generator=generator)
    windows = source[starts + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
