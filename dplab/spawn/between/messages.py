"""What the parent and a rank say to each other, and where the files of a run lie.

Both ends speak as `multiprocessing.connection` does. The rank has a `Connection`. The parent has a
`Mailbox` instead, in which nothing ever waits: a `Connection` that has begun to read or to write a
message goes on until it is whole, and a rank that is stopped in the middle would stop the parent.
"""

import collections
import itertools
import os
import pickle
import socket
import struct
import time
from dataclasses import dataclass, field

_AT_ONCE = 16  # messages of a rank, before the others get their turn
_LENGTH, _LONG = struct.Struct("!i"), struct.Struct("!Q")  # as multiprocessing.connection has them


@dataclass
class Task:
    """What the parent tells every rank; the function and its arguments follow as bytes."""

    rank: int
    world_size: int
    backend: str
    seed: int
    folder: str
    timeout: float
    environment: dict
    directory: str
    path: list
    sources: dict = field(repr=False, default_factory=dict)
    in_ipython: bool = False


@dataclass
class Frame:
    """One line of a traceback or of a stack, outermost first."""

    file: str
    line: int
    function: str
    first: int = 1  # the first line of the function


@dataclass
class InFlight:
    """A call that was launched and is not complete, as torch's flight recorder has it."""

    operation: str
    number: int
    tensor: str  # dtype and shape
    is_collective_of_all: bool  # in the default group

    def __str__(self):
        return f"{self.operation} number {self.number}" + (f" of {self.tensor}" * bool(self.tensor))


@dataclass
class Answer:
    """What a rank says, by ``state``: it is "ready" (has joined); "where" it is; "done" (the value
    follows as bytes), or it "raised", "exited" or is "unpicklable".

    ``time`` is `time.monotonic`, in seconds; ``launched`` is the number of the last collective in
    the default group, ``waiting`` has what was launched and is not complete, and ``warned`` has
    (category, text, file, line) of each of Python's warnings since the last answer.
    """

    state: str
    text: str = ""
    kind: str = ""
    frames: list[Frame] = field(default_factory=list)
    launched: int = 0
    waiting: list[InFlight] = field(default_factory=list)
    warned: list[tuple] = field(default_factory=list)
    time: float = field(default_factory=time.monotonic)


def log_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"calls-{rank}")


def store_file(folder: str) -> str:
    return os.path.join(folder, "store")


def crash_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"crash-{rank}")


class Mailbox:
    """Exchanges messages with a rank's `multiprocessing.connection.Connection`."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._socket = sock
        self._outgoing: collections.deque[memoryview] = collections.deque()
        self._incoming = self._messages()

    def fileno(self):
        return self._socket.fileno()

    def close(self):
        self._outgoing.clear()
        self._socket.close()

    def send(self, value) -> None:
        self.send_bytes(pickle.dumps(value))

    def send_bytes(self, data) -> None:
        size = len(data)
        head = (_LENGTH.pack(size) if size < 1 << 31 else _LENGTH.pack(-1) + _LONG.pack(size))
        self._outgoing += [memoryview(head), memoryview(data)]
        self.flush()

    def flush(self) -> None:
        """Sends as much as the connection takes now; drops all once the rank is gone."""
        try:
            while self._outgoing:
                sent = self._socket.send(self._outgoing[0])
                self._outgoing[0] = self._outgoing[0][sent:]
                if not self._outgoing[0]:
                    self._outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._outgoing)

    def receive(self):
        """Yields the messages that have become whole. EOFError or OSError: the rank is gone."""
        return itertools.takewhile(lambda message: message is not None,
                                   itertools.islice(self._incoming, _AT_ONCE))

    def _messages(self):
        """Yields each message, and None as often as more of it has to come."""
        while True:
            (size,) = _LENGTH.unpack((yield from self._bytes(_LENGTH.size)))
            if size < 0:
                (size,) = _LONG.unpack((yield from self._bytes(_LONG.size)))
            yield (yield from self._bytes(size))

    def _bytes(self, size):
        data = bytearray(size)
        missing = memoryview(data)
        while missing:
            try:
                count = self._socket.recv_into(missing)
            except BlockingIOError:
                yield None
                continue
            if not count:
                raise EOFError
            missing = missing[count:]
        return data
