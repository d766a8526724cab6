"""Draws zero_stages.svg: what each of four ranks keeps under DDP and the three stages of ZeRO."""

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import FAINT, MUTED

RANKS = 4
PARTS = (("parameters", 2), ("gradients", 2), ("optimizer", 12))
"""Each part with its bytes for each parameter, K = 12; the last one is sharded first."""

STAGES = (("DDP", 0), ("ZeRO-1", 1), ("ZeRO-2", 2), ("ZeRO-3", 3))

TITLE = "Each stage cuts one more thing to a quarter"
ALT = (
    "Four rows, DDP and the three stages of ZeRO, each with four ranks. A rank holds parameters "
    "and gradients, 2 bytes for each parameter, and optimizer state, 12 bytes. DDP: every rank "
    "holds all of them, 16 bytes. ZeRO-1: each rank holds its quarter of the optimizer state, 7 "
    "bytes. ZeRO-2: and its quarter of the gradients, 5.5 bytes. ZeRO-3: and its quarter of the "
    "parameters, 4 bytes."
)

LEFT, SCALE, ROW, BLOCK = 150, 12.5, 108, 184
HEIGHT = 20


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 562, TITLE, ALT)
    canvas.text(24, 72, "Bytes for each parameter in mixed precision with Adam, K = 12; dashed: "
                "on another rank.", color=MUTED)
    for rank in range(RANKS):
        canvas.text(LEFT + rank * BLOCK, 112, f"rank {rank}", weight="bold", color=rank_color(rank))
    for row, (name, sharded) in enumerate(STAGES):
        draw_stage(canvas, 136 + row * ROW, name, sharded)
    return canvas


def draw_stage(canvas: Canvas, y: float, name: str, sharded: int) -> None:
    parts = [(part, size, len(PARTS) - index <= sharded)
             for index, (part, size) in enumerate(PARTS)]
    total = sum(size / RANKS if is_sharded else size for _, size, is_sharded in parts)
    canvas.text(24, y + 12, name, size=16, weight="bold")
    canvas.text(24, y + 38, f"{total:g} bytes")
    canvas.text(24, y + 60, f"on each of {RANKS}", color=MUTED)
    for rank in range(RANKS):
        for index, (part, size, is_sharded) in enumerate(parts):
            draw_part(canvas, LEFT + rank * BLOCK, y + index * (HEIGHT + 6), rank, part, size,
                      is_sharded)


def draw_part(canvas: Canvas, x: float, y: float, rank: int, part: str, size: float,
              is_sharded: bool) -> None:
    width = size * SCALE
    canvas.box(x + 0.5, y + 0.5, width - 1, HEIGHT - 1, "white", edge=FAINT, radius=1, dashed=True)
    held = width / RANKS if is_sharded else width
    canvas.box(x + (rank * held if is_sharded else 0), y, held, HEIGHT, rank_color(rank), radius=1)
    if part == "optimizer":
        if not is_sharded:
            canvas.text(x + width / 2, y + HEIGHT / 2, "optimizer state", ha="center",
                        color="white")
    else:
        canvas.text(x + width + 8, y + HEIGHT / 2, part, color=MUTED)


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
