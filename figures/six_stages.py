"""Draws six_stages.svg: the six stages of data-parallel training on four ranks."""

import numpy as np

from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import FAINT, GRID, INK, MUTED

RANKS = 4
LEARNING_RATE = 0.6
WEIGHTS = np.array([0.7, -0.5, 0.3, 0.8])
INPUTS = np.array([  # rank, sample, feature
    [[0.9, -0.2, 0.4, -0.6], [0.3, 0.7, -0.5, 0.2]],
    [[-0.5, 0.8, 0.6, -0.1], [0.2, -0.9, 0.1, -0.7]],
    [[0.6, 0.5, -0.8, 0.3], [-0.4, 0.1, -0.7, 0.9]],
    [[-0.8, -0.3, 0.2, 0.5], [0.1, 0.6, 0.9, -0.4]],
])
TARGETS = np.array([[-0.2, 0.1], [0.7, 0.4], [-0.8, 0.1], [-0.7, 0.9]])
ERRORS = INPUTS @ WEIGHTS - TARGETS
LOSSES = (ERRORS**2).mean(axis=1)
GRADIENTS = 2 * np.einsum("rs,rsf->rf", ERRORS, INPUTS) / ERRORS.shape[1]
MEAN = GRADIENTS.mean(axis=0)
UPDATED = WEIGHTS - LEARNING_RATE * MEAN

STAGES = (
    ("Replicate the weights", "once, before the first step", "equal", "weights"),
    ("Split the global batch", "each rank takes its share", "different", "samples"),
    ("Forward", "each rank on its own samples", "different", "losses"),
    ("Backward", "each rank from its own loss", "different", "gradients"),
    ("All-reduce the gradients", "in every step", "equal", "mean gradients"),
    ("Update", "the same step on every rank", "equal", "new weights"),
)
COLLECTIVES = {0: "broadcast: rank 0's weights, for everyone",
               4: "all-reduce: sum over the ranks, ÷ 4"}
"""The stages that communicate, and what the ranks do there."""

TITLE = "Two of six stages communicate, and only one does in every step"
ALT = (
    "The six stages of a data-parallel step, from top to bottom, and what each of four ranks "
    "holds after it. 1: a broadcast gives all ranks the same weights, once. 2: each rank takes "
    "other samples. 3: forward, each rank has its own loss. 4: backward, each rank has its own "
    "gradient. 5: an all-reduce gives all ranks the same mean gradient, in every step. 6: the same "
    "update leaves all ranks with the same new weights. Stages 2 to 6 repeat; only 1 and 5 "
    "communicate."
)

LEFT, COLUMN, PANEL, HEIGHT, BAND, GAP = 316, 112, 92, 56, 32, 20


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 690, TITLE, ALT)
    for rank in range(RANKS):
        canvas.text(middle(rank), 82, f"rank {rank}", weight="bold", color=rank_color(rank),
                    ha="center")
    canvas.text(770, 82, "the ranks hold", size=13, color=MUTED)
    y, heads = 104, []
    for stage in range(len(STAGES)):
        first = y
        if stage in COLLECTIVES:
            draw_band(canvas, y, COLLECTIVES[stage])
            y += BAND + 12
        for rank in range(RANKS):
            draw_held(canvas, stage, rank, y)
        heads.append((first + y + HEIGHT) / 2)
        draw_head(canvas, stage, heads[-1], y + HEIGHT / 2)
        y += HEIGHT + GAP
    draw_loop(canvas, heads[1], heads[-1])
    canvas.text(24, 660, "Colour: this rank's own. No colour: equal on all ranks. "
                "Stages 2 to 6 repeat, in every step.", color=MUTED)
    return canvas


def middle(rank: int) -> float:
    return LEFT + rank * COLUMN + PANEL / 2


def draw_head(canvas: Canvas, stage: int, y: float, row: float) -> None:
    name, how, alike, held = STAGES[stage]
    canvas.disc(66, y, 17, INK if stage in COLLECTIVES else MUTED)
    canvas.text(66, y, str(stage + 1), size=16, weight="bold", color="white", ha="center")
    canvas.text(94, y - 11, name, size=15, weight="bold")
    canvas.text(94, y + 11, how, size=13, color=MUTED)
    canvas.text(770, row - 11, alike, weight="bold", color=INK if alike == "equal" else MUTED)
    canvas.text(770, row + 11, held, size=13, color=MUTED)


def draw_band(canvas: Canvas, y: float, text: str) -> None:
    canvas.box(LEFT - 10, y, 3 * COLUMN + PANEL + 20, BAND, INK, radius=6)
    canvas.text((middle(0) + middle(3)) / 2, y + BAND / 2, text, weight="bold", color="white",
                ha="center")


def draw_held(canvas: Canvas, stage: int, rank: int, y: float) -> None:
    x, color = LEFT + rank * COLUMN, rank_color(rank)
    canvas.box(x, y, PANEL, HEIGHT, "white", edge=FAINT, radius=6)
    if stage == 1:
        for sample in range(8):
            canvas.box(x + 13 + sample % 4 * 17, y + 12.5 + sample // 4 * 17, 15, 15,
                       color if sample // 2 == rank else GRID, radius=2)
    elif stage == 2:
        canvas.text(middle(rank), y + HEIGHT / 2, f"{LOSSES[rank]:.2f}", size=17, weight="bold",
                    color=color, ha="center")
    else:
        values, shade = {0: (WEIGHTS, MUTED), 3: (GRADIENTS[rank], color), 4: (MEAN, INK),
                         5: (UPDATED, MUTED)}[stage]
        canvas.bars(x + 12, y + 4, values, shade, width=PANEL - 24, height=HEIGHT - 8)


def draw_loop(canvas: Canvas, top: float, bottom: float) -> None:
    canvas.line(47, bottom, 32, bottom, INK, 1.8)
    canvas.line(32, bottom + 0.9, 32, top - 0.9, INK, 1.8)
    canvas.arrow(32, top, 47, top, INK, 1.8)


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
