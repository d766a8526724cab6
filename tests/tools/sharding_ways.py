"""The ways to train that the tests of sharding compare, what they train, and how they compare it.

The models start differently on every rank, no two inputs are equal, and few sizes divide.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dplab
from dplab.parallel import (
    FullyShardedModel,
    ManualDDP,
    ShardedGradientOptimizer,
    ShardedOptimizer,
)
from dplab.parallel.manual_ddp import broadcast_tensors
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads.transformer import Transformer

LOCAL_BATCH = 3
TOKENS, SEQUENCE = 17, 6
CONFIG = TransformerConfig(layers=3, d_model=10, heads=2, d_ff=23, vocabulary=TOKENS,
                           context=SEQUENCE)


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

    def pieces(self):
        return [p for p in self.model.parameters() if p.requires_grad]

    def state(self):
        return self.model.full_state_dict()


WAYS = (Stage1, Stage1Reducing, Stage2, Stage3)
ways = pytest.mark.parametrize("way", WAYS)


def transformer(seed):
    """The course's, in float64: a tied and a non-contiguous parameter, frozen ones, a buffer."""
    torch.manual_seed(seed)
    model = Transformer(CONFIG).double()
    with torch.no_grad():
        for parameter in model.parameters():  # far from GPT-2's small values
            parameter += 0.3 * torch.randn_like(parameter)
    model.positions.weight = nn.Parameter(model.positions.weight.detach().t().contiguous().t())
    model.register_buffer("unused", torch.randn(3))
    model.blocks[1].mlp.up.requires_grad_(False)
    for block in model.blocks:
        block.norm2.weight.requires_grad_(False)  # among trainable ones
    return model


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


def train(trainer, batches, loss, schedule=False, rank_part=mine):
    """Trains, and returns the parameters."""
    if schedule:
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 4, gamma=0.7)
    for batch in batches:
        trainer.optimizer.zero_grad()
        loss(trainer.model, *rank_part(batch)).backward()
        trainer.sync()
        trainer.optimizer.step()
        if schedule:
            scheduler.step()
    return {name: tensor.cpu() for name, tensor in trainer.state().items()}


def assert_close(states, expected, tolerance):
    for rank, state in enumerate(states):
        assert list(state) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name], value, rtol=0, atol=tolerance,
                msg=lambda m, r=rank, n=name: f"rank {r}, {n}: {m}")
