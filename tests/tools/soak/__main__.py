"""``python tests/tools/soak [options]``, from the root of the repository."""

import sys
from pathlib import Path

# Python puts this folder at the front of its path; the modules here import each other as `soak.…`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from soak import main  # noqa: E402

main(sys.argv[1:])
