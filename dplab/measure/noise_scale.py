"""The gradient noise scale, from the norms of local and averaged gradients.

The gradient of a batch of B samples is that of all data, G, plus noise whose covariance is Σ / B,
with Σ that of a single sample's gradient. So its squared norm is |G|² + tr Σ / B on average. Data
parallelism computes each step's gradient at two batch sizes: the local batch b on each rank, and,
after the all-reduce, the global batch B = N b. Two sizes, two unknowns: with the mean over ranks of
the local squared norms, s = mean |g_r|², and the averaged gradient's, t = |mean g_r|²,

    |G|² ≈ (B t − b s) / (B − b),        tr Σ ≈ (s − t) / (1/b − 1/B).

Both are unbiased, and noisy; their ratio is not unbiased. So each is smoothed over the steps, and
then divided: B_simple = tr Σ / |G|², in samples.

Source: S. McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1,
https://arxiv.org/abs/1812.06162.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


class NoiseScale:
    """Follows B_simple = tr Σ / |G|² during training, at one scalar all-reduce for each step.

    In a loop by hand, on every rank::

        noise = NoiseScale(local_batch=16)
        ...
        loss.backward()
        noise.local(model.parameters())
        average_gradients(model)
        noise.averaged(model.parameters())

    With DistributedDataParallel, whose gradients are averaged when ``backward()`` returns, the hook
    takes the place of ``local``: ``ddp.register_comm_hook(noise, NoiseScale.hook)``, once.

    local_batch: b, the samples behind one rank's gradient, equally many on all ranks; the loss is
        their mean. With gradient accumulation, those of all micro-batches.
    smoothing: from 0 up to, not including, 1: the weight of the past in the running means of
        |G|² and tr Σ, which count the last 1 / (1 − smoothing) steps or so.

    Each rank has whole gradients, as in DDP and ZeRO-1. Raises ValueError on one rank,
    whose gradient is the averaged one, and for a number out of range.
    """

    def __init__(self, local_batch: int, smoothing: float = 0.95):
        self.ranks = dist.get_world_size()
        if self.ranks < 2:
            raise ValueError("the noise scale compares local gradients with their mean, so it "
                             f"needs at least 2 ranks, and there is {self.ranks}")
        if local_batch < 1 or not 0 <= smoothing < 1:
            raise ValueError(f"local_batch is at least 1, smoothing in [0, 1): got {local_batch} "
                             f"and {smoothing}")
        self.local_batch, self.smoothing = local_batch, smoothing
        self.steps = 0
        self._squared_gradient = self._variance = 0.0
        self._local: torch.Tensor | None = None

    def local(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Notes the squared norm of this rank's own gradients: after backward, before the mean."""
        self._local = _squared_norm(each.grad for each in parameters if each.grad is not None)

    def averaged(self, parameters: Iterable[torch.nn.Parameter]) -> tuple[float, float]:
        """This step's unbiased estimates of |G|² and tr Σ, of which the running means are updated.

        Called by every rank, when its gradients are the averaged ones. The estimate of |G|² is
        negative at times where the noise is large. Raises RuntimeError if this rank's own
        gradients were not noted in this step.
        """
        if self._local is None:
            raise RuntimeError("this step's local gradients were not noted: call local() before "
                               "they are averaged, or register the hook")
        local, self._local = self._local, None
        dist.all_reduce(local)
        of_small = local.item() / self.ranks
        of_big = _squared_norm(each.grad for each in parameters if each.grad is not None).item()

        b, B = self.local_batch, self.local_batch * self.ranks
        squared_gradient = (B * of_big - b * of_small) / (B - b)
        variance = (of_small - of_big) / (1 / b - 1 / B)
        self.steps += 1
        new = 1 - self.smoothing
        self._squared_gradient += new * (squared_gradient - self._squared_gradient)
        self._variance += new * (variance - self._variance)
        return squared_gradient, variance

    @staticmethod
    def hook(state: "NoiseScale", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: notes the bucket's local norm, then averages it as DDP does."""
        of_bucket = _squared_norm([bucket.buffer()])
        # Buckets come in order, so the first one begins a new backward, whatever was noted before.
        if state._local is None or bucket.index() == 0:
            state._local = of_bucket
        else:
            state._local = state._local + of_bucket
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: all ranks

    @property
    def squared_gradient(self) -> float:
        """The smoothed estimate of |G|²; nan before the first step."""
        return self._squared_gradient / self._seen()

    @property
    def variance(self) -> float:
        """The smoothed estimate of tr Σ, of one sample's gradient; nan before the first step."""
        return self._variance / self._seen()

    @property
    def scale(self) -> float:
        """B_simple in samples; inf while |G|² is estimated at 0 or less, nan before any step."""
        return math.inf if self.squared_gradient <= 0 else self.variance / self.squared_gradient

    def _seen(self):
        """The sum of the weights so far: running means that begin at 0 are too small by it."""
        return 1 - self.smoothing**self.steps if self.steps else math.nan


def _squared_norm(tensors) -> torch.Tensor:
    """The sum of all squares, a scalar; norms in float32 or wider, their sum in float64."""
    norms = [torch.linalg.vector_norm(
        tensor.detach(), dtype=torch.promote_types(tensor.dtype, torch.float32))
        for tensor in tensors]
    return torch.stack(norms).double().square().sum()
