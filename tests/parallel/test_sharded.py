"""ZeRO-1, 2 and 3 on real ranks, against an unsharded optimizer: they train alike."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from ddp_models import Branches
from ranks import run_each, several, world_sizes
from sharding_ways import (
    LOCAL_BATCH,
    MLP,
    WAYS,
    Stage1Reducing,
    Stage2,
    Stage3,
    Whole,
    assert_close,
    decay_on_matrices_only,
    language_loss,
    mine,
    points,
    sentences,
    square_loss,
    train,
    transformer,
    ways,
)
from torch import nn
from torch.nn import functional as F

import dplab
from dplab import run
from dplab.measure import CallLog

STEPS = 8  # among them a change of the learning rate

# --- training -------------------------------------------------------------------------------------

def transformer_with(way, seed, world_size, rank_part):
    trainer = way(transformer(seed).to(dplab.device()), torch.optim.AdamW, decay_on_matrices_only,
                  lr=5e-3)
    batches = [sentences(step, LOCAL_BATCH * world_size) for step in range(STEPS)]
    return train(trainer, batches, language_loss, schedule=True, rank_part=rank_part)


def transformer_on_ranks(way):
    return transformer_with(way, dist.get_rank(), dist.get_world_size(), mine)


@pytest.mark.slow
@ways
@world_sizes
def test_a_transformer_trains_as_unsharded(world_size, way):
    """AdamW in float64: tied and frozen parameters, two groups, a scheduler."""
    expected = transformer_with(Whole, 0, world_size, rank_part=lambda batch: batch)
    assert_close(run_each(transformer_on_ranks, WAYS, world_size)[way], expected, 1e-10)


@pytest.mark.gpu
@ways
def test_a_transformer_trains_as_unsharded_on_gpus(way):
    test_a_transformer_trains_as_unsharded(torch.cuda.device_count(), way)


def train_two_numbers():
    """Two parameters, of one element each, and on four ranks two ranks without any."""
    outcomes = []
    for way in WAYS:
        torch.manual_seed(dist.get_rank())
        trainer = way(nn.Linear(1, 1).to(dplab.device()), torch.optim.AdamW, lr=0.1)
        batches = [tuple(part[:, :1] for part in points(step, dist.get_world_size()))
                   for step in range(5)]
        state = train(trainer, batches, square_loss)
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


def train_branches(way):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainer = way(Branches(ranks, 3).to(dplab.device()), torch.optim.AdamW, lr=0.01,
                  weight_decay=0.5)
    batches = [points(step, LOCAL_BATCH * ranks) for step in range(3)]
    return train(trainer, batches, lambda model, x, y: F.mse_loss(model(x, rank), y))


def train_branches_alone(ranks):
    module = Branches(ranks, 3)
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
    results = run_each(train_branches, (Stage1Reducing, Stage2), world_size)[way]
    assert_close(results, expected, 1e-6)
    untouched = Branches(world_size, 3).branches[-1].weight
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
    for message in run_each(refuse_sparse, (Stage1Reducing, Stage2), 2)[way]:
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


@pytest.mark.slow
@pytest.mark.parametrize("way", [Stage2, Stage3])
@several
def test_accumulation_equals_one_big_batch(world_size, way):
    alone = Whole(MLP(0).double(), torch.optim.AdamW, lr=0.01)
    batches = [points(step, 3 * LOCAL_BATCH * world_size, torch.float64) for step in range(4)]
    expected = train(alone, batches, square_loss, rank_part=lambda batch: batch)
    for often, once in run_each(accumulate, (Stage2, Stage3), world_size)[way]:
        assert_close([often[0], once[0]], expected, 1e-12)
        assert often[1] == 3 * once[1] > 0


def accumulate_in_branches(way):
    """Inside no_sync() one branch is used, and in the backward after it another one."""
    trainer = way(Branches(2, 3).to(dplab.device()), torch.optim.SGD, lr=0.1)
    quiet = (trainer.model if way is Stage3 else trainer.optimizer).no_sync
    with quiet():
        F.mse_loss(trainer.model(mine(points(0, 4))[0], 0), mine(points(0, 4))[1]).backward()
    F.mse_loss(trainer.model(mine(points(1, 4))[0], 1), mine(points(1, 4))[1]).backward()
    trainer.optimizer.step()
    return trainer.state()


@pytest.mark.parametrize("way", [Stage2, Stage3])
def test_what_no_sync_has_left_is_sent_by_the_next_backward(way):
    module = Branches(2, 3)
    for branch in range(2):
        x, y = (part.cpu() for part in points(branch, 4))
        F.mse_loss(module(x, branch), y).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    results = run_each(accumulate_in_branches, (Stage2, Stage3), 2)[way]
    assert_close(results, module.state_dict(), 1e-6)


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
    trainer.optimizer.zero_grad()  # and no step
    return train(trainer, [points(step, LOCAL_BATCH * ranks) for step in range(4)], square_loss)


@pytest.mark.parametrize("way", [Stage1Reducing, Stage2, Stage3])
def test_a_failed_step_leaves_nothing_behind(way):
    alone = Whole(MLP(0), torch.optim.AdamW, lr=0.01)
    expected = train(alone, [points(step, LOCAL_BATCH * 2) for step in range(4)], square_loss,
                     rank_part=lambda batch: batch)
    assert_close(run(go_on_after_a_failure, 2, way), expected, 1e-6)
