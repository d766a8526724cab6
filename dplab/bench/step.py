"""The predicted time of a training step beside the measured one, on emulated links and real gloo.

`measure` runs one configuration and adds ``measured_seconds`` and ``predicted_seconds``: forward
and backward of the course's OverlappedDDP, until the gradients are averaged. The prediction knows
each layer's compute time, measured in the same run with all ranks computing and none sending, and
the link. An emulated link takes its times from the formula that the prediction uses, so there only
the schedule is tested; real gloo's link is fitted to all-reduces timed in the same session.
"""

import itertools
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from dplab import run
from dplab.bench.results import save
from dplab.bench.timing import slowest_seconds
from dplab.measure import EmulatedLink, layer_times
from dplab.parallel import OverlappedDDP
from dplab.predict import cost
from dplab.predict.step import Layer, ddp_spans, step_seconds

MIB = 2**20
MODELS = {  # widths of the layers, samples of a rank
    "12 layers of 512": ([512] * 13, 512),
    "8 layers of 768": ([768] * 9, 96),
    "growing from 256 to 1024": ([256, 256, 384, 512, 640, 768, 896, 1024, 1024], 256),
}
LINKS = {"0.1 GB/s": (0.1e9, 5e-4), "0.25 GB/s": (0.25e9, 2e-4)}
_FIT_BYTES = [64 * 2**10 * 4**power for power in range(5)]


def add_arguments(parser):
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument("--buckets", type=float, nargs="+", default=[1, 4, 100], metavar="MIB",
                        help="default 1 4 100")
    parser.add_argument("--blocks", type=int, default=2,
                        help="each times the layers and the steps, in turn (default 2)")
    parser.add_argument("--save", action="store_true",
                        help="keep the results, which chapter 06 shows")


def main(options):
    print("forward and backward until the gradients are averaged, ms")
    print(f"{'ranks':>5}  {'model':26}{'bucket':>8}  {'link':22}{'predicted':>10}{'measured':>10}"
          f"{'error':>8}")
    results = []
    for configuration in configurations(options):
        result = measure(configuration, options.blocks)
        results.append(result)
        predicted, measured = result["predicted_seconds"], result["measured_seconds"]
        print(f"{result['ranks']:5}  {result['model']:26}{result['bucket_mib']:4g} MiB  "
              f"{result['link']:22}{1e3 * predicted:10.1f}{1e3 * measured:10.1f}"
              f"{predicted / measured - 1:+8.0%}", flush=True)
    for kind in ("emulated", "real"):
        median, p90 = errors(result for result in results if result["kind"] == kind)
        print(f"{kind}: absolute error, median {median:.0%}, 90th percentile {p90:.0%}")
    if options.save:
        save("step", rows=results)


def configurations(options):
    """All combinations on the emulated links, then on real gloo with a link fitted for it."""
    for ranks, model, bucket in itertools.product(options.ranks, MODELS, options.buckets):
        for link, (bandwidth, latency) in LINKS.items():
            yield {"kind": "emulated", "model": model, "ranks": ranks, "bucket_mib": bucket,
                   "link": link, "bandwidth": bandwidth, "latency": latency}
    for ranks in options.ranks:
        link = fit(ranks)
        for model, bucket in itertools.product(MODELS, options.buckets[:2]):
            yield {"kind": "real", "model": model, "ranks": ranks, "bucket_mib": bucket,
                   "link": "gloo, fitted", "bandwidth": link.bandwidth, "latency": link.latency}


def measure(configuration: dict, blocks: int = 3) -> dict:
    """The configuration with its predicted and measured seconds, of the slowest rank."""
    ranks, bucket = configuration["ranks"], configuration["bucket_mib"]
    link = cost.Link("", configuration["bandwidth"], configuration["latency"])
    emulated = EmulatedLink(link.bandwidth, link.latency)
    answers = run(_timed, ranks, configuration["model"], bucket, blocks, timeout=300,
                  backend="gloo", link=emulated if configuration["kind"] == "emulated" else None)
    predicted = max(
        step_seconds(ddp_spans(layers, ranks, link, bucket_bytes=bucket * MIB))
        for layers, _ in answers)
    slowest = [max(steps) for steps in zip(*(steps for _, steps in answers), strict=True)]
    return {**configuration, "predicted_seconds": round(predicted, 6),
            "measured_seconds": round(statistics.median(slowest), 6)}


def errors(results) -> tuple[float, float]:
    """Median and 90th percentile of the absolute error, as a part of the measured time."""
    found = sorted(abs(result["predicted_seconds"] / result["measured_seconds"] - 1)
                   for result in results)
    return statistics.median(found), statistics.quantiles(found, n=10, method="inclusive")[-1]


def fit(ranks: int) -> cost.Link:
    """Latency and bandwidth of gloo's all-reduce between so many ranks here."""
    return cost.fit_link(
        cost.Measurement("ring all-reduce", ranks, nbytes, seconds)
        for nbytes, seconds in run(_all_reduces, ranks, backend="gloo", timeout=300)[0].items())


def _timed(name, bucket_mib, blocks):
    """This rank's layers, medians over the blocks, and the seconds of each step."""
    model, x = _model(name)
    wrapped = OverlappedDDP(model, bucket_mib)
    found, steps = [], []
    for _ in range(blocks):
        dist.barrier()
        with wrapped.no_sync():
            found.append(layer_times(model, x, rounds=5))
        for index in range(6):
            wrapped.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            wrapped(x).square().mean().backward()
            wrapped.finish_gradient_sync()
            if index:
                steps.append(time.perf_counter() - begin)
    return [_middle(layers) for layers in zip(*found, strict=True)], steps


def _middle(layers):
    return Layer(statistics.median(layer.forward_seconds for layer in layers),
                 statistics.median(layer.backward_seconds for layer in layers),
                 layers[0].gradient_bytes)


def _model(name):
    widths, batch = MODELS[name]
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*layers), torch.randn(batch, widths[0])


def _all_reduces():
    """Bytes: median seconds of the slowest rank."""
    times = {nbytes: [] for nbytes in _FIT_BYTES}
    for _ in range(12):
        for nbytes, seconds in times.items():
            tensor = torch.ones(nbytes // 4)
            seconds.append(slowest_seconds(dist.all_reduce, tensor))
    return {nbytes: statistics.median(seconds[2:]) for nbytes, seconds in times.items()}
