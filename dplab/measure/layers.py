"""What each layer of a model costs on this rank: the input of `predict.step.ddp_spans`."""

import statistics
import time

import torch
from torch import nn

from dplab.predict.step import Layer


def layer_times(model: nn.Sequential, x: torch.Tensor, rounds: int = 10) -> list[Layer]:
    """The children of ``model`` as layers, with medians over ``rounds`` steps without any sending.

    A layer's backward lasts from the gradients of the layer after it to its own; children without
    parameters are counted with the layer before them. Forward is timed as a whole and divided
    equally. ``model`` maps ``x`` to any shape; the loss is the mean square. Gradients are left as
    they were. Raises ValueError for a model without trainable parameters.
    """
    layers = [layer for layer in model if any(p.requires_grad for p in layer.parameters())]
    if not layers:
        raise ValueError("a model without trainable parameters has no gradients to send")
    saved = [(parameter, parameter.grad) for parameter in model.parameters()]
    ready, handles = {}, []
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(
                    lambda _, index=index: ready.update({index: time.perf_counter()})))
    forwards: list[float] = []
    backwards: list[list[float]] = [[] for _ in layers]
    try:
        for _ in range(rounds + 2):
            model.zero_grad()
            begin = time.perf_counter()
            loss = model(x).square().mean()
            forwards.append(time.perf_counter() - begin)
            before = time.perf_counter()
            loss.backward()
            for index in reversed(range(len(layers))):
                backwards[index].append(ready[index] - before)
                before = ready[index]
    finally:
        for handle in handles:
            handle.remove()
        for parameter, gradient in saved:
            parameter.grad = gradient
    forward = statistics.median(forwards[2:]) / len(layers)
    return [Layer(forward, statistics.median(seconds[2:]), _gradient_bytes(layer))
            for layer, seconds in zip(layers, backwards, strict=True)]


def _gradient_bytes(layer):
    return sum(parameter.nbytes for parameter in layer.parameters() if parameter.requires_grad)
