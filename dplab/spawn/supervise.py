"""The parent's judgement of a run: what the ranks say and call, and whether it can still end."""

import contextlib
import math
import time

from dplab.spawn import calls, deadlock, report, transport
from dplab.spawn.errors import Interrupted
from dplab.spawn.interrupts import Interrupts
from dplab.spawn.ranks import Ranks

_TICK = 0.1  # seconds between two looks at the call logs
_GRACE = 0.15  # seconds that other ranks have to fail too, after the first did
_PROBE = 0.4  # seconds between two questions to ranks that are late
_START = 120.0  # seconds that ranks have to start


class Supervisor:
    """One run, from its first fork to the last process gone."""

    def __init__(self, payload: memoryview, world_size: int, *, timeout: float, **job):
        self._payload, self._timeout, self._job = payload, timeout, job
        self._ranks = Ranks(world_size)
        self._states = self._ranks.states
        self._interrupts = Interrupts()
        self._comparison = calls.CallComparison()
        self._meetings = deadlock.Meetings()
        self._called_at = 0.0
        self._oom_kills = _oom_kills()

    @property
    def has_begun(self) -> bool:
        """Whether a rank may have begun with its function."""
        return any(state.ready for state in self._states)

    def run(self) -> list:
        """The ranks' values in rank order. Raises `RankError`, `Interrupted` or `ServerEnded`."""
        failed = True
        try:
            with self._interrupts:
                try:
                    self._ranks.start(self._payload, timeout=max(self._timeout, _START),
                                      **self._job)
                    failure = self._watch()
                except KeyboardInterrupt:
                    failure = self._interrupted()
                finally:
                    self._interrupts.put_off()
                    self._ranks.stop()
            failed = failure is not None
        finally:
            self._ranks.display.close(failed)
        if self._interrupts.noted and not isinstance(failure, Interrupted):
            failure = Interrupted(report.of_interrupt(self._states))
        if failure is not None:
            raise failure
        return [self._value_of(state) for state in self._states]

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
            self._ranks.listen(_TICK)
            if self._interrupts.noted:
                return self._interrupted()
            mismatch = self._compared()
            if mismatch:
                return mismatch
            if any(state.failed for state in self._states):
                return self._failure()
            if all(state.finished for state in self._states):
                return None
            now = time.monotonic()
            if not all(state.ready for state in self._states):
                if self._ranks.have_lost_their_store():
                    self._ranks.ask_where()
                    return report.of_lost_store(self._states, self._ranks.folder)
                if now > started + _START:
                    self._ranks.ask_where()
                    return report.of_slow_start(self._states, _START)
                ready_at = now
                continue
            if now > ready_at + self._timeout:
                self._ranks.ask_where()
                return self._compared() or report.of_stuck(self._states, self._timeout)
            silent = self._meetings.any_unmet and now > self._called_at + _PROBE
            if silent or any(state.finished for state in self._states):
                next_probe = next_probe or now + _PROBE
                if now > next_probe:
                    self._ranks.ask_where()
                    next_probe = time.monotonic() + _PROBE
                    hopeless = self._hopeless()
                    if hopeless and hopeless == before:
                        return (report.of_deadlock(self._states, hopeless)
                                if isinstance(hopeless, dict)
                                else report.of_stuck(self._states, self._timeout))
                    before = hopeless

    def _interrupted(self):
        self._ranks.ask_where()
        return Interrupted(report.of_interrupt(self._states))

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
            self._ranks.listen(0.02)
        self._ranks.ask_where()
        kills = _oom_kills()
        for state, log in zip(self._states, self._ranks.logs, strict=True):
            state.out_of_memory = kills > self._oom_kills
            state.last_call = log.last
        return self._compared() or report.of_failure(self._states, self._ranks.folder)

    def _compared(self):
        """The error of a mismatch between the ranks' calls, or None."""
        mismatch = self._compare()
        if mismatch is None:
            return None
        place = mismatch[1]
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and len(place) < next(iter(place.values())).group_size:
            self._ranks.listen(0.02)
            self._compare()
        self._ranks.ask_where()
        return report.of_mismatch(mismatch, self._states)

    def _compare(self):
        found = None
        for state, log in zip(self._states, self._ranks.logs, strict=True):
            new_calls = log.new_calls()
            found = self._comparison.add(state.rank, new_calls) or found
            self._meetings.add(state.rank, new_calls)
            state.last_call = log.last
            if new_calls:
                self._called_at = time.monotonic()
        for state in self._states:
            state.unmet = self._meetings.unmet(state.rank)
        return found


def _oom_kills():
    """How often the system has killed a process here because memory ran out (Linux cgroups)."""
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.events") as file:
        return int(dict(line.split() for line in file)["oom_kill"])
    return 0
