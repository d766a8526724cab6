"""Draws two_streams.svg: a step's backward and all-reduces on two streams of a GPU."""

from dplab.show import Canvas, save_beside, style
from dplab.show.palette import FAINT, MUTED, PART_COLORS, readable_on

TITLE = "The streams wait for each other's events; the CPU waits for neither"
ALT = (
    "Three rows over time. The CPU enqueues the backward of layers 4 to 1, two all-reduces, two "
    "wait() calls and the optimizer in short order, and is then free. The compute stream runs the "
    "backward of layers 4, 3, 2 and 1 one after another. An event after layer 3 lets NCCL's stream "
    "begin the all-reduce of layers 4 and 3, beside the backward of layers 2 and 1, which take "
    "longer there than alone. An event after layer 1 lets it begin the all-reduce of layers 2 and "
    "1, which is exposed. The compute stream waits for that one's event, and then runs the "
    "optimizer."
)
LEFT = 172
# On the compute stream and on NCCL's: name, part, begin and end in pixels behind LEFT.
COMPUTE = (("backward 4", "backward", 40, 130), ("backward 3", "backward", 130, 220),
           ("backward 2", "backward", 220, 340), ("backward 1", "backward", 340, 440),
           ("optimizer", "optimizer", 596, 690))
SENDING = (("all-reduce 4, 3", "communication", 228, 380),
           ("all-reduce 2, 1", "communication", 448, 588))
CALLS = ("4", "3", "A", "2", "1", "B", "w", "w", "o")
BESIDE = {"communication": 58, "optimizer": -10}  # where a name stands outside of its box
ROWS = {"CPU enqueues": 96, "compute stream": 186, "NCCL's stream": 296}


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 420, TITLE, ALT)
    for name, y in ROWS.items():
        canvas.text(24, y + 20, name, size=15, weight="bold")
        canvas.line(LEFT, y + 46, 876, y + 46, FAINT)
    for place, call in enumerate(CALLS):
        canvas.box(LEFT + 4 + 24 * place, ROWS["CPU enqueues"] + 8, 20, 26, "white", edge=MUTED)
        canvas.text(LEFT + 14 + 24 * place, ROWS["CPU enqueues"] + 21, call, size=13, ha="center")
    canvas.text(LEFT + 230, ROWS["CPU enqueues"] + 21, "done: it does not wait, not even in wait()",
                size=14, color=MUTED)
    for row, kernels in (("compute stream", COMPUTE), ("NCCL's stream", SENDING)):
        for name, part, begin, end in kernels:
            color = PART_COLORS[part]
            canvas.box(LEFT + begin + 1, ROWS[row], end - begin - 2, 40, color)
            canvas.text(LEFT + (begin + end) / 2, ROWS[row] + BESIDE.get(part, 20), name, size=13,
                        color=MUTED if part in BESIDE else readable_on(color), ha="center")
    top, low = ROWS["compute stream"] + 42, ROWS["NCCL's stream"] - 2
    for x in (222, 442):  # events of the compute stream
        canvas.arrow(LEFT + x, top, LEFT + x + 6, low, MUTED)
    canvas.arrow(LEFT + 588, low, LEFT + 597, top, MUTED)
    canvas.text(LEFT + 232, 262, "event", size=13, color=MUTED)
    canvas.text(LEFT + 452, 262, "event", size=13, color=MUTED)
    canvas.text(LEFT + 604, 262, "event", size=13, color=MUTED)
    canvas.text(24, 378, "4 to 1: a layer's backward. A, B: an all-reduce, launched from a hook. "
                "w: wait(). o: the optimizer.", size=14)
    canvas.text(24, 400, "Backward is slower as long as an all-reduce runs: its kernel "
                "occupies a part of the GPU.", size=14)
    return canvas


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
