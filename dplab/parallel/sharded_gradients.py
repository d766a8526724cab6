"""ZeRO-2: every rank keeps the gradients, too, for its own part of the parameters alone.

A rank updates only its own pieces, so only their gradients are of use to it. While backward still
computes, gradients are packed into buckets; each full bucket is reduce-scattered, so that every
rank receives the mean of its own chunk, and the bucket is freed. A whole gradient never exists:
what a rank holds is its own chunk, and the buckets that are just being filled or on their way.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, sections 5.2 and 7.2.1.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from dplab.parallel.bucketed_ddp import MIB
from dplab.parallel.manual_ddp import refuse_sparse_gradient
from dplab.parallel.ownership import current_backward, launch_reduce_scatter
from dplab.parallel.sharded_optimizer import ShardedOptimizer


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

    def __init__(self, params, optimizer_cls, *, bucket_mb: float = 25.0, **kwargs):
        if not bucket_mb > 0:
            raise ValueError(f"a bucket holds more than 0 MiB, not {bucket_mb}")
        self._bucket_mb = bucket_mb
        self._place: dict[nn.Parameter, tuple[GradientBucket, int]] = {}
        self._buckets: list[GradientBucket] = []
        self._is_syncing = True
        self._backward = None
        super().__init__(params, optimizer_cls, reduce_gradients=True, **kwargs)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        for flat in self.flats[len(self._buckets):]:
            bucket = GradientBucket(flat)
            self._buckets.append(bucket)
            for index, parameter in enumerate(flat.parameters):
                self._place[parameter] = bucket, index
                parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def _divide(self, parameters) -> list[list[nn.Parameter]]:
        """The parameters of each kind in reverse, in runs that end when they are ``bucket_mb``."""
        closed = []
        for kind in super()._divide(parameters):
            open_ = []
            for parameter in reversed(kind):
                open_.append(parameter)
                if sum(p.nbytes for p in open_) >= self._bucket_mb * MIB:
                    closed.append(open_)
                    open_ = []
            if open_:
                closed.append(open_)
        return closed

    @torch.no_grad()
    def _gradient_is_ready(self, parameter):
        if not self._is_syncing:
            return
        if self._backward != current_backward():
            self._backward, self._launched = current_backward(), 0
            for other in self._buckets:
                other.whole = None  # what a backward that failed half-way may have left
            # Autograd calls this once, when the whole backward is done.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        bucket, index = self._place[parameter]
        bucket.take(index)
        while self._launched < len(self._buckets) and self._buckets[self._launched].is_full:
            self._launch_next()

    def _launch_next(self):
        """Sends the next bucket, as soon as the one before has arrived: two are never on the way.

        In the buckets' order: every rank launches the same reduce-scatters one after another.
        """
        if self._launched > 0:
            self._buckets[self._launched - 1].finish()
        self._buckets[self._launched].launch()
        self._launched += 1

    @torch.no_grad()
    def _end_of_backward(self):
        """Sends what is left, where this backward had no gradient for some parameter."""
        while self._launched < len(self._buckets):
            self._buckets[self._launched].take_leftovers()
            self._launch_next()
        self._buckets[-1].finish()

    def _set_gradients_of_pieces(self):
        if not self._has_reduced:
            self._leave_out_the_unused([used for bucket in self._buckets for used in bucket.used])
            self._has_reduced = True

    def _drop_gradients_of_pieces(self):
        self._has_reduced = False  # they stay until zero_grad(), as any gradient does

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for bucket in self._buckets:
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


class GradientBucket:
    """The gradients of one flat tensor's parameters, on their way to their owners.

    ``whole`` holds them all, from the first one that is taken until the reduce-scatter is done;
    ``chunk`` is this rank's part of the mean, summed over the backwards since ``clear()``.
    ``used`` tells for which parameters this rank has had a gradient since then.
    """

    def __init__(self, flat):
        self.flat = flat
        self.whole = None
        self.clear()

    def clear(self) -> None:
        self.chunk = None
        self.used = [False] * len(self.flat.parameters)
        for piece in self.flat.pieces:
            piece.grad = None

    def take(self, index: int) -> None:
        """Moves one parameter's gradient to its place, scaled by 1/N, and frees it."""
        parameter = self.flat.parameters[index]
        refuse_sparse_gradient(f"parameter {index}", parameter)
        if self.whole is None:
            self.whole = torch.zeros_like(self.flat.flat)
            self._views = self.flat.layout.views(self.whole)
            self._missing = set(range(len(self.flat.parameters)))
        # Scaled before the sum, as in DDP: the sum of N large numbers could overflow.
        torch.mul(parameter.grad, 1 / dist.get_world_size(), out=self._views[index])
        parameter.grad = None
        self.used[index] = True
        self._missing.remove(index)

    @property
    def is_full(self) -> bool:
        return self.whole is not None and not self._missing

    def take_leftovers(self) -> None:
        """Takes what ``no_sync()`` has left; a parameter without a gradient counts as zeros."""
        for index, parameter in enumerate(self.flat.parameters):
            if parameter.grad is not None:
                self.take(index)
        if self.whole is None:
            self.whole = torch.zeros_like(self.flat.flat)

    def launch(self) -> None:
        self._work = launch_reduce_scatter(self.whole)

    def finish(self) -> None:
        """Adds what has arrived to this rank's chunk, and frees the bucket."""
        self._work.wait()
        arrived = self.whole[self.flat.layout.own]
        self.chunk = arrived.clone() if self.chunk is None else self.chunk + arrived
        del self._work
        self.whole = self._views = None
        self.flat.set_gradients(self.chunk)
