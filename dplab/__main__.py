"""The command ``dplab``, also ``python -m dplab``: the course in a copy, its exercises, a plan."""

import sys
from importlib import metadata

from dplab import needs

USAGE = """usage: dplab lab [FOLDER] [options]
       dplab progress
       dplab hint SLUG
       dplab check SLUG FILE
       dplab plan [NAME=VALUE ...] [--json]
       dplab --version

commands:
  lab       opens the course in JupyterLab, in a copy of its chapters that is yours
  progress  shows how far you are, and which exercise comes next
  hint      shows the next hint to an exercise
  check     checks your answer to an exercise: what a Python file or a notebook defines
  plan      predicts how a model trains on a cluster: memory, time, strategy, settings

`dplab lab --help`, and so for each command, lists the options."""


def main(arguments=None):
    """Runs the command and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["lab"]:
        from dplab.lab.command import lab

        return lab(arguments[1:])
    if arguments[:1] == ["plan"]:
        from dplab.predict.__main__ import main as plan

        return plan(arguments[1:])
    if arguments[:1] in (["progress"], ["hint"], ["check"]):
        needs.check_torch()
        from dplab.checks import terminal

        return terminal.main(arguments[0], arguments[1:])
    if arguments[:1] == ["--version"]:
        print(f"dplab {metadata.version('dplab-course')}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    print(f"dplab: there is no command {arguments[0]!r}\n\n{USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
