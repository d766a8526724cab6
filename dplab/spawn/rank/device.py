"""Which backend and which device: the one place where they are chosen."""

import os

_device = None  # of this process, once it is a rank


def choose_backend(world_size: int) -> str:
    """NCCL where every rank can have a GPU of its own, else gloo.

    On AMD GPUs, PyTorch calls RCCL ``"nccl"`` and the devices ``"cuda"``, so nothing changes.
    """
    import torch

    return "nccl" if torch.cuda.device_count() >= world_size else "gloo"


def validate(backend: str, world_size: int) -> None:
    """ValueError for a forced backend that this machine cannot offer."""
    import torch

    if not isinstance(backend, str) or not torch.distributed.is_backend_available(backend):
        raise ValueError(f"this PyTorch has no backend {backend!r}; gloo works everywhere")
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        raise ValueError(f"nccl needs a GPU for every rank: {world_size} ranks, and this machine "
                         f"has {torch.cuda.device_count()}; backend='gloo' works everywhere")


def become_rank(backend: str, local_rank: int) -> None:
    """Remembers this process's device, and makes it the current one."""
    global _device
    import torch

    _device = torch.device("cpu")
    if backend == "nccl":
        _device = torch.device("cuda", local_rank)
        torch.cuda.set_device(_device)


def in_rank() -> bool:
    """Whether this process was started by `run`, or has joined a torchrun job."""
    return _device is not None


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def device():
    """This rank's device: ``cuda:r`` under NCCL or RCCL, else the CPU.

    Outside a rank: the device of rank 0 in a run of one rank.
    """
    import torch

    if _device is not None:
        return _device
    return torch.device("cuda", 0) if choose_backend(1) == "nccl" else torch.device("cpu")
