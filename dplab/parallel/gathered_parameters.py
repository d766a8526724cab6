"""The parameters of ZeRO-3: pieces on each rank that become whole for a while.

Two tricks make it work with autograd. Gathering is an autograd function whose backward is the
reduce-scatter: each is the other's transpose. And freeing a parameter empties its storage, while
the tensor stays: what autograd has saved for backward is valid again as soon as the storage is
filled again.

Parameters may be tied, frozen or of several dtypes, and gathers are launched ahead.
"""

import torch
import torch.distributed as dist
from torch import nn

from dplab.parallel.ownership import Layout, launch_mean, own_chunk, pack, unpack


class Unit:
    """Parameters that are gathered and freed together."""

    def __init__(self, parameters, places):
        kinds = {}
        for p in parameters:
            kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append(p)
        self.shards = [Shard(kind, [places[p] for p in kind]) for kind in kinds.values()]

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
    """

    def __init__(self, parameters, places):
        self.layout = Layout(p.shape for p in parameters)
        self._places = places
        self.whole = pack(parameters)
        dist.broadcast(self.whole, src=0)
        self.chunk = own_chunk(self.whole).clone()
        self.pieces = [nn.Parameter(piece, requires_grad=parameters[0].requires_grad)
                       for piece in self.layout.pieces(self.chunk)]
        self._gathering = None
        self.unsent = None
        self.is_gathered = True
        self.take_out()

    def launch_gather(self) -> None:
        if self.is_gathered:
            return
        self.is_gathered = True
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        # `.data` is the same memory, but to autograd not the same tensor: the same values come
        # back, which is no change of what it has saved, and it shall not take it for one.
        self._gathering = dist.all_gather_single(self.whole.data, self.chunk, async_op=True)

    def put_in(self, take_gradient) -> None:
        self._finish_gather()
        whole = _Gathered.apply(self, take_gradient, *self.pieces)
        self._set(unpack(whole, self.layout.shapes))

    def take_out(self) -> None:
        if not self.is_gathered:
            return
        self._finish_gather()
        self._set(self.pieces)
        self.whole.untyped_storage().resize_(0)
        self.is_gathered = False

    def _finish_gather(self):
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def _set(self, tensors):
        for tensor, places in zip(tensors, self._places, strict=True):
            for module, name in places:
                # Not by setattr, which lets only an nn.Parameter follow an nn.Parameter.
                module._parameters[name] = tensor

    def keep(self, gradient: torch.Tensor) -> None:
        """Adds to what there is to send: a gradient of this rank, in the form of ``whole``."""
        self.unsent = gradient if self.unsent is None else self.unsent.add_(gradient)

    def launch_reduce(self) -> None:
        """Starts to send what was kept to its owners."""
        self._arrived, self.unsent = launch_mean(self.unsent), None

    def finish_reduce(self) -> None:
        """Adds what has arrived, the mean of this rank's chunk, to the pieces' gradients."""
        arrived = self._arrived()
        del self._arrived
        for piece, gradient in zip(self.pieces, self.layout.pieces(arrived), strict=True):
            piece.grad = gradient if piece.grad is None else piece.grad.add_(gradient)

    def gather_copies(self) -> list[torch.Tensor]:
        """The whole parameters in their shapes, as copies."""
        whole = torch.empty_like(self.chunk).repeat(dist.get_world_size())
        dist.all_gather_single(whole, self.chunk)
        return [view.clone() for view in unpack(whole, self.layout.shapes)]


class _Gathered(torch.autograd.Function):
    """From a rank's pieces to whole parameters; backward, from their gradient to its owners."""

    @staticmethod
    def forward(ctx, shard, take_gradient, *pieces):
        ctx.shard, ctx.take_gradient = shard, take_gradient
        return shard.whole.data  # as in `launch_gather`

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


def divide(places, units) -> list[list[nn.Parameter]]:
    """The parameters that belong to no unit alone, and then those of each unit."""
    units_with: dict[nn.Module, set[int]] = {}
    for index, unit in enumerate(units, start=1):
        for part in unit.modules():
            units_with.setdefault(part, set()).add(index)
    divided: list[list[nn.Parameter]] = [[] for _ in range(len(units) + 1)]
    for parameter, where in places.items():
        users = set().union(*(units_with.get(part, {0}) for part, _ in where))
        divided[users.pop() if len(users) == 1 else 0].append(parameter)
    return divided
