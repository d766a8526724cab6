"""One run of the soak: starts it, does to it what is planned, and looks at how it ended."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from cases import ANY, Plan
from notebook import Notebook

ALLOWANCE = 5.0  # seconds that a loaded machine may add to each bound


class Place:
    """The notebook, and the bystanders, as a context manager."""

    def __enter__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="dplab-soak-"))
        self._notebook = None
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()", "-m",
             "dplab.spawn.server.forkserver"],
            start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._files = [Path(tempfile.mkdtemp(prefix="dplab-", dir=folder)) / "calls-0"
                       for folder in (self._folder, "/dev/shm")]
        for file in self._files:
            file.write_text("a bystander's")
        return self

    def __exit__(self, *_):
        if self._notebook:
            self._notebook.end()
        self._process.kill()
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._files[1].parent)
        shutil.rmtree(self._folder)

    def notebook(self) -> Notebook:
        if self._notebook is None or not self._notebook.process.is_running():
            self._notebook = Notebook(self._folder)
        return self._notebook

    def disturbed(self) -> list[str]:
        """What happened to the bystanders."""
        found = [f"the bystander {file} is gone or changed" for file in self._files
                 if not file.exists() or file.read_text() != "a bystander's"]
        if (self._process.poll() is not None
                or psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED):
            found.append("the bystanding process was ended or stopped")
        return found


def attempt(place: Place, plan: Plan) -> tuple[float, list[str]]:
    """Makes the run, and a healthy one after it: the seconds of the first, and what was wrong."""
    run = Run(place.notebook(), plan, plan.bound + ALLOWANCE)
    run.go()
    found = run.complaints()
    if run.reply is None:
        found += run.remains()
    else:
        again = Run(run.notebook, Plan(2), 30.0)
        again.go()
        found += [f"the run after it: {text}" for text in again.complaints()]
    return run.seconds, found + place.disturbed()


class Run:
    """One run in the notebook. ``reply``: how it ended there; None where it did not."""

    def __init__(self, notebook, plan, bound):
        self.notebook, self.plan, self.bound = notebook, plan, bound
        self.reply, self.seconds = None, None
        self._killed, self._below, self._folders = False, [], set()
        act = plan.outside.removesuffix(" twice").replace("interrupt first run", "interrupt")
        moments = [plan.moment, plan.moment + 0.1] if plan.outside.endswith("twice") else [
            plan.moment] * bool(act)
        self._acts = [(moment, act) for moment in moments]

    def go(self):
        """Starts it, does from outside what is to be done, and waits for its end."""
        if "first run" in self.plan.outside and (server := self.notebook.server()):
            server.kill()
            while server.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
        self.notebook.start(self.plan.task)
        began = since = time.monotonic()
        longest = 2 * self.bound + max(ends.seconds for ends in self.plan.ends)
        while True:
            now = time.monotonic()
            if self._acts and now > began + self._acts[0][0] and self._done(self._acts[0][1]):
                del self._acts[0]
                since = now
            if self._killed:
                break
            if self.notebook.ended(0.002) or now > since + longest:
                self.reply = self.notebook.finish(0)
                break
        self.seconds = now - since

    def _done(self, act):
        """Does it if it can be done now."""
        ranks, notebook = self.notebook.ranks(), self.notebook
        with contextlib.suppress(psutil.Error, OSError):
            if act in ("kill", "stop"):
                if len(ranks) <= self.plan.which:
                    return False
                rank = ranks[self.plan.which]
                rank.kill() if act == "kill" else rank.suspend()
            elif act == "kill server":
                server = notebook.server()
                if server is None:
                    return False
                notebook.killed_server = server.pid
                server.kill()
            elif act == "kill notebook":
                self._below = notebook.process.children(recursive=True)
                self._folders = notebook.folders()
                notebook.process.kill()
                self._killed = True
            else:
                notebook.interrupt()
            return True
        return False

    def complaints(self) -> list[str]:
        if self.reply is None:
            return [] if self._killed else [f"no end after {self.seconds:.1f} s"]
        reply, found = self.reply, []
        fitting = [ends for ends in self.plan.ends if self._fits(ends)]
        if not fitting:
            found.append(f"{reply['outcome']}, rank {reply['rank']}, {reply['text'][:900]!r}, and "
                         f"not {' or '.join(map(str, self.plan.ends))}")
        bound = self.bound + max((ends.seconds for ends in fitting), default=0.0)
        if self.seconds > bound:
            found.append(f"{self.seconds:.1f} s, and not {bound:.1f} s at most")
        if reply["outcome"] in ("values", "raised"):
            shown = self.notebook.output()
            found += [f"not shown: {line[:40]!r}" for line in self.plan.output
                      if not any(line in each for each in shown)]
        return found + self.notebook.left(reply["made"])

    def _fits(self, ends):
        reply = self.reply
        if ends.outcome != reply["outcome"]:
            return False
        if ends.outcome == "values":
            return reply["values"] == self.plan.values()
        if ends.outcome == "interrupted" and not reply["made"]:
            return True  # before anything was started
        return (ends.rank in (ANY, reply["rank"])
                and all(text in reply["text"] for text in ends.says))

    def remains(self) -> list[str]:
        """What is left of a notebook that was killed."""
        started = time.monotonic()
        _, alive = psutil.wait_procs([*self._below, *self.notebook.end()], timeout=self.bound)
        self.seconds += time.monotonic() - started
        found = [f"process {process.pid} outlived its notebook" for process in alive]
        found += [f"{folder} outlived its notebook" for folder in self._folders
                  if folder.exists()]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return found
