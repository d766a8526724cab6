"""Real ranks and real data, with each collective held back to the time that a chosen link needs.

A process group that passes every call on to gloo. When gloo is done, a thread waits until the
emulated link would be, too: since the last rank came, and since the link was free, the time that
`predict.cost` gives for the collective's algorithm. Then the work is complete: for who waits for
it, for DDP's reducer, for `fully_shard`.
"""

import functools
import math
import mmap
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dplab.predict import cost
from dplab.predict.step import COMMUNICATION, Span
from dplab.spawn.between import calls
from dplab.spawn.rank import recording


@dataclass(frozen=True)
class EmulatedLink:
    """For ``run(..., link=EmulatedLink(bandwidth, latency))``: ``bandwidth`` in bytes/s in each
    direction, ``latency`` in seconds for each step of a collective's algorithm (a ring all-reduce
    has 2(N−1) steps).

    Collectives of a group share its link in order of launch; sends and receives take the outgoing
    and the incoming direction. A collective is never faster than gloo's real one on this machine,
    so a link can be emulated only as far as it is slower. Raises ValueError for a bandwidth that is
    not above zero, or a negative latency.
    """

    bandwidth: float
    latency: float = 0.0
    name: str = ""

    def __post_init__(self):
        cost.Link(self.name, self.bandwidth, self.latency)  # which checks both

    def __str__(self):
        return f"emulated {self.name or 'link'}: {self.bandwidth / 1e9:.3g} GB/s, " \
               f"{round(1e6 * self.latency, 1):g} µs"

    def seconds(self, operation: str, world_size: int, nbytes: float) -> float:
        """The least time of a call that hands over ``nbytes`` on each rank."""
        link = cost.Link(self.name, self.bandwidth, self.latency)
        if operation in ("send", "recv"):
            return link.seconds(nbytes)
        whole = cost.whole_bytes(operation, world_size, nbytes)
        return cost.seconds(cost.USUAL[operation], world_size, whole, link)

    def carried(self, ranks: Sequence[Sequence[Span]]) -> list[list[Span]]:
        """The spans of a step, with each collective from when the link begins it until it is
        through: by the link's queue and speed, and not by when a rank's thread wakes.
        """
        def on_the_link(span):
            if span.lane != COMMUNICATION:
                return span
            begin = span.start + span.queued
            return span.cut(begin, begin + self.seconds(span.name, len(ranks), span.nbytes))

        return [[on_the_link(span) for span in spans] for spans in ranks]

    def install(self, backend: str) -> str:
        """Registers the emulation on this rank; returns its backend's name, for the launcher."""
        if backend != "gloo":
            raise ValueError(f"a link is emulated over gloo, not over {backend}: backend='gloo'")
        dist.Backend.register_backend(
            "emulated", functools.partial(_EmulatedGroup, self), extended_api=True, devices=["cpu"])
        return "emulated"


class _EmulatedGroup(dist.ProcessGroup):
    """gloo's process group behind a slower link."""

    def __init__(self, link, options, _):
        rank, size, store = options.group_rank, options.group_size, options.store
        super().__init__(rank, size)
        self._link, self._gloo = link, dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
        backend._set_sequence_number_for_group()
        kind = dist.ProcessGroup.BackendType.GLOO
        self._gloo._register_backend(torch.device("cpu"), kind, backend)
        self._gloo._set_default_backend(kind)
        self._gloo._set_group_name(options.group_id)
        self._arrivals = _Arrivals(store, options.group_id, rank, size)
        self._threads = ThreadPoolExecutor(256, "emulated-link")
        self._busy = {"send": 0.0, "recv": 0.0}  # the directions: until when, in `time.monotonic`
        self._lock = threading.Lock()
        self._numbers = Counter()  # of calls to each peer, and of collectives
        self._last = None  # the collective before

    def getBackendName(self):
        return "emulated"

    @property
    def group_name(self):
        return self._gloo.group_name

    def shutdown(self):
        self._threads.shutdown(wait=True)

    def _launch(self, method, operation, own, args, kwargs):
        tensors = recording.tensors_in(args[own]) if own is not None else []
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        seconds = self._link.seconds(operation, self.size(), nbytes)
        to_all = operation not in self._busy
        kind = "collective" if to_all else operation
        peer = None if to_all or method == "recv_anysource" else args[1]
        meeting = self._arrivals.meeting(kind, peer, self._numbers[kind, peer])
        self._numbers[kind, peer] += 1
        launch = getattr(dist.ProcessGroup, method)
        launch = getattr(launch, "__wrapped__", launch)  # recorded is the call of this group alone
        work = _EmulatedWork(launch(self._gloo, *args, **kwargs), args[0] if args else [])
        directions, before = ([*self._busy], self._last) if to_all else ([operation], None)
        if to_all:
            self._last = work
        self._threads.submit(self._complete, work, meeting, seconds, directions, before)
        return work

    def _complete(self, work, meeting, seconds, directions, before):
        try:
            work.real.wait()
            if before is not None:
                before.scheduled.wait()
            with self._lock:
                work.began = max(meeting(), *(self._busy[each] for each in directions))
                end = work.began + seconds
                self._busy |= dict.fromkeys(directions, end)
            work.scheduled.set()
            time.sleep(max(0.0, end - time.monotonic()))
            work.future.set_result(work.outputs)
        except Exception as error:
            work.scheduled.set()
            work.future.set_exception(error)


class _EmulatedWork(dist.Work):
    def __init__(self, real, outputs):
        super().__init__()
        self.real, self.outputs = real, outputs
        self.future = torch.futures.Future()
        self.scheduled = threading.Event()

    # Under the name of `recording.WAIT`, by which a stack shows that the rank waits for others.
    def wait_for_others(self, timeout=None):
        self.future.wait()
        return True

    wait = wait_for_others

    def get_future(self):
        return self.future

    def is_completed(self):
        return self.future.done()

    def result(self):
        return self.outputs

    def _source_rank(self):
        return self.real._source_rank()


class _Arrivals:
    """When each rank launched each call, in memory that all ranks share: the clock is common."""

    _SLOTS = 512  # calls in flight of one kind, at most
    _ENTRY = struct.Struct("qd")

    def __init__(self, store, group_id, rank, size):
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        path = os.path.join(os.path.dirname(store.path), f"arrivals-{group_id.replace('/', '-')}")
        self._rank, self._size = rank, size
        nbytes = (size + 2 * size * size) * self._SLOTS * self._ENTRY.size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, nbytes)
        self._memory = mmap.mmap(descriptor, nbytes)
        os.close(descriptor)

    def meeting(self, kind, peer, number):
        """Notes that this rank launches the call; returns a function for when all have."""
        own, rows = self._rank, range(self._size)
        if kind != "collective":
            if peer is None:  # a receive from anyone
                return time.monotonic
            sender, receiver = (own, peer) if kind == "send" else (peer, own)
            send = self._size * (1 + 2 * sender) + 2 * receiver
            own, rows = send + (kind == "recv"), (send, send + 1)
        now = time.monotonic()
        self._ENTRY.pack_into(self._memory, self._place(own, number), number, now)
        return lambda: max(now, *(self._read(row, number) for row in rows))

    def _place(self, row, number):
        return (row * self._SLOTS + number % self._SLOTS) * self._ENTRY.size

    def _read(self, row, number):
        noted, when = self._ENTRY.unpack_from(self._memory, self._place(row, number))
        return when if noted == number else -math.inf


def _emulated(method, operation, own):
    def call(self, *args, **kwargs):
        return self._launch(method, operation, own, args, kwargs)

    return recording.recorded(call, operation, own)


for _method, (_operation, _own) in {**calls.COLLECTIVES, **calls.POINT_TO_POINT}.items():
    if hasattr(dist.ProcessGroup, _method):
        setattr(_EmulatedGroup, _method, _emulated(_method, _operation, _own))
