"""``python tests/tools/two_nodes [options]``, from the root of the repository."""

import argparse
import sys
from pathlib import Path

# Python puts this folder at the front of its path; the modules here import each other as
# `two_nodes.…`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import two_nodes  # noqa: E402
from dplab.bench.results import save  # noqa: E402
from two_nodes import link_bytes, restart  # noqa: E402
from two_nodes.hosts import missing  # noqa: E402
from two_nodes.training import CONFIG, PER_NODE  # noqa: E402


def main():
    parser = argparse.ArgumentParser(prog="python tests/tools/two_nodes",
                                     description=two_nodes.__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=400e6,
                        help="of the link, in bits/s (default 400e6)")
    parser.add_argument("--steps", type=int, default=3, help="measured (default 3)")
    parser.add_argument("--save", action="store_true",
                        help="keep the bytes")
    options = parser.parse_args()
    if missing():
        sys.exit(f"two_nodes: {missing()}")
    rows = link_bytes.measure(options.rate, options.steps)
    print(f"gloo; 2 nodes × {PER_NODE} ranks, {options.rate / 1e6:.0f} Mbit/s between them; "
          f"{CONFIG.parameters:,} parameters in fp32\n"
          f"{'bytes of a step, one way':36}{'predicted':>12}{'measured':>12}{'ratio':>8}"
          f"{'with headers':>14}{'link alone':>12}{'a step':>9}")
    for row in rows:
        print(f"{row['strategy']:36}{row['predicted']:12,.0f}{row['payload']:12,.0f}"
              f"{row['payload'] / row['predicted']:8.4f}{row['bytes']:14,.0f}"
              f"{8 * row['predicted'] / options.rate:10.3f} s{row['seconds']:7.2f} s")
    whole, broken = restart.one_process(30), restart.killed(30, after=24, rank=3)
    print(f"\nRank 3 of 2 × {PER_NODE} killed after step 24 of 30: starts from steps "
          f"{broken['starts']}; last loss {broken['losses'][-1][1]:.4f}, in one process "
          f"{whole[-1][1]:.4f}")
    if options.save:
        save("two_nodes", "python tests/tools/two_nodes --save", rate=options.rate,
             parameters=CONFIG.parameters, rows=rows)


main()
