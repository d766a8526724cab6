"""The course's DDPs on real ranks: against one process, against torch's DDP, and by their parts.

The models start differently on every rank, and no two inputs are equal.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from job import two_ranks_under_torchrun
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dplab
from dplab.parallel import (
    BucketedDDP,
    ManualDDP,
    OverlappedDDP,
    average_gradients,
    broadcast_module,
)

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
LOCAL_BATCH = 5
SMALL = 0.0005  # MiB, so that a small model has several buckets
WRAPPERS = {"manual": ManualDDP, "bucketed": functools.partial(BucketedDDP, bucket_mb=SMALL),
            "overlapped": functools.partial(OverlappedDDP, bucket_mb=SMALL)}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


class Awkward(nn.Module):
    """Tied, frozen, non-contiguous and scalar parameters, without anything that mixes samples."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.encode = nn.Linear(7, 11, bias=False)
        self.frozen = nn.Linear(11, 11).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(13, 11).t())
        self.back = nn.Linear(13, 11)
        self.decode = nn.Linear(11, 7)
        self.again = nn.Linear(7, 11, bias=False)
        self.again.weight = self.encode.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.frozen(self.encode(x)))
        hidden = self.decode(torch.tanh(self.back(hidden @ self.turned)))
        return self.scale * self.again(hidden)


class Normalised(nn.Sequential):
    """BatchNorm: float and int64 buffers that every training step changes."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(7, 13, bias=False), nn.BatchNorm1d(13), nn.ReLU(),
                         nn.Linear(13, 3))


def batch(step, samples, seed=5):
    """Inputs (samples, 7) and targets (samples, 11) in float64, different in every element."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return (torch.randn(samples, 7, generator=generator, dtype=torch.float64),
            torch.randn(samples, 11, generator=generator, dtype=torch.float64))


def mine(tensor):
    """This rank's contiguous part of a global batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def assert_all_equal(states, expected, **tolerance):
    for rank, state in enumerate(states):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, **tolerance,
                                       msg=lambda m, r=rank, n=name: f"rank {r}, {n}: {m}")


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


@each_wrapper
@world_sizes
def test_trains_as_one_process_on_the_full_batch(world_size, wrap):
    expected = train_awkward_alone(6, LOCAL_BATCH * world_size)
    results = dplab.run(train_awkward_both_ways, world_size, wrap, 6)
    for states in zip(*results, strict=True):  # zero_grad's set_to_none: True, then False
        assert_all_equal(states, expected, rtol=0, atol=1e-12)
    start = Awkward(seed=0).state_dict()
    assert torch.equal(expected["frozen.weight"], start["frozen.weight"])
    assert not torch.allclose(expected["turned"], start["turned"])


# --- against torch's DDP ------------------------------------------------------------------------

def difference_from_ddp(wrap, model_cls, optimizer_cls, options, steps):
    """Largest differences after training: of parameters, of buffers, and of ranks from rank 0."""
    model = model_cls(seed=dist.get_rank()).float()
    manual, reference = wrap(copy.deepcopy(model)), DistributedDataParallel(model)
    for step in range(steps):
        x, _ = batch(step, LOCAL_BATCH * dist.get_world_size())
        for replica in (manual, reference):
            if step == 0:
                replica.optimizer = optimizer_cls(replica.parameters(), **options)
            replica.optimizer.zero_grad()
            replica(mine(x).float()).square().mean().backward()
            if replica is manual:
                manual.finish_gradient_sync()
            replica.optimizer.step()

    def largest(ours, theirs):
        return max(((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)),
                   default=0.0)

    parameters = [p.detach() for p in manual.parameters()]
    on_rank_0 = [p.clone() for p in parameters]
    for tensor in on_rank_0:
        dist.broadcast(tensor, src=0)
    return (largest(parameters, [p.detach() for p in reference.parameters()]),
            largest(manual.buffers(), reference.buffers()), largest(parameters, on_rank_0))


def differences_from_ddp(wrap, steps):
    return {f"{model_cls.__name__}, {optimizer_cls.__name__}":
            difference_from_ddp(wrap, model_cls, optimizer_cls, options, steps)
            for model_cls in (Awkward, Normalised)
            for optimizer_cls, options in ((torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
                                           (torch.optim.AdamW, {"lr": 1e-3}))}


@each_wrapper
@world_sizes
def test_trains_as_ddp(world_size, wrap):
    for differences in dplab.run(differences_from_ddp, world_size, wrap, 20):
        for case, (parameters, buffers, between_ranks) in differences.items():
            assert parameters < 1e-6, case
            assert buffers < 1e-6, case
            assert between_ranks == 0.0, case


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


def tensors_of(module):
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())


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


# --- the gradients ------------------------------------------------------------------------------

class Branches(nn.Module):
    """Rank r uses branch r, and nobody uses the last one."""

    def __init__(self, world_size):
        super().__init__()
        torch.manual_seed(3)
        self.shared = nn.Linear(7, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 2) for _ in range(world_size + 1)])

    def forward(self, x, branch):
        return self.branches[branch](self.shared(x))


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


def count_collectives(counts):
    """Makes this rank's torch.distributed count what is called on it, in ``counts``."""
    for name in ("all_reduce", "broadcast"):
        original = getattr(dist, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            counts[_name] = counts.get(_name, 0) + args[0].numel()
            return _original(*args, **kwargs)

        setattr(dist, name, counted)


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
    for message in dplab.run(sync_sparse, 2, wrap):
        assert "'words.weight'" in message and "sparse=False" in message
    assert dplab.run(sync_nothing, 2, wrap) == [True, True]


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
    assert_all_equal(dplab.run(accumulate, world_size, wrap, 3), expected, rtol=0, atol=1e-12)


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
    assert dplab.run(leave_no_sync_by_an_error, 2, wrap) == [1.5, 1.5]


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
    expected = dplab.run(forward_twice_then_backward, 2, DistributedDataParallel)[0]
    assert_all_equal(dplab.run(forward_twice_then_backward, 2, wrap), expected)


# --- as a module --------------------------------------------------------------------------------

def save_and_load():
    model = ManualDDP(Normalised(seed=dist.get_rank()))
    keys = list(model.state_dict())
    assert keys == list(DistributedDataParallel(Normalised(seed=0)).state_dict())
    other = ManualDDP(Normalised(seed=9))
    other.load_state_dict(model.state_dict())
    other.module.load_state_dict(model.module.state_dict())
    return other.module.state_dict()


def test_state_dict_has_the_keys_of_ddp_and_loads():
    assert_all_equal(dplab.run(save_and_load, 2), Normalised(seed=0).state_dict(), rtol=0, atol=0)


UNDER_TORCHRUN = """
import sys, torch, torch.distributed as dist
from dplab.parallel import ManualDDP
dist.init_process_group("gloo")
model = ManualDDP(torch.nn.Linear(2, 1))
(model(torch.ones(1, 2)) * (dist.get_rank() + 1)).sum().backward()
model.finish_gradient_sync()
others = [m for m in sys.modules if m.startswith("dplab.") and not m.startswith("dplab.parallel")]
print(f"<{model.module.bias.grad.item()} {others}>", flush=True)
dist.destroy_process_group()
"""


def test_runs_under_plain_torchrun_and_needs_torch_alone(tmp_path):
    done = two_ranks_under_torchrun(tmp_path, UNDER_TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<1.5 []>") == 2
