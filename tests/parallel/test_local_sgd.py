"""Local SGD, DiLoCo and its streaming form on real ranks, against one process that plays them all.

The models start differently on every rank, and no two inputs are equal.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from odd_models import INPUTS, OUTPUTS, Awkward, assert_all_equal, batch
from ranks import world_sizes
from torch import nn
from torch.nn import functional as F

import dplab
from dplab.measure import CallLog
from dplab.parallel import DiLoCo, LocalSGD, StreamingDiLoCo

STEPS = 11


class Net(nn.Sequential):
    """Parameters of every kind, and BatchNorm's buffers of two kinds."""

    def __init__(self, seed):
        super().__init__(Awkward(seed), nn.BatchNorm1d(OUTPUTS).double())


class Plain(nn.Sequential):
    """Without buffers and frozen parameters."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(INPUTS, 11), nn.Tanh(), nn.Linear(11, OUTPUTS))
        self.double()


def backward(model, rank, step):
    x, y = batch(100 * rank + step, 5)
    model.zero_grad()
    F.cross_entropy(model(x), y.argmax(1)).backward()


def inner(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.02)


# --- as one process plays them: `meet` changes what all ranks have after a step -------------------

def set_all(tensors, value):
    for tensor in tensors:
        tensor.copy_(value)


class Means:
    """Every so many steps: parameters and buffers of numbers to their mean, others to rank 0's."""

    def __init__(self, every):
        self.every = every

    @torch.no_grad()
    def meet(self, models, step):
        if step % self.every:
            return
        for name, first in models[0].named_parameters():
            if first.requires_grad:
                same = [model.get_parameter(name) for model in models]
                set_all(same, self.merged(name, torch.stack(same).mean(0)))
        for name, first in models[0].named_buffers():
            same = [model.get_buffer(name) for model in models]
            set_all(same, torch.stack(same).mean(0) if first.is_floating_point() else first)

    def merged(self, name, mean):
        return mean


class OuterSteps(Means):
    """An outer step towards the mean: v ← μv + Δ, θ ← θ − η(Δ + μv)."""

    def __init__(self, rate, momentum):
        super().__init__(every=3)
        self.rate, self.momentum = rate, momentum
        self.anchors = {name: p.detach().clone() for name, p in Net(0).named_parameters()}
        self.velocity = {name: torch.zeros_like(p) for name, p in self.anchors.items()}

    def merged(self, name, mean):
        way = self.anchors[name] - mean
        self.velocity[name] = self.momentum * self.velocity[name] + way
        self.anchors[name] -= self.rate * (way + self.momentum * self.velocity[name])
        return self.anchors[name]


class Fragments:
    """Two halves of all parameters, each of which takes an outer step with what left before."""

    def __init__(self, every, late, mix, rate, momentum):
        self.every, self.late, self.mix, self.rate, self.momentum = every, late, mix, rate, momentum
        anchor = nn.utils.parameters_to_vector(Plain(0).parameters()).detach()
        self.anchors = list(anchor.clone().tensor_split(2))
        self.velocity = [torch.zeros_like(part) for part in self.anchors]
        self.under_way = {}

    @torch.no_grad()
    def meet(self, models, step):
        whole = [nn.utils.parameters_to_vector(model.parameters()) for model in models]
        for half in (0, 1):
            parts = [vector.tensor_split(2)[half] for vector in whole]
            due = step - half * (self.every // 2)
            if due > 0 and due % self.every == 0:
                self.under_way[half] = self.anchors[half] - torch.stack(parts).mean(0)
            elif due > self.every and due % self.every == self.late:
                way = self.under_way[half]
                self.velocity[half] = self.momentum * self.velocity[half] + way
                self.anchors[half] -= self.rate * (way + self.momentum * self.velocity[half])
                for part in parts:
                    part.copy_(self.mix * part + (1 - self.mix) * self.anchors[half])
        for vector, model in zip(whole, models, strict=True):
            nn.utils.vector_to_parameters(vector, model.parameters())


STREAM = {"every": 4, "late": 1, "mix": 0.3}
CASES = [  # the model, the scheme, and how it is played
    (Net, functools.partial(LocalSGD, every=3), lambda: Means(3)),
    (Net, functools.partial(DiLoCo, every=3), lambda: OuterSteps(0.7, 0.9)),
    (Net, functools.partial(DiLoCo, every=3, outer_learning_rate=0.5, outer_momentum=0.0),
     lambda: OuterSteps(0.5, 0.0)),
    (Plain, functools.partial(StreamingDiLoCo, **STREAM, fragments=2, outer_learning_rate=0.6,
                              outer_momentum=0.8),
     lambda: Fragments(**STREAM, rate=0.6, momentum=0.8)),
]


def train_each():
    """By case, the state after each step on this rank; and at the end of a stream."""
    found = []
    for net, make_scheme, _ in CASES:
        model, states = net(seed=dist.get_rank()), []
        scheme = make_scheme(model, inner(model))
        for step in range(STEPS):
            backward(model, dist.get_rank(), step)
            scheme.step()
            states.append(copy.deepcopy(model.state_dict()))
        if net is Plain:
            scheme.finish()
            states.append(copy.deepcopy(model.state_dict()))
        found.append(states)
    return found


@pytest.mark.slow
@world_sizes
def test_each_step_is_what_one_process_computes(world_size):
    of_ranks = zip(*dplab.run(train_each, world_size, backend="gloo"), strict=True)
    for (net, _, make_played), found in zip(CASES, of_ranks, strict=True):
        models, played = [net(seed=0) for _ in range(world_size)], make_played()
        optimizers = [inner(model) for model in models]
        for step in range(STEPS):
            for rank, model in enumerate(models):
                backward(model, rank, step)
                optimizers[rank].step()
            played.meet(models, step + 1)
            for states, model in zip(found, models, strict=True):
                assert_all_equal([states[step]], model.state_dict(), 1e-9)
        if net is Plain:
            Means(1).meet(models, 1)
            assert_all_equal([states[STEPS] for states in found], models[0].state_dict(), 1e-9)


def what_is_sent():
    """Bytes of parameters, once in H steps; a dtype has a message of its own; rank 0's counters."""
    size, found = 8 * (INPUTS * 11 + 11 + 11 * OUTPUTS + OUTPUTS), []
    for every in (1, 4, 16):
        model = Plain(seed=dist.get_rank())
        trainer = DiLoCo(model, inner(model), every)
        with CallLog() as log:
            for step in range(16):
                backward(model, dist.get_rank(), step)
                trainer.step()
        found.append((log.count("all_reduce"), log.bytes() / size))
    assert found == [(16, 16), (4, 4), (1, 1)]

    model = Plain(seed=0)
    model[2].to(torch.bfloat16)
    trainer = LocalSGD(model, inner(model), every=1)
    with torch.no_grad(), CallLog() as log:
        for parameter in model.parameters():
            parameter.fill_(dist.get_rank() + 0.5)
        trainer.average()
    assert [p.detach().float().unique().item() for p in model.parameters()] == [1.5] * 4
    assert log.count() == 2

    model = Net(seed=0)
    trainer = LocalSGD(model, inner(model), every=4)
    counter = model[1].num_batches_tracked.fill_(5 + dist.get_rank())
    trainer.average()
    assert counter.item() == 5
    with pytest.raises(ValueError, match="not every 0"):
        LocalSGD(model, inner(model), every=0)
    for every, fragments, late in ((4, 2, 4), (4, 5, 1), (4, 2, 0)):
        with pytest.raises(ValueError, match="do not fit"):
            StreamingDiLoCo(model, inner(model), every, fragments, late)


def test_what_is_sent_and_what_is_refused():
    dplab.run(what_is_sent, 3, backend="gloo")
