"""A kernel of this interpreter that shares nothing with the reader's own."""

import os
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager


def private_kernel(folder: Path):
    """The manager of such a kernel, and its environment; what it keeps is in ``folder``: neither
    the reader's progress nor an IPython profile has a part in it.
    """
    manager = AsyncKernelManager(
        # Without folders to look in, it starts this interpreter, whatever is installed.
        kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        # Sockets in the private folder: the loopback is left to the ranks, who count its bytes.
        transport="ipc", connection_file=str(folder / "kernel.json"))
    return manager, os.environ | {"DPLAB_HOME": str(folder / "dplab"), "DPLAB_LIVE": "0",
                                  "IPYTHONDIR": str(folder / "ipython")}
