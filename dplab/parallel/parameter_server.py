"""A parameter server: rank 0 keeps the model, the other ranks pull it and push gradients.

Asynchronous SGD applies each gradient as it comes, and nobody waits for anybody. While a worker
computes, the others' gradients change the model, so that its own belongs to older parameters than
it is applied to: it is stale. The synchronous server waits instead for N gradients of the same
parameters; with b backup workers it waits for the first N of N + b and drops those that come late.

Server and workers only send and receive, with `dist.recv` from whoever comes first. gloo can do
that and NCCL cannot, so run with ``backend="gloo"`` and tensors on the CPU.

Sources: J. Dean et al., "Large scale distributed deep networks", 2012 (asynchronous SGD);
J. Chen et al., "Revisiting distributed synchronous SGD", 2016, arXiv:1604.00981 (staleness, backup
workers).
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from dplab.parallel.manual_ddp import broadcast_module

SERVER = 0
_GO_ON, _STOP = 1.0, 0.0


@dataclass(frozen=True)
class Push:
    """A gradient as it came in at the server.

    ``staleness``: how many updates the server made between this worker's pull and this push.
    ``loss``: the worker's, on its own batch. ``seconds``: since the server began.
    """

    worker: int
    staleness: int
    applied: bool
    loss: float
    seconds: float


class ParameterServer:
    """What rank 0 does, while the others call `train_as_worker`; all bring an equal ``module``.

    ``optimizer`` is any torch optimizer for ``module``. After each update, ``after_update`` is
    called with the number of updates so far, if it is given. After a service, ``pushes`` has every
    gradient that came, in order of arrival; those that were not applied are among them.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer,
                 after_update: Callable[[int], None] | None = None):
        self.parameters = _begin(module)
        self.optimizer = optimizer
        self.after_update = after_update
        self.updates = 0
        self.pushes: list[Push] = []
        self._pulled_at = {rank: 0 for rank in range(dist.get_world_size()) if rank != SERVER}
        self._started = time.perf_counter()

    def serve_asynchronously(self, updates: int, turns: Iterable[int] | None = None) -> None:
        """Applies ``updates`` gradients, each as it comes, and then sends the workers home.

        ``turns``: whose gradient is to be next, a rank for each update; by default whoever comes
        first.
        """
        named = None if turns is None else iter(turns)
        waiting: list[int] = []
        for _ in range(updates):
            self._answer(waiting, _GO_ON)
            worker = None if named is None else next(named)
            push, gradient = self._receive(worker, most_stale=math.inf)
            self._apply(gradient)
            waiting = [push.worker]
        self._send_home(waiting)

    def serve_synchronously(self, updates: int, backups: int = 0) -> None:
        """Makes ``updates`` updates, each with the mean of the first N gradients that are fresh.

        N is the number of workers less ``backups``. A worker whose gradient belongs to older
        parameters gets the new ones at once, and the gradient is dropped. The others wait for the
        update. Raises ValueError if no worker, or more than there are, would be waited for.
        """
        needed = len(self._pulled_at) - backups
        if not 1 <= needed <= len(self._pulled_at):
            raise ValueError(f"of {len(self._pulled_at)} workers 0 to {len(self._pulled_at) - 1} "
                             f"can be backups, not {backups}")
        waiting: list[int] = []
        for _ in range(updates):
            self._answer(waiting, _GO_ON)
            waiting, mean = [], torch.zeros_like(_flat(self.parameters))
            while len(waiting) < needed:
                push, gradient = self._receive(most_stale=0)
                if push.applied:
                    mean += gradient / needed
                    waiting.append(push.worker)
                else:
                    self._answer([push.worker], _GO_ON)
            self._apply(mean)
        self._send_home(waiting)

    def _send_home(self, waiting: list[int]) -> None:
        """Takes and drops the gradients at which workers still work, and lets all workers stop."""
        for worker in sorted(self._pulled_at.keys() - set(waiting)):
            self._receive(worker, most_stale=-1)
        self._answer(self._pulled_at, _STOP)

    def _receive(self, worker: int | None = None, *, most_stale: float):
        message = torch.cat([_flat(self.parameters), torch.zeros(1)])
        worker = dist.recv(message, src=worker)
        staleness = self.updates - self._pulled_at[worker]
        push = Push(worker, staleness, staleness <= most_stale, message[-1].item(),
                    time.perf_counter() - self._started)
        self.pushes.append(push)
        return push, message[:-1]

    def _apply(self, gradient: torch.Tensor) -> None:
        for parameter, part in zip(self.parameters, _split(gradient, self.parameters), strict=True):
            parameter.grad = part
        self.optimizer.step()
        self.updates += 1
        if self.after_update is not None:
            self.after_update(self.updates)

    def _answer(self, workers: Iterable[int], go_on: float) -> None:
        message = torch.cat([_flat(self.parameters), torch.tensor([go_on])])
        for worker in workers:
            self._pulled_at[worker] = self.updates
            dist.send(message, worker)


def train_as_worker(module: nn.Module, compute_loss: Callable[[int], torch.Tensor]) -> int:
    """What a worker does until the server sends it home: a gradient, a push, a pull, and so on.

    ``compute_loss`` takes the number of this worker's batch, from 0 on, and returns the loss of
    ``module`` there, a scalar. Returns how many gradients it computed. Afterwards the trained
    parameters are the server's last; buffers are each worker's own. Raises ValueError for trained
    parameters that are not float32 on the CPU, and on a single rank.
    """
    parameters = _begin(module)
    number, go_on = 0, _GO_ON
    while go_on == _GO_ON:
        module.zero_grad()
        loss = compute_loss(number)
        loss.backward()
        number += 1
        gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                     for parameter in parameters]
        dist.send(torch.cat([_flat(gradients), loss.detach().reshape(1)]), SERVER)
        go_on = _pull(parameters)
    return number


@torch.no_grad()
def _pull(parameters) -> float:
    message = torch.cat([_flat(parameters), torch.zeros(1)])
    dist.recv(message, src=SERVER)
    for parameter, part in zip(parameters, _split(message[:-1], parameters), strict=True):
        parameter.copy_(part)
    return message[-1].item()


def _begin(module) -> list[nn.Parameter]:
    """Makes the module rank 0's; the parameters that are trained, all of them float32."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(f"the parameter server takes float32 on the CPU, not "
                             f"{parameter.dtype} on {parameter.device}: module.float().cpu(), and "
                             "run with backend='gloo'")
    if dist.get_world_size() < 2:
        raise ValueError("a parameter server needs a worker: start 2 ranks or more")
    broadcast_module(module)
    return parameters


def _flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _split(flat, tensors) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
