"""The course's DDPs on real ranks: against one process, against torch's DDP, and as modules."""

import copy

import pytest
import torch
import torch.distributed as dist
from ddp_models import (
    EACH,
    LOCAL_BATCH,
    Awkward,
    Normalised,
    assert_all_equal,
    batch,
    count_collectives,
    each_wrapper,
    tensors_of,
)
from ranks import mine, run_each, world_sizes
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dplab
from dplab.parallel import ManualDDP, broadcast_module

# --- against a single process -------------------------------------------------------------------

def train_awkward_both_ways(wrap, steps):
    return [train_awkward(wrap, steps, set_to_none) for set_to_none in (True, False)]


def train_awkward(wrap, steps, set_to_none):
    model = wrap(Awkward(seed=dist.get_rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, LOCAL_BATCH * dist.get_world_size())
        optimizer.zero_grad(set_to_none=set_to_none)
        F.mse_loss(model(mine(x)), mine(y)).backward()
        model.finish_gradient_sync()
        optimizer.step()
    return model.module.state_dict()


def train_awkward_alone(steps, samples):
    model = Awkward(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, samples)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.slow
@each_wrapper
@world_sizes
def test_trains_as_one_process_on_the_full_batch(world_size, wrap):
    expected = train_awkward_alone(6, LOCAL_BATCH * world_size)
    results = run_each(train_awkward_both_ways, EACH, world_size, 6)[wrap]
    for states in zip(*results, strict=True):  # zero_grad's set_to_none: True, then False
        assert_all_equal(states, expected, rtol=0, atol=1e-12)
    start = Awkward(seed=0).state_dict()
    assert torch.equal(expected["frozen.weight"], start["frozen.weight"])
    assert not torch.allclose(expected["turned"], start["turned"])


# --- against torch's DDP ------------------------------------------------------------------------

def difference_from_ddp(wrap, steps):
    """Largest differences after training: of parameters, of buffers, and of ranks from rank 0."""
    model = Normalised(seed=dist.get_rank())
    manual, reference = wrap(copy.deepcopy(model)), DistributedDataParallel(model)
    for replica in (manual, reference):
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
        for step in range(steps):
            x, _ = batch(step, LOCAL_BATCH * dist.get_world_size())
            optimizer.zero_grad()
            replica(mine(x).float()).square().mean().backward()
            if replica is manual:
                manual.finish_gradient_sync()
            optimizer.step()

    def largest(ours, theirs):
        return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))

    parameters = [p.detach() for p in manual.parameters()]
    on_rank_0 = [p.clone() for p in parameters]
    for tensor in on_rank_0:
        dist.broadcast(tensor, src=0)
    return (largest(parameters, [p.detach() for p in reference.parameters()]),
            largest(manual.buffers(), reference.buffers()), largest(parameters, on_rank_0))


@pytest.mark.slow
@each_wrapper
@world_sizes
def test_trains_as_ddp(world_size, wrap):
    for parameters, buffers, between_ranks in run_each(difference_from_ddp, EACH, world_size,
                                                       8)[wrap]:
        assert parameters < 1e-6 and buffers < 1e-6
        assert between_ranks == 0.0


# --- the start ----------------------------------------------------------------------------------

def assorted(rank):
    """Every kind of tensor that a broadcast has to carry, with values of this rank."""
    module = Awkward(seed=rank)
    module.register_buffer("flags", torch.tensor([True, False, True, True]).roll(rank))
    module.register_buffer("count", torch.tensor(100 + rank))
    module.register_buffer("passing", torch.full((3,), rank + 0.5), persistent=False)
    module.register_buffer("turned_buffer", (torch.arange(6.0).reshape(2, 3) + rank).t())
    module.register_buffer("small", torch.tensor([1.5 + rank], dtype=torch.bfloat16))
    module.register_buffer("empty", torch.zeros(0, 3))
    return module


def start_both_ways():
    return [start(by_hand) for by_hand in (True, False)]


def start(by_hand):
    module = assorted(dist.get_rank())
    before = tensors_of(module)
    strides = {name: tensor.stride() for name, tensor in before.items()}
    if by_hand:
        broadcast_module(module)
    else:
        ManualDDP(module)
    after = tensors_of(module)
    assert all(after[name] is before[name] for name in before), "an optimizer would lose these"
    assert strides == {name: tensor.stride() for name, tensor in after.items()}
    assert module.again.weight is module.encode.weight
    assert not module.frozen.weight.requires_grad and module.turned.requires_grad
    return {name: tensor.detach() for name, tensor in after.items()}


@world_sizes
def test_every_rank_starts_as_rank_0(world_size):
    expected = {name: tensor.detach() for name, tensor in tensors_of(assorted(0)).items()}
    for states in zip(*dplab.run(start_both_ways, world_size), strict=True):
        assert_all_equal(states, expected, rtol=0, atol=0)


# --- buffers ------------------------------------------------------------------------------------

def watch_buffers():
    """BatchNorm's buffers after one training forward, a second one, and one in eval mode."""
    rank = dist.get_rank()
    model = ManualDDP(nn.Sequential(nn.BatchNorm1d(7)))
    seen = []
    counts = {}
    count_collectives(counts)
    for step in range(2):
        out = model(batch(2 * rank + step, LOCAL_BATCH)[0].float())
        seen.append((model.module[0].running_mean.clone(), model.module[0].num_batches_tracked + 0))
    assert counts == {"broadcast": 2 * (7 + 7 + 1)}
    out.sum().backward()

    model.eval()
    if rank == 0:  # alone: in eval mode, nobody waits for anybody
        model(torch.zeros(3, 7))
    with model.train().no_sync():
        model(torch.ones(rank + 2, 7))
    assert counts == {"broadcast": 2 * (7 + 7 + 1)}
    return seen


@world_sizes
def test_a_training_forward_begins_with_the_buffers_of_rank_0(world_size):
    results = dplab.run(watch_buffers, world_size)
    inputs = [[batch(2 * rank + step, LOCAL_BATCH)[0].float() for step in range(2)]
              for rank in range(world_size)]
    for rank, ((mean_1, count_1), (mean_2, count_2)) in enumerate(results):
        torch.testing.assert_close(mean_1, 0.1 * inputs[rank][0].mean(0))
        of_rank_0 = 0.1 * inputs[0][0].mean(0)
        torch.testing.assert_close(mean_2, 0.9 * of_rank_0 + 0.1 * inputs[rank][1].mean(0))
        assert (count_1, count_2) == (1, 2)


def forward_twice_then_backward(wrapper):
    model = wrapper(Normalised(seed=dist.get_rank()))
    x = [batch(step, LOCAL_BATCH, seed=dist.get_rank())[0].float() for step in range(2)]
    (model(x[0]).square().mean() + model(x[1]).square().mean()).backward()
    if wrapper is not DistributedDataParallel:
        model.finish_gradient_sync()
    return {name: p.grad for name, p in model.module.named_parameters()}


@each_wrapper
def test_two_forwards_before_one_backward(wrap):
    results = run_each(forward_twice_then_backward, (DistributedDataParallel, *EACH), 2)
    assert_all_equal(results[wrap], results[DistributedDataParallel][0])

