"""A real IPython kernel for tests of the launcher, and a look at the processes it leaves."""

import contextlib
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field

import cloudpickle
import psutil
from jupyter_client.manager import KernelManager

cloudpickle.register_pickle_by_value(sys.modules[__name__])
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Reply:
    """What a cell showed."""

    status: str = "running"
    text: str = ""  # stdout, stderr, the last state of each display, the value, in this order
    error: str = ""
    value: str = ""
    displays: dict = field(default_factory=dict)  # an empty one was taken away
    history: list = field(default_factory=list)  # each state of each display, as text


class Kernel:
    """``with Kernel() as kernel: kernel.run("1 + 1").value``"""

    def __init__(self, **environment):
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(env={**os.environ, "DPLAB_LIVE": "0", **environment})
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        self.process = psutil.Process(self._manager.provisioner.pid)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        left = descendants(self.process)
        with contextlib.suppress(Exception):
            self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        wait_until_gone(left, 20)

    def start(self, code):
        """Sends a cell, and returns at once."""
        self._message = self._client.execute(code)

    def finish(self, timeout=60) -> Reply:
        """Waits for the cell that `start` sent."""
        reply, streams, deadline = Reply(), "", time.monotonic() + timeout
        for kind, content in self._answers(self._client.get_iopub_msg, deadline):
            if kind == "stream":
                streams += content["text"]
            elif kind in ("display_data", "update_display_data"):
                key = content.get("transient", {}).get("display_id", len(reply.displays))
                reply.displays[key] = content["data"]
                reply.history.append(content["data"].get("text/plain", ""))
            elif kind == "execute_result":
                reply.value = content["data"]["text/plain"]
            elif kind == "error":
                reply.error = _ANSI.sub("", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                break
        _, content = next(self._answers(self._client.get_shell_msg, deadline + 30))
        reply.status = content["status"]
        shown = [data["text/plain"] for data in reply.displays.values() if data]
        reply.text = "\n".join([streams, *shown, reply.value])
        return reply

    def _answers(self, get, deadline):
        """The kernel's messages on the cell that `start` sent: kind and content of each."""
        while True:
            message = get(timeout=max(deadline - time.monotonic(), 0.01))
            if message["parent_header"].get("msg_id") == self._message:
                yield message["msg_type"], message["content"]

    def run(self, code, timeout=60) -> Reply:
        self.start(code)
        return self.finish(timeout)

    def until_displayed(self, text, timeout=30):
        """The first display whose text contains ``text``, while the cell still runs."""
        for _, content in self._answers(self._client.get_iopub_msg, time.monotonic() + timeout):
            data = content.get("data", {})
            if text in data.get("text/plain", ""):
                return data

    def interrupt(self):
        """What the ■ button does."""
        self._manager.interrupt_kernel()

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)

    def ranks(self, count):
        """Waits until the fork server has at least ``count`` descendants; returns all of them."""
        return wait_for(lambda: (found := descendants(self.process, below_server=True))
                        and len(found) >= count and found)


def descendants(process, below_server=False):
    """A process's descendants, or those of its fork server alone."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        found = process.children(recursive=True)
    if below_server:
        return [rank for child in found if is_server(child) for rank in descendants(child)]
    return found


def is_server(process):
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE and (
            "dplab.spawn.server.forkserver" in process.cmdline())
    return False


def server_of(process=None):
    """The fork server of a process (by default of this one)."""
    # a rank has its server's command line: the server is the child
    return next(child for child in (process or psutil.Process()).children() if is_server(child))


def kill_server():
    """Ends this process's fork server, and waits until it has ended."""
    server = server_of()
    server.kill()
    wait_for(lambda: server.status() == psutil.STATUS_ZOMBIE)


def wait_for(condition, timeout=30):
    """The condition's value as soon as it is true."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true after {timeout} s"
        time.sleep(0.02)
    return value


def wait_until_gone(processes, timeout):
    """Asserts that all have ended (a zombie has) within ``timeout`` seconds."""
    def alive(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    wait_for(lambda: not any(map(alive, processes)), timeout)


def no_ranks_left():
    """Asserts that this process's fork server has no process below it."""
    assert not server_of().children(recursive=True)
