"""FullyShardedModel on real ranks: whole gradients, state dicts, and what is left after a failure.

That it trains as an unsharded model, its memory and its bytes are tested in test_sharded*.py.
"""


import torch
import torch.distributed as dist
from ranks import inputs, mine, world_sizes
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dplab import run
from dplab.parallel import FullyShardedModel


def gradients_of(module, x, **options):
    """The mean gradients over the ranks, whole, by name, from a sharded copy of the module."""
    model = FullyShardedModel(module, **options)
    model(mine(x)).square().mean().backward()
    with torch.no_grad():
        for piece in model.parameters():
            if piece.grad is not None:
                piece.copy_(piece.grad)  # so that full_state_dict gathers the gradients
    return model.full_state_dict()


def expected_gradients(module, x):
    module(x).square().mean().backward()
    return {name: p.grad if p.requires_grad else p.detach()
            for name, p in module.named_parameters()}


class Twice(nn.Module):
    """One unit runs twice, one never, and a branch runs beside the rest."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.never, self.again, self.beside = (nn.Linear(6, 6) for _ in range(4))
        self.double()

    def forward(self, x):
        x = torch.tanh(self.again(torch.tanh(self.first(x))))
        return self.beside(x) + torch.tanh(self.again(x))


class Checkpointed(nn.Module):
    """Activation checkpointing inside of units, and around them."""

    def __init__(self, inside, on=True):
        super().__init__()
        torch.manual_seed(2)
        self.inside, self.on = inside, on
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)])
        if inside and on:
            for layer in self.layers:
                whole = layer.forward
                layer.forward = lambda x, whole=whole: checkpoint(whole, x, use_reentrant=False)
        self.double()

    def forward(self, x):
        for layer in self.layers:
            if self.on and not self.inside:
                with set_checkpoint_early_stop(False):  # or the layer's hooks would not all run
                    x = x + checkpoint(layer, x, use_reentrant=False)
            else:
                x = x + layer(x)
        return x


class Structured(nn.Module):
    """Units that take keywords, and give dicts of tuples; an integer and a None among them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)

        class Layer(nn.Linear):
            def forward(self, *, x):
                return {"out": (torch.tanh(super().forward(x)), None), "count": 3}

        self.layers = nn.ModuleDict({"a": Layer(6, 6), "b": Layer(6, 6)})
        self.scale = nn.Parameter(torch.randn(()))
        self.double()

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x=x)["out"][0]
        return self.scale * x


class FrozenBetween(nn.Sequential):
    """Frozen units, through which gradients flow on to trainable ones."""

    def __init__(self):
        torch.manual_seed(2)
        super().__init__(*[nn.Linear(6, 6) for _ in range(5)])
        self[1].requires_grad_(False)
        self[3].requires_grad_(False)
        self.double()


MODELS = {
    "a unit twice": Twice,
    "checkpointing inside": lambda: Checkpointed(inside=True),
    "checkpointing around": lambda: Checkpointed(inside=False),
    "dicts": Structured,
    "frozen units": FrozenBetween,
    "no units": lambda: nn.Linear(6, 4).double(),
}


def gradients_of_each():
    x = inputs(12)
    return {name: gradients_of(model(), x) for name, model in MODELS.items()}


@world_sizes
def test_gradients_are_those_of_the_whole_batch(world_size):
    results = run(gradients_of_each, world_size, backend="gloo")
    for name, model in MODELS.items():
        whole = model()
        if isinstance(whole, Checkpointed):
            whole = Checkpointed(whole.inside, on=False)
        expected = expected_gradients(whole, inputs(12))
        for result in results:
            for key, value in expected.items():
                if value is not None:  # a unit that never ran has none
                    torch.testing.assert_close(result[name][key], value, rtol=0, atol=1e-13,
                                               msg=lambda m, n=name, k=key: f"{n}, {k}: {m}")


def use_outside_of_training():
    model = FullyShardedModel(Twice())
    x = mine(inputs(12))
    with torch.no_grad():
        quiet = model(x)
    loud = model(x)  # and no backward
    assert torch.equal(quiet, loud)
    first, second = model(x).square().mean(), model(x).square().mean()
    (first + second).backward()
    twice = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for _ in range(2):
        model(x).square().mean().backward()
    once_each = [p.grad for p in model.parameters() if p.grad is not None]
    left = sum(shard.whole.untyped_storage().nbytes() for shard in model._shards())
    unused = model.module.never.weight.grad
    close = all(torch.allclose(a, b, rtol=0, atol=1e-14)
                for a, b in zip(twice, once_each, strict=True))
    return close, left, unused, model(x).detach(), loud.detach()


def test_forward_without_backward_and_two_forwards_before_one():
    for close, left, unused, after, before in run(use_outside_of_training, 3, backend="gloo"):
        assert close and left == 0 and unused is None
        assert torch.equal(after, before)


def which_belong_where(units):
    module = Twice()
    module.beside.weight = module.first.weight
    chosen = None if units is None else [getattr(module, name) for name in units]
    model = FullyShardedModel(module, units=chosen)
    return [[piece.numel() for shard in unit.shards for piece in shard.pieces]
            for unit in model._units]


def test_what_is_tied_or_belongs_to_no_unit_is_gathered_for_the_whole_step():
    assert run(which_belong_where, 1, None) == [[[36], [6], [36, 6], [36, 6], [6]]]
    assert run(which_belong_where, 1, ["again", "first"]) == [
        [[36, 36, 6, 6], [36, 6], [6]]]


def wrong_units():
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    errors = []
    for units in ([nn.Linear(2, 2)], [module], [module[0], module[0][0]], [module[1]] * 2):
        try:
            FullyShardedModel(module, units)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_units_that_make_no_sense_are_refused():
    for errors in run(wrong_units, 2, backend="gloo"):
        foreign, whole, nested, twice = errors
        assert "not a submodule" in foreign and "not a submodule" in whole
        assert "part of another" in nested and "twice" in twice


# --- state dicts --------------------------------------------------------------------------------

class WithBuffer(nn.Module):
    def __init__(self, seed, size=5):
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.tied = nn.Linear(3, size), nn.Linear(3, size)
        self.norm = nn.BatchNorm1d(size)
        self.tied.weight = self.inner.weight


def save():
    model = FullyShardedModel(WithBuffer(dist.get_rank()))
    return model.full_state_dict()


def test_the_whole_state_is_that_of_the_module():
    expected = WithBuffer(0).state_dict()
    for whole in run(save, 3, backend="gloo"):
        assert list(whole) == list(expected)
        for name, value in expected.items():
            assert torch.equal(whole[name], value), name
    WithBuffer(1).load_state_dict(whole)
