"""One run of the soak: starts it, does to it what is planned, and looks at how it ended."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from soak.notebook import Notebook
from soak.plan import ANY, Plan


class Place:
    """The notebooks, and the bystanders, as a context manager."""

    def __enter__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="dplab-soak-"))
        self._notebooks = {}
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
        for notebook in self._notebooks.values():
            notebook.end()
        self._process.kill()
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._files[1].parent)
        shutil.rmtree(self._folder)

    def notebook(self, name) -> Notebook:
        notebook = self._notebooks.get(name)
        if notebook is None or not notebook.process.is_running():
            notebook = self._notebooks[name] = Notebook(self._folder, name == "cramped")
        return notebook

    def replace(self, notebook) -> list[psutil.Process]:
        """Ends a notebook; the next one of its name is new. Returns what was below it."""
        self._notebooks = {key: value for key, value in self._notebooks.items()
                           if value is not notebook}
        return notebook.end()

    def disturbed(self) -> list[str]:
        """What happened to the bystanders."""
        found = [f"the bystander {file} is gone or changed" for file in self._files
                 if not file.exists() or file.read_text() != "a bystander's"]
        if (self._process.poll() is not None
                or psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED):
            found.append("the bystanding process was ended or stopped")
        return found


class Attempt:
    """One run, and where there is one, the run in another notebook beside it."""

    def __init__(self, place: Place, plan: Plan, allowance: float):
        self._place = place
        runs = [_Run(place.notebook("cramped" if plan.cramped else "one"), plan, allowance)]
        if plan.beside:
            runs.append(_Run(place.notebook("another"), plan.beside, allowance))
        for run in runs:
            run.begin()
        while not all([run.has_ended() for run in runs]):
            time.sleep(0.002)
        self._runs = runs

    @property
    def seconds(self) -> float:
        return max(run.seconds for run in self._runs)

    @property
    def bound(self) -> float:
        return max(run.bound for run in self._runs)

    def complaints(self) -> list[str]:
        found = [text for run in self._runs for text in run.complaints()]
        for run in self._runs:
            if run.reply is None:
                found += run.remains(self._place.replace(run.notebook))
            else:
                again = _Run(run.notebook, Plan(2), 30.0)
                again.begin()
                while not again.has_ended():
                    time.sleep(0.002)
                found += [f"the run after it: {text}" for text in again.complaints()]
        return found + self._place.disturbed()


class _Run:
    """One run in one notebook."""

    def __init__(self, notebook, plan, allowance):
        self.notebook, self.plan = notebook, plan
        self.reply, self.seconds = None, None
        self.bound = plan.bound + allowance
        self._acts = _acts(plan)
        self._killed, self._below, self._folders = False, [], set()

    def begin(self):
        if "first run" in self.plan.outside:
            server = self.notebook.server()
            if server:
                server.kill()
                while server.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.01)
        self.notebook.start(self.plan.task)
        self._since = time.monotonic()
        self._began = self._since

    def has_ended(self) -> bool:
        """Does what is to be done from outside, and looks whether the run is over."""
        if self.seconds is not None:
            return True
        now = time.monotonic()
        if self._acts and now > self._began + self._acts[0][0] and self._done(self._acts[0][1]):
            del self._acts[0]
            self._since = now
        ended = self.notebook.ended(0)
        if self._killed:
            self.seconds = now - self._since
        elif ended or now > self._since + 2 * self.bound + self._extra():
            self.reply = self.notebook.finish(0)
            self.seconds = now - self._since
        return self.seconds is not None

    def _extra(self):
        return max(ends.seconds for ends in self.plan.ends)

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
        else:
            self.bound += max(ends.seconds for ends in fitting)
        if self.seconds > self.bound:
            found.append(f"{self.seconds:.1f} s, and not {self.bound:.1f} s at most")
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

    def remains(self, below) -> list[str]:
        """What is left of a notebook that was killed."""
        started = time.monotonic()
        _, alive = psutil.wait_procs([*self._below, *below], timeout=self.bound)
        self.seconds += time.monotonic() - started
        found = [f"process {process.pid} outlived its notebook" for process in alive]
        found += [f"{folder} outlived its notebook" for folder in self._folders
                  if folder.exists()]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return found


def _acts(plan):
    """(seconds after the start, what is then done from outside), in order."""
    if not plan.outside:
        return []
    act = plan.outside.removesuffix(" twice").replace("interrupt first run", "interrupt")
    twice = plan.outside.endswith("twice")
    return [(plan.moment, act)] + ([(plan.moment + 0.1, act)] if twice else [])
