"""The life of a rank, from start to exit.

It takes a task from the parent, joins the process group, runs the function, answers, and then
stays: a rank that left at once would close connections that its peers still need. The parent ends
it.
"""

import contextlib
import ctypes
import datetime
import faulthandler
import json
import linecache
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import traceback
import types
from multiprocessing.connection import Connection

from ..between import values
from ..between.calls import DEFAULT_GROUP, map_log
from ..between.errors import in_plain_words
from ..between.messages import Answer, Frame, InFlight, Task, crash_file, log_file, store_file
from . import console, recording
from . import device as devices

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def main(connection: int, output: int) -> int:
    """Serves one task, given the descriptors of the connection to the parent and of the output."""
    console.connect(output)
    wire = _Wire(Connection(connection))
    task: Task = pickle.loads(wire.receive())
    payload = wire.receive()
    threading.Thread(target=wire.listen, args=[task.folder], daemon=True).start()
    try:
        wire.say(*_work(task, payload, wire))
    except OSError:  # the parent has gone
        return 1
    while True:
        signal.pause()


class _Wire:
    """The connection to the parent. A thread listens on it for questions and for the end."""

    def __init__(self, connection):
        self._connection = connection
        self._lock = threading.Lock()
        self._everyone_is_ready = threading.Event()

    def receive(self):
        return self._connection.recv_bytes()

    def say(self, answer, value=None):
        answer.warned = console.take_warnings()
        with self._lock:
            self._connection.send(answer)
            if value is not None:
                self._connection.send_bytes(value)

    def wait_for_the_others(self):
        """Until every rank has joined: nothing that one does now meets one that still connects."""
        self.say(Answer("ready"))
        self._everyone_is_ready.wait()

    def listen(self, folder):
        """Answers where the main thread is. Ends the rank and its children with the parent."""
        try:
            while True:
                if self._connection.recv() == "go":
                    self._everyone_is_ready.set()
                else:
                    self.say(_where())
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)


def _work(task, payload, wire):
    """Runs the task. Returns the last answer, and with "done" the value as bytes."""
    try:
        _settle(task)
        console.install(task.in_ipython)
        try:
            function, args, kwargs, link = values.loads(payload).values()
        except Exception as error:
            return Answer("unpicklable", "what was sent to the rank could not be loaded there "
                          f"({in_plain_words(error)})"), None
        _join_process_group(task, link)
        _fill_main(function)
        wire.wait_for_the_others()
        value = function(*args, **kwargs)
        console.say_of_figures()
        _flush()
        return Answer("done", launched=_flight()[0]), values.dumps(value)
    except values.Unpicklable as error:
        text = str(error).replace("the value", "the returned value", 1)
        return Answer("unpicklable", text), None
    except SystemExit as error:
        return Answer("exited", f"called sys.exit({error.code!r})", frames=_frames_of(error)), None
    except BaseException as error:
        return Answer("raised", in_plain_words(error), type(error).__name__, _frames_of(error),
                      launched=_flight()[0]), None
    finally:
        _flush()


def _settle(task):
    """Makes this process look like the parent: environment, folder, path, sources of cells."""
    faulthandler.enable(open(crash_file(task.folder, task.rank), "w"), all_threads=False)
    os.environ.clear()
    os.environ.update(task.environment)
    threads = int(task.environment.get("OMP_NUM_THREADS") or 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.chdir(task.directory)
    sys.path[:] = task.path
    for file, text in task.sources.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    if sys.platform == "linux":
        # a DataLoader's workers inherit a Dataset that was defined in the notebook
        multiprocessing.set_start_method("fork", force=True)

    import torch

    torch.set_num_threads(threads)
    devices.become_rank(task.backend, task.rank)
    seed_everything(task.seed, task.rank)


def seed_everything(seed: int, rank: int) -> None:
    """Seeds torch, NumPy and `random` with ``1000 * seed + rank``."""
    import numpy
    import torch

    number = 1000 * seed + rank
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)


def _join_process_group(task, link):
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    recording.record_into(map_log(log_file(task.folder, task.rank)))
    name = task.backend if link is None else link.install(task.backend)
    device = devices.device()
    dist.init_process_group(
        name, rank=task.rank, world_size=task.world_size,
        store=dist.FileStore(store_file(task.folder), task.world_size),
        timeout=datetime.timedelta(seconds=min(task.timeout + 60, 7 * 86400)),
        device_id=None if device.type == "cpu" else device)


def _fill_main(function):
    """Lets plain pickle (torch.save, a DataLoader's queue) find the notebook's classes."""
    main = types.ModuleType("__main__")
    main.__dict__.update({cls.__name__: cls for cls in values.classes_by_value()})
    names = getattr(function, "__globals__", {})
    main.__dict__.update({name: value for name, value in names.items() if name[:2] != "__"})
    sys.modules["__main__"] = main


def _where():
    frame = sys._current_frames().get(threading.main_thread().ident)
    launched, waiting = _flight()
    return Answer("where", frames=_frames(traceback.walk_stack(frame))[::-1], launched=launched,
                  waiting=waiting)


def _flight():
    """From torch's flight recorder: the last collective launched, and those in flight."""
    from torch._C import _distributed_c10d as c10d

    trace = json.loads(c10d._dump_fr_trace_json())
    status = trace.get("pg_status", {}).get(DEFAULT_GROUP, {})
    waiting = [_in_flight(entry) for entry in trace.get("entries", []) if not entry["retired"]]
    return int(status.get("last_enqueued_collective", 0)), waiting


_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64",
           "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}


def _in_flight(entry):
    name = entry["profiling_name"].split(":")[-1].replace("_allgather_base", "all_gather").replace(
        "_reduce_scatter_base", "reduce_scatter")
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    tensor = ""
    if entry["input_dtypes"] and name != "barrier":
        dtype = entry["input_dtypes"][0]
        tensor = f"{_DTYPES.get(dtype, dtype.lower())}{(entry['input_sizes'] or [[]])[0]}"
    return InFlight(name, number, tensor, entry["process_group"][0] == DEFAULT_GROUP
                    and not entry["is_p2p"])


def _frames_of(error):
    return _frames(traceback.walk_tb(error.__traceback__))


def _frames(walk):
    return [Frame(frame.f_code.co_filename, line or 0, frame.f_code.co_name,
                  frame.f_code.co_firstlineno) for frame, line in walk]


def _flush():
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, None, or the learner's own
            stream.flush()
    ctypes.CDLL(None).fflush(None)
