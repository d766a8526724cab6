"""Gradients on their way while backward still computes: what makes PyTorch's DDP fast.

Autograd calls a hook when it has added up a parameter's gradient. A bucket's all-reduce starts when
its last gradient is there and the buckets before it have left, so all ranks launch in one order,
and it runs while backward goes on. Only the last bucket, and what queues before it, is left to wait
for at the end.

The first part of this file is that idea alone. The second part is what production needs beside it:
``no_sync()``, and parameters that a rank does not use.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
section 3.2.4.
"""

import torch
import torch.distributed as dist
from torch import nn

from dplab.parallel.bucketed_ddp import BucketedDDP
from dplab.parallel.manual_ddp import refuse_sparse_gradient

# --- the idea ------------------------------------------------------------------------------------


class OverlappedBuckets:
    """Averages the gradients of buckets during backward; call ``finish()`` after each backward."""

    def __init__(self, buckets: list[list[nn.Parameter]]):
        self.buckets = buckets
        for bucket in buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.gradient_is_ready)
        self.start_over()

    def start_over(self):
        self.ready, self.under_way = set(), []

    def gradient_is_ready(self, parameter):
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.under_way):]:
            if not self.ready.issuperset(bucket):
                break  # the buckets behind it wait: every rank launches in the order of the list
            flat = torch.cat([each.grad.flatten() for each in bucket]) / dist.get_world_size()
            self.under_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for bucket, flat, work in self.under_way:
            work.wait()
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad.copy_(part.view_as(parameter))
        self.start_over()


# --- what production needs beside it -------------------------------------------------------------


class OverlappedDDP(BucketedDDP):
    """`BucketedDDP` whose all-reduces start during ``backward()``, as soon as a bucket is full.

    Call ``finish_gradient_sync()`` after it, as with `ManualDDP`. Raises RuntimeError if backward
    computes a gradient a second time before that: use ``no_sync()`` for all backwards but the last.
    """

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0):
        super().__init__(module, bucket_mb)
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._place = {}
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                self._place[parameter] = bucket, index
                parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)
        self._start_over()

    def _start_over(self):
        self._missing = {bucket: set(range(len(bucket.parameters))) for bucket in self.buckets}
        self._launched = 0

    @torch.no_grad()
    def _gradient_is_ready(self, parameter):
        if not self._is_syncing:
            return
        bucket, index = self._place[parameter]
        if index not in self._missing[bucket]:
            raise RuntimeError(
                f"the gradient of {self._names[parameter]!r} was computed a second time before "
                "finish_gradient_sync(): let all backwards but the last run inside no_sync()")
        refuse_sparse_gradient(self._names[parameter], parameter)
        bucket.put(index)
        self._missing[bucket].remove(index)
        self._launch_full_buckets()

    def _launch_full_buckets(self):
        # In the buckets' order: every rank has to launch the same all-reduces one after another,
        # whatever order its own gradients come in.
        while self._launched < len(self.buckets):
            bucket = self.buckets[self._launched]
            if self._missing[bucket]:
                return
            bucket.launch()
            self._launched += 1

    @torch.no_grad()
    def finish_gradient_sync(self) -> None:
        """Waits until every gradient is the mean over the ranks; nothing inside ``no_sync()``."""
        if not self._is_syncing:
            return
        for bucket, missing in self._missing.items():
            for index in missing:  # left over by no_sync(), or not used by this rank
                bucket.put(index)
            missing.clear()
        self._launch_full_buckets()
        for bucket in self.buckets:
            bucket.finish()
        self._start_over()
