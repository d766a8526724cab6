"""The predicted time of NCCL's collectives beside published tables of nccl-tests.

Each table by size of the tensor; those marked "held out" gave the prediction no rate.
"""

import statistics

from dplab.predict import network
from dplab.predict.pace import PACES

CLASSES = {"to 1 MiB": 2**20, "to 64 MiB": 2**26, "larger": float("inf")}


def add_arguments(parser):
    parser.add_argument("--summary", action="store_true", help="all held-out tables together alone")
    parser.add_argument("--rows", metavar="NAME",
                        help='each row of the tables of that name, such as "H100, 2 nodes, EFA"')


def main(options):
    tables = network.published_tables()
    if options.rows:
        chosen = [table for table in tables if table["name"] == options.rows]
        if not chosen:
            raise SystemExit(f"no table {options.rows!r}; there are "
                             f"{', '.join(sorted({table['name'] for table in tables}))}")
        for table in chosen:
            print_rows(table)
        return
    print(f"{'table':33}{'collective':15}{'':9}"
          + "".join(f"{f'error {name}':>17}" for name in CLASSES))
    if not options.summary:
        for table in tables:
            print_errors(table["name"], table["collective"], table["held_out"], compared([table]))
    held_out = compared([table for table in tables if table["held_out"]])
    print_errors("all held out, median", "", True, [
        (nbytes, abs(error), held) for nbytes, error, held in held_out])
    print(f"{'of these, from slow to fast':57}"
          + "".join(f"{statistics.mean(held for _, _, held in rows):17.0%}"
                    for rows in by_class(held_out).values()))


def compared(tables) -> list[tuple[float, float, bool]]:
    """(bytes, relative error, whether the measured time lies from fast to slow), row by row."""
    found = []
    for table in tables:
        for nbytes, seconds in network.table_rows(table):
            slow, typical, fast = predicted(table, nbytes)
            found.append((nbytes, typical / seconds - 1, fast <= seconds <= slow))
    return found


def predicted(table, nbytes) -> list[float]:
    """Seconds at each of `pace.PACES`."""
    return [network.collective_seconds(network.table_cluster(table, pace), table["collective"],
                                       nbytes) for pace in PACES]


def by_class(rows):
    """The rows under each of CLASSES, by their bytes."""
    found = {name: [] for name in CLASSES}
    for row in rows:
        found[next(name for name, most in CLASSES.items() if row[0] <= most)].append(row)
    return found


def print_errors(name, collective, held_out, rows):
    errors = ([error for _, error, _ in each] for each in by_class(rows).values())
    print(f"{name:33}{collective:15}{'held out' if held_out else '':9}" + "".join(
        f"{statistics.median(each):+17.0%}" if each else f"{'–':>17}" for each in errors))


def print_rows(table):
    print(f"{table['name']}: {table['collective']}, {table['source']}\n"
          f"{'bytes':>12}{'measured':>13}{'slow':>13}{'typical':>13}{'fast':>13}")
    for nbytes, seconds in network.table_rows(table):
        print(f"{nbytes:12,}" + "".join(f"{1e6 * each:10,.1f} µs"
                                        for each in (seconds, *predicted(table, nbytes))))
