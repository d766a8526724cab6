"""The command ``dplab``, also ``python -m dplab``: the course in a copy to work in, and a plan."""

import sys

USAGE = """usage: dplab lab [FOLDER] [options]
       dplab plan [ADDRESS] [options]

commands:
  lab    opens the course in JupyterLab, in a copy of its chapters that is yours
  plan   predicts how a model trains on a cluster: memory, time, strategy, settings

`dplab lab --help` and `dplab plan --help` list the options."""


def main(arguments=None):
    """Runs the command and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["lab"]:
        from dplab.lab.command import lab

        return lab(arguments[1:])
    if arguments[:1] == ["plan"]:
        from dplab.predict.__main__ import main as plan

        return plan(arguments[1:])
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    print(f"dplab: there is no command {arguments[0]!r}\n\n{USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
