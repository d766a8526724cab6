"""ZeRO-2: every rank keeps the gradients, too, for its own part of the parameters alone.

A rank updates only its own chunk, so only that chunk's gradients are of use to it. While backward
still computes, each bucket that is full is reduce-scattered, so that every rank receives the mean
of its own chunk, and the bucket is freed. Whole gradients exist only in the buckets that are just
being filled or on their way.

Chapter 08 builds that idea alone. Here is what production needs beside it: one bucket on its way
while backward goes on, accumulation, and parameters that a rank does not use.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, sections 5.2 and 7.2.1.
"""

from contextlib import contextmanager

import torch

from dplab.parallel.bucketed_ddp import MIB, filled_in_reverse
from dplab.parallel.manual_ddp import refuse_sparse_gradient
from dplab.parallel.ownership import current_backward, launch_mean
from dplab.parallel.sharded_optimizer import Flat, ShardedOptimizer


class GradientBucket(Flat):
    """A flat tensor of parameters whose gradients leave for their owners together.

    ``chunk`` is this rank's part of the mean, summed over the backwards since ``clear()``; ``used``
    tells for which parameters this rank has had a gradient since then.
    """

    def __init__(self, parameters):
        super().__init__(parameters)
        self.clear()

    def clear(self) -> None:
        self.chunk: torch.Tensor | None = None
        self.used = [False] * len(self.parameters)

    def launch(self) -> None:
        """Takes the gradients away; a parameter without one counts as zeros."""
        self.used = [used or parameter.grad is not None
                     for used, parameter in zip(self.used, self.parameters, strict=True)]
        self._arrived = launch_mean(self.packed_gradients())
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Adds what has arrived to this rank's chunk, and frees the bucket."""
        arrived = self._arrived()
        self.chunk = arrived if self.chunk is None else self.chunk + arrived
        del self._arrived
        self.set_gradients(self.chunk)


class ShardedGradientOptimizer(ShardedOptimizer):
    """A `ShardedOptimizer` that takes gradients away in ``backward()``, as soon as they are there.

    For a model without DDP. After ``backward()`` the ``grad`` of every parameter is None: the means
    over the ranks lie in ``pieces``, cut to this rank's part, and add up there until this
    optimizer's ``zero_grad()``. ``step()`` all-gathers the new parameters: with the reduce-scatter,
    2(N−1)/N·M bytes in all, as much as DDP. Every backward sends the gradients, so accumulating
    over several costs as many reduce-scatters, or with ``no_sync()`` the memory for whole
    gradients.

    bucket_mb: MiB at which a bucket is full. Parameters are taken in reverse, within their
    parameter group. Raises ValueError if it is not above zero; all else as `ShardedOptimizer`.
    """

    flats: list[GradientBucket]  # type: ignore[assignment]

    def __init__(self, params, optimizer_cls, *, bucket_mb: float = 25.0, **kwargs):
        if not bucket_mb > 0:
            raise ValueError(f"a bucket holds more than 0 MiB, not {bucket_mb}")
        self._bucket_mb = bucket_mb
        self._is_syncing = True
        self._backward = None
        super().__init__(params, optimizer_cls, reduce_gradients=True, **kwargs)

    def _flats_of(self, kind):
        for parameter in kind:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)
        return [GradientBucket(bucket)
                for bucket in filled_in_reverse(kind, self._bucket_mb * MIB)]

    @torch.no_grad()
    def _gradient_is_ready(self, parameter):
        if not self._is_syncing:
            return
        refuse_sparse_gradient(f"a parameter of shape {tuple(parameter.shape)}", parameter)
        if self._backward != current_backward():
            self._backward, self._ready, self._launched = current_backward(), set(), 0
            # Autograd calls this once, when the whole backward is done.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self._ready.add(parameter)
        while (self._launched < len(self.flats)
               and self._ready.issuperset(self.flats[self._launched].parameters)):
            self._launch_next()

    def _launch_next(self):
        """Sends the next bucket once the one before has arrived, so that two are never held."""
        if self._launched > 0:
            self.flats[self._launched - 1].finish()
        self.flats[self._launched].launch()
        self._launched += 1

    @torch.no_grad()
    def _end_of_backward(self):
        """Sends what is left, where this backward had no gradient for some parameter."""
        while self._launched < len(self.flats):
            self._launch_next()
        self.flats[-1].finish()

    def _set_gradients_of_pieces(self):
        self._leave_out_the_unused([used for bucket in self.flats for used in bucket.used])

    def _drop_gradients_of_pieces(self):
        """They stay until zero_grad(), as any gradient does."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        ShardedOptimizer._drop_gradients_of_pieces(self)
        for bucket in self.flats:
            bucket.clear()

    @contextmanager
    def no_sync(self):
        """Inside, nothing is communicated, and whole gradients add up on each rank.

        The next backward outside takes them along.
        """
        was_syncing, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = was_syncing
