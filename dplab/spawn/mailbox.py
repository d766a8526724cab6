"""The parent's end of a connection to a rank. Nothing here waits, whatever the rank does: one that
is stopped in the middle of a message, or reads none, does not stop the parent.
"""

import collections
import pickle
import socket
import struct

_READS = 16  # at most, before the other ranks get their turn
_LENGTH, _LONG = struct.Struct("!i"), struct.Struct("!Q")  # as multiprocessing.connection has them


class Mailbox:
    """Exchanges messages with a rank's `multiprocessing.connection.Connection`."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._socket = sock
        self._outgoing: collections.deque[memoryview] = collections.deque()
        self._missing: memoryview
        self._incoming = self._expect(_LENGTH.size)
        self._reads = self._length

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

    def receive(self) -> list[bytearray]:
        """The messages that have become complete. Raises EOFError once the rank is gone."""
        messages: list[bytearray] = []
        for _ in range(_READS):
            if self._missing:
                try:
                    count = self._socket.recv_into(self._missing)
                except BlockingIOError:
                    break
                except OSError:
                    count = 0
                if not count and messages:
                    break  # the rank's last words first
                if not count:
                    raise EOFError
                self._missing = self._missing[count:]
            if not self._missing:
                self._reads(messages)
        return messages

    def _expect(self, size):
        data = bytearray(size)
        self._missing = memoryview(data)
        return data

    def _length(self, _):
        (size,) = _LENGTH.unpack(self._incoming)
        self._reads = self._body if size >= 0 else self._long_length
        self._incoming = self._expect(size if size >= 0 else _LONG.size)

    def _long_length(self, _):
        self._reads = self._body
        self._incoming = self._expect(*_LONG.unpack(self._incoming))

    def _body(self, messages):
        messages.append(self._incoming)
        self._reads = self._length
        self._incoming = self._expect(_LENGTH.size)
