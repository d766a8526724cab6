"""The gradient noise scale on real ranks: against arithmetic, and against a known gradient."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dplab
from dplab.measure import NoiseScale
from dplab.parallel import average_gradients

SHAPES = ((3, 4), (5,), ())


class Parameters(nn.Module):
    """Parameters with given gradients, and one without."""

    def __init__(self, flat):
        super().__init__()
        sizes = [math.prod(shape) for shape in SHAPES]
        for number, (part, shape) in enumerate(zip(flat.split(sizes), SHAPES, strict=True)):
            parameter = nn.Parameter(torch.zeros(shape, dtype=flat.dtype))
            parameter.grad = part.clone().view(shape)
            self.register_parameter(f"p{number}", parameter)
        self.unused = nn.Parameter(torch.ones(2))


def gradient_of(rank, step):
    generator = torch.Generator().manual_seed(17 * step + rank)
    return 0.3 + torch.randn(18, generator=generator, dtype=torch.float64)


def one_step(noise, gradient):
    model = Parameters(gradient)
    noise.local(model.parameters())
    average_gradients(model)
    return noise.averaged(model.parameters())


def follow(local_batch, smoothing, steps):
    noise = NoiseScale(local_batch, smoothing)
    nothing_yet = (noise.scale, noise.variance, noise.squared_gradient)
    each = [one_step(noise, gradient_of(dist.get_rank(), step)) for step in range(steps)]
    return each, (noise.squared_gradient, noise.variance, noise.scale), nothing_yet


@pytest.mark.parametrize("world_size", [2, 3])
def test_both_estimates_are_those_of_the_paper(world_size):
    b, smoothing, steps = 6, 0.7, 5
    B = b * world_size
    squared, variance = [], []
    for step in range(steps):
        gradients = torch.stack([gradient_of(rank, step) for rank in range(world_size)])
        small = gradients.square().sum(dim=1).mean().item()
        big = gradients.mean(dim=0).square().sum().item()
        squared.append((B * big - b * small) / (B - b))
        variance.append((small - big) / (1 / b - 1 / B))

    weights = [smoothing ** (steps - 1 - step) for step in range(steps)]
    smooth = [sum(w * x for w, x in zip(weights, xs, strict=True)) / sum(weights)
              for xs in (squared, variance)]
    exact = {"rel": 1e-9}
    for each, smoothed, nothing_yet in dplab.run(follow, world_size, b, smoothing, steps):
        assert [g for g, _ in each] == pytest.approx(squared, **exact)
        assert [s for _, s in each] == pytest.approx(variance, **exact)
        assert smoothed == pytest.approx([*smooth, smooth[1] / smooth[0]], **exact)
        assert all(map(math.isnan, nothing_yet))


def model_and_data():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(60, 90), nn.Tanh(), nn.Linear(90, 60)).double()
    return model, torch.randn(5, 4 * dist.get_world_size(), 60).double()


def by_hand(steps):
    model, data = model_and_data()
    noise = NoiseScale(local_batch=4)
    for batch in data[:steps]:
        model.zero_grad()
        model(batch.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
        noise.local(model.parameters())
        average_gradients(model)
        noise.averaged(model.parameters())
    return noise.squared_gradient, noise.variance, noise.scale


def with_ddp(steps, skipped=()):
    model, data = model_and_data()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
    noise = NoiseScale(local_batch=4)
    ddp.register_comm_hook(noise, NoiseScale.hook)
    for step, batch in enumerate(data[:steps]):
        ddp.zero_grad()
        ddp(batch.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
        if step not in skipped:
            noise.averaged(ddp.parameters())
    return noise.squared_gradient, noise.variance, noise.scale


def test_the_hook_of_ddp_sees_the_same():
    hooked, plain = dplab.run(with_ddp, 3, 5), dplab.run(by_hand, 3, 5)
    for one, other in zip(hooked, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_steps_that_nobody_measured_leave_no_trace_in_the_hook():
    def last_alone():
        return with_ddp(2, skipped=[0])[:2]

    def last_by_hand():
        model, data = model_and_data()
        model(data[1].chunk(2)[dist.get_rank()]).square().mean().backward()
        noise = NoiseScale(local_batch=4)
        noise.local(model.parameters())
        average_gradients(model)
        return noise.averaged(model.parameters())

    for one, other in zip(dplab.run(last_alone, 2), dplab.run(last_by_hand, 2), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_half_precision_neither_overflows_nor_rounds():
    def estimate():
        noise = NoiseScale(1)
        parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
        parameter.grad = torch.full((4,), 300.0 + dist.get_rank(), dtype=torch.float16)
        noise.local([parameter])
        parameter.grad = torch.full((4,), 300.5, dtype=torch.float16)
        return noise.averaged([parameter])

    for squared, variance in dplab.run(estimate, 2):
        assert squared == pytest.approx(4 * 300 * 301, rel=1e-6)
        assert variance == pytest.approx(4 * 0.5, rel=0.05)


def test_a_gradient_lost_in_noise_has_an_infinite_scale():
    def opposite():
        noise = NoiseScale(1)
        sign = 1 - 2 * dist.get_rank()
        squared, _ = one_step(noise, sign * torch.ones(18, dtype=torch.float64))
        return squared, noise.scale

    assert dplab.run(opposite, 2) == 2 * [(pytest.approx(-18), math.inf)]


def test_what_makes_no_sense_is_refused():
    def refused():
        for arguments in ((0,), (4, 1.0), (4, -0.1)):
            with pytest.raises(ValueError, match="local_batch is at least 1"):
                NoiseScale(*arguments)
        noise, model = NoiseScale(4), Parameters(gradient_of(dist.get_rank(), 0))
        noise.local(model.parameters())
        noise.averaged(model.parameters())
        with pytest.raises(RuntimeError, match="were not noted"):
            noise.averaged(model.parameters())

    dplab.run(refused, 2)
    with pytest.raises(dplab.RankError, match="ValueError: the noise scale compares"):
        dplab.run(NoiseScale, 1, 4)
