"""How the tests of the demos start them: as a module, and under torchrun."""

import subprocess
import sys

from dplab.demos import simple_ddp

SCRIPT = simple_ddp.__file__
MODULE = [sys.executable, "-m", "dplab.demos.simple_ddp"]
VISUALIZER = ["-m", "dplab.demos.gradient_sync_visualizer"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=180)
