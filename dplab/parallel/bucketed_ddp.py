"""Gradients in buckets: many small all-reduces become a few large ones.

Each message costs a latency, however small it is, so gradients travel together: a bucket is one
flat tensor with room for the gradients of several parameters. The parameters are taken in reverse,
because backward computes the last layer's gradients first. After the all-reduce, each parameter's
``.grad`` is a view into its bucket, so that nothing has to be copied back.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
section 3.2.3.
"""

import torch
import torch.distributed as dist
from torch import nn

from dplab.parallel.manual_ddp import ManualDDP, refuse_sparse_gradient

MIB = 2**20


class Bucket:
    """The gradients of some parameters of one dtype, side by side in one flat tensor.

    Behind the gradients lies a flag for each parameter: whether this rank has used it. The flags
    are summed with the gradients, so every rank learns without another message whether anybody has.
    """

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes) + len(sizes), requires_grad=False)
        *parts, self.flags = self.flat.split([*sizes, len(sizes)])
        self.views = [part.view(parameter.shape)
                      for part, parameter in zip(parts, parameters, strict=True)]

    def put(self, index: int) -> None:
        """Scales one parameter's gradient by 1/N, into its place; without one, it is zeros."""
        parameter, view = self.parameters[index], self.views[index]
        if parameter.grad is None:
            self.flags[index] = 0.0
            view.zero_()
            return
        self.flags[index] = 1.0
        # Where the gradient already is the view (nobody set it to None), this scales in place.
        torch.mul(parameter.grad, 1 / dist.get_world_size(), out=view)
        parameter.grad = view

    def launch(self) -> None:
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        """Waits for the sum. A parameter that no rank has used keeps what it had."""
        self.work.wait()
        del self.work
        for parameter, view, used in zip(self.parameters, self.views, self.flags.tolist(),
                                         strict=True):
            if used:
                parameter.grad = view


def bucket_parameters(module: nn.Module, bucket_mb: float) -> list[Bucket]:
    """The trainable parameters in reverse, in buckets that close when they reach ``bucket_mb`` MiB.

    So a bucket exceeds that size by less than its last parameter; a bucket holds one dtype only.
    """
    closed: list[list[nn.Parameter]] = []
    open_: dict[tuple, list[nn.Parameter]] = {}
    # parameters() yields a tied parameter once, so it has one place.
    for parameter in reversed(list(module.parameters())):
        if not parameter.requires_grad:
            continue
        kind = (parameter.dtype, parameter.device)
        open_.setdefault(kind, []).append(parameter)
        nbytes = sum(each.nbytes for each in open_[kind])
        if nbytes >= bucket_mb * MIB:
            closed.append(open_.pop(kind))
    return [Bucket(parameters) for parameters in [*closed, *open_.values()]]


class BucketedDDP(ManualDDP):
    """`ManualDDP` with one all-reduce for each bucket of about ``bucket_mb`` MiB, after backward.

    Which parameters are trainable is settled here. Raises ValueError if ``bucket_mb`` is not above
    zero, NotImplementedError at the first sparse gradient.
    """

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0):
        if not bucket_mb > 0:
            raise ValueError(f"a bucket holds more than 0 MiB, not {bucket_mb}")
        super().__init__(module)
        self.buckets = bucket_parameters(module, bucket_mb)

    @torch.no_grad()
    def finish_gradient_sync(self) -> None:
        """Averages the gradients over the ranks; does nothing inside ``no_sync()``."""
        if not self._is_syncing:
            return
        for name, parameter in self.module.named_parameters():
            refuse_sparse_gradient(name, parameter)
        for bucket in self.buckets:
            for index in range(len(bucket.parameters)):
                bucket.put(index)
            bucket.launch()
        for bucket in self.buckets:
            bucket.finish()
