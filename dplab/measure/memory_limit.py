"""A limit on what a rank may allocate, so that it runs out of memory as a GPU does, and alone."""

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dplab.measure.storages import Storages, storages_of

# glibc gives what is larger than this back to the kernel as soon as it is freed. Left alone, it
# raises the threshold with what it sees, and keeps freed memory in pieces that fit nothing.
_M_MMAP_THRESHOLD = -3  # in malloc.h


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[None]:
    """Within the block, this process may hold ``nbytes`` bytes more than it did before.

    On Linux the kernel keeps to it (RLIMIT_DATA: all memory of this process alone that can be
    written). What is beyond is refused to this process; no other one, and not the machine, is
    affected. torch raises RuntimeError then, as Python raises MemoryError. Threads that start in
    the block count with their stacks, so take a first small step before it.

    Elsewhere, the storages of tensors are counted after each operation of torch, and MemoryError is
    raised by the one that is too much. What C++ code allocates for itself is not counted there.
    """
    with _by_the_kernel(nbytes) if sys.platform == "linux" else _Counted(nbytes):
        yield


@contextlib.contextmanager
def _by_the_kernel(nbytes):
    import resource

    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**18)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    soft = _writable() + int(nbytes)
    if before[1] != resource.RLIM_INFINITY:
        soft = min(soft, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _writable():
    """The bytes that the limit is about, as the kernel counts them now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData"))


class _Counted(TorchDispatchMode):
    def __init__(self, nbytes):
        super().__init__()
        self._limit, self._held = nbytes, 0
        self._storages = Storages(self._changed)

    def _changed(self, _, change):
        self._held += change

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for storage in storages_of(tree_leaves(outputs)):
            self._storages.look_at(storage)
        if self._held > self._limit:
            raise MemoryError(f"{func} would bring this rank to {self._held:,} bytes of tensors, "
                              f"and its limit is {self._limit:,}")
        return outputs
