"""ZeRO-1: every rank keeps the optimizer's state for its own part of the parameters.

Adam remembers two numbers for each parameter, and in plain data parallelism every rank remembers
all of them, the same as all others. Here each rank owns 1/N of the elements: it keeps the state for
these alone and updates these alone. Then the ranks exchange the new *parameters* by an all-gather;
the states are never sent.

Chapter 08 builds that idea alone. This is a torch optimizer made of it: with several dtypes and
parameter groups, unused parameters, schedulers, saved states.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, sections 5.1 and 7.2.
"""

import torch
import torch.distributed as dist
from torch import nn

from dplab.parallel.manual_ddp import refuse_sparse_gradient, true_on_any_rank
from dplab.parallel.ownership import (
    Layout,
    into_one,
    launch_mean,
    own_chunk,
    pack,
    refuse_another_shard,
    shard_of,
)


class Flat:
    """Some parameters of one dtype in one flat tensor, of which this rank updates its own chunk.

    From now on the parameters are views into ``flat``; they start as those of rank 0. ``pieces``
    are this rank's parts of them, nn.Parameters that share their memory.
    """

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.layout = Layout(parameter.shape for parameter in parameters)
        self.flat = into_one(parameters)
        dist.broadcast(self.flat, src=0)
        self.own = own_chunk(self.flat)
        self.pieces = [nn.Parameter(piece) for piece in self.layout.pieces(self.own)]

    def cut_gradients(self) -> None:
        """Each piece's gradient: its part of the parameter's, as a view where that is possible."""
        for index, (piece, parameter) in enumerate(zip(self.pieces, self.parameters, strict=True)):
            piece.grad = (None if parameter.grad is None
                          else self.layout.piece_of(index, parameter.grad))

    def reduce_gradients(self) -> None:
        """Each piece's gradient: its part of the mean over the ranks. Those of parameters stay."""
        self.set_gradients(launch_mean(self.packed_gradients())())

    def packed_gradients(self) -> torch.Tensor:
        return pack([torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                     for parameter in self.parameters])

    def set_gradients(self, chunk: torch.Tensor) -> None:
        for piece, gradient in zip(self.pieces, self.layout.pieces(chunk), strict=True):
            piece.grad = gradient


class ShardedOptimizer(torch.optim.Optimizer):
    """``optimizer_cls``, any torch optimizer that treats each element by itself, on 1/N of them.

    By default it takes gradients that are already averaged, by DDP say, and ``step()`` ends with
    an all-gather of the parameters: (N−1)/N·M bytes sent by each rank, beside DDP's 2(N−1)/N·M.
    With ``reduce_gradients=True`` it takes the local gradients of a model without DDP: ``step()``
    reduce-scatters them, updates, and all-gathers, which is 2(N−1)/N·M in all, no more than DDP.

    params, kwargs: as for ``optimizer_cls``, parameter groups included. Every rank passes the same
    parameters in the same order; their values on rank 0 are the ones that count. They move into
    flat tensors, so put the model on its device and into its dtype before. Which parameters are
    trainable is settled here; frozen ones, like buffers, are not its business: without DDP, call
    `broadcast_module` for them before. A parameter that no rank has a gradient for is left alone.
    NotImplementedError at a sparse gradient.

    ``param_groups`` are the groups of whole parameters, for learning rate schedulers as usual;
    ``state`` is that of this rank's pieces, and so is ``state_dict()``: each rank saves its own.
    """

    def __init__(self, params, optimizer_cls, *, reduce_gradients: bool = False, **kwargs):
        self.flats: list[Flat] = []
        self._reduces_gradients = reduce_gradients
        self._local = optimizer_cls([{"params": []}], **kwargs)
        self._local.param_groups.clear()  # add_param_group fills them, called by super
        super().__init__(params, self._local.defaults)
        self.state = self._local.state

    @torch.no_grad()
    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        kinds: dict[tuple, list[nn.Parameter]] = {}  # by what can be in one flat tensor
        for parameter in group["params"]:
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        flats = [flat for kind in kinds.values() for flat in self._flats_of(kind)]
        pieces = [piece for flat in flats for piece in flat.pieces if piece.numel() > 0]
        self._local.add_param_group({**_settings(group), "params": pieces})
        self.flats += flats

    def _flats_of(self, kind: list[nn.Parameter]) -> list[Flat]:
        return [Flat(kind)]

    @property
    def pieces(self) -> list[nn.Parameter]:
        """This rank's pieces of the trainable parameters; their ``grad`` is set by ``step()``."""
        return [piece for flat in self.flats for piece in flat.pieces]

    @torch.no_grad()
    def step(self, closure=None):
        """One step of the optimizer. Every rank calls it; afterwards all have all new values."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._set_gradients_of_pieces()
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            local.update(_settings(group))  # a scheduler may have changed the learning rate
        self._local.step()
        self._drop_gradients_of_pieces()
        for work in [dist.all_gather_single(flat.flat, flat.own, async_op=True)
                     for flat in self.flats]:
            work.wait()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._drop_gradients_of_pieces()

    def _set_gradients_of_pieces(self):
        for index, parameter in enumerate(p for flat in self.flats for p in flat.parameters):
            refuse_sparse_gradient(f"parameter {index}", parameter)
        if not self._reduces_gradients:
            for flat in self.flats:
                flat.cut_gradients()
            return
        for flat in self.flats:
            flat.reduce_gradients()
        self._leave_out_the_unused([p.grad is not None
                                    for flat in self.flats for p in flat.parameters])

    def _leave_out_the_unused(self, is_used: list[bool]):
        """Without a gradient, the optimizer skips a piece: no momentum, no weight decay."""
        if self.flats:
            is_used = true_on_any_rank(is_used, self.flats[0].flat.device)
        for piece, used in zip(self.pieces, is_used, strict=True):
            if not used:
                piece.grad = None

    def _drop_gradients_of_pieces(self):
        for piece in self.pieces:
            piece.grad = None

    def state_dict(self) -> dict:
        """This rank's state, with what it belongs to: ``load_state_dict`` looks at that first."""
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            local.update(_settings(group))
        return {**self._local.state_dict(), "shard": shard_of(self._shapes())}

    def load_state_dict(self, state_dict: dict) -> None:
        """Takes over what ``state_dict()`` gave on this rank of an equal job.

        ValueError if it comes from another rank, another world size, or other parameters.
        """
        if "shard" not in state_dict:
            raise ValueError("this is not the state of a ShardedOptimizer, but of a whole one")
        refuse_another_shard(state_dict["shard"], self._shapes())
        self._local.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            group.update(_settings(local))
        self.state = self._local.state

    def _shapes(self):
        return [[tuple(parameter.shape) for parameter in flat.parameters] for flat in self.flats]


def _settings(group: dict) -> dict:
    """The learning rate and all else of a parameter group, without the parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
