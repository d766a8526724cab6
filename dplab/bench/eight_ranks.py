"""Eight ranks' traces of one job that is five times as fast as one rank: chapter 06's capstone.

Real ranks and real collectives on an emulated link. Computing is emulated by sleeps of known
length. Four known faults are put in; `lost` says what each costs by these lengths.
"""

import statistics
import time
from dataclasses import replace

import torch.distributed as dist

from dplab import run
from dplab.bench.results import save
from dplab.measure import EmulatedLink, aligned
from dplab.workloads.slept_steps import Parts, Sizes, traced_steps

RANKS, STEPS, WARM_UP = 8, 5, 2
SIZES = Sizes(layers=8, forward=0.015, backward=0.030, optimizer=0.040, bucket_bytes=65_536,
              batches=0)
DATA, KERNELS, STRAGGLER, SLOW_RANK, BUCKET = 0.064, 0.005, 0.056, 5, 0.0433  # seconds
LINK = EmulatedLink(2 * (RANKS - 1) / RANKS * SIZES.bucket_bytes / BUCKET, 0.0)


def late_load(worker):
    time.sleep(DATA)


def own_delay():
    """Of each kernel on this rank; a straggler needs it for forward and backward."""
    return STRAGGLER / (2 * SIZES.layers) if dist.get_rank() == SLOW_RANK else 0.0


def slow_forward(worker):
    for _ in worker.buckets:
        worker.kernel("forward", SIZES.forward + own_delay())


def slow_backward(worker):
    works = []
    for bucket in worker.buckets:
        worker.kernel("backward", SIZES.backward + KERNELS + own_delay())
        works.append(dist.all_reduce(bucket, async_op=True))
    return works


def lost():
    """By cause: the seconds that it adds to a step, by the lengths above."""
    a_layer = SIZES.backward + KERNELS + STRAGGLER / (2 * SIZES.layers)
    return {"data": DATA, "kernels": SIZES.layers * KERNELS, "straggler": STRAGGLER,
            "exposed": SIZES.layers * BUCKET - (SIZES.layers - 1) * a_layer}


def measure(ranks, parts):
    """The spans of all ranks, for each step after the first ones, from zero on."""
    sizes = replace(SIZES, batches=(WARM_UP + STEPS) * ranks)
    steps = run(traced_steps, ranks, parts, sizes, backend="gloo", link=LINK)
    return [aligned(step) for step in list(zip(*steps, strict=True))[WARM_UP:]]


def length(step):
    return max(span.end for spans in step for span in spans)


def add_arguments(parser):
    parser.add_argument("--save", action="store_true",
                        help="keep the results, which chapter 06 shows")


def main(options):
    sick = Parts(load=late_load, forward=slow_forward, backward=slow_backward)
    jobs = {"alone": [without_calls(step) for step in measure(1, Parts())],
            "together": measure(RANKS, sick)}
    seconds = {name: statistics.median(map(length, steps)) for name, steps in jobs.items()}
    print(f"one rank: {1e3 * seconds['alone']:.0f} ms; {RANKS} ranks: "
          f"{1e3 * seconds['together']:.0f} ms, "
          f"{RANKS * seconds['alone'] / seconds['together']:.2f} times as fast")
    for cause, each in lost().items():
        print(f"  put in: {cause:10}{1e3 * each:4.0f} ms, "
              f"{RANKS * each / seconds['together']:.2f} GPUs")
    if options.save:
        save("eight_ranks", about="Of each step, of each rank, the spans: name, lane, start and "
             "end in seconds since the step began. Real ranks and collectives on an emulated link; "
             "computing is emulated by sleeps. put_in: seconds of a step by cause.",
             put_in={cause: round(seconds, 5) for cause, seconds in lost().items()},
             **{name: [[rows(spans) for spans in step] for step in steps]
                for name, steps in jobs.items()})


def without_calls(step):
    """One rank sends nothing: its collectives are over at once."""
    return [[span for span in spans if span.lane != "communication"] for spans in step]


def rows(spans):
    return [[span.name, span.lane, round(span.start, 5), round(span.end, 5)] for span in spans]
