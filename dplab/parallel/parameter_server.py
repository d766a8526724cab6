"""A parameter server: rank 0 keeps the model, the other ranks pull it and push gradients.

Asynchronous SGD applies each gradient as it comes, and nobody waits for anybody. While a worker
computes, the others' gradients change the model, so that its own belongs to older parameters than
it is applied to: it is stale.

Server and workers only send and receive, with `dist.recv` from whoever comes first. gloo can do
that and NCCL cannot, so run with ``backend="gloo"`` and tensors on the CPU.

Sources: J. Dean et al., "Large scale distributed deep networks", 2012 (asynchronous SGD);
J. Chen et al., "Revisiting distributed synchronous SGD", 2016, arXiv:1604.00981 (staleness).
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dplab.parallel.manual_ddp import broadcast_module

SERVER = 0
_GO_ON, _STOP = 1.0, 0.0


class ParameterServer:
    """What rank 0 does, while the others call `train_as_worker` with modules of the same shapes.

    ``optimizer`` is any torch optimizer for ``module``, whose parameters are all trained. After
    each update, ``after_update`` is called, if it is given. ``staleness`` has, for each gradient
    that was applied, how many updates the server made between its worker's pull and its push.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer,
                 after_update: Callable[[], None] | None = None):
        broadcast_module(module)
        self.parameters = list(module.parameters())
        self.optimizer = optimizer
        self.after_update = after_update
        self.staleness: list[int] = []
        self._pulled_at = {rank: 0 for rank in range(dist.get_world_size()) if rank != SERVER}

    def serve(self, updates: int, turns: Iterable[int] | None = None) -> None:
        """Applies ``updates`` gradients, each as it comes, and then sends the workers home.

        ``turns``: whose gradient is to be next, a rank for each update; by default whoever comes
        first.
        """
        named = iter(turns or [])
        for update in range(updates):
            worker, gradient = self._receive(next(named, None))
            self.staleness.append(update - self._pulled_at[worker])
            sizes = [parameter.numel() for parameter in self.parameters]
            for parameter, part in zip(self.parameters, gradient.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            self.optimizer.step()
            if self.after_update is not None:
                self.after_update()
            if update < updates - 1:
                self._answer(worker, _GO_ON)
                self._pulled_at[worker] = update + 1
        for other in self._pulled_at.keys() - {worker}:
            self._receive(other)  # a gradient that comes too late, and is dropped
        for each in self._pulled_at:
            self._answer(each, _STOP)

    def _receive(self, worker):
        gradient = torch.zeros_like(parameters_to_vector(self.parameters))
        return dist.recv(gradient, src=worker), gradient

    def _answer(self, worker, go_on):
        weights = parameters_to_vector(self.parameters).detach()
        dist.send(torch.cat([weights, torch.tensor([go_on])]), worker)


def train_as_worker(module: nn.Module, compute_loss: Callable[[int], torch.Tensor]) -> int:
    """What a worker does until the server sends it home: a gradient, a push, a pull, and so on.

    ``compute_loss`` takes the number of this worker's batch, from 0 on, and returns the loss of
    ``module`` there. Returns how many gradients it computed. Afterwards the parameters are the
    server's last; buffers are each worker's own.
    """
    broadcast_module(module)
    number, go_on = 0, _GO_ON
    while go_on == _GO_ON:
        module.zero_grad()
        compute_loss(number).backward()
        number += 1
        gradients = [parameter.grad for parameter in module.parameters()
                     if parameter.grad is not None]
        dist.send(parameters_to_vector(gradients), SERVER)
        answer = torch.zeros(sum(parameter.numel() for parameter in module.parameters()) + 1)
        dist.recv(answer, src=SERVER)
        vector_to_parameters(answer[:-1], module.parameters())
        go_on = answer[-1].item()
    return number
