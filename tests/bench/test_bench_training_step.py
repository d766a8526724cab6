"""Each strategy of the benches trains as one process does, on parts of the same batches."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from two_nodes import KINDS

import dplab
from dplab.bench import sharded, training_step
from dplab.predict import traffic

STEPS, RANKS = 4, 2
NAMES = [*training_step.WRAPPERS, "ZeroRedundancyOptimizer", "ShardedOptimizer",
         "ShardedOptimizer, reduce_gradients=True", "ShardedGradientOptimizer",
         "FullyShardedModel", *training_step.RESHARDS]
DEEPSPEED = [f"DeepSpeed {stage}" for stage in range(4)] if training_step.HAS_DEEPSPEED else []


def layers():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)])


def batches():
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(6, 7, generator=generator), torch.randn(6, 7, generator=generator))
            for _ in range(STEPS)]


def compute_loss(model, x, y):
    return (model(x) - y).square().mean()


def losses_of_rank(names):
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    found = {}
    for name in names:
        model = layers()
        step = training_step.training_step(name, model, compute_loss, torch.optim.AdamW,
                                        units=list(model), bucket_mb=0.0001, lr=0.05)
        found[name] = [step(x[mine], y[mine]) for x, y in batches()]
    return found


@pytest.fixture(scope="module")
def of_ranks():
    return dplab.run(losses_of_rank, RANKS, NAMES + DEEPSPEED, backend="gloo", timeout=120)


@pytest.fixture(scope="module")
def whole():
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = compute_loss(model, x, y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES + DEEPSPEED)
def test_ranks_train_as_one_process_does(name, of_ranks, whole):
    losses_of = [losses[name] for losses in of_ranks]
    means = [sum(losses) / RANKS for losses in zip(*losses_of, strict=True)]
    assert means == pytest.approx(whole, rel=1e-4)
    assert len(set(means)) == STEPS


def test_names_of_those_who_use_them():
    assert set(sharded.KINDS) <= {*NAMES, *DEEPSPEED}
    assert {step for _, step in KINDS.values()} <= set(NAMES)
    assert {name for name, _ in KINDS.values()} <= set(traffic.STRATEGIES)


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="no strategy 'FSDP'"):
        training_step.training_step("FSDP", layers(), compute_loss, torch.optim.SGD)
