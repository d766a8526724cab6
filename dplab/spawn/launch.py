"""`run`: a function on N ranks, from a notebook, a script, or inside a torchrun job."""

import math
import numbers

from dplab.spawn import backend as backends
from dplab.spawn import torchrun, transport
from dplab.spawn.errors import RankError, ServerEnded
from dplab.spawn.start import MOST_RANKS
from dplab.spawn.supervise import Supervisor

_LARGEST_SEED = 2**32


def run(fn, world_size, *args, timeout=60.0, backend=None, link=None, seed=0, **kwargs) -> list:
    """Runs ``fn(*args, **kwargs)`` on ``world_size`` ranks; returns their values in rank order.

    On each rank the default process group is initialised and ``dplab.device()`` is the rank's
    device; ``fn`` is ordinary torch.distributed code. It is sent by value, with what it uses of the
    notebook. Each call starts fresh processes, so nothing leaks from one to the next. Values may be
    any picklable objects; tensors come back on the CPU.

    timeout: seconds that ``fn`` may take on all ranks together.
    backend: ``"nccl"`` where every rank can have a GPU of its own (on AMD GPUs the same name stands
        for RCCL), ``"xccl"`` likewise on Intel GPUs, else ``"gloo"``; a name forces it.
    link: a `dplab.measure.EmulatedLink`, or any object whose ``install(backend)`` is called on each
        rank before the process group starts, and returns the name of the backend to use. With a
        link, ``backend`` is ``"gloo"`` unless it is named.
    seed: rank r seeds torch, NumPy and `random` with ``1000 * seed + r``.

    Under torchrun nothing is started: the call joins that job, and every rank gets the whole list.

    Raises TypeError for a non-callable, and for a world size that is no integer; ValueError for one
    below 1, above 120, or not torchrun's, for a timeout, seed or backend that cannot be, and for a
    link under torchrun; RuntimeError inside a rank; OSError where the machine has no room for so
    many ranks; `RankError` when a rank fails, `ServerEnded` when what they are forked from was
    killed with them. The ■ button and Ctrl-C end the ranks, and raise
    KeyboardInterrupt with a line on where each was.
    """
    _validate(fn, world_size, timeout, backend, seed)
    if backends.under_torchrun():
        if link is not None:
            raise ValueError("under torchrun the job's own link is there, and no other is emulated")
        return torchrun.join(fn, world_size, args, kwargs, timeout, backend, seed)
    if backends.in_rank():
        raise RuntimeError("this process is a rank already: run() starts ranks from the notebook, "
                           "not from inside a rank")
    try:
        payload = transport.dumps((fn, args, kwargs, link))
    except transport.Unpicklable as error:
        text = str(error)
        for index, name in enumerate(("the function", "args", "kwargs", "link")):
            text = text.replace(f"the value[{index}]", name, 1)
        raise RankError(f"{text}, so it cannot be sent to the ranks.\nMake it inside the function "
                        "instead, or pass what it is made from.", kind="unpicklable") from None
    name = backends.choose_backend(world_size, backend or (link and "gloo"))

    def supervisor():
        return Supervisor(payload, world_size, timeout=timeout, seed=seed, backend=name)

    first = supervisor()
    try:
        return first.run()
    except ServerEnded:
        if first.has_begun:
            raise
    return supervisor().run()  # with another server


def _validate(fn, world_size, timeout, backend, seed):
    if not callable(fn):
        raise TypeError(f"the first argument must be a function, not {type(fn).__name__}: "
                        "write run(fn, 4), not run(fn(), 4)")
    if isinstance(world_size, bool) or not isinstance(world_size, numbers.Integral):
        raise TypeError(f"world_size must be an integer, not {world_size!r}")
    if not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"world_size must be 1 to {MOST_RANKS}, not {world_size}; for more "
                         "ranks there are `dplab.dryrun` and `dplab.predict`")
    if (isinstance(timeout, bool) or not isinstance(timeout, numbers.Real)
            or math.isnan(timeout) or timeout <= 0):
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    if (isinstance(seed, bool) or not isinstance(seed, numbers.Integral)
            or not 0 <= seed <= _LARGEST_SEED):
        raise ValueError(f"seed must be an integer from 0 to {_LARGEST_SEED}, not {seed!r}")
    if backend is not None:
        backends.validate(backend, world_size)
