"""``python -m dplab.bench [NAME [options]]``: one bench, or all of them on one page."""

import argparse
import sys

from dplab.bench import page


def main(arguments: list[str]) -> int:
    """The exit status: 1 if a bench of the page failed."""
    if arguments and arguments[0] in page.BENCHES:
        page.run_bench(arguments[0], arguments[1:], heading=True)
        return 0
    benches = "\n".join(f"  {name:17}{page.summary(name)}" for name in page.BENCHES)
    parser = argparse.ArgumentParser(
        prog="python -m dplab.bench", usage="%(prog)s [--all] [--without NAME ...]\n"
        "       %(prog)s NAME [options]", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"{page.__doc__} Or one of them, with options (NAME --help):\n\n{benches}")
    parser.add_argument("--all", action="store_true", help="the long benches, too")
    parser.add_argument("--without", nargs="+", default=[], choices=page.BENCHES, metavar="NAME",
                        help="leave these out")
    if arguments and not arguments[0].startswith("-"):
        parser.error(f"there is no bench {arguments[0]!r}. There are:\n\n{benches}")
    options = parser.parse_args(arguments)
    return 1 if page.print_page(options.without, options.all) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
