"""BatchNorm over the batches of all ranks, forward and backward, from all-reduce.

BatchNorm normalizes each channel with the mean and the variance of the batch. Where the batch is
split, each rank's own statistics are other numbers than those of the whole, so the forward pass
adds up sums over the ranks before it normalizes. Each output then depends on every rank's input,
so the backward pass adds up sums over the ranks, too.

With n values of a channel on all ranks together, x̂ = (x − μ) / √(σ² + ε), y = γ x̂ + β, and
g = ∂L/∂y, the gradient of the input is

    ∂L/∂x = γ / √(σ² + ε) · (g − Σg / n − x̂ Σ(g x̂) / n),

where μ, σ² and both sums run over the values of all ranks. A training step sends C + 1 and then C
numbers in forward, and 2C in backward, for C channels.

Source: S. Ioffe and C. Szegedy, "Batch Normalization", 2015, https://arxiv.org/abs/1502.03167.
torch.nn.SyncBatchNorm does the same with one collective in forward, on GPUs only.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm


class SynchronizedBatchNorm(_BatchNorm):
    """`nn.BatchNorm1d`, `2d` and `3d` in one, with the statistics of all ranks' batches.

    Input and output have the shape (N, C) or (N, C, *). C and the dtype are the same on all ranks;
    N and * need not be, and N may be 0 on some. Statistics are computed in float32, or in the
    input's dtype if that is wider. Arguments, parameters and buffers are those of `nn.BatchNorm1d`,
    so each loads the other's ``state_dict``; ``group``: whose batches count, by default all ranks'.
    Without a process group, it is an ordinary BatchNorm.

    In training mode every rank of the group calls forward, and then backward, those with an empty
    batch as well. Where the input requires grad on one rank, it does so on all. The running
    statistics come out equal on all ranks, the variance with the divisor n − 1 of the whole batch.
    In eval mode nothing is communicated.

    The gradient of the input is that of the *sum* of the ranks' losses. The gradients of weight and
    bias are this rank's part of theirs: the sum over the ranks is the gradient of that sum, and
    their mean, which DDP takes, that of the mean of the ranks' losses.

    Raises ValueError for an input of another shape, and in training mode where a channel has one
    value, or none, on all ranks together.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1,
                 affine: bool = True, track_running_stats: bool = True, *, group=None,
                 device=None, dtype=None):
        super().__init__(num_features, eps, momentum, affine, track_running_stats,
                         device=device, dtype=dtype)
        self.group = group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training and dist.is_initialized()):
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance, count = _statistics(input.detach(), self.group)
        if self.track_running_stats:
            self._track(mean, variance * count / (count - 1))
        scale = torch.rsqrt(variance + self.eps)
        return _Normalize.apply(input, self.weight, self.bias, mean, scale, count, self.group)

    @torch.no_grad()
    def _track(self, mean, variance):
        """Moves the running statistics towards those of this batch."""
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # the plain mean over all batches
            share = 1 / self.num_batches_tracked.item()
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(new.to(running.dtype), share)

    def _check_input_dim(self, input):
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected an input of shape (N, {self.num_features}) or "
                             f"(N, {self.num_features}, *), got {tuple(input.shape)}")

    @classmethod
    def convert(cls, module: nn.Module, group=None) -> nn.Module:
        """``module`` with each BatchNorm in it, itself included, replaced by a synchronized one.

        The new ones hold the same parameters and buffers as the old, so that an optimizer made
        before stays valid. Submodules are replaced in place.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            new = cls(module.num_features, module.eps, module.momentum, module.affine,
                      module.track_running_stats, group=group, device="meta")
            new.train(module.training)
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                setattr(new, name, getattr(module, name))
            return new
        for name, child in module._modules.items():  # under each name: named_children() skips tied
            if child is not None:
                setattr(module, name, cls.convert(child, group))
        return module


def _statistics(x, group):
    """Mean and variance (divisor n), both (C,), and n over the batches of all ranks.

    Two messages, since the squares are those of the distances to the mean of all ranks:
    E[x²] − E[x]² needs one, and cancels to garbage where the mean is large beside the spread.
    """
    x = _widened(x)
    count = x.new_tensor([x.numel() // x.shape[1]])
    sums = torch.cat([_over_values(x), count])
    dist.all_reduce(sums, group=group)
    count = sums[-1]
    if count <= 1:
        raise ValueError(f"BatchNorm needs more than one value of a channel in training, and all "
                         f"ranks together have {count:.0f}")
    mean = sums[:-1] / count
    squares = _over_values((x - _along(mean, x)).square())
    dist.all_reduce(squares, group=group)
    return mean, squares / count, count


class _Normalize(torch.autograd.Function):
    """γ (x − mean) · scale + β, where mean and scale are themselves functions of x on all ranks."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, scale, count, group):
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.group = group
        normalized = (_widened(x) - _along(mean, x)) * _along(scale, x)
        if weight is not None:
            normalized = normalized * _along(weight, x) + _along(bias, x)
        return normalized.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight, mean, scale, count = ctx.saved_tensors
        gradient = gradient.to(mean.dtype)
        normalized = (_widened(x) - _along(mean, x)) * _along(scale, x)
        of_bias, of_weight = _over_values(gradient), _over_values(gradient * normalized)

        of_x = None
        if ctx.needs_input_grad[0]:
            means = torch.stack([of_bias, of_weight])
            dist.all_reduce(means, group=ctx.group)
            means /= count
            of_x = gradient - _along(means[0], x) - normalized * _along(means[1], x)
            of_x = of_x * _along(scale if weight is None else scale * weight, x)
            of_x = of_x.to(x.dtype)
        if weight is None:
            return of_x, None, None, None, None, None, None
        return of_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None, None


def _over_values(x):
    """The sum over all values of each channel of this rank's batch: (N, C, *) to (C,)."""
    return x.sum(dim=[0, *range(2, x.dim())])


def _along(values, x):
    """One value for each channel, (C,), in a shape that broadcasts against (N, C, *)."""
    return values.view(-1, *[1] * (x.dim() - 2))


def _widened(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))
