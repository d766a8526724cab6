"""The ranks of one run as the parent has them: it starts them, talks with them, and ends them."""

import contextlib
import os
import pickle
import selectors
import shutil
import socket
import sys
import tempfile
import time
from typing import Any

from ..between.calls import LOG_BYTES, CallReader
from ..between.errors import SHARED_MEMORY, with_advice
from ..between.messages import Mailbox, Task, log_file
from ..server.start import start_ranks
from . import display, places
from .stages import RankStage, RankState

_ANSWER = 0.5  # seconds that a rank has to say where it is
_NEWS = 0.05  # seconds by which the news of a death may come after the errors that it causes
_MARGIN = 4 << 20  # bytes beside the call logs: the ranks' meeting place, what a crash leaves
_LAST_WORDS = {"raised": RankStage.RAISED, "exited": RankStage.EXITED,
               "unpicklable": RankStage.UNPICKLABLE}


class Ranks:
    """``states`` and call ``logs``, in rank order; ``folder`` is the run's own."""

    def __init__(self, world_size: int):
        self.states = [RankState(rank) for rank in range(world_size)]
        self.logs: list[CallReader] = []
        self.folder = ""
        self.display = display.show(world_size)
        self.heard_at = 0.0  # when one last showed something, by `time.monotonic`
        self._mailboxes: list[Mailbox] = []
        self._selector: Any = None  # these two come with `start`
        self._handle: Any = None

    def start(self, payload: memoryview, **task) -> None:
        """Starts them and hands each its `Task` and the payload. OSError where the machine lacks
        something; `stop` is due in any case."""
        nbytes = len(self.states) * LOG_BYTES
        try:
            self.folder = tempfile.mkdtemp(prefix="dplab-", dir=_folder_with_room(nbytes))
            for state in self.states:
                self.logs.append(CallReader(log_file(self.folder, state.rank)))
            self._start(payload)
        except OSError as error:
            raise with_advice(error, len(self.states), nbytes) from None
        common = {
            "world_size": len(self.states), "folder": self.folder,
            "environment": dict(os.environ), "directory": os.getcwd(), "path": list(sys.path),
            "sources": places.sources_of_cells(), "in_ipython": places.ipython() is not None,
            **task}
        for state, mailbox in zip(self.states, self._mailboxes, strict=True):
            mailbox.send(Task(rank=state.rank, **common))
            mailbox.send_bytes(payload)
            self._listen_to(state)

    def _start(self, payload):
        self._selector = selectors.DefaultSelector()
        pairs = []
        try:
            for state in self.states:
                ours, theirs = socket.socketpair()
                reader, writer = os.pipe()
                pairs.append((theirs.detach(), writer))
                self._mailboxes.append(Mailbox(ours))
                self._selector.register(ours, selectors.EVENT_READ, (self._hear, state.rank))
                self._selector.register(reader, selectors.EVENT_READ,
                                        (self._read, state.rank, reader))
            self._handle = start_ranks(self.folder, pairs, payload)
        finally:
            for descriptor in (descriptor for pair in pairs for descriptor in pair):
                os.close(descriptor)
        if self._handle.channel is not None:
            self._selector.register(self._handle.channel, selectors.EVENT_READ, (self._exits,))

    def ask_where(self) -> None:
        """Asks every rank that is at work where it is, and waits a little for answers."""
        asked = [state for state in self.states if state.at_work]
        for state in asked:
            state.where = None
            self._say(state, "where")
        deadline = time.monotonic() + _ANSWER
        while time.monotonic() < deadline and any(
                state.where is None and state.at_work for state in asked):
            self.listen(0.02)

    def listen(self, seconds: float) -> None:
        """Takes in what comes within that time: words, output, exits."""
        for key, _ in self._selector.select(seconds):
            handler, *rest = key.data
            handler(*rest)
        self._exits()
        self.display.refresh()

    def _hear(self, rank):
        state, mailbox = self.states[rank], self._mailboxes[rank]
        mailbox.flush()
        try:
            for message in mailbox.receive():
                self._take(state, message)
        except (EOFError, OSError):
            self._selector.unregister(mailbox)
            return
        self._listen_to(state)

    def _take(self, state, message):
        if state.coming is not None:
            state.value, state.answer, state.coming = message, state.coming, None
            state.stage = RankStage.RETURNED
            return
        answer = pickle.loads(message)
        self.display.warnings.add(state.rank, answer.warned)
        if answer.state == "where":
            state.where = answer
        elif answer.state == "done":
            state.coming = answer
            if not state.died:
                state.stage = RankStage.RETURNING
        elif answer.state != "ready":
            state.answer = answer
            state.stage = _LAST_WORDS[answer.state]
        elif not state.died:
            state.stage = RankStage.JOINED
            if all(state.stage is RankStage.JOINED for state in self.states):
                self._go()

    def _go(self):
        for state in self.states:
            state.stage, state.has_run = RankStage.RUNNING, True
            self._say(state, "go")

    def _say(self, state, word):
        self._mailboxes[state.rank].send(word)
        self._listen_to(state)

    def _listen_to(self, state):
        """Looks for what comes, and as long as there is something to send, for room for it."""
        mailbox = self._mailboxes[state.rank]
        key = self._selector.get_map().get(mailbox)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if mailbox.has_more_to_send else 0)
        if key is not None and key.events != events:
            self._selector.modify(mailbox, events, key.data)

    def _read(self, rank, descriptor):
        data = os.read(descriptor, 1 << 16)
        if data:
            self.heard_at = time.monotonic()
            self.display.feed(rank, data)
        else:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _exits(self):
        for rank, code in self._handle.exits():
            state = self.states[rank]
            state.exit_code, state.ended_at = code, time.monotonic() - _NEWS
            if state.at_work:
                state.stage = RankStage.DIED

    def stop(self) -> None:
        """Ends the ranks, then reads what they still had to say."""
        gone = False
        if self._handle is not None:
            if self._handle.channel is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(self._handle.channel)
            gone = self._handle.end()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._selector is not None:
            self._read_the_rest(1.0 if gone else 0.3)
        for mailbox in self._mailboxes:
            mailbox.close()
        for log in self.logs:
            log.close()

    def _read_the_rest(self, seconds):
        deadline = time.monotonic() + seconds
        while self._readers() and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.05):
                if key.data[0] == self._read:
                    self._read(*key.data[1:])
                else:
                    self._selector.unregister(key.fileobj)
        for key in self._readers():
            os.close(key.fd)
        self._selector.close()

    def _readers(self):
        return [key for key in self._selector.get_map().values() if key.data[0] == self._read]


def _folder_with_room(nbytes):
    """Where a run's files lie: in shared memory if there is room, else (None) as tempfile has it.

    Docker gives a container 64 MB of shared memory, and some sandboxes none.
    """
    with contextlib.suppress(OSError):
        if (os.access(SHARED_MEMORY, os.W_OK)
                and shutil.disk_usage(SHARED_MEMORY).free > nbytes + _MARGIN):
            return SHARED_MEMORY
    return None
