"""Files that are written whole or not at all."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, data: str | bytes) -> None:
    """Through a second file, which takes the name once it is on the disk.

    So a stop midway or a full disk leaves the old file as it was. Makes the folder where it is
    missing. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    second = path.with_name(f".{path.name}-{os.getpid()}.part")
    try:
        with open(second, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(second, path)
    except BaseException:
        with contextlib.suppress(OSError):
            second.unlink()
        raise
