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
    clip_grad_norm_,
)
from dplab.parallel.manual_ddp import broadcast_tensors

LOCAL_BATCH = 3
TOKENS, SEQUENCE = 17, 6


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


WAYS = (Stage1, Stage1Reducing, Stage2, Stage3)
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
