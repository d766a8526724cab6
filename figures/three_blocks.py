"""Draws three_blocks.svg: one rank's step of `fully_shard`, as the simulator lays it out."""

from dataclasses import replace

from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.cluster import Cluster, Job, predict
from dplab.show import Canvas, rank_color, save_beside, style
from dplab.show.palette import FAINT, readable_on

LEFT, WIDTH, TOP = 104, 778, {"compute": 84, "communication": 164}
KINDS = ("forward", "backward", "gather", "reduce-scatter")

_cluster = Cluster(GPUS["H100"], 8, LINKS["NVLink 4"], LINKS["400 Gb/s"])
_model = replace(MODELS["Llama-3 8B"], layers=3)
SPANS = predict(Job(_model, 1, 2048, gradient_bytes=4), _cluster).spans[:-1]  # not the update

TITLE = "A step of three blocks: only its two ends send while nothing computes"
ALT = "One rank's step of fully_shard, three blocks and a root, in order of start. " + "; ".join(
    f"{span.name} from {1e3 * span.start:.1f} to {1e3 * span.end:.1f} ms"
    for span in sorted(SPANS, key=lambda span: span.start)) + "."


@style()
def draw() -> Canvas:
    canvas = Canvas(900, 290, TITLE, ALT)
    scale = WIDTH / SPANS[-1].end
    for name, lane in (("computed", "compute"), ("sent", "communication")):
        canvas.text(18, TOP[lane] + 26, name, size=15, weight="bold")
        canvas.line(LEFT, TOP[lane] + 56, LEFT + WIDTH, TOP[lane] + 56, FAINT)
    for span in SPANS:
        kind, unit = span.name.split(" ", 1)
        color = rank_color(KINDS.index(kind))
        x, width = LEFT + scale * span.start, scale * span.seconds
        canvas.box(x + 0.5, TOP[span.lane], width - 1, 52, color)
        canvas.text(x + width / 2, TOP[span.lane] + 26, f"{kind[0].upper()}{unit.split()[-1][0]}",
                    size=13, ha="center", color=readable_on(color))
    canvas.text(18, 250, "F: forward. B: backward. G: gather. R: reduce-scatter. 0, 1, 2: the "
                "blocks. r: the root.", size=14)
    canvas.text(18, 272, "Llama-3 8B with three of its 32 blocks on 64 H100s, 2,048 tokens on "
                f"each: {1e3 * SPANS[-1].end:.0f} ms.", size=14)
    return canvas


if __name__ == "__main__":
    save_beside(draw().figure, __file__, TITLE)
