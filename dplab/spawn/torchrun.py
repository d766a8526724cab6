"""`run` inside a job that torchrun started: no process is started, the job is joined."""

import atexit
import datetime
import functools
import os
import time


def join(fn, world_size, args, kwargs, timeout, backend, seed) -> list:
    """Calls ``fn`` on this rank and gathers every rank's value. ValueError for another size."""
    import torch.distributed as dist

    from dplab.spawn import backend as backends
    from dplab.spawn import transport
    from dplab.spawn.rank import seed_everything

    job_size = int(os.environ["WORLD_SIZE"])
    if job_size != world_size:
        raise ValueError(f"this torchrun job has {job_size} ranks, and the code asks for "
                         f"{world_size}: start it with nodes × --nproc-per-node = {world_size}")
    if not dist.is_initialized():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        name = backends.choose_backend(local_size, backend)
        backends.become_rank(name, local_rank)
        dist.init_process_group(name, timeout=datetime.timedelta(seconds=timeout))
    seed_everything(seed, dist.get_rank())
    value = fn(*args, **kwargs)
    values = [None] * world_size
    dist.all_gather_object(values, bytes(transport.dumps(value)))
    _let_threads_finish_at_exit()
    return [transport.loads(each) for each in values]


@functools.cache
def _let_threads_finish_at_exit():
    """gloo's threads let go of a collective a moment after its wait(), and need Python for it.

    A thread that comes too late, when Python is ending, aborts the process ("terminate called
    without an active exception"). `destroy_process_group` waits for the threads, but not where
    something keeps the group alive, as `fully_shard` does. So all get their turn before the end.
    """
    atexit.register(time.sleep, 0.1)
