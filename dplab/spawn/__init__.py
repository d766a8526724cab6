"""Starts N ranks, runs a function on each, and brings back their values or a diagnosis.

Four rooms. Each imports from those below it in this list, and none imports anything else of the
package that this one is a part of: a copy of this folder, under any name, is a library.

``parent``   the notebook's side. `run` sends a function to ranks, and `magic` a cell. `supervise`
             watches them from the first fork to the last process gone, `ranks` talks with them,
             `stages` has what may become of them, `matching` finds calls that do not fit, `report`
             puts a failure into words with lines as in `places`. `output` has what ranks print, as
             lines, and `display` shows it, and says where silent ranks are.
``server``   the process that ranks are forked from: `start` starts it and asks it for ranks,
             `forkserver` is what it runs.
``rank``     `life` of a rank from start to exit, `recording` of what it calls, its `device`, and
             what it has for a `console`.
``between``  what both sides know: `messages` and where a run's files lie, `values` as bytes,
             `calls` and the log of them, `errors`.

A run: the parent makes a private folder, a socket and a pipe for each rank, and sends their ends to
the server. The server forks the ranks. Each joins the process group, waits until all have, runs the
function, answers, and stays alive. The parent reads answers, output and call logs until every rank
has returned or the run has failed; then the server ends the ranks with their children.
`parent.stages` names the stages of a rank.
"""

from .between.errors import RankError, expect_failure
from .parent import output
from .parent.magic import register_magic
from .parent.run import run
from .rank.device import device
from .server import start
from .server.start import warm_up

__all__ = ["RankError", "configure", "device", "expect_failure", "register_magic", "run", "warm_up"]


def configure(*, preload: tuple[str, ...] = (), rank_color=None) -> None:
    """What the package around this one hands in, before the server starts.

    ``preload``: modules that ranks will need beside torch's, which the server imports once.
    ``rank_color``: a function from a rank's number to a colour (``"#RRGGBB"``) for its label.
    """
    start.preload = tuple(preload)
    if rank_color is not None:
        output.rank_color = rank_color
