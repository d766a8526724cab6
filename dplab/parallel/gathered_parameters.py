"""The parameters of ZeRO-3: pieces on each rank that become whole for a while.

Two tricks make it work with autograd. Gathering is an autograd function whose backward is the
reduce-scatter: each is the other's transpose. And freeing a parameter empties its storage, while
the tensor stays: what autograd has saved for backward is valid again as soon as the storage is
filled again.
"""

import torch
import torch.distributed as dist
from torch import nn

from dplab.parallel.ownership import Layout, launch_reduce_scatter


class Unit:
    """Parameters that are gathered and freed together."""

    def __init__(self, parameters, places, param_dtype, reduce_dtype):
        kinds = {}
        for p in parameters:
            kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append(p)
        self.shards = [Shard(kind, [places[p] for p in kind], param_dtype, reduce_dtype)
                       for kind in kinds.values()]

    def launch_gather(self) -> None:
        for shard in self.shards:
            shard.launch_gather()

    def put_in(self, take_gradient) -> None:
        """The module has its whole parameters.

        ``take_gradient(shard, gradient)`` will be called with the gradient of each shard's.
        """
        self.launch_gather()
        for shard in self.shards:
            shard.put_in(take_gradient)

    def take_out(self) -> None:
        """The module has this rank's pieces again."""
        for shard in self.shards:
            shard.take_out()


class Shard:
    """Some parameters of one kind in one flat tensor, of which this rank keeps its own chunk.

    places: for each parameter the pairs of module and name where it is found, several if tied.
    There may be three dtypes: the chunk is stored in the parameters' own, ``whole`` is gathered and
    used in ``param_dtype``, and gradients are summed in ``reduce_dtype``.
    """

    def __init__(self, parameters, places, param_dtype, reduce_dtype):
        self.layout = Layout(p.shape for p in parameters)
        self._places = places
        self._reduce_dtype = reduce_dtype
        flat = parameters[0].new_zeros(self.layout.length, requires_grad=False)
        for parameter, view in zip(parameters, self.layout.views(flat), strict=True):
            view.copy_(parameter.detach())
        dist.broadcast(flat, src=0)
        self.chunk = flat[self.layout.own].clone()
        self.pieces = [nn.Parameter(piece, requires_grad=parameters[0].requires_grad)
                       for piece in self.layout.pieces(self.chunk)]
        self.whole = flat.to(param_dtype) if param_dtype and flat.is_floating_point() else flat
        self._gathering = None
        self.unsent = None
        self.is_gathered = True
        self.take_out()

    def launch_gather(self) -> None:
        if self.is_gathered:
            return
        self.is_gathered = True
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        message = self.chunk.to(self.whole.dtype)  # which must live until it is sent
        self._gathering = dist.all_gather_single(self.whole, message, async_op=True), message

    def put_in(self, take_gradient) -> None:
        self._finish_gather()
        whole = _Gathered.apply(self, take_gradient, *self.pieces)
        self._set(self.layout.views(whole))

    def take_out(self) -> None:
        if not self.is_gathered:
            return
        self._finish_gather()
        self._set(self.pieces)
        self.whole.untyped_storage().resize_(0)
        self.is_gathered = False

    def _finish_gather(self):
        if self._gathering is not None:
            self._gathering[0].wait()
            self._gathering = None

    def _set(self, tensors):
        for tensor, places in zip(tensors, self._places, strict=True):
            for module, name in places:
                # Not by setattr, which lets only an nn.Parameter follow an nn.Parameter.
                module._parameters[name] = tensor

    def keep(self, gradient: torch.Tensor) -> None:
        """Adds to what there is to send: a gradient of this rank, in the form of ``whole``."""
        gradient = gradient.to(self._reduce_dtype or gradient.dtype)
        self.unsent = gradient if self.unsent is None else self.unsent.add_(gradient)

    def launch_reduce(self) -> None:
        """Starts to send what was kept to its owners."""
        # Scaled before the sum, as in DDP: the sum of N large numbers could overflow.
        self._sent, self.unsent = self.unsent.mul_(1 / dist.get_world_size()), None
        self._work = launch_reduce_scatter(self._sent)

    def finish_reduce(self) -> None:
        """Adds what has arrived, the mean of this rank's chunk, to the pieces' gradients."""
        self._work.wait()
        arrived = self._sent[self.layout.own].to(self.chunk.dtype, copy=True)
        del self._sent, self._work
        for piece, gradient in zip(self.pieces, self.layout.pieces(arrived), strict=True):
            piece.grad = gradient if piece.grad is None else piece.grad.add_(gradient)

    def gather_copies(self) -> list[torch.Tensor]:
        """The whole parameters in their own dtype and shapes, as copies."""
        whole = self.chunk.new_empty(self.layout.length)
        dist.all_gather_single(whole, self.chunk)
        return [view.clone() for view in self.layout.views(whole)]


class _Gathered(torch.autograd.Function):
    """From a rank's pieces to whole parameters; backward, from their gradient to its owners."""

    @staticmethod
    def forward(ctx, shard, take_gradient, *pieces):
        ctx.shard, ctx.take_gradient = shard, take_gradient
        # The same memory, but not the same tensor: that it is filled again for backward is no
        # change of what autograd has saved, and it shall not take it for one.
        return shard.whole.data

    @staticmethod
    def backward(ctx, gradient):
        ctx.take_gradient(ctx.shard, gradient)
        return (None,) * (2 + len(ctx.shard.pieces))  # `finish_reduce` sets the pieces' grad


def places_of(module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """For each parameter, the modules that have it and its names there."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((part, name))
    return places


def divide(module, units) -> list[list[nn.Parameter]]:
    """The parameters that belong to no unit alone, and then those of each unit."""
    users: dict[nn.Parameter, set[int]] = {parameter: set() for parameter in module.parameters()}
    in_units = {part for unit in units for part in unit.modules()}
    for index, unit in enumerate(units, start=1):
        for parameter in unit.parameters():
            users[parameter].add(index)
    for part in module.modules():
        if part not in in_units:
            for parameter in part.parameters(recurse=False):
                users[parameter].add(0)
    divided: list[list[nn.Parameter]] = [[] for _ in range(len(units) + 1)]
    for parameter, indices in users.items():
        divided[indices.pop() if len(indices) == 1 else 0].append(parameter)
    return divided
