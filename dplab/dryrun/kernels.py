"""Where a CPU's kernel keeps more than a GPU's, the shapes that the GPU's keeps.

On a CPU, RMSNorm is several operations, which save two copies of their input in fp32. The fused
kernel saves the input as it is, and one number for each row. Tensors in a dry run have no values,
so that the memory is all there is to imitate.
"""

import torch
import torch.nn.functional as F


def use_fused_kernels() -> None:
    """From now on, in this process, `F.rms_norm` keeps and makes what the fused kernel does."""
    F.rms_norm = _rms_norm


def _rms_norm(x, normalized_shape, weight=None, eps=None):
    return _FusedRMSNorm.apply(x, len(normalized_shape), weight)


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dimensions, weight):
        with torch.enable_grad():  # the tracker tells activations by it
            output = torch.empty_like(x)
            deviation = torch.empty(x.shape[:-dimensions], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, deviation)
        return output

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight)
