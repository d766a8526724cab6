"""FullyShardedModel's parts: units, prefetch, precision, checkpoints, and where it meets autograd.

That it trains as an unsharded model, its memory and its bytes are tested in test_sharded.py.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from job import two_ranks_under_torchrun
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import dplab
from dplab import RankError, run
from dplab.measure import CallLog
from dplab.parallel import FullyShardedModel, ShardedOptimizer, clip_grad_norm_

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
several = pytest.mark.parametrize("world_size", [2, 3, 4])


def inputs(rows, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator, dtype=torch.float64)


def mine(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


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


def restore_after_a_failure():
    model = FullyShardedModel(Twice())
    x = mine(inputs(12))
    handle = model.module.again.register_forward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model(x)
    handle.remove()
    state = {name: value + 1 for name, value in model.full_state_dict().items()}
    model.load_full_state_dict(state)
    whole = Twice()
    whole.load_state_dict(state)
    return torch.equal(model(x), whole(x))


def test_nothing_stays_gathered_when_forward_fails():
    assert run(restore_after_a_failure, 2, backend="gloo") == [True, True]


# --- what is gathered, and when -----------------------------------------------------------------

class Noting(nn.Module):
    """Notes how many gathers have been launched when forward and backward pass by."""

    def forward(self, x):
        return Note.apply(x, self.note)


class Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        note()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.note()
        return gradient, None


def order_of_gathers():
    """Elements of each gather and reduce-scatter, and how many gathers each layer has seen."""
    layers = [nn.Sequential(nn.Linear(size, 4, bias=False), Noting(), nn.Linear(4, size + 2))
              for size in (2, 4, 6)]
    model = FullyShardedModel(nn.Sequential(*layers, nn.ReLU()))
    seen = []
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


# --- mixed precision ----------------------------------------------------------------------------

def small():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def train_in_bf16(reduce_dtype):
    module = small()
    model = FullyShardedModel(module, param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    dtypes = set()
    module[0].register_forward_pre_hook(lambda m, x: dtypes.update([x[0].dtype, m.weight.dtype]))
    module.register_forward_hook(lambda m, x, out: dtypes.add(out.dtype))
    for step in range(5):
        x = mine(inputs(4 * dist.get_world_size(), seed=step)).float()
        optimizer.zero_grad()
        with CallLog() as log:
            model(x).float().square().mean().backward()
        optimizer.step()
    sent = {call.dtype for call in log.calls if call.operation == "send"}
    gathered = {call.dtype for call in log.calls if call.operation == "all_gather"}
    pieces = {t.dtype for p in model.parameters() for t in (p, p.grad)}
    return model.full_state_dict(), dtypes, gathered, sent, pieces


def train_in_bf16_alone(world_size):
    """float32 parameters, a bfloat16 copy for each step, gradients averaged in float32."""
    module = small()
    for step in range(5):
        total = [torch.zeros_like(p) for p in module.parameters()]
        for part in inputs(4 * world_size, seed=step).float().chunk(world_size):
            low = small()
            low.load_state_dict(module.state_dict())
            low.bfloat16()
            low(part.bfloat16()).float().square().mean().backward()
            for sum_, p in zip(total, low.parameters(), strict=True):
                sum_ += p.grad.float() / world_size
        with torch.no_grad():
            for p, gradient in zip(module.parameters(), total, strict=True):
                p -= 0.5 * gradient
    return module.state_dict()


@several
def test_layers_compute_in_bf16_and_the_pieces_stay_in_float32(world_size):
    expected = train_in_bf16_alone(world_size)
    low, full = torch.bfloat16, torch.float32
    for state, dtypes, gathered, sent, pieces in run(train_in_bf16, world_size, full,
                                                     backend="gloo"):
        assert dtypes == {low}
        assert (gathered, sent, pieces) == ({"bfloat16"}, {"float32"}, {full})
        for name, value in expected.items():
            assert state[name].dtype == full
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
    for state, _, _, sent, pieces in run(train_in_bf16, world_size, None, backend="gloo"):
        assert (sent, pieces) == ({"bfloat16"}, {full})
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0.02)


# --- clipping -----------------------------------------------------------------------------------

def clip():
    """Norms before, and what is left, for pieces of which some ranks have none."""
    piece = nn.Parameter(torch.zeros(3 if dist.get_rank() == 1 else 0))
    other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    piece.grad, other.grad = torch.full_like(piece, 2.0), torch.full_like(other, 1.0)
    norms = [clip_grad_norm_([piece, other, nn.Parameter(torch.ones(1))], limit).item()
             for limit in (100.0, 1.0, 1.0)]
    return norms, clip_grad_norm_([], 1.0).item(), other.grad.tolist()


@several
def test_clipping_is_by_the_norm_over_all_ranks(world_size):
    whole = (3 * 4 + world_size * 2) ** 0.5
    for norms, of_nothing, left in run(clip, world_size, backend="gloo"):
        assert norms == pytest.approx([whole, whole, 1.0], rel=1e-5)
        assert of_nothing == 0.0
        assert left == pytest.approx([1 / whole] * 2, rel=1e-5)


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
    return model.full_state_dict(), model.state_dict()


def load_whole(state, size=5):
    model = FullyShardedModel(WithBuffer(9, size))
    try:
        model.load_full_state_dict(state)
    except ValueError as error:
        return str(error)
    return model.full_state_dict()


def load_pieces(states):
    model = FullyShardedModel(WithBuffer(9))
    model.load_state_dict(states[dist.get_rank()])
    return model.full_state_dict()


def refused(states, size):
    model = FullyShardedModel(WithBuffer(9, size))
    try:
        model.load_state_dict(states[dist.get_rank()])
    except ValueError as error:
        return str(error)


def test_state_dicts():
    expected = WithBuffer(0).state_dict()
    saved = run(save, 3, backend="gloo")
    whole, pieces = saved[1][0], [pieces for _, pieces in saved]
    loaded = [whole, *run(load_whole, 4, whole, backend="gloo"),
              *run(load_pieces, 3, pieces, backend="gloo")]
    for state in loaded:
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
    WithBuffer(1).load_state_dict(whole)

    assert "'inner.weight' has shape (5, 3) there and (6, 3) here" in run(
        load_whole, 2, whole, 6, backend="gloo")[0]
    del whole["inner.bias"]
    assert "['inner.bias'] is not in both" in run(load_whole, 2, whole, backend="gloo")[0]
    for states, size, words in ((pieces[:2], 5, "world size: 3 there, 2 here"),
                                ([pieces[0]] * 3, 5, "rank: 0 there, 1 here"),
                                (pieces, 6, "another model")):
        assert words in run(refused, len(states), states, size, backend="gloo")[1]


# --- with the launcher --------------------------------------------------------------------------

def stay_away():
    model = FullyShardedModel(small())
    loss = model(torch.ones(2, 6)).sum()
    if dist.get_rank() == 0:
        loss.backward()


def stay_away_from_step():
    module = small()
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1,
                                 reduce_gradients=True)
    module(torch.ones(2, 6)).sum().backward()
    if dist.get_rank() == 0:
        optimizer.step()


@pytest.mark.parametrize("function", [stay_away, stay_away_from_step])
def test_a_rank_that_stays_away_is_named_at_once(function):
    with pytest.raises(RankError) as failure:
        run(function, 2, backend="gloo", timeout=30)
    assert failure.value.kind == "stuck"
    assert "rank 1" in str(failure.value) and "30 s" not in str(failure.value)


def train_over(link_or_none):
    module = nn.Sequential(*[nn.Linear(40, 40) for _ in range(3)])
    model = FullyShardedModel(module)
    model(torch.ones(2, 40)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_over_an_emulated_link():
    link = dplab.measure.EmulatedLink(1e7, 1e-4)
    for emulated, real in zip(run(train_over, 3, None, link=link, backend="gloo"),
                              run(train_over, 3, None, backend="gloo"), strict=True):
        for name, value in real.items():
            assert torch.equal(emulated[name], value)


UNDER_TORCHRUN = """
import sys, torch, torch.distributed as dist
from dplab.parallel import FullyShardedModel
dist.init_process_group("gloo")
model = FullyShardedModel(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)))
(model(torch.ones(1, 2)) * (dist.get_rank() + 1)).sum().backward()
others = [m for m in sys.modules if m.startswith("dplab.") and not m.startswith("dplab.parallel")]
print(f"<{model.module[1].bias.grad.tolist()} {others}>", flush=True)
dist.destroy_process_group()
"""


def test_runs_under_plain_torchrun_and_its_thread_ends(tmp_path):
    done = two_ranks_under_torchrun(tmp_path, UNDER_TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "<" in line) == [
        "<[1.5] []>", "<[] []>"]
