"""ZeRO-1 and 2 as optimizers: state dicts, what is refused, groups and closures."""

import pytest
import torch
import torch.distributed as dist
from sharding_ways import (
    LOCAL_BATCH,
    MLP,
    Stage1Reducing,
    Stage2,
    assert_close,
    points,
    square_loss,
    train,
    ways,
)
from torch import nn

import dplab
from dplab import run
from dplab.parallel import ShardedGradientOptimizer, ShardedOptimizer


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
    return [train(trainer, batches[3:], square_loss) for trainer in (through, again)]


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


@pytest.mark.slow
@pytest.mark.parametrize("way", [Stage1Reducing, Stage2])
def test_a_state_that_does_not_fit_is_refused(way):
    states = run(saved, 3, way, backend="gloo")
    shifted = states[1:] + states[:1]
    whole = torch.optim.AdamW(nn.Linear(7, 5).parameters()).state_dict()

    def load_each():
        return (load(way, states), load(way, states, sizes=(5, 7)), load(way, shifted),
                load(way, [whole] * 3))

    for rank, (own, other, of_another_rank, of_all) in enumerate(run(load_each, 3, backend="gloo")):
        assert own is None
        assert "other parameters" in other
        assert f"of rank {(rank + 1) % 3}, not of rank {rank}" in of_another_rank
        assert "of a whole one" in of_all
    for message in run(load, 2, way, states, backend="gloo"):
        assert "saved on 3 ranks" in message and "2 now" in message


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
