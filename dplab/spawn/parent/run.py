"""The way to ranks: `run`, from a notebook, a script or inside a torchrun job."""

import atexit
import contextlib
import datetime
import functools
import inspect
import numbers
import os
import re
import time

from ..between import values
from ..between.errors import RankError, ServerEnded
from ..rank import device as devices
from ..rank import life
from ..server.start import MOST_RANKS
from .supervise import Supervisor

_OPTIONS = ("timeout", "backend", "link", "seed")


def _options_belong_to_run(run):
    """Refuses an option that is a parameter of the function too: nobody could tell whose it is."""

    @functools.wraps(run)
    def checked(fn, world_size, *args, **kwargs):
        open_ones = ()
        with contextlib.suppress(TypeError, ValueError):  # what is wrong there is said elsewhere
            open_ones = inspect.signature(functools.partial(fn, *args)).parameters
        for option in _OPTIONS:
            if option in kwargs and option in open_ones:
                name = getattr(fn, "__name__", "the function")
                raise TypeError(
                    f"{option}= is an option of run(), and {name}() has a parameter of that name: "
                    f"run(lambda: {name}(…, {option}=…), {world_size}) gives the function's")
        return run(fn, world_size, *args, **kwargs)

    return checked


@_options_belong_to_run
def run(fn, world_size, *args, timeout=60.0, backend=None, link=None, seed=0, **kwargs) -> list:
    """Runs ``fn(*args, **kwargs)`` on ``world_size`` ranks; returns their values in rank order.

    On each rank the default process group is initialised and ``dplab.device()`` is the rank's
    device; ``fn`` is ordinary torch.distributed code. It is sent by value, with what it uses of the
    notebook. Each call starts fresh processes, so nothing leaks from one to the next. Values may be
    any picklable objects; tensors come back on the CPU.

    timeout: seconds that ``fn`` may take on all ranks together.
    backend: ``"nccl"`` where every rank can have a GPU of its own (on AMD GPUs the same name stands
        for RCCL), else ``"gloo"``; a name forces it.
    link: an emulated link, or any object whose ``install(backend)`` is called on each rank
        before the process group starts, and returns the name of the backend to use. With a link,
        ``backend`` is ``"gloo"`` unless it is named.
    seed: rank r seeds torch, NumPy and `random` with ``1000 * seed + r``.

    These four are `run`'s own, and never reach ``fn``: where ``fn`` has a parameter of the same
    name that ``args`` leave open, naming it is a TypeError.

    Under torchrun nothing is started: the call joins that job, and every rank gets the whole list.

    Raises TypeError for a non-callable, and for a world size that is no integer; ValueError for one
    below 1, above 120, or not torchrun's, for a timeout or backend that cannot be, and for a link
    under torchrun; RuntimeError inside a rank; OSError where the machine has no room for so
    many ranks; `RankError` when a rank fails, `ServerEnded` when what they are forked from was
    killed with them. The ■ button and Ctrl-C end the ranks, and raise
    KeyboardInterrupt with a line on where each was.
    """
    validate(fn, world_size, timeout, backend)
    if devices.under_torchrun():
        if link is not None:
            raise ValueError("under torchrun the job's own link is there, and no other is emulated")
        return _join_torchrun(fn, world_size, args, kwargs, timeout, backend, seed)
    if devices.in_rank():
        raise RuntimeError("this process is a rank already: run() starts ranks from the notebook, "
                           "not from inside a rank")
    try:
        payload = values.dumps({"the function": fn, "args": args, "kwargs": kwargs, "link": link})
    except values.Unpicklable as error:
        culprit = re.sub(r"^the value\['(.+?)'\]", r"\1", str(error))
        culprit = culprit.replace("the function.names", "the notebook's names", 1)  # of %%ranks
        raise RankError(f"{culprit}, so it cannot be sent to the ranks.\nMake it on the ranks, in "
                        "the function or cell, or pass what it is made from.",
                        kind="unpicklable") from None
    name = backend or (link and "gloo") or devices.choose_backend(world_size)

    def supervisor():
        return Supervisor(payload, world_size, timeout=timeout, seed=seed, backend=name)

    first = supervisor()
    try:
        return first.run()
    except ServerEnded:
        if first.has_begun:
            raise
    return supervisor().run()  # with another server


def validate(fn, world_size, timeout=60.0, backend=None):
    """TypeError or ValueError for what `run` cannot take."""
    if not callable(fn):
        raise TypeError(f"the first argument must be a function, not {type(fn).__name__}: "
                        "write run(fn, 4), not run(fn(), 4)")
    if isinstance(world_size, bool) or not isinstance(world_size, numbers.Integral):
        raise TypeError(f"world_size must be an integer, not {world_size!r}")
    if not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"world_size must be 1 to {MOST_RANKS}, not {world_size}; more "
                         "ranks than that are for a dry run, or a prediction")
    if not timeout > 0:  # nor not-a-number
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    if backend is not None:
        devices.validate(backend, world_size)


def _join_torchrun(fn, world_size, args, kwargs, timeout, backend, seed) -> list:
    """Calls ``fn`` on this rank and gathers every rank's value. ValueError for another size."""
    import torch.distributed as dist

    job_size = int(os.environ["WORLD_SIZE"])
    if job_size != world_size:
        raise ValueError(f"this torchrun job has {job_size} ranks, and the code asks for "
                         f"{world_size}: start it with nodes × --nproc-per-node = {world_size}")
    if not dist.is_initialized():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        name = backend or devices.choose_backend(local_size)
        devices.become_rank(name, local_rank)
        dist.init_process_group(name, timeout=datetime.timedelta(seconds=timeout))
    life.seed_everything(seed, dist.get_rank())
    value = fn(*args, **kwargs)
    gathered: list = [None] * world_size
    dist.all_gather_object(gathered, bytes(values.dumps(value)))
    _let_threads_finish_at_exit()
    return [values.loads(each) for each in gathered]


@functools.cache
def _let_threads_finish_at_exit():
    """gloo's threads let go of a collective a moment after its wait(), and need Python for it.

    A thread that comes too late, when Python is ending, aborts the process ("terminate called
    without an active exception"). `destroy_process_group` waits for the threads, but not where
    something keeps the group alive, as `fully_shard` does. So all get their turn before the end.
    """
    atexit.register(time.sleep, 0.1)
