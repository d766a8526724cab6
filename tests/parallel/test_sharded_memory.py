"""ZeRO-1, 2 and 3 on real ranks: what each rank holds, and what it sends."""

import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from ranks import MIB, least_on_the_wire, several
from sharding_ways import (
    LOCAL_BATCH,
    MLP,
    WAYS,
    Stage1,
    Stage1Reducing,
    Stage3,
    mine,
    points,
    square_loss,
)
from torch import nn

import dplab
from dplab import run
from dplab.parallel import FullyShardedModel, ShardedGradientOptimizer, ShardedOptimizer

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


@pytest.mark.slow
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
    """Bytes per rank of one step, as a multiple of the model's."""
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
        model = FullyShardedModel(module)
        optimizer = torch.optim.SGD(model.parameters(), **options)
    x = torch.randn(4, 1024)

    def step():
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    step()
    return least_on_the_wire(step) / size


FACTORS = {"step of ZeRO-1": 1, "ZeRO-1": 2, "ZeRO-2": 2, "ZeRO-3": 3}


@functools.cache
def metered_ways(world_size):
    return run(lambda: {kind: metered(kind) for kind in FACTORS}, world_size, backend="gloo")[0]


@pytest.mark.slow
@pytest.mark.alone
@several
@pytest.mark.parametrize("kind", FACTORS)
def test_bytes_on_the_wire_are_those_of_the_paper(kind, world_size):
    share = (world_size - 1) / world_size
    assert metered_ways(world_size)[kind] == pytest.approx(FACTORS[kind] * share, rel=0.03)
