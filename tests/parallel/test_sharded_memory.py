"""ZeRO-1, 2 and 3 on real ranks: what each rank holds, and what it sends."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from ranks import MIB, least_on_the_wire, run_each, several
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
    for way, results in run_each(memory_of, WAYS, world_size).items():
        assert sum(pieces for *_, pieces in results) == total
        for parameters, gradients, state, pieces in results:
            assert pieces <= share + 10, way
            assert state == 2 * pieces, way
            padded = total + world_size
            assert parameters <= (share + 10 if way is Stage3 else padded), way
            assert gradients <= (padded if way in (Stage1, Stage1Reducing) else share + 10), way


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


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_on_the_wire_are_those_of_the_paper(world_size):
    found = run(lambda: {kind: metered(kind) for kind in FACTORS}, world_size, backend="gloo")[0]
    share = (world_size - 1) / world_size
    assert found == pytest.approx({kind: factor * share for kind, factor in FACTORS.items()},
                                  rel=0.03)
