"""FullyShardedModel on real ranks: gradients of any module, what is gathered when, what is refused.

That it trains as one process does, its memory and its bytes are tested in test_zero.py.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import inputs, mine, world_sizes
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dplab import run
from dplab.measure import CallLog
from dplab.parallel import FullyShardedModel

# --- gradients ------------------------------------------------------------------------------------

class Twice(nn.Module):
    """One unit runs twice, one never, and a branch runs beside the rest."""

    def __init__(self):
        super().__init__()
        self.first, self.never, self.again, self.beside = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        x = torch.tanh(self.again(torch.tanh(self.first(x))))
        return self.beside(x) + torch.tanh(self.again(x))


class Checkpointed(nn.Module):
    """Activation checkpointing inside of units, or around them."""

    def __init__(self, inside, on=True):
        super().__init__()
        self.around = on and not inside
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)])
        for layer in self.layers if inside and on else ():
            whole = layer.forward
            layer.forward = lambda x, whole=whole: checkpoint(whole, x, use_reentrant=False)

    def forward(self, x):
        for layer in self.layers:
            if self.around:
                with set_checkpoint_early_stop(False):  # or the layer's hooks would not all run
                    x = x + checkpoint(layer, x, use_reentrant=False)
            else:
                x = x + layer(x)
        return x


class Structured(nn.Module):
    """Units that take keywords, and give dicts of tuples; an integer and a None among them."""

    def __init__(self):
        super().__init__()

        class Layer(nn.Linear):
            def forward(self, *, x):
                return {"out": (torch.tanh(super().forward(x)), None), "count": 3}

        self.layers = nn.ModuleDict({"a": Layer(6, 6), "b": Layer(6, 6)})
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x=x)["out"][0]
        return self.scale * x


MODELS = {
    "a unit twice": Twice,
    "checkpointing inside": lambda on=True: Checkpointed(True, on),
    "checkpointing around": lambda on=True: Checkpointed(False, on),
    "dicts": Structured,
    "no units": lambda: nn.Linear(6, 4),
}


def made(name, **options):
    torch.manual_seed(2)
    return MODELS[name](**options).double()


def gradients_of_each():
    """By model, its mean gradients over the ranks, whole, by name."""
    found, x = {}, mine(inputs(12))
    for name in MODELS:
        model = FullyShardedModel(made(name))
        model(x).square().mean().backward()
        with torch.no_grad():
            for piece in model.parameters():
                if piece.grad is not None:
                    piece.copy_(piece.grad)  # so that full_state_dict gathers the gradients
        found[name] = model.full_state_dict()
    return found


@world_sizes
def test_gradients_are_those_of_the_whole_batch(world_size):
    results = run(gradients_of_each, world_size, backend="gloo")
    for name in MODELS:
        whole = made(name, **({"on": False} if name.startswith("checkpointing") else {}))
        whole(inputs(12)).square().mean().backward()
        for key, parameter in whole.named_parameters():
            if parameter.grad is not None:  # which a unit that never ran has not
                for result in results:
                    torch.testing.assert_close(
                        result[name][key], parameter.grad, rtol=0, atol=1e-13,
                        msg=lambda m, at=(name, key): f"{at}: {m}")


def use_outside_of_training():
    """Forward without backward; two forwards before a backward, which are one after another."""
    model, x = FullyShardedModel(made("a unit twice")), mine(inputs(12))
    with torch.no_grad():
        quiet = model(x)
    loud = model(x)
    assert torch.equal(quiet, loud)
    first, second = model(x).square().mean(), model(x).square().mean()
    (first + second).backward()
    twice = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for _ in range(2):
        model(x).square().mean().backward()
    once_each = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(twice, once_each, rtol=0, atol=1e-14)
    assert model.module.never.weight.grad is None
    assert sum(shard.whole.untyped_storage().nbytes() for shard in model._shards()) == 0
    assert torch.equal(model(x), loud)


def test_forward_without_backward_and_two_forwards_before_one():
    run(use_outside_of_training, 3, backend="gloo")


# --- units ----------------------------------------------------------------------------------------

class Noting(nn.Module):
    """Notes how many gathers have been launched when forward and backward pass by."""

    def forward(self, x):
        self.note()
        x.register_hook(lambda _: self.note())
        return x


def order_of_gathers():
    """Elements of each gather and reduce-scatter, and how many gathers each layer has seen."""
    layers = [nn.Sequential(nn.Linear(size, 4, bias=False), Noting(), nn.Linear(4, size + 2))
              for size in (2, 4, 6)]
    model, seen = FullyShardedModel(nn.Sequential(*layers, nn.ReLU())), []
    with CallLog() as log:
        for layer in layers:
            layer[1].note = lambda: seen.append(log.count("all_gather"))
        model(torch.randn(2, 2)).sum().backward()
    gathers = [call.shape[0] for call in log.calls if call.operation == "all_gather"]
    return gathers, seen, log.bytes("send") // 4


def test_the_next_unit_is_on_its_way_while_one_computes():
    sizes = [(8 + 20) // 2, (16 + 30) // 2, (24 + 40) // 2]
    for gathers, seen, reduced in run(order_of_gathers, 2, backend="gloo"):
        assert gathers == [*sizes, *reversed(sizes)]
        assert seen == [2, 3, 3, 5, 6, 6]
        assert reduced == sum(sizes)


def units_of_modules():
    """What is tied or belongs to no unit is gathered for the whole step."""
    for names, expected in ((None, [[36], [6], [36, 6], [36, 6], [6]]),
                            (["again", "first"], [[36, 36, 6, 6], [36, 6], [6]])):
        module = Twice()
        module.beside.weight = module.first.weight
        units = names and [getattr(module, name) for name in names]
        sizes = [[piece.numel() for shard in unit.shards for piece in shard.pieces]
                 for unit in FullyShardedModel(module, units)._units]
        assert sizes == expected

    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    for units, words in (([nn.Linear(2, 2)], "not a submodule"), ([module], "not a submodule"),
                         ([module[0], module[0][0]], "part of another"),
                         ([module[1]] * 2, "given twice")):
        with pytest.raises(ValueError, match=words):
            FullyShardedModel(module, units)


def test_which_parameters_make_a_unit_and_which_units_are_refused():
    run(units_of_modules, 1)


# --- the whole state ------------------------------------------------------------------------------

def with_buffers(seed):
    """Tied weights of different types, and BatchNorm's buffers."""
    torch.manual_seed(seed)
    module = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(3, 5), "c": nn.Linear(4, 3),
                            "norm": nn.BatchNorm1d(5)})
    module["b"].weight = module["a"].weight
    module["c"].to(torch.bfloat16)
    module["norm"].running_mean += seed + 1
    return module


def test_the_whole_state_is_that_of_the_module():
    expected = with_buffers(0).state_dict()
    states = run(lambda: FullyShardedModel(with_buffers(dist.get_rank())).full_state_dict(), 3)
    for whole in states:
        assert list(whole) == list(expected)
        for name, value in expected.items():
            assert torch.equal(whole[name], value) and whole[name].dtype == value.dtype, name
    with_buffers(1).load_state_dict(whole)
