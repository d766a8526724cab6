"""Eight ranks' traces of one job that is five times as fast as one rank: chapter 06's capstone.

Real ranks and real collectives on an emulated link. Computing is emulated by sleeps of known
length. Three faults are put in, and the link is slow. `lost` adds up the slowest rank's step by
these lengths. What comes back when one cause alone is repaired is something else, and is measured.
"""

import statistics
import time
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from dplab import run
from dplab.bench.results import save, spread
from dplab.measure import EmulatedLink, aligned
from dplab.workloads.slept_steps import Parts, Sizes, traced_steps

RANKS, STEPS, WARM_UP = 8, 5, 2
REPAIRED_STEPS = 15  # of each job in which one cause is repaired; an odd number has a median
SIZES = Sizes(layers=8, forward=0.015, backward=0.030, optimizer=0.040, bucket_bytes=65_536,
              batches=0)
DATA, KERNELS, STRAGGLER, SLOW_RANK, BUCKET = 0.064, 0.005, 0.056, 5, 0.0433  # seconds
LINK = EmulatedLink(2 * (RANKS - 1) / RANKS * SIZES.bucket_bytes / BUCKET, 0.0)
FASTER = 2  # times the bandwidth: the remedy for exposed communication


@dataclass(frozen=True)
class Faults:
    """Seconds of a step; all of them 0 is a healthy job. The parts of the job have them."""

    data: float = DATA
    kernels: float = KERNELS  # of each kernel of backward, on all ranks
    straggler: float = STRAGGLER  # on one rank, over all its kernels

    def parts(self):
        return Parts(load=self.load, forward=self.forward, backward=self.backward)

    def load(self, worker):
        time.sleep(self.data or 0.0005)

    def forward(self, worker):
        for _ in worker.buckets:
            worker.kernel("forward", SIZES.forward + self.own_delay())

    def backward(self, worker):
        works = []
        for bucket in worker.buckets:
            worker.kernel("backward", SIZES.backward + self.kernels + self.own_delay())
            works.append(dist.all_reduce(bucket, async_op=True))
        return works

    def own_delay(self):
        """Of each kernel on this rank; a straggler needs it for forward and backward."""
        return self.straggler / (2 * SIZES.layers) if dist.get_rank() == SLOW_RANK else 0.0


def lost():
    """By cause: its seconds of the slowest rank's step, by the lengths above.

    These are sums along one timeline. They do not say how much shorter the step gets without a
    cause: "exposed" itself depends on the other three.
    """
    a_layer = SIZES.backward + KERNELS + STRAGGLER / (2 * SIZES.layers)
    return {"data": DATA, "kernels": SIZES.layers * KERNELS, "straggler": STRAGGLER,
            "exposed": SIZES.layers * BUCKET - (SIZES.layers - 1) * a_layer}


def measure(ranks, parts, link=LINK, count=None):
    """The spans of all ranks, for each of `STEPS` or ``count`` steps after the first ones, from
    zero on.
    """
    sizes = replace(SIZES, batches=(WARM_UP + (count or STEPS)) * ranks)
    steps = run(traced_steps, ranks, parts, sizes, backend="gloo", link=link)
    return [aligned(step) for step in list(zip(*steps, strict=True))[WARM_UP:]]


def repaired():
    """By cause: the seconds of some steps of the same job with this one cause repaired; and with
    "nothing" repaired.
    """
    faster = replace(LINK, bandwidth=FASTER * LINK.bandwidth)
    jobs = {"nothing": (Faults(), LINK)} | {
        cause: (replace(Faults(), **{cause: 0.0}), LINK)
        for cause in ("data", "kernels", "straggler")} | {"exposed": (Faults(), faster)}
    return {cause: [round(length(step), 5) for step in
                    measure(RANKS, faults.parts(), link, REPAIRED_STEPS)]
            for cause, (faults, link) in jobs.items()}


def length(step):
    return max(span.end for spans in step for span in spans)


def main():
    jobs = {"alone": [without_calls(step) for step in measure(1, Parts())],
            "together": measure(RANKS, Faults().parts())}
    seconds = {name: statistics.median(map(length, steps)) for name, steps in jobs.items()}
    print(f"one rank: {1e3 * seconds['alone']:.0f} ms; {RANKS} ranks: "
          f"{1e3 * seconds['together']:.0f} ms, "
          f"{RANKS * seconds['alone'] / seconds['together']:.2f} times as fast")
    without = repaired()
    for cause, each in lost().items():
        print(f"  {cause:10}{1e3 * each:4.0f} ms of the slowest rank's step, "
              f"{RANKS * each / seconds['together']:.2f} GPUs; repaired alone, the step takes "
              f"{spread([1e3 * step for step in without[cause]], 0)} ms")
    save("eight_ranks", about="Of each step, of each rank, the spans: name, lane, start and "
         "end in seconds since the step began. Real ranks and collectives on an emulated link; "
         "computing is emulated by sleeps. sizes: of a healthy rank, times in seconds. "
         "bandwidth: of the link, bytes/s. put_in: seconds "
         "of the slowest rank's step by cause, by these lengths. repaired: seconds of the "
         "steps of the same job with one cause repaired; for exposed, a link "
         f"{FASTER} times as fast; for nothing, the same job.",
         sizes=asdict(SIZES), bandwidth=LINK.bandwidth,
         put_in={cause: round(seconds, 5) for cause, seconds in lost().items()},
         repaired=without,
         **{name: [[rows(spans) for spans in step] for step in steps]
            for name, steps in jobs.items()})


def without_calls(step):
    """One rank sends nothing: its collectives are over at once."""
    return [[span for span in spans if span.lane != "communication"] for spans in step]


def rows(spans):
    return [[span.name, span.lane, round(span.start, 5), round(span.end, 5)] for span in spans]


if __name__ == "__main__":
    main()
