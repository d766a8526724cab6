"""The parent's judgement of a run: what the ranks say and call, and whether it can still end."""

import math
import signal
import threading
import time

from ..between import values
from ..between.errors import Interrupted
from . import report
from .display import is_live
from .matching import CallComparison, Meetings, waits_without_end
from .ranks import Ranks

_TICK = 0.1  # seconds between two looks at the call logs
_GRACE = 0.15  # seconds that other ranks have to fail too, after the first did
_PROBE = 0.4  # seconds between two questions to ranks that are late
_START = 120.0  # seconds that ranks have to start
SILENCE = 5.0  # seconds without output and calls, until it is said where the ranks are
_WHERE = 2.0  # seconds between two looks at that
_PATIENCE = 3.0  # seconds after which a second press of ■ is not put off any more


class Supervisor:
    """One run, from its first fork to the last process gone."""

    def __init__(self, payload: memoryview, world_size: int, *, timeout: float, **task):
        self._payload, self._timeout, self._task = payload, timeout, task
        self._ranks = Ranks(world_size)
        self._states = self._ranks.states
        self._since = 0.0  # when they began to start, then to work, by `time.monotonic`
        self._interrupts = _Interrupts()
        self._comparison = CallComparison()
        self._meetings = Meetings()
        self._called_at = 0.0
        self._next_probe = 0.0  # none is due
        self._hopeless_before = None
        self._next_look = 0.0  # at where silent ranks are

    @property
    def has_begun(self) -> bool:
        """Whether a rank may have begun with its function."""
        return any(state.has_run for state in self._states)

    def run(self) -> list:
        """The ranks' values in rank order. Raises `RankError`, `Interrupted` or `ServerEnded`."""
        failure: BaseException | None = None
        try:
            with self._interrupts:
                try:
                    self._ranks.start(self._payload, timeout=max(self._timeout, _START),
                                      **self._task)
                    failure = self._watch()
                except KeyboardInterrupt:
                    failure = self._interrupted()
                finally:
                    self._interrupts.put_off()
                    self._ranks.stop()
        finally:
            self._ranks.display.close(failure)
        if self._interrupts.noted and not isinstance(failure, Interrupted):
            failure = Interrupted(report.of_interrupt(self._states))
        if failure is not None:
            raise failure
        return [self._value_of(state) for state in self._states]

    def _value_of(self, state):
        data, state.value = state.value, None  # large values are not held twice
        try:
            return values.loads(data)
        except Exception as error:
            state.answer.text = ("the returned value could not be loaded here "
                                 f"({type(error).__name__}: {error})")
            raise report.of_unpicklable(state, self._states) from None

    def _watch(self):
        """Until the run has ended. Returns the error, or None if every rank has returned."""
        self._since = time.monotonic()  # the time to fork them does not count
        starting = True
        while True:
            self._ranks.listen(_TICK)
            if starting and not any(state.is_starting for state in self._states):
                starting, self._since = False, time.monotonic()
            error = self._press() or self._mismatch() or self._failure()
            if error or all(state.finished for state in self._states):
                return error
            if error := self._late_start() if starting else self._late() or self._no_end():
                return error
            self._say_where()

    def _say_where(self):
        """Says where the ranks are, once they have shown and called nothing for a while."""
        now, display = time.monotonic(), self._ranks.display
        if now < max(self._since, self._called_at, self._ranks.heard_at) + SILENCE:
            display.say([])
        elif is_live() and now > self._next_look:
            self._next_look = now + _WHERE
            self._ranks.ask_where()
            display.say(report.whereabouts(self._states), now - self._since)

    # What ends a run: each gives the error, or None.

    def _press(self):
        return self._interrupted() if self._interrupts.noted else None

    def _interrupted(self):
        self._ranks.ask_where()
        return Interrupted(report.of_interrupt(self._states))

    def _mismatch(self):
        """Ranks' calls that do not agree."""
        found = self._compare()
        if found is None:
            return None
        place = found[1]
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and len(place) < next(iter(place.values())).group_size:
            self._ranks.listen(0.02)
            self._compare()
        self._ranks.ask_where()
        return report.of_mismatch(found, self._states)

    def _failure(self):
        """A rank raised, exited or died."""
        if not any(state.failed for state in self._states):
            return None
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and not all(
                state.failed or state.finished for state in self._states):
            self._ranks.listen(0.02)
        self._ranks.ask_where()
        return self._mismatch() or report.of_failure(self._states, self._ranks.folder)

    def _late_start(self):
        if time.monotonic() > self._since + _START:
            self._ranks.ask_where()
            return report.of_slow_start(self._states, _START)
        return None

    def _late(self):
        if time.monotonic() < self._since + self._timeout:
            return None
        self._ranks.ask_where()
        if all(state.finished for state in self._states):  # the last ones while they were asked
            return None
        return self._mismatch() or report.of_stuck(self._states, self._timeout)

    def _no_end(self):
        """Ranks that wait for what will never come, seen twice in a row.

        There is a doubt once a rank has returned while others run, or sends and receives without
        counterpart have met with silence.
        """
        now = time.monotonic()
        silent = self._meetings.any_unmet and now > self._called_at + _PROBE
        if not silent and not any(state.finished for state in self._states):
            return None
        self._next_probe = self._next_probe or now + _PROBE
        if now <= self._next_probe:
            return None
        self._ranks.ask_where()
        self._next_probe = time.monotonic() + _PROBE
        hopeless, before = self._hopeless(), self._hopeless_before
        self._hopeless_before = hopeless
        if not hopeless or hopeless != before:
            return None
        if isinstance(hopeless, dict):
            return report.of_deadlock(self._states, hopeless)
        return report.of_stuck(self._states, self._timeout)

    def _hopeless(self):
        """What will never come: {rank: the ranks it waits for} of a deadlock, or (rank, number) of
        a collective that a rank which has returned never launched; else None.
        """
        if waits := waits_without_end(self._states):
            return waits
        least = min((state.answer.launched for state in self._states if state.finished),
                    default=math.inf)
        for state in self._states:
            if not state.finished and state.where:
                for call in state.where.waiting:
                    if call.is_collective_of_all and call.number > least:
                        return state.rank, call.number
        return None

    def _compare(self):
        """Takes in what the ranks have called since the last time; a first mismatch, or None."""
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


class _Interrupts:
    """The ■ button and Ctrl-C during a run: noted, and acted upon where nothing is half done.

    As a context manager: an interrupt no longer raises KeyboardInterrupt wherever it strikes. A
    handler other than Python's own stays, and threads but the main one have none.
    """

    def __init__(self):
        self.noted = False
        self._first = 0.0
        self._is_set = False

    def __enter__(self):
        self._is_set = (threading.current_thread() is threading.main_thread()
                        and signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        if self._is_set:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_):
        if self._is_set:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def put_off(self):
        """From now on, no press is acted upon: what follows is short, and must be done whole."""
        self._first = float("inf")

    def _note(self, *_):
        now = time.monotonic()
        if self.noted and now > self._first + _PATIENCE:
            raise KeyboardInterrupt  # nobody has looked: the parent writes to a full pipe
        if not self.noted:
            self._first = max(self._first, now)
        self.noted = True
