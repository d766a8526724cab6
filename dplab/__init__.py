"""dplab: the lab bench of a hands-on course on data-parallel training.

Names are loaded on first use, so that ``import dplab.predict`` stays free of torch. The first use
also starts the process that ranks are forked from, in the background.
"""

import importlib

from dplab import needs

needs.check_system()

_MODULE_OF = {
    "run": "spawn",
    "device": "spawn",
    "RankError": "spawn",
    "expect_failure": "spawn",
    "check": "exercises",
    "hint": "exercises",
    "solution": "exercises",
    "progress": "exercises",
}
_PACKAGES = {"bench", "demos", "dryrun", "exercises", "measure", "parallel", "predict", "show",
             "spawn", "workloads"}

__all__ = [*_MODULE_OF, "load_ipython_extension"]


def __getattr__(name):
    if name in _PACKAGES:
        return importlib.import_module(f"dplab.{name}")
    if name in _MODULE_OF:
        needs.check_torch()
        value = getattr(importlib.import_module(f"dplab.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        importlib.import_module("dplab.spawn").warm_up()
        return value
    raise AttributeError(f"module 'dplab' has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, *_PACKAGES])


def load_ipython_extension(shell):
    """``%load_ext dplab``: adds the ``%%ranks`` cell magic and warms the fork server up."""
    needs.check_torch()
    from dplab.spawn.magic import register

    register(shell)
