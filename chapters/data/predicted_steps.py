"""The predicted time of a training step beside the measured one, on emulated links and real gloo.

`dplab.workloads.timed_steps` says how both are found.
"""

import itertools
import statistics

from dplab.bench.results import save
from dplab.workloads.timed_steps import MODELS, fit_gloo_link, predict_and_measure

LINKS = {"0.1 GB/s": (0.1e9, 5e-4), "0.25 GB/s": (0.25e9, 2e-4)}
FASTER = "0.25 GB/s"
RANKS, BUCKETS = (2, 4), (1, 4, 100)  # buckets in MiB
BLOCKS = 2  # each times the layers and the steps, in turn


def main():
    print("forward and backward until the gradients are averaged, ms")
    print(f"{'ranks':>5}  {'model':26}{'bucket':>8}  {'link':22}{'predicted':>10}{'measured':>10}"
          f"{'error':>8}")
    results = []
    for configuration in configurations():
        result = predict_and_measure(configuration, BLOCKS)
        results.append(result)
        predicted, measured = result["predicted_seconds"], result["measured_seconds"]
        print(f"{result['ranks']:5}  {result['model']:26}{result['bucket_mib']:4g} MiB  "
              f"{result['link']:22}{1e3 * predicted:10.1f}{1e3 * measured:10.1f}"
              f"{predicted / measured - 1:+8.0%}", flush=True)
    for kind in ("emulated", "asleep", "real"):
        median, p90 = errors(result for result in results if result["kind"] == kind)
        print(f"{kind}: absolute error, median {median:.0%}, 90th percentile {p90:.0%}")
    save("predicted_steps", rows=results)


def configurations():
    """All combinations on the emulated links, those on the faster link again with ranks that sleep
    in place of computing, then on real gloo with a link fitted for it.
    """
    for ranks, model, bucket in itertools.product(RANKS, MODELS, BUCKETS):
        for link, (bandwidth, latency) in LINKS.items():
            yield {"kind": "emulated", "model": model, "ranks": ranks, "bucket_mib": bucket,
                   "link": link, "bandwidth": bandwidth, "latency": latency}
    bandwidth, latency = LINKS[FASTER]
    for ranks, model, bucket in itertools.product(RANKS, MODELS, BUCKETS):
        yield {"kind": "asleep", "model": model, "ranks": ranks, "bucket_mib": bucket,
               "link": f"{FASTER}, asleep", "bandwidth": bandwidth, "latency": latency}
    for ranks in RANKS:
        link = fit_gloo_link(ranks)
        for model, bucket in itertools.product(MODELS, BUCKETS[:2]):
            yield {"kind": "real", "model": model, "ranks": ranks, "bucket_mib": bucket,
                   "link": "gloo, fitted", "bandwidth": link.bandwidth, "latency": link.latency}


def errors(results) -> tuple[float, float]:
    """Median and 90th percentile of the absolute error, as a part of the measured time."""
    found = sorted(abs(result["predicted_seconds"] / result["measured_seconds"] - 1)
                   for result in results)
    return statistics.median(found), statistics.quantiles(found, n=10, method="inclusive")[-1]


if __name__ == "__main__":
    main()
