"""Local SGD and DiLoCo: ranks that train by themselves, and meet only every so many steps.

Each rank takes steps of its own, with its own gradients, and after every H of them an all-reduce
makes the parameters of all ranks their mean. What is sent is as large as a gradient, but is sent
only once in H steps. DiLoCo takes the way from the old parameters to that mean for a gradient, and
gives it to a second, outer optimizer with momentum. Streaming DiLoCo meets in fragments, and goes
on computing while one of them travels.

Sources: S. Stich, "Local SGD converges fast and communicates little", 2019, arXiv:1805.09767;
A. Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023,
arXiv:2311.08105 (algorithm 1); A. Douillard et al., "Streaming DiLoCo with overlapping
communication", 2025, arXiv:2501.18512 (algorithm 2, without its 4-bit numbers).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dplab.parallel.manual_ddp import broadcast_module, broadcast_tensors


class LocalSGD:
    """``optimizer`` steps on each rank alone; every ``every`` steps the models become their mean.

    ``module`` needs no DDP around it, and ``optimizer`` may be any: its state stays with its rank.
    The values of rank 0 are the ones that count at the start. Then call ``step()`` in place of
    ``optimizer.step()``, equally often on every rank, and ``average()`` at the end, unless
    ``every`` divides the steps. After an average all ranks hold the same model: trained parameters
    and buffers of floating-point numbers are the mean over the ranks, other buffers are rank 0's.
    Frozen parameters are left alone; which those are is settled here. Put the model on its device
    and into its dtype before. Raises ValueError for ``every`` below 1.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, every: int):
        if every < 1:
            raise ValueError(f"the ranks meet every 1 or more steps, not every {every}")
        broadcast_module(module)
        self.optimizer = optimizer
        self.every = every
        self.steps = 0
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        buffers = list(module.buffers())
        self._averaged_buffers = [b for b in buffers if b.is_floating_point()]
        self._counters = [b for b in buffers if not b.is_floating_point()]

    def step(self) -> None:
        """One step of this rank's own optimizer; if it is the H-th, the ranks meet."""
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.every == 0:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Makes the models of all ranks one. Called by every rank."""
        average_tensors(self.parameters + self._averaged_buffers)
        broadcast_tensors(self._counters)


class DiLoCo(LocalSGD):
    """Local SGD whose ranks do not go to the mean, but take an outer step towards it.

    With θ the parameters that all ranks had after the last meeting, and θ_r what each has made of
    them, the outer gradient is the mean of θ − θ_r. SGD with Nesterov momentum applies it to θ, and
    all ranks go on from there. In the paper the inner optimizer is AdamW and H is 500. Each rank
    keeps θ and the momentum besides: twice the parameters. With ``outer_learning_rate=1`` and no
    momentum it is local SGD.
    """

    def __init__(self, module, optimizer, every, outer_learning_rate=0.7, outer_momentum=0.9):
        super().__init__(module, optimizer, every)
        self.anchors = [parameter.detach().clone() for parameter in self.parameters]
        self.outer = torch.optim.SGD(self.anchors, lr=outer_learning_rate, momentum=outer_momentum,
                                     nesterov=outer_momentum > 0)

    @torch.no_grad()
    def average(self) -> None:
        """Takes the outer step, with the mean of all ranks' models. Called by every rank."""
        super().average()
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            anchor.grad = anchor - parameter
        self.outer.step()
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            parameter.copy_(anchor)
            anchor.grad = None


class StreamingDiLoCo:
    """DiLoCo in ``fragments`` of the parameters, which take turns and arrive ``late`` steps later.

    Each fragment meets every ``every`` steps. When its average is there, the outer step goes to the
    fragment's anchor, and the rank's own parameters become ``mix`` · own + (1 − mix) · anchor: its
    last steps were taken without that average, and are kept in part. Call ``step()`` in place of
    ``optimizer.step()``, and ``finish()`` at the end, equally often on every rank. Buffers are left
    alone. Raises ValueError where a fragment would meet again before it arrived.
    """

    def __init__(self, module, optimizer, every, fragments=4, late=1, mix=0.5,
                 outer_learning_rate=0.7, outer_momentum=0.9):
        if not (0 < late < every and 0 < fragments <= every):
            raise ValueError(f"{fragments} fragments that are {late} steps late do not fit into "
                             f"{every} steps")
        broadcast_module(module)
        self.optimizer, self.every, self.late, self.mix = optimizer, every, late, mix
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        whole = parameters_to_vector(self.parameters).detach()
        self.fragments = [_Fragment(part, outer_learning_rate, outer_momentum)
                          for part in whole.tensor_split(fragments)]
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """One step of this rank's own optimizer; then fragments leave or arrive, if it is time."""
        self.optimizer.step()
        self.steps += 1
        whole = parameters_to_vector(self.parameters)
        parts = whole.tensor_split(len(self.fragments))
        for place, (fragment, part) in enumerate(zip(self.fragments, parts, strict=True)):
            # Their turns are spread evenly over the steps between two meetings.
            turn = self.steps - place * self.every // len(self.fragments)
            if turn > 0 and turn % self.every == 0:
                fragment.leave(part)
            elif fragment.work is not None and turn % self.every == self.late:
                fragment.arrive()
                part.lerp_(fragment.anchor, 1 - self.mix)
        vector_to_parameters(whole, self.parameters)

    def finish(self) -> None:
        """Makes the models of all ranks one: their mean. What still travels is dropped."""
        for fragment in self.fragments:
            if fragment.work is not None:
                fragment.work.wait()
        average_tensors(self.parameters)


class _Fragment:
    """A part of the parameters with an outer optimizer of its own; ``work``: on its way, or None.
    """

    def __init__(self, part, outer_learning_rate, outer_momentum):
        self.anchor = part.clone()
        self.outer = torch.optim.SGD([self.anchor], lr=outer_learning_rate,
                                     momentum=outer_momentum, nesterov=outer_momentum > 0)
        self.work: dist.Work | None = None

    def leave(self, part) -> None:
        """Sends the way from the anchor to ``part``, and does not wait for the others'."""
        self.anchor.grad = (self.anchor - part) / dist.get_world_size()
        self.work = dist.all_reduce(self.anchor.grad, async_op=True)

    def arrive(self) -> None:
        """Takes the outer step, once the average is there. Something must be on its way."""
        assert self.work is not None
        self.work.wait()
        self.outer.step()
        self.work = None


@torch.no_grad()
def average_tensors(tensors: list[torch.Tensor]) -> None:
    """Replaces each tensor by its mean over the ranks: one all-reduce for each kind of tensor.

    Tensors of one dtype on one device travel together, in one flat message.
    """
    kinds: dict[tuple, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same_kind in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same_kind])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([tensor.numel() for tensor in same_kind])
        for tensor, part in zip(same_kind, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
