"""Gradients in buckets: many small all-reduces become a few large ones.

Each message costs a latency, however small it is, so gradients travel together, in a flat tensor.
Buckets are filled from the last parameter on, because backward computes the last layer's gradients
first. A bucket closes when it reaches its size; what is left at the end is a bucket too.

The first part of this file is that idea alone. The second part is what production needs beside it:
buckets that keep their memory, one dtype in each, and parameters that a rank does not use.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
section 3.2.3.
"""

import torch
import torch.distributed as dist
from torch import nn

from dplab.parallel.manual_ddp import ManualDDP, refuse_sparse_gradient

MIB = 2**20

# --- the idea ------------------------------------------------------------------------------------


def filled_in_reverse(parameters: list[nn.Parameter],
                      bucket_bytes: float) -> list[list[nn.Parameter]]:
    """Buckets from the last parameter to the first; each closes when it reaches its bytes."""
    buckets: list[list[nn.Parameter]] = []
    held = bucket_bytes
    for parameter in reversed(parameters):
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.nbytes
    return buckets


# --- what production needs beside it -------------------------------------------------------------


class Bucket:
    """The gradients of some parameters of one dtype, side by side in one flat tensor.

    After the all-reduce each ``.grad`` is a view into it, so nothing has to be copied back. Behind
    the gradients lies a flag for each parameter: whether this rank has used it. The flags
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
    Buckets stand in the order in which they close, since that is when they are complete.
    """
    # parameters() yields a tied parameter once, so it has one place.
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    place = {parameter: index for index, parameter in enumerate(trained)}
    kinds = {(parameter.dtype, parameter.device) for parameter in trained}
    buckets = [bucket for kind in kinds for bucket in filled_in_reverse(
        [each for each in trained if (each.dtype, each.device) == kind], bucket_mb * MIB)]
    return [Bucket(bucket) for bucket in sorted(buckets, key=lambda bucket: -place[bucket[-1]])]


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
