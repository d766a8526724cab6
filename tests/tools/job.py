"""A script of two ranks under plain torchrun, for the tests of what runs there too."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def two_ranks_under_torchrun(folder, source, *arguments) -> subprocess.CompletedProcess:
    """Writes ``source`` into ``folder`` and runs it as a job; the output is captured as text."""
    script = folder / "script.py"
    script.write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script), *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=120)
