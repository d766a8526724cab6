"""Gradients on their way while backward still computes: what makes PyTorch's DDP fast.

Autograd calls a hook when it has added up a parameter's gradient. The hook puts the gradient into
its bucket, and the last one of a bucket starts the bucket's all-reduce, which runs while backward
goes on with the layers before. Only the last buckets are left to wait for at the end.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
section 3.2.4.
"""

import torch
from torch import nn

from dplab.parallel.bucketed_ddp import BucketedDDP
from dplab.parallel.manual_ddp import refuse_sparse_gradient


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
