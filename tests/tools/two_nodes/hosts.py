"""Hosts on one machine: network namespaces, each with a name and an address, on one slow link.

For Linux, as root, with iproute2's `ip` and `tc`. Each host has its own loopback, its own host name
and its own ``/etc/hosts``; a veth pair joins the two, and tc's token bucket limits what each end
sends. They share the disk, as the nodes of a cluster do.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

INTERFACE, MTU = "eth0", 9000
HEADERS = 14 + 20 + 20 + 12  # of a packet: Ethernet, IPv4, TCP, and TCP's time stamps
# The last line: torch 2.13's torchrun keeps one store for all restarts, and in it a new rank may
# find the address of a dead one; with this, each restart gets a store of its own.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1",
               "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_OWN_FILES = Path("/etc/netns")  # `ip netns exec` lays NAME/hosts over /etc/hosts


def missing() -> str | None:
    """Why there can be no hosts here, or None if they can be made."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    absent = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    return f"no {' and no '.join(absent)}: install iproute2 and util-linux" if absent else None


class Hosts:
    """Two hosts, as a context manager; on leaving it their processes and namespaces are gone.

    names: their host names, which each can resolve. rate: of the link in each direction, in bits/s.
    ``spaces`` are the namespaces' names, ``files`` what each host has as its ``/etc/hosts``.
    """

    def __init__(self, names=("node-0", "node-1"), rate: float = 400e6):
        self.names, self.rate = tuple(names), rate
        self.addresses = [f"10.77.0.{number}" for number in (1, 2)]
        tag = f"dplab-{os.getpid()}-{secrets.token_hex(3)}"
        self.spaces = [f"{tag}-{number}" for number in (0, 1)]
        self.files = [_OWN_FILES / space / "hosts" for space in self.spaces]
        self._started: list[subprocess.Popen] = []

    def __enter__(self):
        try:
            for space in self.spaces:
                _ip("netns", "add", space)
                _ip("-n", space, "link", "set", "lo", "up")
            one, other = self.spaces
            _ip("link", "add", INTERFACE, "netns", one, "type", "veth",
                "peer", "name", INTERFACE, "netns", other)
            for number in (0, 1):
                self._connect(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _connect(self, number):
        space = self.spaces[number]
        _ip("-n", space, "address", "add", f"{self.addresses[number]}/24", "dev", INTERFACE)
        _ip("-n", space, "link", "set", INTERFACE, "mtu", str(MTU), "up")
        # A queue longer than what TCP has in flight: nothing is dropped, so nothing is sent twice.
        _ip("netns", "exec", space, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf",
            "rate", f"{self.rate:.0f}bit", "burst", "256kb", "limit", "64mb")
        known = {"localhost": "127.0.0.1", **dict(zip(self.names, self.addresses, strict=True))}
        self.files[number].parent.mkdir(parents=True)
        self.files[number].write_text("".join(f"{known[name]} {name}\n" for name in known))

    def __exit__(self, *_):
        self.end_all()
        for process in self._started:
            process.wait()
        for space, file in zip(self.spaces, self.files, strict=True):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)
            shutil.rmtree(file.parent, ignore_errors=True)

    def start(self, number: int, command, env=None, **options) -> subprocess.Popen:
        """Starts a command on host ``number``, with ``env`` added to the environment."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[number]]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.spaces[number], *named, *map(str, command)],
            env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, text=True, **options)
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """The processes on both hosts."""
        found = [subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
                 for space in self.spaces]
        return [int(pid) for each in found for pid in each.stdout.split()]

    def end_all(self) -> None:
        """Kills what runs on the hosts: their namespaces hold nobody else's processes."""
        while pids := self.pids():  # again, for those that were just being started
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def start_job(hosts: Hosts, per_node: int, script, **options) -> list[subprocess.Popen]:
    """torchrun on each host, as one would type it there. script: its path and arguments."""
    return [hosts.start(number, [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", len(hosts.names),
        "--nproc-per-node", per_node, "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{hosts.names[0]}:29500", *script],
        env=ENVIRONMENT, **options) for number in range(len(hosts.names))]


def _ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
