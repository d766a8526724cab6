"""A training step whose time is predicted and measured: `predict_and_measure`.

The time is that of forward and backward of the course's OverlappedDDP, until the gradients are
averaged. The prediction knows the link, and each layer's compute time, measured in the same run
with all ranks computing and none sending. An emulated link takes its times from the formula that
the prediction uses, so there only the schedule is tested; `fit_gloo_link` fits real gloo's link to
all-reduces timed in the same session. In steps that are asleep, each layer sleeps for as long as it
computed before, so that the cores are free for sending.
"""

import itertools
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from dplab import run
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
_FITTED_BYTES = [64 * 2**10 * 4**power for power in range(5)]


def predict_and_measure(configuration: dict, blocks: int = 3) -> dict:
    """The configuration, with ``predicted_seconds`` and ``measured_seconds`` of the slowest rank.

    configuration: ``kind`` ("emulated", "asleep" or "real"; the first two on an emulated link),
    ``model`` (one of MODELS), ``ranks``, ``bucket_mib``, and the link's ``bandwidth`` in bytes/s
    and ``latency`` in seconds. blocks: how often the layers and then the steps are timed, in turn.
    """
    kind, ranks, bucket = (configuration[name] for name in ("kind", "ranks", "bucket_mib"))
    link = cost.Link("", configuration["bandwidth"], configuration["latency"])
    emulated = EmulatedLink(link.bandwidth, link.latency)
    answers = run(_timed, ranks, configuration["model"], bucket, blocks, kind == "asleep",
                  timeout=300, backend="gloo", link=None if kind == "real" else emulated)
    predicted = max(
        step_seconds(ddp_spans(layers, ranks, link, bucket_bytes=bucket * MIB))
        for layers, _ in answers)
    slowest = [max(steps) for steps in zip(*(steps for _, steps in answers), strict=True)]
    return {**configuration, "predicted_seconds": round(predicted, 6),
            "measured_seconds": round(statistics.median(slowest), 6)}


def fit_gloo_link(ranks: int) -> cost.Link:
    """Latency and bandwidth of gloo's all-reduce between so many ranks here."""
    return cost.fit_link(
        cost.Measurement("ring all-reduce", ranks, nbytes, seconds)
        for nbytes, seconds in run(_all_reduces, ranks, backend="gloo", timeout=300)[0].items())


def slowest_seconds(function, *args) -> float:
    """The seconds that ``function(*args)`` takes the slowest rank; all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    function(*args)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def layered_model(name: str) -> tuple[nn.Sequential, torch.Tensor]:
    """One of MODELS, the same on each rank, and its inputs."""
    widths, batch = MODELS[name]
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*layers), torch.randn(batch, widths[0])


def gradient_mib(name: str) -> float:
    """MiB of the gradients of one of MODELS."""
    return sum(parameter.nbytes for parameter in layered_model(name)[0].parameters()) / MIB


class _Asleep(nn.Module):
    """A layer that sleeps for as long as it took to compute, and computes one sample."""

    def __init__(self, layer: nn.Module, took: Layer):
        super().__init__()
        self.layer, self.took = layer, took

    def forward(self, x):
        time.sleep(self.took.forward_seconds)
        return _SleepInBackward.apply(self.layer(x), self.took.backward_seconds)


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *gradients):
        time.sleep(ctx.seconds)
        return gradients[0], None


def _timed(name, bucket_mib, blocks, asleep):
    """This rank's layers, medians over the blocks, and the seconds of each step."""
    model, x = layered_model(name)
    if asleep:
        dist.barrier()
        took = layer_times(model, x, rounds=5)
        model, x = nn.Sequential(*map(_Asleep, model, took)), x[:1]
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


def _all_reduces():
    """Bytes: median seconds of the slowest rank."""
    times = {nbytes: [] for nbytes in _FITTED_BYTES}
    for _ in range(12):
        for nbytes, seconds in times.items():
            tensor = torch.ones(nbytes // 4)
            seconds.append(slowest_seconds(dist.all_reduce, tensor))
    return {nbytes: statistics.median(seconds[2:]) for nbytes, seconds in times.items()}
