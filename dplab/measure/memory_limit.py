"""A limit on what a rank may allocate, so that it runs out of memory as a GPU does, and alone."""

import contextlib
import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from torch.utils._pytree import tree_leaves

from dplab.measure.storages import Storages, Watch, storages_of

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
    with _by_the_kernel(nbytes) if sys.platform == "linux" else _counted(nbytes):
        yield


@contextlib.contextmanager
def _by_the_kernel(nbytes):
    import resource

    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**18)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    held = 1024 * int(re.search(r"VmData:\s+(\d+) kB", status)[1])  # of what the limit is about
    resource.setrlimit(resource.RLIMIT_DATA, (held + int(nbytes), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextlib.contextmanager
def _counted(nbytes):
    storages = Storages(lambda *_: None)

    def ran(operation, _, outputs):
        for storage in storages_of(tree_leaves(outputs)):
            storages.look_at(storage)
        if (held := sum(storages.sizes)) > nbytes:
            raise MemoryError(f"{operation} would bring this rank to {held:,} bytes of tensors, "
                              f"and its limit is {nbytes:,}")

    with Watch(ran):
        yield
