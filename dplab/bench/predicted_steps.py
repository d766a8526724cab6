"""The predicted time of a training step beside the measured one, on emulated links and real gloo.

`dplab.workloads.timed_steps` says how both are found.
"""

import itertools
import statistics

from dplab.bench.results import save
from dplab.measure import available_cores
from dplab.workloads.timed_steps import MODELS, fit_gloo_link, gradient_mib, predict_and_measure

LINKS = {"0.1 GB/s": (0.1e9, 5e-4), "0.25 GB/s": (0.25e9, 2e-4)}
FASTER = "0.25 GB/s"
SHARING = """\
Layers are timed while all ranks compute, so the prediction knows how computing ranks share the
{cores} cores. It does not know that sending needs cores, too: copies, sums, threads that wake up.
Several buckets do this beside backward, one bucket does it after backward. Ranks that sleep for as
long as they computed leave the cores free. So on a machine with nothing else to do, sharing the
cores makes the difference between the two columns; what "asleep" is off by has other reasons.
(Chapter 05, "Hiding is not free", measures the work of sending. Chapter 06, "Time a step without
fooling yourself", has ranks that wait for a core; where it needs many ranks, they sleep.)"""


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument("--buckets", type=float, nargs="+", default=[1, 4, 100], metavar="MIB",
                        help="default 1 4 100")
    parser.add_argument("--blocks", type=int, default=2,
                        help="each times the layers and the steps, in turn (default 2)")
    parser.add_argument("--save", action="store_true",
                        help="keep the results in chapters/data")


def main(options):
    print("forward and backward until the gradients are averaged, ms")
    print(f"{'ranks':>5}  {'model':26}{'bucket':>8}  {'link':22}{'predicted':>10}{'measured':>10}"
          f"{'error':>8}")
    results = []
    for configuration in configurations(options):
        result = predict_and_measure(configuration, options.blocks)
        results.append(result)
        predicted, measured = result["predicted_seconds"], result["measured_seconds"]
        print(f"{result['ranks']:5}  {result['model']:26}{result['bucket_mib']:4g} MiB  "
              f"{result['link']:22}{1e3 * predicted:10.1f}{1e3 * measured:10.1f}"
              f"{predicted / measured - 1:+8.0%}", flush=True)
    for kind in ("emulated", "asleep", "real"):
        median, p90 = errors(result for result in results if result["kind"] == kind)
        print(f"{kind}: absolute error, median {median:.0%}, 90th percentile {p90:.0%}")
    print_sharing(results)
    if options.save:
        save("predicted_steps", rows=results)


def configurations(options):
    """All combinations on the emulated links, those on the faster link again with ranks that sleep
    in place of computing, then on real gloo with a link fitted for it.
    """
    for ranks, model, bucket in itertools.product(options.ranks, MODELS, options.buckets):
        for link, (bandwidth, latency) in LINKS.items():
            yield {"kind": "emulated", "model": model, "ranks": ranks, "bucket_mib": bucket,
                   "link": link, "bandwidth": bandwidth, "latency": latency}
    bandwidth, latency = LINKS[FASTER]
    for ranks, model, bucket in itertools.product(options.ranks, MODELS, options.buckets):
        yield {"kind": "asleep", "model": model, "ranks": ranks, "bucket_mib": bucket,
               "link": f"{FASTER}, asleep", "bandwidth": bandwidth, "latency": latency}
    for ranks in options.ranks:
        link = fit_gloo_link(ranks)
        for model, bucket in itertools.product(MODELS, options.buckets[:2]):
            yield {"kind": "real", "model": model, "ranks": ranks, "bucket_mib": bucket,
                   "link": "gloo, fitted", "bandwidth": link.bandwidth, "latency": link.latency}


def errors(results) -> tuple[float, float]:
    """Median and 90th percentile of the absolute error, as a part of the measured time."""
    found = sorted(abs(result["predicted_seconds"] / result["measured_seconds"] - 1)
                   for result in results)
    return statistics.median(found), statistics.quantiles(found, n=10, method="inclusive")[-1]


def print_sharing(results) -> None:
    """What the sharing of the cores does to the error: one line for each number of ranks."""
    cores = available_cores()
    print(f"\nwhat sharing {cores} cores does: median of predicted / measured - 1, {FASTER}")
    print(f"{'ranks':>5}  {'buckets':8}{'computing':>10}{'asleep':>10}")
    for (ranks, buckets), of_kinds in errors_of_sharing(results).items():
        print(f"{ranks:5}  {buckets:8}" + "".join(
            f"{of_kinds[kind]:>+10.0%}" if kind in of_kinds else f"{'':10}"
            for kind in ("emulated", "asleep")))
    print(SHARING.format(cores=cores))


def errors_of_sharing(results) -> dict[tuple[int, str], dict[str, float]]:
    """By ranks and "several" buckets or "one": for each kind of step on the faster link, the median
    of the error with its sign. Below 0, the prediction is too short.
    """
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    for result in results:
        if result["link"].startswith(FASTER):
            buckets = "one" if result["bucket_mib"] >= gradient_mib(result["model"]) else "several"
            of_kinds = found.setdefault((result["ranks"], buckets), {})
            of_kinds.setdefault(result["kind"], []).append(
                result["predicted_seconds"] / result["measured_seconds"] - 1)
    return {group: {kind: statistics.median(signed) for kind, signed in of_kinds.items()}
            for group, of_kinds in sorted(found.items())}
