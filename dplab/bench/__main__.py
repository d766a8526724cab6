"""``python -m dplab.bench NAME [options]``: runs one bench and prints its table."""

import argparse

from dplab.bench import collectives, ddp, dryrun, launch, sharded, step

BENCHES = {"collectives": collectives, "ddp": ddp, "dryrun": dryrun, "launch": launch,
           "sharded": sharded, "step": step}


def main():
    parser = argparse.ArgumentParser(prog="python -m dplab.bench", description=__doc__)
    parsers = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, module in BENCHES.items():
        summary = module.__doc__.splitlines()[0]
        module.add_arguments(parsers.add_parser(name, help=summary, description=summary))
    options = parser.parse_args()
    BENCHES[options.bench].main(options)


if __name__ == "__main__":
    main()
