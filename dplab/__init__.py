"""dplab: the lab bench of a hands-on course on data-parallel training.

Names are loaded on first use, so that ``import dplab.predict`` stays free of torch. The process
that ranks are forked from starts with ``%load_ext dplab``, `warm_up`, or the first `run`.
"""

import importlib

from dplab import needs

needs.check_system()

_MODULE_OF = {
    "run": "spawn",
    "device": "spawn",
    "RankError": "spawn",
    "expect_failure": "spawn",
    "warm_up": "spawn",
    "check": "checks",
    "hint": "checks",
    "solution": "checks",
    "mine": "checks",
    "whose": "checks",
    "reset": "checks",
    "progress": "checks",
    "guess": "desk.guesses",
    "drill": "drills",
}
_PACKAGES = {"bench", "checks", "demos", "desk", "drills", "dryrun", "exercises", "measure",
             "parallel", "predict", "show", "spawn", "workloads"}

_PRELOAD = (  # what ranks of the course ask for: small each, and as long as their start together
    "dplab.measure", "dplab.parallel", "dplab.predict.memory", "dplab.workloads.digits",
    "dplab.checks",
)

__all__ = [*_MODULE_OF, "load_ipython_extension"]


def __getattr__(name):
    if name == "spawn":
        return _launcher()
    if name in _PACKAGES:
        return importlib.import_module(f"dplab.{name}")
    if name in _MODULE_OF:
        needs.check_torch()
        if _MODULE_OF[name] == "spawn":
            _launcher()
        value = getattr(importlib.import_module(f"dplab.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'dplab' has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, *_PACKAGES])


def load_ipython_extension(shell):
    """``%load_ext dplab``: adds the ``%%ranks`` cell magic and warms the fork server up."""
    needs.check_torch()
    _launcher().register_magic(shell)


def _launcher():
    """`dplab.spawn`, which knows nothing of the course, with what the course hands in."""
    from dplab.show.palette import rank_color

    spawn = importlib.import_module("dplab.spawn")
    spawn.configure(preload=_PRELOAD, rank_color=rank_color)
    return spawn
