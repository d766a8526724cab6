"""The course's DDPs on real ranks: after each backward, during it, one by one and in buckets.

They are compared with one process that has the whole batch, with torch's DDP, and with arithmetic.
"""

import copy
import functools
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from odd_models import INPUTS, SMALL_MB, Awkward, Branches, assert_all_equal, batch
from ranks import MIB, mine, run_each, world_sizes
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dplab import run
from dplab.measure import CallLog
from dplab.parallel import (
    BucketedDDP,
    ManualDDP,
    OverlappedDDP,
    average_gradients,
    broadcast_module,
)
from dplab.parallel.bucketed_ddp import bucket_parameters, filled_in_reverse
from dplab.parallel.overlapped_ddp import OverlappedBuckets

LOCAL_BATCH = 6
WRAPPERS = (ManualDDP, functools.partial(BucketedDDP, bucket_mb=SMALL_MB),
            functools.partial(OverlappedDDP, bucket_mb=SMALL_MB))
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS, ids=["manual", "bucketed", "overlapped"])


def gradients_of(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


# --- against one process --------------------------------------------------------------------------

def train_awkward(wrap):
    """Six steps, of which every other one has three micro-batches."""
    model = wrap(Awkward(seed=dist.get_rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        x, y = map(mine, batch(step, LOCAL_BATCH * dist.get_world_size()))
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        pieces = list(zip(x.chunk(1 + 2 * (step % 2)), y.chunk(1 + 2 * (step % 2)), strict=True))
        with model.no_sync(), CallLog() as log:
            for x, y in pieces[:-1]:
                (F.mse_loss(model(x), y) / len(pieces)).backward()
                model.finish_gradient_sync()
        assert not log.calls
        x, y = pieces[-1]
        (F.mse_loss(model(x), y) / len(pieces)).backward()
        model.finish_gradient_sync()
        optimizer.step()
    return model.module.state_dict()


@pytest.mark.slow
@each_wrapper
@world_sizes
def test_trains_as_one_process_on_the_whole_batch(world_size, wrap):
    alone = Awkward(seed=0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        x, y = batch(step, LOCAL_BATCH * world_size)
        optimizer.zero_grad()
        F.mse_loss(alone(x), y).backward()
        optimizer.step()
    assert_all_equal(run_each(train_awkward, WRAPPERS, world_size)[wrap], alone.state_dict())
    assert torch.equal(alone.frozen.weight, Awkward(seed=0).frozen.weight)


def sync_branches(wrap):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = wrap(Branches(ranks))
    model(batch(rank, LOCAL_BATCH)[0], rank).square().mean().backward()
    if not isinstance(model, DistributedDataParallel):
        model.finish_gradient_sync()
    return gradients_of(model.module)


@world_sizes
def test_a_parameter_unused_on_some_ranks_gets_the_mean_with_zeros_everywhere(world_size):
    alone = Branches(world_size)
    for rank in range(world_size):
        (alone(batch(rank, LOCAL_BATCH)[0], rank).square().mean() / world_size).backward()
    assert alone.branches[-1].weight.grad is None
    torchs = functools.partial(DistributedDataParallel, find_unused_parameters=True)
    for results in run_each(sync_branches, (*WRAPPERS, torchs), world_size).values():
        assert_all_equal(results, gradients_of(alone))


# --- the start, and buffers -----------------------------------------------------------------------

def assorted(rank):
    """Every kind of tensor that a broadcast has to carry, with values of this rank."""
    module = Awkward(seed=rank)
    module.register_buffer("flags", torch.tensor([True, False, True, True]).roll(rank))
    module.register_buffer("passing", torch.full((3,), rank + 0.5), persistent=False)
    module.register_buffer("turned_buffer", (torch.arange(6.0).reshape(2, 3) + rank).t())
    module.register_buffer("small", torch.tensor([1.5 + rank], dtype=torch.bfloat16))
    module.register_buffer("empty", torch.zeros(0, 3))
    return module


def tensors_of(module):
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def start(give_out):
    module = assorted(dist.get_rank())
    before = tensors_of(module)
    strides = {name: tensor.stride() for name, tensor in before.items()}
    give_out(module)
    after = tensors_of(module)
    assert all(after[name] is before[name] for name in before), "an optimizer would lose these"
    assert strides == {name: tensor.stride() for name, tensor in after.items()}
    return {name: tensor.detach() for name, tensor in after.items()}


def test_every_rank_starts_as_rank_0():
    expected = {name: tensor.detach() for name, tensor in tensors_of(assorted(0)).items()}
    for results in run_each(start, (broadcast_module, ManualDDP), 3).values():
        assert_all_equal(results, expected, tolerance=0)


def with_batch_norm(wrap):
    """Trained, with two forwards before a backward at last, and one in eval mode by rank 0 alone.

    What the replica has then, what torch's DDP has, and the bytes that broadcasts sent.
    """
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(INPUTS, 13, bias=False), nn.BatchNorm1d(13), nn.ReLU(),
                           nn.Linear(13, 3))
    found, sent = [], 0
    for kind in (wrap, DistributedDataParallel):
        model = kind(copy.deepcopy(module))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(5):
            x = mine(batch(step, LOCAL_BATCH * dist.get_world_size())[0]).float()
            optimizer.zero_grad()
            with CallLog() as log:
                loss = model(x).square().mean()
                if step == 4:
                    loss = loss + model(x + 1).square().mean()
            sent += log.bytes("broadcast") if kind is wrap else 0
            loss.backward()
            if kind is wrap:
                model.finish_gradient_sync()
            optimizer.step()
        last = {f"gradient of {name}": each for name, each in gradients_of(model.module).items()}
        found.append(copy.deepcopy(tensors_of(model.module) | last))
        if kind is wrap:
            if dist.get_rank() == 0:
                model.eval()(torch.zeros(3, INPUTS))
            with model.train().no_sync():
                model(torch.ones(dist.get_rank() + 2, INPUTS))
    return (*found, sent)


@pytest.mark.slow
@each_wrapper
@pytest.mark.parametrize("ranks", [1, 3])
def test_trains_as_torchs_ddp(ranks, wrap):
    for ours, theirs, sent in run_each(with_batch_norm, WRAPPERS, ranks)[wrap]:
        assert_all_equal([ours], theirs, tolerance=1e-6)
        assert sent == 6 * (4 * 13 + 4 * 13 + 8)  # as often as forward ran


# --- gradients ------------------------------------------------------------------------------------

def averaged_gradients():
    """Gradients that each rank has in other strides, that overflow when summed; what was sent."""
    rank = dist.get_rank()
    module = nn.ParameterList([torch.zeros(3, 5), torch.zeros(4, dtype=torch.float16)])
    gradient = torch.arange(15.0).reshape(3, 5)
    module[0].grad = gradient if rank == 0 else gradient.t().contiguous().t()
    module[1].grad = torch.full((4,), 40_000.0, dtype=torch.float16)  # the largest is 65,504
    with CallLog() as log:
        average_gradients(module)
    return module[0].grad, module[1].grad, [call.shape for call in log.calls]


def test_strides_may_differ_and_a_sum_may_overflow():
    for gradient, large, sent in run(averaged_gradients, 4):
        assert torch.equal(gradient, torch.arange(15.0).reshape(3, 5))
        assert large.tolist() == [40_000.0] * 4
        assert sent == [(2,), (3, 5), (4,)]  # whether somebody has a gradient, and the gradients


def what_is_special(wrap):
    """A sparse gradient; nothing to average; no_sync() left by an error, and inside another.

    Where gradients leave during backward, also two backwards without a finish between them.
    """
    words = wrap(nn.ModuleDict({"words": nn.Embedding(10, 3, sparse=True)}))
    with pytest.raises(NotImplementedError, match=r"'words\.weight'.*sparse=False"):
        words.module["words"](torch.tensor([dist.get_rank()])).sum().backward()
        words.finish_gradient_sync()

    for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False), Branches(2)):
        wrap(module).finish_gradient_sync()
        assert all(parameter.grad is None for parameter in module.parameters())

    model = wrap(nn.Linear(1, 1))
    with pytest.raises(KeyError), model.no_sync(), model.no_sync():
        raise KeyError
    with model.no_sync(), CallLog() as log:
        with model.no_sync():
            pass
        model.finish_gradient_sync()
    assert not log.calls, "the inner block ended the outer one"
    (model(torch.ones(1, 1)) * (dist.get_rank() + 1)).sum().backward()
    model.finish_gradient_sync()
    assert model.module.bias.grad.item() == 1.5
    if isinstance(model, OverlappedDDP):
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(RuntimeError, match=r"'(weight|bias)' was computed .*no_sync\(\)"):
            model(torch.ones(1, 1)).sum().backward()


@each_wrapper
def test_what_is_special_about_a_backward(wrap):
    run(what_is_special, 2, wrap)


# --- buckets --------------------------------------------------------------------------------------

def layers(*sizes):
    """A parameter of each size."""
    return nn.ParameterList([torch.arange(float(size)) for size in sizes])


def sizes_in(buckets):
    return [[parameter.numel() for parameter in bucket.parameters] for bucket in buckets]


def test_buckets_are_filled_in_reverse_and_close_at_their_size():
    def sizes(limit):
        return sizes_in(bucket_parameters(layers(1, 2, 3, 4, 5), 4 * limit / MIB))

    assert sizes(1) == [[5], [4], [3], [2], [1]]
    assert sizes(9) == [[5, 4], [3, 2, 1]]  # closed once it is reached; the last is never full
    assert sizes(10) == [[5, 4, 3], [2, 1]]

    module = layers(3, 7, 4, 2)
    module.append(nn.Parameter(torch.zeros(6, dtype=torch.float64)))
    module[1].requires_grad_(False)
    module.append(module[2])
    assert sizes_in(bucket_parameters(module, 8 / MIB)) == [[6], [2], [4], [3]]
    assert sorted(sizes_in(bucket_parameters(module, 1))) == [[2, 4, 3], [6]]
    for size in (0, float("nan")):
        with pytest.raises(ValueError, match="more than 0 MiB"):
            BucketedDDP(module, bucket_mb=size)


def loss_of(module):
    """Gradient of parameter p: 2 p times the rank's number plus one."""
    return (dist.get_rank() + 1) * sum(parameter.square().sum() for parameter in module)


def bytes_in_buckets(kind):
    model, sent, places = kind(layers(1, 2, 3, 4, 5), bucket_mb=4 * 8 / MIB), [], []
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        with CallLog() as log:
            loss_of(model.module).backward()
            model.finish_gradient_sync()
        sent.append([call.bytes for call in log.calls])
        places.append([parameter.grad.data_ptr() for parameter in model.module])
    storages = {parameter.grad.untyped_storage().data_ptr() for parameter in model.module}
    return sent, places[0] == places[1], len(storages)


@pytest.mark.parametrize("kind", [BucketedDDP, OverlappedDDP])
def test_one_all_reduce_for_each_bucket_and_gradients_are_views(kind):
    for found in run(bytes_in_buckets, 2, kind):
        assert found == (2 * [[4 * (9 + 2), 4 * (6 + 3)]], True, 2)  # and a flag for each


def launches(kind):
    """Seconds from each all-reduce's launch to the end of backward."""
    module = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
    model = kind(module, bucket_mb=4 * 42 / MIB)  # one bucket for each layer
    x = torch.ones(2, 6)
    for layer in module:
        x = layer(x)
        x.register_hook(lambda _: time.sleep(0.2))  # in backward, before the layer's gradients
    with CallLog() as log:
        x.sum().backward()
        end = time.monotonic()
        model.finish_gradient_sync()
    return [end - call.time for call in log.calls]


def test_all_reduces_start_while_backward_computes():
    for bucketed, overlapped in run(lambda: [launches(BucketedDDP), launches(OverlappedDDP)], 2):
        assert len(bucketed) == 3 and max(bucketed) < 0
        assert len(overlapped) == 3 and min(overlapped) > 0
        assert all(a - b > 0.15 for a, b in itertools.pairwise(overlapped)), "one by one"


def orders_that_differ(kind):
    """Rank 0 needs parameter 2 for its loss first, rank 1 last, and rank 2 not at all."""
    module = layers(4, 4, 4)
    model = kind(module)
    p, rank = list(module), dist.get_rank()
    order = [p[2], p[1], p[0]] if rank == 0 else [p[0], p[1]] + [p[2]] * (rank == 1)
    x = torch.ones(4)
    for parameter in order:
        x = x * parameter.exp()
    if rank == 2 and kind is the_idea:  # which does without what a rank has not used
        x = x + 0 * p[2].exp()
    x.sum().backward()
    getattr(model, "finish_gradient_sync", getattr(model, "finish", None))()
    return [parameter.grad.clone() for parameter in p]


def the_idea(module):
    return OverlappedBuckets(filled_in_reverse(list(module), 4 * 4))


def by_class(module):
    return OverlappedDDP(module, bucket_mb=4 * 4 / MIB)


@pytest.mark.parametrize("kind", [by_class, the_idea])
def test_ranks_launch_in_one_order_whatever_order_gradients_come_in(kind):
    values = torch.arange(4.0)
    two, three = (2 * values).exp(), (3 * values).exp()
    expected = [(2 * three + two) / 3] * 2 + [2 * three / 3]
    for gradients in run(orders_that_differ, 3, kind):
        torch.testing.assert_close(gradients, expected)
