"""Which backend and which device: the one place where they are chosen."""

import os

_DEVICE_OF = {"nccl": "cuda", "xccl": "xpu", "gloo": "cpu", "mpi": "cpu"}
_device = None  # of this process, once it is a rank


def choose_backend(world_size: int, backend: str | None = None) -> str:
    """NCCL where every rank can have a GPU of its own, XCCL likewise on Intel's, else gloo.

    On AMD GPUs, PyTorch calls RCCL ``"nccl"`` and the devices ``"cuda"``, so nothing changes.
    ``backend`` forces the choice.
    """
    import torch

    if backend is not None:
        return backend
    if torch.cuda.is_available() and torch.cuda.device_count() >= world_size:
        return "nccl"
    if torch.xpu.is_available() and torch.xpu.device_count() >= world_size:
        return "xccl"
    return "gloo"


def validate(backend: str, world_size: int) -> None:
    """ValueError for a forced backend that this machine cannot offer."""
    import torch

    if not isinstance(backend, str) or not torch.distributed.is_backend_available(backend):
        raise ValueError(f"this PyTorch has no backend {backend!r}; gloo works everywhere")
    kind = _DEVICE_OF.get(backend, "cpu")
    if kind != "cpu":
        count = torch.get_device_module(kind).device_count()
        if count < world_size:
            raise ValueError(f"{backend} needs a GPU for every rank: {world_size} ranks, and "
                             f"this machine has {count}; backend='gloo' works everywhere")


def become_rank(backend: str, local_rank: int) -> None:
    """Remembers this process's device, and makes it the current one."""
    global _device
    import torch

    kind = _DEVICE_OF.get(backend, "cpu")
    _device = torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)
    if kind != "cpu":
        torch.get_device_module(kind).set_device(_device)


def in_rank() -> bool:
    """Whether this process was started by `run`, or has joined a torchrun job."""
    return _device is not None


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def device():
    """This rank's device: ``cuda:r`` under NCCL or RCCL, ``xpu:r`` under XCCL, else the CPU.

    Outside a rank: the device of rank 0 in a run of one rank.
    """
    import torch

    if _device is not None:
        return _device
    kind = _DEVICE_OF[choose_backend(1)]
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
