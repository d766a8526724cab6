"""The predicted time of NCCL's collectives beside published tables of nccl-tests.

Each table by size of the tensor; those marked "held out" gave the prediction no rate.
"""

import statistics

from dplab.predict import network

CLASSES = {"to 1 MiB": 2**20, "to 64 MiB": 2**26, "larger": float("inf")}


def add_arguments(parser):
    pass


def main(options):
    print(f"{'table':33}{'collective':15}{'':9}"
          + "".join(f"{f'error {name}':>17}" for name in CLASSES))
    all_held_out = []
    for table in network.published_tables():
        errors = compared(table)
        print_errors(table["name"], table["collective"], table["held_out"], errors)
        all_held_out += errors if table["held_out"] else []
    print_errors("all held out, median", "", True,
                 [(nbytes, abs(error)) for nbytes, error in all_held_out])


def compared(table) -> list[tuple[float, float]]:
    """(bytes, relative error of the typical pace), row by row."""
    cluster = network.table_cluster(table)
    return [(nbytes, network.collective_seconds(cluster, table["collective"], nbytes) / seconds - 1)
            for nbytes, seconds in network.table_rows(table)]


def by_class(rows) -> dict[str, list[float]]:
    """The errors under each of CLASSES, by their bytes."""
    found: dict[str, list[float]] = {name: [] for name in CLASSES}
    for nbytes, error in rows:
        found[next(name for name, most in CLASSES.items() if nbytes <= most)].append(error)
    return found


def print_errors(name, collective, held_out, rows):
    print(f"{name:33}{collective:15}{'held out' if held_out else '':9}" + "".join(
        f"{statistics.median(each):+17.0%}" if each else f"{'–':>17}"
        for each in by_class(rows).values()))
