"""Draws all_reduce_algorithms.svg: who sends to whom in three all-reduces, and what it costs."""

from fractions import Fraction

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import FAINT, MUTED
from dplab.show.ring import sent_chunk

RANKS = 4
ROUND = [(rank, (rank + 1) % RANKS) for rank in range(RANKS)]
"""A step is a list of messages (from, to) that are under way at the same time."""

NAIVE = [[(rank, (rank + distance) % RANKS) for rank in range(RANKS)] for distance in (1, 2, 3)]
TREE = [[(3, 1)], [(1, 0)], [(2, 0)], [(0, 1)], [(0, 2), (1, 3)]]
RING = [ROUND] * 6

SQUARE = ((22, 32), (86, 32), (86, 96), (22, 96))
BRANCHES = ((60, 16), (22, 62), (98, 62), (22, 108))

ALGORITHMS = (
    ("naive", "everything to everyone", NAIVE, Fraction(1), SQUARE,
     ("N ranks: (N−1) M each", "N(N−1) M in all"), "N ranks: N−1 of M"),
    ("tree", "add up to rank 0, then back down", TREE, Fraction(1), BRANCHES,
     ("N ranks: at most 3 M each", "2(N−1) M in all"), "N ranks: at most 4 log₂N of M"),
    ("ring", "one round adds, one passes on", RING, Fraction(1, RANKS), SQUARE,
     ("N ranks: 2(N−1)/N M each", "2(N−1) M in all"), "N ranks: 2(N−1) of M/N"),
)

TITLE = "The ring sends no more than the tree, and spreads it over all ranks"
ALT = (
    "Three ways to all-reduce M bytes on four ranks. Naive, 3 steps: in each, every rank sends "
    "everything, M, to another rank; each sends 3 M. Tree, 5 steps: sums go up from rank 3 to 1, "
    "1 to 0 and 2 to 0, the total goes down from 0 to 1, 0 to 2 and 1 to 3, in messages of M; "
    "ranks 0 and 1 send 2 M, ranks 2 and 3 send M, 1.5 M on average. Ring, 6 steps: in each, "
    "every rank sends one chunk, a quarter of M, to the next rank: in step 1 rank r sends chunk "
    "r−1, and in each later step the chunk before that one; each sends 1.5 M. For N ranks the "
    "totals are N(N−1) M, 2(N−1) M and 2(N−1) M; the messages that follow one another are N−1 of "
    "M, at most 4 log₂N of M, and 2(N−1) of M/N."
)

WIDTH, HEIGHT, STEP_WIDTH, STEP_HEIGHT = 276, 724, 130, 142
BYTES = 58
"""The length of a bar for M bytes."""


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 846, TITLE, ALT)
    canvas.text(24, 72, "Four ranks, M bytes each. A thick arrow carries M, a thin one the chunk "
                "with that number, M/4.", color=MUTED)
    for index, algorithm in enumerate(ALGORITHMS):
        draw_algorithm(canvas, 24 + index * (WIDTH + 12), 98, *algorithm)
    return canvas


def draw_algorithm(canvas: Canvas, x: float, y: float, name: str, how: str, steps, size: Fraction,
                   places, sent_by_n: tuple[str, str], messages_of_n: str) -> None:
    canvas.box(x, y, WIDTH, HEIGHT, "white", edge=FAINT, radius=8)
    canvas.text(x + 14, y + 24, name, size=16, weight="bold")
    canvas.text(x + 14, y + 48, how, size=13, color=MUTED)
    for step, messages in enumerate(steps):
        draw_step(canvas, x + 14 + step % 2 * STEP_WIDTH, y + 70 + step // 2 * STEP_HEIGHT, step,
                  messages, size, places)
    y += 78 + 3 * STEP_HEIGHT
    canvas.text(x + 14, y + 6, "bytes that each rank sends", weight="bold")
    for rank, sent in enumerate(bytes_sent(steps, size)):
        row = y + 20 + rank * 19
        canvas.text(x + 14, row + 7, str(rank), size=13, weight="bold", color=rank_color(rank))
        canvas.box(x + 32, row, float(sent) * BYTES, 14, rank_color(rank), radius=1)
        canvas.text(x + 38 + float(sent) * BYTES, row + 7, f"{float(sent):g} M", size=13)
    canvas.text(x + 14, y + 107, sent_by_n[0], size=13, color=MUTED)
    canvas.text(x + 14, y + 127, sent_by_n[1], size=13, color=MUTED)
    canvas.text(x + 14, y + 158, "messages one after another", weight="bold")
    canvas.text(x + 14, y + 179, f"{len(steps)} of " + ("M" if size == 1 else f"M/{RANKS}"),
                size=13)
    canvas.text(x + 14, y + 199, messages_of_n, size=13, color=MUTED)


def bytes_sent(steps, size: Fraction) -> list[Fraction]:
    """What each rank sends in all, in units of M."""
    return [size * sum(source == rank for step in steps for source, _ in step)
            for rank in range(RANKS)]


def draw_step(canvas: Canvas, x: float, y: float, step: int, messages, size: Fraction,
              places) -> None:
    canvas.text(x, y + 6, f"step {step + 1}", size=13, color=MUTED)
    y += 14
    for source, to in messages:
        draw_message(canvas, x, y, places[source], places[to], rank_color(source),
                     4 if size == 1 else 1.6, both_ways=(to, source) in messages)
        if size != 1:
            draw_chunk(canvas, x, y, places[source], places[to],
                       sent_chunk(source, step + 1, RANKS))
    for rank, (across, down) in enumerate(places):
        canvas.disc(x + across, y + down, 11, rank_color(rank))
        canvas.text(x + across, y + down, str(rank), weight="bold", color="white", ha="center")


def draw_chunk(canvas: Canvas, x: float, y: float, source, to, chunk: int) -> None:
    """The chunk's number, on the outer side of its arrow."""
    across, down = to[0] - source[0], to[1] - source[1]
    length = (across**2 + down**2) ** 0.5
    canvas.text(x + (source[0] + to[0]) / 2 + 10 * down / length,
                y + (source[1] + to[1]) / 2 - 10 * across / length, str(chunk), size=13,
                ha="center")


def draw_message(canvas: Canvas, x: float, y: float, source, to, color: str, width: float, *,
                 both_ways: bool) -> None:
    across, down = to[0] - source[0], to[1] - source[1]
    length = (across**2 + down**2) ** 0.5
    across, down = across / length, down / length
    aside = 4 if both_ways else 0
    canvas.arrow(x + source[0] + 13 * across - aside * down,
                 y + source[1] + 13 * down + aside * across,
                 x + to[0] - 13 * across - aside * down,
                 y + to[1] - 13 * down + aside * across, color, width)


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
