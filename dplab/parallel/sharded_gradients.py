"""ZeRO-2: every rank keeps the gradients, too, for its own part of the parameters alone.

A rank updates only its own chunk, so only that chunk's gradients are of use to it. While backward
still computes, each bucket that is full is reduce-scattered, so that every rank receives the mean
of its own chunk, and the bucket is freed. Whole gradients exist only in the buckets that are just
being filled or on their way.

The first part of this file is that idea alone. The second part is what production needs: one bucket
on its way while backward goes on, accumulation, and parameters that a rank does not use.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, sections 5.2 and 7.2.1.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from dplab.parallel.bucketed_ddp import MIB, filled_in_reverse
from dplab.parallel.manual_ddp import refuse_sparse_gradient
from dplab.parallel.ownership import (
    current_backward,
    into_one,
    launch_reduce_scatter,
    mean_for_owner,
    own_chunk,
    pack,
    unpack,
)
from dplab.parallel.sharded_optimizer import Flat, ShardedOptimizer

# --- the idea ------------------------------------------------------------------------------------


class ZeRO2:
    """Each rank keeps state and gradients for its own chunk of each bucket."""

    def __init__(self, buckets: list[list[nn.Parameter]], make_optimizer):
        self.buckets = buckets
        self.flats = [into_one(bucket) for bucket in buckets]
        self.own = [own_chunk(flat) for flat in self.flats]
        self.optimizer = make_optimizer(self.own)
        for bucket in buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)
        self.start_over()

    def start_over(self):
        self.ready, self.sent = set(), 0

    def gradient_is_ready(self, parameter):
        self.ready.add(parameter)
        # In the order of the list, so that all ranks send the same bucket at a time.
        while self.sent < len(self.buckets) and self.ready.issuperset(self.buckets[self.sent]):
            bucket, own = self.buckets[self.sent], self.own[self.sent]
            own.grad = mean_for_owner(pack([each.grad for each in bucket]))
            for each in bucket:
                each.grad = None
            self.sent += 1

    def step(self):
        self.optimizer.step()
        for flat, own in zip(self.flats, self.own, strict=True):
            dist.all_gather_single(flat, own)
            own.grad = None
        self.start_over()


# --- what production needs -----------------------------------------------------------------------


class GradientBucket(Flat):
    """A flat tensor of parameters whose gradients leave for their owners together.

    ``whole`` holds them all, from the first one that is taken until the reduce-scatter is done;
    ``chunk`` is this rank's part of the mean, summed over the backwards since ``clear()``.
    ``used`` tells for which parameters this rank has had a gradient since then.
    """

    def __init__(self, parameters):
        super().__init__(parameters)
        self.whole = None
        self.clear()

    def clear(self) -> None:
        self.chunk = None
        self.used = [False] * len(self.parameters)

    def take(self, index: int) -> None:
        """Moves one parameter's gradient to its place, scaled by 1/N, and frees it."""
        parameter = self.parameters[index]
        refuse_sparse_gradient(f"parameter {index}", parameter)
        if self.whole is None:
            self.whole = torch.zeros_like(self.flat)
            self._views = unpack(self.whole, self.layout.shapes)
            self._missing = set(range(len(self.parameters)))
        torch.mul(parameter.grad, 1 / dist.get_world_size(), out=self._views[index])
        parameter.grad = None
        self.used[index] = True
        self._missing.remove(index)

    @property
    def is_full(self) -> bool:
        return self.whole is not None and not self._missing

    def take_leftovers(self) -> None:
        """Takes what ``no_sync()`` has left; a parameter without a gradient counts as zeros."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.take(index)
        if self.whole is None:
            self.whole = torch.zeros_like(self.flat)

    def launch(self) -> None:
        self._work = launch_reduce_scatter(self.whole)

    def finish(self) -> None:
        """Adds what has arrived to this rank's chunk, and frees the bucket."""
        self._work.wait()
        arrived = own_chunk(self.whole)
        self.chunk = arrived.clone() if self.chunk is None else self.chunk + arrived
        self._work = self.whole = self._views = None
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
        self._place: dict[nn.Parameter, tuple[GradientBucket, int]] = {}
        self._is_syncing = True
        self._backward = None
        super().__init__(params, optimizer_cls, reduce_gradients=True, **kwargs)

    def _flats_of(self, kind):
        buckets = [GradientBucket(bucket)
                   for bucket in filled_in_reverse(kind, self._bucket_mb * MIB)]
        for bucket in buckets:
            for index, parameter in enumerate(bucket.parameters):
                self._place[parameter] = bucket, index
                parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)
        return buckets

    @torch.no_grad()
    def _gradient_is_ready(self, parameter):
        if not self._is_syncing:
            return
        if self._backward != current_backward():
            self._backward, self._launched = current_backward(), 0
            for other in self.flats:
                other.whole = None  # what a backward that failed half-way may have left
            # Autograd calls this once, when the whole backward is done.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        bucket, index = self._place[parameter]
        bucket.take(index)
        while self._launched < len(self.flats) and self.flats[self._launched].is_full:
            self._launch_next()

    def _launch_next(self):
        """Sends the next bucket, as soon as the one before has arrived: two are never on the way.
        """
        if self._launched > 0:
            self.flats[self._launched - 1].finish()
        self.flats[self._launched].launch()
        self._launched += 1

    @torch.no_grad()
    def _end_of_backward(self):
        """Sends what is left, where this backward had no gradient for some parameter."""
        while self._launched < len(self.flats):
            self.flats[self._launched].take_leftovers()
            self._launch_next()
        self.flats[-1].finish()

    def _set_gradients_of_pieces(self):
        if not self._has_reduced:
            self._leave_out_the_unused([used for bucket in self.flats for used in bucket.used])
            self._has_reduced = True

    def _drop_gradients_of_pieces(self):
        self._has_reduced = False  # they stay until zero_grad(), as any gradient does

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
