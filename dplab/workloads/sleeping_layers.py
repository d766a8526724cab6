"""Layers that sleep in place of computing, so that the cores are free to send."""

import time

import torch
from torch import nn


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_seconds, backward_seconds):
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


class SleepingLayer(nn.Linear):
    """A linear layer without bias that takes so many seconds longer in forward and in backward."""

    def __init__(self, width: int, forward_seconds: float, backward_seconds: float):
        super().__init__(width, width, bias=False)
        self._seconds = forward_seconds, backward_seconds

    def forward(self, x):
        return _Sleeps.apply(super().forward(x), *self._seconds)
