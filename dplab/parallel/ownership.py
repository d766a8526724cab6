"""What the three stages of ZeRO share: each element of the parameters has one owner.

Parameters stand side by side in one flat tensor, which is cut into N equal chunks, one for each
rank. Gradients go to their owners by a reduce-scatter, and what owners have comes back to all by
an all-gather.

An optimizer has its own view of a chunk, and sums travel while backward goes on.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, section 5.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from dplab.parallel.collectives import ring_reduce_scatter


def pack(tensors) -> torch.Tensor:
    """A copy of all tensors side by side, with zeros at the end so that N divides its length."""
    parts = [tensor.detach().flatten() for tensor in tensors]
    padding = -sum(map(len, parts)) % dist.get_world_size()
    return torch.cat([*parts, parts[0].new_zeros(padding)])


def unpack(flat: torch.Tensor, shapes) -> list[torch.Tensor]:
    """Each tensor in its shape, as a view into ``flat``."""
    sizes = [shape.numel() for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def own_chunk(flat: torch.Tensor) -> torch.Tensor:
    """The chunk that this rank owns, as a view into ``flat``."""
    return flat.chunk(dist.get_world_size())[dist.get_rank()]


def into_one(parameters) -> torch.Tensor:
    """Moves parameters into one flat tensor, which is returned: they are views into it."""
    flat = pack(parameters)
    views = unpack(flat, [parameter.shape for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return flat


class Layout:
    """Which part of each tensor lies in this rank's chunk: its *piece*, often empty.

    The cut goes straight through tensors, so that no rank has more than another, whatever their
    shapes. Optimizers that treat each element by itself (SGD, Adam, AdamW, RMSprop, …) cannot tell
    a piece from a parameter. The padding at the end belongs to nobody's piece.
    """

    def __init__(self, shapes):
        self.shapes = list(shapes)
        places = list(accumulate((shape.numel() for shape in self.shapes), initial=0))
        size = -(-places[-1] // dist.get_world_size())
        # Where each tensor begins, and where it is cut, both counted from the chunk's start.
        self._begins = [place - dist.get_rank() * size for place in places]
        self._cuts = list(pairwise(min(max(begin, 0), size) for begin in self._begins))

    def pieces(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """This rank's piece of each tensor, of one dimension, as a view into the rank's chunk."""
        return [chunk[first:last] for first, last in self._cuts]

    def piece_of(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of tensor number ``index``, cut out of that tensor itself."""
        first, last = (place - self._begins[index] for place in self._cuts[index])
        return tensor.reshape(-1)[first:last] if first < last else tensor.new_empty(0)


def launch_mean(flat: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Starts to average ``flat`` over the ranks, chunk by chunk, and returns at once.

    Call the result for this rank's chunk of the mean: it waits. ``flat`` is working space until
    then, and nobody else may touch it. Ranks launch the same ones, in one order.
    """
    flat.mul_(1 / dist.get_world_size())  # before the sum, as in DDP: that could overflow
    if flat.device.type == "cpu":
        # gloo sends a whole all-reduce for a reduce-scatter, twice the bytes, so the ring of
        # chapter 03 does it. Its steps follow one another: a thread takes them, in backward.
        wait = _background().submit(ring_reduce_scatter, flat).result
    else:
        wait = dist.reduce_scatter_single(own_chunk(flat), flat, async_op=True).wait

    def arrived():
        wait()
        return own_chunk(flat).clone()  # a view would keep all of ``flat`` alive

    return arrived


@functools.cache
def _background() -> ThreadPoolExecutor:
    # One thread: two rings at once would take each other's messages.
    return ThreadPoolExecutor(1, "reduce-scatter")


def current_backward() -> int:
    """A number of its own for the backward that autograd is just running, or -1 outside of one."""
    return torch._C._current_graph_task_id()


def shard_of(shapes) -> dict:
    """What a saved shard belongs to."""
    return {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "shapes": shapes}


def refuse_another_shard(saved: dict, shapes) -> None:
    """ValueError, unless ``saved``, made by ``shard_of``, is this rank's of an equal job."""
    own = shard_of(shapes)
    if saved["world_size"] != own["world_size"]:
        raise ValueError(f"this state was saved on {saved['world_size']} ranks, and there are "
                         f"{own['world_size']} now: every shard would have to be cut anew")
    if saved["shapes"] != shapes:
        raise ValueError("this state belongs to other parameters: their shapes are "
                         f"{saved['shapes']} there and {shapes} here")
    if saved["rank"] != own["rank"]:
        raise ValueError(f"this is the state of rank {saved['rank']}, not of rank {own['rank']}: "
                         "each rank loads its own")
