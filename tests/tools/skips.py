"""What a test needs and a reader's machine may lack: there the test is skipped, in CI it fails."""

import os
import shutil

import pytest


def skip_or_fail(why):
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def need_program(name):
    if shutil.which(name) is None:
        skip_or_fail(f"needs {name}")
