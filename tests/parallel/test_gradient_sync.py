"""The course's DDPs on real ranks: what becomes of the gradients, and when nothing is sent."""

import torch
import torch.distributed as dist
from ddp_models import (
    EACH,
    LOCAL_BATCH,
    WRAPPERS,
    Awkward,
    Branches,
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
from dplab.parallel import average_gradients

# --- the gradients ------------------------------------------------------------------------------


def sync_branches_in_each_way():
    return [sync_branches(wrap) for wrap in (None, *WRAPPERS.values())]


def sync_branches(wrap):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if wrap is None:
        model = DistributedDataParallel(Branches(world_size), find_unused_parameters=True)
    else:
        model = wrap(Branches(world_size))
    x, _ = batch(rank, LOCAL_BATCH)
    model(x.float(), rank).square().mean().backward()
    if wrap is not None:
        model.finish_gradient_sync()
    return {name: p.grad for name, p in model.module.named_parameters()}


@world_sizes
def test_a_parameter_unused_on_some_ranks_gets_the_mean_with_zeros_everywhere(world_size):
    expected = dict.fromkeys(tensors_of(Branches(world_size)))
    for rank in range(world_size):
        alone = Branches(world_size)
        alone(batch(rank, LOCAL_BATCH)[0].float(), rank).square().mean().backward()
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None:
                so_far = 0 if expected[name] is None else expected[name]
                expected[name] = so_far + parameter.grad / world_size
    assert expected[f"branches.{world_size}.weight"] is None

    results = dplab.run(sync_branches_in_each_way, world_size)
    for gradients in [gradients for ways in results for gradients in ways]:
        for name, value in expected.items():
            if value is None:
                assert gradients[name] is None, name
            else:
                torch.testing.assert_close(gradients[name], value)


def sync_awkward_gradients():
    rank = dist.get_rank()
    module = Awkward(seed=0)
    x, y = batch(rank, LOCAL_BATCH)
    (10**rank * F.mse_loss(module(x), y)).backward()
    local = {name: p.grad.clone() for name, p in module.named_parameters() if p.requires_grad}
    objects = [p.grad for p in module.parameters()]
    counts = {}
    count_collectives(counts)
    average_gradients(module)
    assert all(p.grad is g for p, g in zip(module.parameters(), objects, strict=True))
    assert module.turned.grad.stride() == module.turned.stride() == (1, 11)
    assert module.frozen.weight.grad is None
    trainable = [p for p in module.parameters() if p.requires_grad]
    assert counts == {"all_reduce": sum(p.numel() for p in trainable) + len(trainable)}
    return local, {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


@world_sizes
def test_gradients_become_their_mean_and_each_travels_once(world_size):
    results = dplab.run(sync_awkward_gradients, world_size)
    expected = {name: sum(local[name] for local, _ in results) / world_size
                for name in results[0][0]}
    assert len(expected) == 7 and "again.weight" not in expected
    assert_all_equal([averaged for _, averaged in results], expected, rtol=1e-13, atol=1e-13)


def sync_mismatched_layouts():
    """The same gradient in row-major order on rank 0 and column-major order on the others."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(3, 5))])
    gradient = torch.arange(15.0).reshape(3, 5)
    module[0].grad = gradient if dist.get_rank() == 0 else gradient.t().contiguous().t()
    average_gradients(module)
    return module[0].grad


def sync_large_halves():
    module = nn.ParameterList([nn.Parameter(torch.zeros(4, dtype=torch.float16))])
    module[0].grad = torch.full((4,), 40_000.0, dtype=torch.float16)  # the largest is 65,504
    average_gradients(module)
    return module[0].grad


def test_layout_and_overflow():
    for gradient in dplab.run(sync_mismatched_layouts, 3):
        torch.testing.assert_close(gradient, torch.arange(15.0).reshape(3, 5))
    for gradient in dplab.run(sync_large_halves, 4):
        assert gradient.tolist() == [40_000.0] * 4


def sync_sparse(wrap):
    model = wrap(nn.ModuleDict({"words": nn.Embedding(10, 3, sparse=True)}))
    try:
        model.module["words"](torch.tensor([dist.get_rank()])).sum().backward()
        model.finish_gradient_sync()
    except NotImplementedError as error:
        return str(error)


def sync_nothing(wrap):
    for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False), Branches(2)):
        wrap(module).finish_gradient_sync()
    return all(p.grad is None for p in module.parameters())


@each_wrapper
def test_sparse_gradients_are_refused_by_name_and_nothing_is_no_trouble(wrap):
    for message in run_each(sync_sparse, EACH, 2)[wrap]:
        assert "'words.weight'" in message and "sparse=False" in message
    assert run_each(sync_nothing, EACH, 2)[wrap] == (True, True)


# --- no_sync ------------------------------------------------------------------------------------

def accumulate(wrap, micro_batches):
    """One step whose local batch comes in slices; returns the gradients before and after."""
    world_size = dist.get_world_size()
    model = wrap(Awkward(seed=dist.get_rank()))
    x, y = batch(0, LOCAL_BATCH * micro_batches * world_size)
    slices = list(zip(mine(x).split(LOCAL_BATCH), mine(y).split(LOCAL_BATCH), strict=True))
    counts = {}
    count_collectives(counts)
    with model.no_sync():
        for x, y in slices[:-1]:
            (F.mse_loss(model(x), y) / micro_batches).backward()
            model.finish_gradient_sync()
        assert counts == {}
    x, y = slices[-1]
    (F.mse_loss(model(x), y) / micro_batches).backward()
    model.finish_gradient_sync()
    return {name: p.grad for name, p in model.module.named_parameters() if p.requires_grad}


@each_wrapper
@world_sizes
def test_accumulation_equals_one_big_batch(world_size, wrap):
    alone = Awkward(seed=0)
    x, y = batch(0, LOCAL_BATCH * 3 * world_size)
    F.mse_loss(alone(x), y).backward()
    expected = {name: p.grad for name, p in alone.named_parameters() if p.requires_grad}
    assert_all_equal(run_each(accumulate, EACH, world_size, 3)[wrap], expected, rtol=0, atol=1e-12)


def leave_no_sync_by_an_error(wrap):
    model = wrap(nn.Linear(1, 1))
    try:
        with model.no_sync(), model.no_sync():
            raise KeyError
    except KeyError:
        pass
    counts = {}
    count_collectives(counts)
    with model.no_sync():
        with model.no_sync():
            pass
        model.finish_gradient_sync()
    assert counts == {}, "the inner block ended the outer one"
    (model(torch.ones(1, 1)) * (dist.get_rank() + 1)).sum().backward()
    model.finish_gradient_sync()
    return model.module.bias.grad.item()


@each_wrapper
def test_no_sync_ends_with_its_block(wrap):
    assert run_each(leave_no_sync_by_an_error, EACH, 2)[wrap] == (1.5, 1.5)
