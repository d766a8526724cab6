"""The parent's side of a run: feeds the ranks, listens to them, and judges how it went."""

import contextlib
import math
import os
import selectors
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from dplab.spawn import calls, deadlock, output, report, transport
from dplab.spawn.errors import Interrupted
from dplab.spawn.rank import Answer, Job, log_file
from dplab.spawn.start import start_ranks

_TICK = 0.1  # seconds between two looks at the call logs
_GRACE = 0.15  # seconds that other ranks have to fail too, after the first did
_ANSWER = 0.5  # seconds that a rank has to say where it is
_PROBE = 0.4  # seconds between two questions to ranks that are late
_START = 120.0  # seconds that ranks have to start
_NEWS = 0.05  # seconds by which the news of a death may come after the errors that it causes


@dataclass
class RankState:
    """What the parent knows of one rank."""

    rank: int
    world_size: int
    joined: bool = False  # the process group
    ready: bool = False  # and so have all others: its function runs
    answer: Answer | None = None  # its last word: done, raised, exited, unpicklable
    value: object = field(default=None, repr=False)
    where: Answer | None = None
    exit_code: int | None = None
    ended_at: float = 0.0  # `time.monotonic`, of the exit
    out_of_memory: bool = False
    last_call: calls.Call | None = None
    unmet: list[calls.Call] = field(default_factory=list)  # sends, receives without counterpart

    @property
    def finished(self):
        return self.answer is not None and self.answer.state == "done"

    @property
    def died(self):
        return self.answer is None and self.exit_code is not None

    @property
    def failed(self):
        return self.died or (self.answer is not None and not self.finished)

    @property
    def failed_at(self):
        return self.ended_at if self.died else self.answer.time


class Supervisor:
    """One run, from its first fork to the last process gone."""

    def __init__(self, payload: bytes, world_size: int, *, timeout: float, **job):
        self._payload, self._world_size, self._timeout = payload, world_size, timeout
        self._states = [RankState(rank, world_size) for rank in range(world_size)]
        self._job = job
        self._selector = selectors.DefaultSelector()
        self._display = output.show(world_size)
        self._comparison = calls.CallComparison()
        self._meetings = deadlock.Meetings()
        self._called_at = 0.0
        self._oom_kills = _oom_kills()

    def run(self) -> list:
        """The ranks' values in rank order. Raises `RankError`, or `Interrupted`."""
        shared = "/dev/shm"
        self._folder = tempfile.mkdtemp(
            prefix="dplab-", dir=shared if os.access(shared, os.W_OK) else None)
        self._logs = [calls.CallReader(log_file(self._folder, state.rank))
                      for state in self._states]
        failure = None
        try:
            self._start()
            try:
                failure = self._watch()
            except KeyboardInterrupt:
                self._ask_where()
                raise Interrupted(report.of_interrupt(self._states)) from None
        finally:
            self._stop(failed=failure is not None)
        if failure is not None:
            raise failure
        return [self._value_of(state) for state in self._states]

    def _start(self):
        self._connections, pairs = [], []
        for rank in range(self._world_size):
            ours, theirs = socket.socketpair()
            reader, writer = os.pipe()
            self._connections.append(Connection(ours.detach()))
            pairs.append((theirs.detach(), writer))
            self._selector.register(self._connections[rank], selectors.EVENT_READ,
                                    (self._hear, rank))
            self._selector.register(reader, selectors.EVENT_READ, (self._read, rank, reader))
        try:
            self._handle = start_ranks(self._folder, pairs)
        finally:
            for descriptor in (descriptor for pair in pairs for descriptor in pair):
                os.close(descriptor)
        if self._handle.channel is not None:
            self._selector.register(self._handle.channel, selectors.EVENT_READ, (self._exits,))
        common = {
            "world_size": self._world_size, "folder": self._folder, "timeout": self._timeout,
            "environment": dict(os.environ), "directory": os.getcwd(), "path": list(sys.path),
            "sources": _cell_sources(), **self._job}
        for rank, connection in enumerate(self._connections):
            with contextlib.suppress(OSError):
                connection.send(Job(rank=rank, **common))
                connection.send_bytes(self._payload)

    def _value_of(self, state):
        data, state.value = state.value, None  # large values are not held twice
        try:
            return transport.loads(data)
        except Exception as error:
            state.answer.text = ("the returned value could not be loaded here "
                                 f"({type(error).__name__}: {error})")
            raise report.of_unpicklable(state, self._states) from None

    def _watch(self):
        """Until every rank is done, or the run has failed. Returns the error, or None."""
        started = ready_at = time.monotonic()
        next_probe = before = None
        while True:
            self._listen(_TICK)
            mismatch = self._compared()
            if mismatch:
                return mismatch
            if any(state.failed for state in self._states):
                return self._failure()
            if all(state.finished for state in self._states):
                return None
            now = time.monotonic()
            if not all(state.ready for state in self._states):
                if now > started + _START:
                    self._ask_where()
                    return report.of_stuck(self._states, _START)
                ready_at = now
                continue
            if now > ready_at + self._timeout:
                self._ask_where()
                return self._compared() or report.of_stuck(self._states, self._timeout)
            silent = self._meetings.any_unmet and now > self._called_at + _PROBE
            if silent or any(state.finished for state in self._states):
                next_probe = next_probe or now + _PROBE
                if now > next_probe:
                    self._ask_where()
                    next_probe = time.monotonic() + _PROBE
                    hopeless = self._hopeless()
                    if hopeless and hopeless == before:
                        return (report.of_deadlock(self._states, hopeless)
                                if isinstance(hopeless, dict)
                                else report.of_stuck(self._states, self._timeout))
                    before = hopeless

    def _hopeless(self):
        """What will never come: {rank: the ranks it waits for} of a deadlock, or (rank, number) of
        a collective that a rank which has returned never launched; else None.
        """
        if waits := deadlock.waits_without_end(self._states):
            return waits
        least = min((state.answer.launched for state in self._states if state.finished),
                    default=math.inf)
        for state in self._states:
            if not state.finished and state.where:
                for number, _ in state.where.waiting:
                    if number > least:
                        return state.rank, number
        return None

    def _failure(self):
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and not all(
                state.failed or state.finished for state in self._states):
            self._listen(0.02)
        self._ask_where()
        kills = _oom_kills()
        for state, log in zip(self._states, self._logs, strict=True):
            state.out_of_memory = kills > self._oom_kills
            state.last_call = log.last
        return self._compared() or report.of_failure(self._states, self._folder)

    def _compared(self):
        """The error of a mismatch between the ranks' calls, or None."""
        mismatch = self._compare()
        if mismatch is None:
            return None
        place = mismatch[1]
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and len(place) < next(iter(place.values())).group_size:
            self._listen(0.02)
            self._compare()
        self._ask_where()
        return report.of_mismatch(mismatch, self._states)

    def _compare(self):
        found = None
        for state, log in zip(self._states, self._logs, strict=True):
            new_calls = log.new_calls()
            found = self._comparison.add(state.rank, new_calls) or found
            self._meetings.add(state.rank, new_calls)
            state.last_call = log.last
            if new_calls:
                self._called_at = time.monotonic()
        for state in self._states:
            state.unmet = self._meetings.unmet(state.rank)
        return found

    def _ask_where(self):
        """Asks every rank that is at work where it is, and waits a little for answers."""
        asked = [state for state in self._states
                 if state.ready and state.answer is None and state.exit_code is None]
        for state in asked:
            state.where = None
            with contextlib.suppress(OSError):
                self._connections[state.rank].send("where")
        deadline = time.monotonic() + _ANSWER
        while time.monotonic() < deadline and any(
                state.where is None and not (state.answer or state.died) for state in asked):
            self._listen(0.02)

    def _listen(self, seconds):
        for key, _ in self._selector.select(seconds):
            handler, *rest = key.data
            handler(*rest)
        self._exits()
        self._display.refresh()

    def _hear(self, rank):
        state, connection = self._states[rank], self._connections[rank]
        try:
            answer = connection.recv()
            if answer.state == "done":
                state.value = connection.recv_bytes()
        except (EOFError, OSError):
            self._selector.unregister(connection)
            return
        if answer.state == "ready":
            state.joined = True
            if all(state.joined for state in self._states):
                self._go()
        elif answer.state == "where":
            state.where = answer
        else:
            state.answer = answer
            state.ready = True

    def _go(self):
        for state, connection in zip(self._states, self._connections, strict=True):
            state.ready = True
            with contextlib.suppress(OSError):
                connection.send("go")

    def _read(self, rank, descriptor):
        data = os.read(descriptor, 1 << 16)
        if data:
            self._display.feed(rank, data)
        else:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _exits(self):
        for rank, code in self._handle.exits():
            self._states[rank].exit_code = code
            self._states[rank].ended_at = time.monotonic() - _NEWS

    def _stop(self, failed):
        """Ends the ranks, then reads what they still had to say."""
        patience = 10.0 if any(state.ready for state in self._states) else 0.3
        if hasattr(self, "_handle"):
            if self._handle.channel is not None:
                self._selector.unregister(self._handle.channel)
            # a server that is still loading ends the ranks as soon as it has started them
            self._handle.end(patience)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)
        deadline = time.monotonic() + min(patience, 1.0)
        while self._readers() and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.05):
                if key.data[0] == self._read:
                    self._read(*key.data[1:])
                else:
                    self._selector.unregister(key.fileobj)
        for key in self._readers():
            os.close(key.fd)
        self._selector.close()
        for part in (*self._connections, *self._logs):
            part.close()
        self._display.close(failed=failed)

    def _readers(self):
        return [key for key in self._selector.get_map().values() if key.data[0] == self._read]


def _cell_sources():
    """The sources of the notebook's cells, which exist in no file."""
    import linecache

    return {name: "".join(entry[2]) for name, entry in list(linecache.cache.items())
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)}


def _oom_kills():
    """How often the system has killed a process here because memory ran out (Linux cgroups)."""
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.events") as file:
        return int(dict(line.split() for line in file)["oom_kill"])
    return 0
