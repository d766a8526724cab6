"""ZeRO-1, 2 and 3 on real ranks: against an unsharded optimizer, by memory, and by bytes.

The models start differently on every rank, no two inputs are equal, and few sizes divide.
"""

import contextlib
import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dplab
from dplab import run
from dplab.measure import CallLog, WireMeter
from dplab.parallel import (
    FullyShardedModel,
    ManualDDP,
    ShardedGradientOptimizer,
    ShardedOptimizer,
    clip_grad_norm_,
)
from dplab.parallel.manual_ddp import broadcast_tensors

MIB = 2**20
LOCAL_BATCH = 3
TOKENS, SEQUENCE = 17, 6

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
several = pytest.mark.parametrize("world_size", [2, 3, 4])


# --- the four ways to train, and the one to compare with -----------------------------------------

class Whole:
    """Every rank has everything; the gradients are averaged after backward."""

    def __init__(self, module, optimizer_cls, groups=None, **options):
        self.module = self.model = self._wrap(module)
        parameters = (groups or nn.Module.parameters)(self.model)
        self.optimizer = self._optimizer(parameters, optimizer_cls, **options)

    def _wrap(self, module):
        return module

    def _optimizer(self, parameters, optimizer_cls, **options):
        return optimizer_cls(parameters, **options)

    def sync(self):
        pass

    def clip(self, max_norm):
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def pieces(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def state(self):
        return {name: t.detach().clone() for name, t in self.model.state_dict().items()}


class Stage1(Whole):
    def _wrap(self, module):
        return ManualDDP(module)

    def _optimizer(self, parameters, optimizer_cls, **options):
        return ShardedOptimizer(parameters, optimizer_cls, **options)

    def sync(self):
        self.model.finish_gradient_sync()

    def clip(self, max_norm):
        return self.optimizer.clip_grad_norm_(max_norm)

    def pieces(self):
        return self.optimizer.pieces

    def state(self):
        return {name: t.detach().clone() for name, t in self.model.module.state_dict().items()}


class Stage1Reducing(Stage1):
    def _wrap(self, module):
        broadcast_tensors([*module.buffers(), *(p for p in module.parameters()
                                                if not p.requires_grad)])
        return module

    def _optimizer(self, parameters, optimizer_cls, **options):
        return ShardedOptimizer(parameters, optimizer_cls, reduce_gradients=True, **options)

    def sync(self):
        pass

    state = Whole.state


class Stage2(Stage1Reducing):
    def _optimizer(self, parameters, optimizer_cls, **options):
        return ShardedGradientOptimizer(parameters, optimizer_cls, bucket_mb=0.002, **options)


class Stage3(Whole):
    def _wrap(self, module):
        return FullyShardedModel(module)

    def clip(self, max_norm):
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def pieces(self):
        return [p for p in self.model.parameters() if p.requires_grad]

    def state(self):
        return self.model.full_state_dict()


WAYS = [Stage1, Stage1Reducing, Stage2, Stage3]
ways = pytest.mark.parametrize("way", WAYS)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                             for part in self.mix(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A frozen scale stands among the trainable parameters of the second norm."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads=2)
        self.mlp = nn.Sequential(nn.Linear(width, 23), nn.GELU(), nn.Linear(23, width))
        self.norm2.weight.requires_grad_(False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tied embedding and output, positions of the root's own, and a module that is all frozen."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        width = 10
        self.embed = nn.Embedding(TOKENS, width)
        self.positions = nn.Parameter(torch.randn(width, SEQUENCE).t())
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.register_buffer("shift", torch.randn(width))
        self.out = nn.Linear(width, TOKENS)
        self.out.weight = self.embed.weight
        self.double()

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions + self.shift
        for block in self.blocks:
            x = block(x)
        return self.out(torch.tanh(self.frozen(x)))


def sentences(step, count):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(TOKENS, (count, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1].to(dplab.device()), tokens[:, 1:].to(dplab.device())


def language_loss(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def decay_on_matrices_only(model):
    """Two parameter groups, by the parameters' names."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    biases = [p for name, p in named.items() if name.endswith("bias")]
    others = [p for name, p in named.items() if not name.endswith("bias")]
    return [{"params": others, "weight_decay": 0.3}, {"params": biases, "lr": 2e-3}]


class MLP(nn.Sequential):
    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


def points(step, count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(count, size, generator=generator, dtype=dtype).to(dplab.device())
                 for size in (7, 3))


def square_loss(model, x, y):
    return F.mse_loss(model(x), y)


def mine(batch):
    return [part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch]


def train(trainer, batches, loss, schedule=False, max_norm=None, rank_part=mine):
    """Trains, and returns the parameters and the norms that clipping found."""
    norms = []
    if schedule:
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 4, gamma=0.7)
    for batch in batches:
        trainer.optimizer.zero_grad()
        loss(trainer.model, *rank_part(batch)).backward()
        trainer.sync()
        if max_norm is not None:
            norms.append(trainer.clip(max_norm).item())
        trainer.optimizer.step()
        if schedule:
            scheduler.step()
    return {name: tensor.cpu() for name, tensor in trainer.state().items()}, norms


def assert_close(states, expected, tolerance):
    for rank, state in enumerate(states):
        assert list(state) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name], value, rtol=0, atol=tolerance,
                msg=lambda m, r=rank, n=name: f"rank {r}, {n}: {m}")


# --- training -------------------------------------------------------------------------------------

def transformer_with(way, seed, world_size, rank_part):
    trainer = way(Transformer(seed).to(dplab.device()), torch.optim.AdamW, decay_on_matrices_only,
                  lr=5e-3)
    batches = [sentences(step, LOCAL_BATCH * world_size) for step in range(20)]
    return train(trainer, batches, language_loss, schedule=True, max_norm=0.5,
                 rank_part=rank_part)


def transformer_on_ranks(way):
    return transformer_with(way, dist.get_rank(), dist.get_world_size(), mine)


@ways
@world_sizes
def test_a_transformer_trains_as_unsharded(world_size, way):
    """AdamW in float64: tied and frozen parameters, two groups, a scheduler, clipping."""
    expected, norms = transformer_with(Whole, 0, world_size, rank_part=lambda batch: batch)
    assert min(norms) > 0.5, "nothing is clipped"
    results = run(transformer_on_ranks, world_size, way)
    assert_close([state for state, _ in results], expected, 1e-10)
    for _, found in results:
        assert found == pytest.approx(norms, rel=1e-10)


@pytest.mark.gpu
@ways
def test_a_transformer_trains_as_unsharded_on_gpus(way):
    test_a_transformer_trains_as_unsharded(torch.cuda.device_count(), way)


OPTIMIZERS = {"SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
              "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3)}


def mlp_with(way, optimizer, seed, world_size, rank_part):
    trainer = way(MLP(seed).to(dplab.device()), OPTIMIZERS[optimizer])
    batches = [points(step, LOCAL_BATCH * world_size) for step in range(20)]
    return train(trainer, batches, square_loss, rank_part=rank_part)[0]


def mlp_on_ranks():
    return {(way.__name__, optimizer): mlp_with(way, optimizer, dist.get_rank(),
                                                dist.get_world_size(), mine)
            for way in WAYS for optimizer in OPTIMIZERS}


@world_sizes
def test_an_mlp_trains_as_unsharded_in_float32(world_size):
    results = run(mlp_on_ranks, world_size)
    for way, optimizer in results[0]:
        expected = mlp_with(Whole, optimizer, 0, world_size, lambda batch: batch)
        assert_close([result[way, optimizer] for result in results], expected, 1e-6)


def train_two_numbers():
    """Two parameters, of one element each, and on four ranks two ranks without any."""
    outcomes = []
    for way in WAYS:
        torch.manual_seed(dist.get_rank())
        trainer = way(nn.Linear(1, 1).to(dplab.device()), torch.optim.AdamW, lr=0.1)
        batches = [tuple(part[:, :1] for part in points(step, dist.get_world_size()))
                   for step in range(5)]
        state, _ = train(trainer, batches, square_loss, max_norm=1.0)
        sizes = [sum(t.numel() for t in piece_state.values() if t.dim())
                 for piece_state in trainer.optimizer.state.values()]
        outcomes.append((state["weight"].item(), state["bias"].item(), sum(sizes)))
    return outcomes


def test_more_ranks_than_parameters():
    for ranks in (3, 4):
        results = run(train_two_numbers, ranks)
        for of_one_way in zip(*results, strict=True):
            assert len({(weight, bias) for weight, bias, _ in of_one_way}) == 1
            assert [size for _, _, size in of_one_way] == [2, 2, 0, 0][:ranks]
        for weight, bias, _ in results[0]:
            assert (weight, bias) == pytest.approx(results[0][0][:2], abs=1e-6)


# --- parameters without a gradient ----------------------------------------------------------------

class Branches(nn.Module):
    """Rank r uses branch r, and nobody uses the last one."""

    def __init__(self, world_size):
        super().__init__()
        torch.manual_seed(3)
        self.shared = nn.Linear(7, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 3) for _ in range(world_size + 1)])

    def forward(self, x, branch):
        return self.branches[branch](self.shared(x))


def train_branches(way):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainer = way(Branches(ranks).to(dplab.device()), torch.optim.AdamW, lr=0.01,
                  weight_decay=0.5)
    batches = [points(step, LOCAL_BATCH * ranks) for step in range(3)]
    return train(trainer, batches, lambda model, x, y: F.mse_loss(model(x, rank), y))[0]


def train_branches_alone(ranks):
    module = Branches(ranks)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for rank, (x, y) in enumerate(zip(*(part.chunk(ranks) for part in
                                            points(step, LOCAL_BATCH * ranks)), strict=True)):
            (F.mse_loss(module(x.cpu(), rank), y.cpu()) / ranks).backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize("way", [Stage1Reducing, Stage2])
@several
def test_a_parameter_that_nobody_used_is_left_alone(world_size, way):
    expected = train_branches_alone(world_size)
    assert_close(run(train_branches, world_size, way), expected, 1e-6)
    untouched = Branches(world_size).branches[-1].weight
    assert torch.equal(expected[f"branches.{world_size}.weight"], untouched)


def refuse_sparse(way):
    module = nn.Sequential(nn.Embedding(10, 3, sparse=True))
    trainer = way(module.to(dplab.device()), torch.optim.SGD, lr=0.1)
    try:
        trainer.model(torch.tensor([1], device=dplab.device())).sum().backward()
        trainer.sync()
        trainer.optimizer.step()
    except NotImplementedError as error:
        return str(error)


@pytest.mark.parametrize("way", [Stage1Reducing, Stage2])
def test_sparse_gradients_are_refused(way):
    for message in run(refuse_sparse, 2, way):
        assert "sparse=False" in message


# --- accumulation ---------------------------------------------------------------------------------

def accumulate(way):
    """Three micro-batches a step; with each backward sending, and with only the last one."""
    ranks = dist.get_world_size()
    outcomes = []
    for waits in (False, True):
        trainer = way(MLP(dist.get_rank()).double().to(dplab.device()), torch.optim.AdamW, lr=0.01)
        for step in range(4):
            x, y = mine(points(step, 3 * LOCAL_BATCH * ranks, torch.float64))
            trainer.optimizer.zero_grad()
            quiet = (trainer.model if way is Stage3 else trainer.optimizer).no_sync
            slices = list(zip(x.chunk(3), y.chunk(3), strict=True))
            with CallLog() as log:
                for number, part in enumerate(slices):
                    if waits and number < 2:
                        with quiet():
                            (square_loss(trainer.model, *part) / 3).backward()
                    else:
                        (square_loss(trainer.model, *part) / 3).backward()
            trainer.optimizer.step()
        outcomes.append((trainer.state(), log.bytes("send") + log.bytes("reduce_scatter")))
    return outcomes


@pytest.mark.parametrize("way", [Stage2, Stage3])
@several
def test_accumulation_equals_one_big_batch(world_size, way):
    alone = Whole(MLP(0).double(), torch.optim.AdamW, lr=0.01)
    batches = [points(step, 3 * LOCAL_BATCH * world_size, torch.float64) for step in range(4)]
    expected, _ = train(alone, batches, square_loss, rank_part=lambda batch: batch)
    for often, once in run(accumulate, world_size, way):
        assert_close([often[0], once[0]], expected, 1e-12)
        assert often[1] == 3 * once[1] > 0


def accumulate_in_branches(way):
    """Inside no_sync() one branch is used, and in the backward after it another one."""
    trainer = way(Branches(2).to(dplab.device()), torch.optim.SGD, lr=0.1)
    quiet = (trainer.model if way is Stage3 else trainer.optimizer).no_sync
    with quiet():
        F.mse_loss(trainer.model(mine(points(0, 4))[0], 0), mine(points(0, 4))[1]).backward()
    F.mse_loss(trainer.model(mine(points(1, 4))[0], 1), mine(points(1, 4))[1]).backward()
    trainer.optimizer.step()
    return trainer.state()


@pytest.mark.parametrize("way", [Stage2, Stage3])
def test_what_no_sync_has_left_is_sent_by_the_next_backward(way):
    module = Branches(2)
    for branch in range(2):
        x, y = (part.cpu() for part in points(branch, 4))
        F.mse_loss(module(x, branch), y).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert_close(run(accumulate_in_branches, 2, way), module.state_dict(), 1e-6)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("half-way")


def go_on_after_a_failure(way):
    """A forward and a backward that fail half-way, a step that is skipped, and then training."""
    ranks = dist.get_world_size()
    module = MLP(dist.get_rank()).to(dplab.device())
    trainer = way(module, torch.optim.AdamW, lr=0.01)
    for hook in ("register_forward_pre_hook", "register_forward_hook"):
        handle = getattr(module[2], hook)(
            lambda module, *values: Failing.apply(values[-1]) if len(values) > 1 else 1 / 0)
        with contextlib.suppress(KeyError, ZeroDivisionError):
            square_loss(trainer.model, *points(0, 2)).backward()
        handle.remove()
        trainer.optimizer.zero_grad()
    square_loss(trainer.model, *points(0, 2)).backward()
    trainer.clip(1.0)
    trainer.optimizer.zero_grad()  # and no step
    return train(trainer, [points(step, LOCAL_BATCH * ranks) for step in range(4)], square_loss)[0]


@pytest.mark.parametrize("way", [Stage1Reducing, Stage2, Stage3])
def test_a_failed_step_leaves_nothing_behind(way):
    alone = Whole(MLP(0), torch.optim.AdamW, lr=0.01)
    expected, _ = train(alone, [points(step, LOCAL_BATCH * 2) for step in range(4)], square_loss,
                        rank_part=lambda batch: batch)
    assert_close(run(go_on_after_a_failure, 2, way), expected, 1e-6)


# --- memory ---------------------------------------------------------------------------------------

def elements(tensors):
    """How many elements the tensors' storages hold; one that several share counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size()
                for t in tensors if t is not None}
    return sum(storages.values())


def memory_of(way):
    """Elements of the parameters, of gradients after backward, of the state, and of pieces."""
    trainer = way(MLP(0).to(dplab.device()), torch.optim.AdamW, lr=0.01)
    for step in range(2):
        trainer.optimizer.zero_grad()
        square_loss(trainer.model, *mine(points(step, LOCAL_BATCH * dist.get_world_size()))
                    ).backward()
        trainer.sync()
        gradients = [p.grad for p in [*trainer.model.parameters(), *trainer.pieces()]]
        held = elements(gradients)
        trainer.optimizer.step()
    state = [t for of_piece in trainer.optimizer.state.values() for t in of_piece.values()
             if torch.is_tensor(t) and t.dim()]
    return (elements(trainer.model.parameters()), held, sum(t.numel() for t in state),
            sum(p.numel() for p in trainer.pieces()))


@several
def test_each_rank_holds_its_share_and_no_more(world_size):
    total = sum(p.numel() for p in MLP(0).parameters())
    share = math.ceil(total / world_size)
    for way in WAYS:
        results = run(memory_of, world_size, way)
        assert sum(pieces for *_, pieces in results) == total
        for parameters, gradients, state, pieces in results:
            assert pieces <= share + 10, way
            assert state == 2 * pieces, way
            padded = total + world_size
            assert parameters <= (share + 10 if way is Stage3 else padded), way
            assert gradients <= (padded if way in (Stage1, Stage1Reducing) else share + 10), way


def parameters_in_use():
    """Elements of whole parameters that a rank holds at each layer, in forward and backward."""
    module = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(6)])
    model = FullyShardedModel(module)
    seen = []

    def look(*_):
        seen.append(sum(unit.whole.untyped_storage().nbytes() // 4 for unit in model._shards()))

    for layer in module:
        layer.register_forward_pre_hook(look)
        layer.register_full_backward_hook(look)
    x = torch.randn(2, 40, requires_grad=True)
    look()
    model(x).sum().backward()
    look()
    return seen


def test_of_whole_layers_there_is_the_running_one_and_the_next():
    for first, *during, last in run(parameters_in_use, 4, backend="gloo"):
        assert (first, last) == (0, 0)
        assert len(during) == 12
        assert max(during) == 2 * 40 * 40


def buckets_in_use():
    """Elements of whole gradients that a rank holds as backward reaches each layer."""
    module = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(8)])
    optimizer = ShardedGradientOptimizer(module.parameters(), torch.optim.SGD, lr=0.1,
                                         bucket_mb=4 * 1600 / MIB)
    seen = []

    def look(_):
        gradients = [p.grad for p in module.parameters()]
        whole = [bucket.whole for bucket in optimizer._buckets]
        seen.append(elements([t for t in [*gradients, *whole] if t is not None]))

    for parameter in module.parameters():
        parameter.register_hook(look)
    module(torch.randn(2, 40)).sum().backward()
    return seen, elements([*[p.grad for p in optimizer.pieces], *[b.whole for b in
                                                                 optimizer._buckets]])


def test_of_whole_gradients_there_are_few_buckets_at_a_time():
    for seen, left in run(buckets_in_use, 4, backend="gloo"):
        assert len(seen) == 8
        assert max(seen) <= 2 * 1600
        assert left == 8 * 400


# --- bytes ----------------------------------------------------------------------------------------

def metered(kind):
    """Bytes per rank of one step, as a multiple of the model's; the least of five tries."""
    sizes = (1024, 1025, 1023, 1024, 1026)
    module = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
    size = 4 * sum(p.numel() for p in module.parameters())
    assert size > 16 * MIB
    model, options = module, {"lr": 1e-3, "momentum": 0.9}
    if kind == "step of ZeRO-1":
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, **options)
    elif kind == "ZeRO-1":
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, reduce_gradients=True,
                                     **options)
    elif kind == "ZeRO-2":
        optimizer = ShardedGradientOptimizer(module.parameters(), torch.optim.SGD, bucket_mb=4,
                                             **options)
    else:
        model = FullyShardedModel(module, param_dtype=torch.bfloat16 if "bf16" in kind else None)
        optimizer = torch.optim.SGD(model.parameters(), **options)
    x, sent = torch.randn(4, 1024), []
    for _ in range(6):
        optimizer.zero_grad()
        with WireMeter() as wire:
            model(x).float().square().mean().backward()
            optimizer.step()
        sent.append(wire.bytes_per_rank / size)
    return min(sent[1:])


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("kind", "factor"), [("step of ZeRO-1", 1), ("ZeRO-1", 2), ("ZeRO-2", 2),
                                              ("ZeRO-3", 3), ("ZeRO-3 in bf16", 1.5)])
def test_bytes_on_the_wire_are_those_of_the_paper(kind, factor, world_size):
    measured = run(metered, world_size, kind, backend="gloo")[0]
    assert measured == pytest.approx(factor * (world_size - 1) / world_size, rel=0.03)


# --- state dicts of optimizers --------------------------------------------------------------------

def interrupted(way, path):
    """Trains 3 and 3 steps, by itself and after a restart from what it has saved."""
    ranks = dist.get_world_size()
    batches = [points(step, LOCAL_BATCH * ranks) for step in range(6)]
    through = way(MLP(0).to(dplab.device()), torch.optim.AdamW, lr=0.01)
    train(through, batches[:3], square_loss)
    through.optimizer.param_groups[0]["lr"] = 0.03
    torch.save((through.model.state_dict(), through.optimizer.state_dict()),
               f"{path}/{dist.get_rank()}")

    model, optimizer = torch.load(f"{path}/{dist.get_rank()}", weights_only=True)
    again = way(MLP(1).to(dplab.device()), torch.optim.AdamW, lr=0.5)
    again.model.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    return [train(trainer, batches[3:], square_loss)[0] for trainer in (through, again)]


@ways
def test_training_goes_on_from_what_each_rank_has_saved(way, tmp_path):
    for through, again in run(interrupted, 3, way, tmp_path):
        assert_close([again], through, 0)


def saved(way, sizes=(7, 5)):
    optimizer = way(nn.Linear(*sizes), torch.optim.AdamW, lr=0.01).optimizer
    return optimizer.state_dict()


def load(way, states, sizes=(7, 5)):
    trainer = way(nn.Linear(*sizes), torch.optim.AdamW, lr=0.01)
    try:
        trainer.optimizer.load_state_dict(states[dist.get_rank()])
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("way", [Stage1Reducing, Stage2])
def test_a_state_that_does_not_fit_is_refused(way):
    states = run(saved, 3, way, backend="gloo")
    assert run(load, 3, way, states, backend="gloo") == [None] * 3
    for message in run(load, 2, way, states, backend="gloo"):
        assert "saved on 3 ranks" in message and "2 now" in message
    for message in run(load, 3, way, states, (5, 7), backend="gloo"):
        assert "other parameters" in message
    for rank, message in enumerate(run(load, 3, way, states[1:] + states[:1], backend="gloo")):
        assert f"of rank {(rank + 1) % 3}, not of rank {rank}" in message
    whole = torch.optim.AdamW(nn.Linear(7, 5).parameters()).state_dict()
    for message in run(load, 3, way, [whole] * 3, backend="gloo"):
        assert "of a whole one" in message


def as_an_optimizer():
    optimizer = ShardedOptimizer(MLP(0).parameters(), torch.optim.AdamW, lr=0.1,
                                 reduce_gradients=True)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    more = nn.Linear(3, 3)
    optimizer.add_param_group({"params": more.parameters(), "lr": 0.0})
    before = more.weight.detach().clone()
    loss = optimizer.step(lambda: more.weight.sum().square())
    return loss.item() == before.sum().square().item(), torch.equal(more.weight, before)


def test_it_is_an_optimizer_with_groups_and_closures():
    assert run(as_an_optimizer, 2, backend="gloo") == [(True, True)] * 2
    for optimizer_cls in (ShardedOptimizer, ShardedGradientOptimizer):
        with pytest.raises(ValueError, match="empty parameter list"):
            optimizer_cls([], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="more than 0 MiB"):
        ShardedGradientOptimizer(MLP(0).parameters(), torch.optim.SGD, bucket_mb=0, lr=0.1)
