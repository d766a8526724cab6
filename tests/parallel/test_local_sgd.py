"""Local SGD and DiLoCo on real ranks, against one process that plays all of them.

The models start differently on every rank, and no two inputs are equal.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dplab
from dplab.measure import CallLog
from dplab.parallel.local_sgd import DiLoCo, LocalSGD

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
LOCAL_BATCH, INPUTS, CLASSES = 5, 7, 3


class Net(nn.Module):
    """With BatchNorm's buffers of two kinds, a frozen parameter, a tied and a transposed one."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.encode = nn.Linear(INPUTS, 11)
        self.encode.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(11)
        self.middle = nn.Linear(11, 11, bias=False)
        self.middle.weight = nn.Parameter(torch.randn(11, 11).t() / 4)
        self.again = self.middle
        self.head = nn.Linear(11, CLASSES)
        self.register_buffer("scale", torch.tensor(0.7 + seed))

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.encode(x)))
        return self.scale * self.head(torch.tanh(self.again(self.middle(hidden))))


class Plain(nn.Module):
    """Without buffers, so that nothing mixes the samples of a batch."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(INPUTS, 11), nn.Tanh(), nn.Linear(11, CLASSES))

    def forward(self, x):
        return self.layers(x)


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return (torch.randn(LOCAL_BATCH, INPUTS, generator=generator),
            torch.randint(CLASSES, (LOCAL_BATCH,), generator=generator))


def backward(model, rank, step):
    x, y = batch(rank, step)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, lr=0.3),
              "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.02),
              "adamw": lambda p: torch.optim.AdamW(p, lr=0.02)}


def on_a_rank(kind, net, optimizer, steps, every, **options):
    """The state after each step, on this rank."""
    model = net(seed=dist.get_rank())
    trainer = kind(model, OPTIMIZERS[optimizer](model.parameters()), every, **options)
    states = []
    for step in range(steps):
        backward(model, dist.get_rank(), step)
        trainer.step()
        states.append(copy.deepcopy(model.state_dict()))
    return states


def simulated(net, optimizer, world_size, steps, every, merge):
    """The same in this process; ``merge`` takes the replicas' values of one parameter."""
    models = [net(seed=0) for _ in range(world_size)]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    states = [[] for _ in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            backward(model, rank, step)
            optimizers[rank].step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for name, parameter in models[0].named_parameters():
                    if parameter.requires_grad:
                        same = [dict(model.named_parameters())[name] for model in models]
                        new = merge(name, torch.stack(same))
                        for each in same:
                            each.copy_(new)
                for name, buffer in models[0].named_buffers():
                    same = [dict(model.named_buffers())[name] for model in models]
                    new = (torch.stack(same).mean(0) if buffer.is_floating_point()
                           else buffer.clone())
                    for each in same:
                        each.copy_(new)
        for rank, model in enumerate(models):
            states[rank].append(copy.deepcopy(model.state_dict()))
    return states


def mean(name, values):
    return values.mean(0)


def outer_nesterov(net, learning_rate, momentum):
    """A merge that takes an outer step, written out: v ← μv + Δ, θ ← θ − η(Δ + μv)."""
    anchors = {name: value.detach().clone() for name, value in net(seed=0).named_parameters()}
    velocity = {name: torch.zeros_like(value) for name, value in anchors.items()}

    def merge(name, values):
        difference = anchors[name] - values.mean(0)
        velocity[name] = momentum * velocity[name] + difference
        anchors[name] = anchors[name] - learning_rate * (difference + momentum * velocity[name])
        return anchors[name]

    return merge


def assert_equal_states(found, expected):
    for rank, (states, wanted) in enumerate(zip(found, expected, strict=True)):
        for step, (state, want) in enumerate(zip(states, wanted, strict=True)):
            for name in want:
                torch.testing.assert_close(
                    state[name], want[name], rtol=1e-4, atol=1e-5,
                    msg=lambda text, at=(rank, step, name): f"{at}: {text}")


OUTER = [(0.7, 0.9), (0.5, 0.0)]  # learning rate, momentum


def in_each_way():
    """Local SGD by optimizer and steps between meetings, then DiLoCo by outer optimizer."""
    return [on_a_rank(LocalSGD, Net, optimizer, 7, every)
            for optimizer in OPTIMIZERS for every in (1, 3)] + [
        on_a_rank(DiLoCo, Net, "adamw", 11, 3, outer_learning_rate=rate, outer_momentum=momentum)
        for rate, momentum in OUTER]


@pytest.mark.slow
@world_sizes
def test_each_step_is_what_one_process_computes(world_size):
    found = zip(*dplab.run(in_each_way, world_size, backend="gloo"), strict=True)
    expected = [simulated(Net, optimizer, world_size, 7, every, mean)
                for optimizer in OPTIMIZERS for every in (1, 3)] + [
        simulated(Net, "adamw", world_size, 11, 3, outer_nesterov(Net, *outer)) for outer in OUTER]
    for states, want in zip(found, expected, strict=True):
        assert_equal_states(states, want)


def test_each_dtype_has_a_message_of_its_own():
    def work():
        model = Plain(seed=0)
        model.layers[2].to(torch.bfloat16)
        trainer = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=1.0), 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(dist.get_rank() + 0.5)
        with CallLog() as log:
            trainer.average()
        return [p.detach().float().unique().item() for p in model.parameters()], log.count()

    assert dplab.run(work, 3, backend="gloo") == 3 * [([1.5] * 4, 2)]


def test_bytes_are_those_of_the_parameters_once_in_h_steps():
    def work(every):
        model = Plain(seed=dist.get_rank())
        trainer = DiLoCo(model, OPTIMIZERS["sgd"](model.parameters()), every)
        with CallLog() as log:
            for step in range(64):
                backward(model, dist.get_rank(), step)
                trainer.step()
        return log.bytes("all_reduce"), log.count()

    size = 4 * (INPUTS * 11 + 11 + 11 * CLASSES + CLASSES)
    found = dplab.run(lambda: [work(every) for every in (1, 4, 64)], 2, backend="gloo")
    assert found == 2 * [[(64 * size, 64), (16 * size, 16), (size, 1)]]


def test_integer_buffers_become_rank_0s_and_meeting_never_is_refused():
    def work():
        model = Net(seed=0)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with pytest.raises(ValueError, match="not every 0"):
            LocalSGD(model, optimizer, 0)
        trainer = LocalSGD(model, optimizer, every=4)
        model.norm.num_batches_tracked.fill_(5 + dist.get_rank())
        trainer.average()
        return model.norm.num_batches_tracked.item()

    assert dplab.run(work, 3, backend="gloo") == [5, 5, 5]
