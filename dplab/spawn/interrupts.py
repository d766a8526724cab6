"""The ■ button and Ctrl-C during a run: noted, and acted upon where nothing is half done."""

import signal
import threading
import time

_PATIENCE = 3.0  # seconds after which a second press is not put off any more


class Interrupts:
    """As a context manager: an interrupt no longer raises KeyboardInterrupt wherever it strikes.

    A handler other than Python's own stays, and threads but the main one have none.
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
