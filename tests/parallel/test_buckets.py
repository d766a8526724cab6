"""Buckets and overlap: what is in a bucket, when it leaves, and what the gradients are then.

That BucketedDDP and OverlappedDDP train right is tested in test_manual_ddp.py.
"""

import itertools
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from ranks import MIB, run_each
from torch import nn

from dplab import run
from dplab.measure import CallLog
from dplab.parallel import BucketedDDP, OverlappedDDP
from dplab.parallel.bucketed_ddp import average_bucket, bucket_parameters, filled_in_reverse
from dplab.parallel.overlapped_ddp import OverlappedBuckets

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WRAPPERS = [BucketedDDP, OverlappedDDP]


def layers(*sizes, dtype=torch.float32):
    """A parameter of each size, with its index for a name."""
    return nn.ParameterList([nn.Parameter(torch.arange(float(size)).to(dtype)) for size in sizes])


def sizes_in(buckets):
    return [[parameter.numel() for parameter in bucket.parameters] for bucket in buckets]


@pytest.mark.parametrize(("limit", "expected"), [
    (1, [[5], [4], [3], [2], [1]]),
    (9, [[5, 4], [3, 2, 1]]),  # closed once it is reached, and the last one is never full
    (10, [[5, 4, 3], [2, 1]]),
])
def test_buckets_hold_parameters_in_reverse_and_close_at_their_size(limit, expected):
    assert sizes_in(bucket_parameters(layers(1, 2, 3, 4, 5), 4 * limit / MIB)) == expected


def test_a_bucket_has_one_dtype_and_tied_and_frozen_parameters_no_second_place():
    module = layers(3, 7, 4)
    module.append(nn.Parameter(torch.zeros(6, dtype=torch.float64)))
    module[1].requires_grad_(False)
    module.append(module[2])
    buckets = bucket_parameters(module, 1)
    assert sizes_in(buckets) == [[6], [4, 3]] or sizes_in(buckets) == [[4, 3], [6]]
    for bucket in buckets:
        assert {parameter.dtype for parameter in bucket.parameters} == {bucket.flat.dtype}


@pytest.mark.parametrize("size", [0, float("nan")])
def test_a_bucket_has_a_size(size):
    with pytest.raises(ValueError, match="more than 0 MiB"):
        BucketedDDP(nn.Linear(1, 1), bucket_mb=size)


def loss_of(module):
    """Gradient of parameter p: 2 p times the rank's number plus one."""
    return (dist.get_rank() + 1) * sum(parameter.square().sum() for parameter in module)


def step_and_look(wrap):
    model = wrap(layers(1, 2, 3, 4, 5), bucket_mb=4 * 8 / MIB)
    with CallLog() as log:
        loss_of(model.module).backward()
        model.finish_gradient_sync()
    flat = {bucket.flat.data_ptr(): bucket.flat.numel() for bucket in model.buckets}
    views = [parameter.grad.data_ptr() for parameter in model.module]
    inside = [any(start <= view < start + 4 * length for start, length in flat.items())
              for view in views]
    gradients = [parameter.grad.clone() for parameter in model.module]

    model.zero_grad(set_to_none=False)
    loss_of(model.module).backward()
    model.finish_gradient_sync()
    again = [parameter.grad.data_ptr() for parameter in model.module] == views
    return [call.bytes for call in log.calls], inside, gradients, again


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_one_all_reduce_for_each_bucket_and_gradients_are_views(wrap, ranks):
    mean = sum(range(1, ranks + 1)) / ranks
    for sent, inside, gradients, again in run_each(step_and_look, tuple(WRAPPERS), ranks)[wrap]:
        assert sent == [4 * (9 + 2), 4 * (6 + 3)]  # gradients, and a flag for each
        assert all(inside) and again
        for gradient in gradients:
            torch.testing.assert_close(gradient, 2 * mean * torch.arange(float(len(gradient))))


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.2)
        return gradient


def launches_in_backward(wrap):
    torch.manual_seed(1)
    module = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
    model = wrap(module, bucket_mb=4 * 42 / MIB)  # one bucket for each layer
    x = torch.ones(2, 6)
    for layer in module:
        x = Slow.apply(layer(x))  # backward pauses before each layer's gradients
    with CallLog() as log:
        x.sum().backward()
        end_of_backward = time.monotonic()
        model.finish_gradient_sync()
    return [call.time < end_of_backward for call in log.calls], [call.time for call in log.calls]


def test_all_reduces_start_while_backward_computes():
    for early, times in run(launches_in_backward, 2, OverlappedDDP):
        assert early == [True, True, True]
        assert all(b - a > 0.15 for a, b in itertools.pairwise(times)), "one by one"
    for early, _ in run(launches_in_backward, 2, BucketedDDP):
        assert early == [False, False, False]


def orders_that_differ():
    """Rank 0 needs parameter 2 for its loss first, rank 1 last, and rank 2 not at all."""
    model = OverlappedDDP(layers(4, 4, 4), bucket_mb=4 * 4 / MIB)
    p, rank = list(model.module), dist.get_rank()
    order = [p[2], p[1], p[0]] if rank == 0 else [p[0], p[1]] + [p[2]] * (rank == 1)
    x = torch.ones(4)
    for parameter in order:
        x = x * parameter.exp()
    x.sum().backward()
    model.finish_gradient_sync()
    return [parameter.grad.clone() for parameter in p]


def test_ranks_launch_in_one_order_whatever_order_gradients_come_in():
    values = torch.arange(4.0)
    two, three = (2 * values).exp(), (3 * values).exp()
    expected = [(2 * three + two) / 3] * 2 + [2 * three / 3]
    for gradients in run(orders_that_differ, 3):
        for gradient, right in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, right)


def the_idea_where_orders_differ():
    """Two parameters beside each other, of which rank 0 computes the second one first."""
    module = layers(4, 4)
    overlapped = OverlappedBuckets([[module[1]], [module[0]]])
    order = module if dist.get_rank() else reversed(list(module))
    # Gradients that differ, so that it shows where numbers of two buckets are added.
    losses = {each: (1 + index) * (dist.get_rank() + 1) * each.square().sum()
              for each, index in ((each, int(each is module[1])) for each in order)}
    sum(losses.values()).backward()
    overlapped.finish()
    return [parameter.grad.clone() for parameter in module]


def test_the_idea_alone_launches_in_one_order_too():
    values = torch.arange(4.0)
    for gradients in run(the_idea_where_orders_differ, 2):
        for factor, gradient in enumerate(gradients, start=1):
            torch.testing.assert_close(gradient, factor * 3 * values)


def backward_twice():
    model = OverlappedDDP(nn.Linear(3, 2), bucket_mb=1)
    model(torch.ones(1, 3)).sum().backward()
    try:
        model(torch.ones(1, 3)).sum().backward()
    except RuntimeError as error:
        return str(error)


def test_a_gradient_computed_twice_is_named():
    for message in run(backward_twice, 2):
        assert "'weight'" in message or "'bias'" in message
        assert "no_sync()" in message


def ideas_beside_wrappers():
    """The gradients of two steps by the idea alone, after backward and during it, and by a class.

    Also whether the idea's first all-reduce is launched before backward ends.
    """
    found = {}
    for name in ("after", "during", "class"):
        module = layers(1, 2, 3, 4, 5)
        buckets = filled_in_reverse(list(module), 4 * 8)
        overlapped = OverlappedBuckets(buckets) if name == "during" else None
        model = BucketedDDP(module, 4 * 8 / MIB) if name == "class" else None
        for _ in range(2):
            module.zero_grad()
            loss_of(module).backward()
            if overlapped is not None:
                found["early"] = len(overlapped.under_way)
                overlapped.finish()
            elif model is not None:
                model.finish_gradient_sync()
            else:
                for bucket in buckets:
                    average_bucket(bucket)
        found[name] = [parameter.grad.clone() for parameter in module]
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_idea_alone_averages_as_the_classes_do(ranks):
    for found in run(ideas_beside_wrappers, ranks):
        assert found["early"] == 2
        for after, during, of_class in zip(found["after"], found["during"], found["class"],
                                           strict=True):
            torch.testing.assert_close(after, of_class)
            torch.testing.assert_close(during, of_class)
