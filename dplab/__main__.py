"""``dplab lab`` and ``python -m dplab lab``: opens the course in a copy to work in."""

import sys

from dplab.lab.command import lab

USAGE = """usage: dplab lab [FOLDER] [options]

commands:
  lab    opens the course in JupyterLab, in a copy of its chapters that is yours

`dplab lab --help` lists the options."""


def main(arguments=None):
    """Runs the command and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["lab"]:
        return lab(arguments[1:])
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    print(f"dplab: there is no command {arguments[0]!r}\n\n{USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
