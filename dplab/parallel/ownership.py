"""What the three stages of ZeRO share: who owns which elements, and sums that go to their owners.

Parameters stand side by side in one flat tensor, which is cut into N equal chunks, one for each
rank. The cut goes straight through parameters, so that no rank has more than another, whatever the
parameters' shapes; what of a parameter lies in a rank's chunk is that rank's *piece* of it, often
empty. Optimizers that treat each element by itself (SGD, Adam, AdamW, RMSprop, …) cannot tell a
piece from a parameter.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, section 5.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from dplab.parallel.collectives import ring_reduce_scatter


class Layout:
    """Where tensors of the given shapes lie in one flat tensor, and which part is this rank's.

    ``length`` is the flat tensor's: the elements, rounded up to a multiple of the world size.
    ``own`` is the slice of it that this rank owns, its chunk. The padding at the end belongs to
    nobody's piece.
    """

    def __init__(self, shapes):
        self.shapes = [torch.Size(shape) for shape in shapes]
        self._places = list(pairwise(accumulate((s.numel() for s in self.shapes), initial=0)))
        self.size = self._places[-1][1]
        self._chunk_size = -(-self.size // dist.get_world_size())
        self.length = self._chunk_size * dist.get_world_size()
        start = dist.get_rank() * self._chunk_size
        self.own = slice(start, start + self._chunk_size)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each whole tensor, in its shape, as a view into ``flat``."""
        *parts, _padding = flat.split([*(stop - start for start, stop in self._places),
                                       self.length - self.size])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def pieces(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """This rank's piece of each tensor, of one dimension, as a view into the rank's chunk."""
        return [chunk[self._in_chunk(start) : self._in_chunk(stop)]
                for start, stop in self._places]

    def piece_of(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of tensor number ``index``, cut out of that tensor itself."""
        start, stop = self._places[index]
        first, last = (self.own.start + self._in_chunk(place) - start for place in (start, stop))
        return tensor.reshape(-1)[first:last] if first < last else tensor.new_empty(0)

    def _in_chunk(self, place: int) -> int:
        return min(max(place - self.own.start, 0), self._chunk_size)


def launch_reduce_scatter(flat: torch.Tensor) -> dist.Work:
    """Starts to sum ``flat`` over the ranks, chunk by chunk, and returns at once.

    After ``wait()`` on the result, this rank's chunk of ``flat`` holds the sum, and the rest
    nothing of use. ``flat`` is of one dimension, of a length that the world size divides; nobody
    else may touch it before. Ranks launch the same reduce-scatters one after another.
    """
    if flat.device.type != "cpu":
        own = flat.chunk(dist.get_world_size())[dist.get_rank()]
        return dist.reduce_scatter_single(own, flat, async_op=True)
    # gloo sends a whole all-reduce for a reduce-scatter, twice the bytes, so the ring of chapter
    # 03 does it. Its steps follow one another, and a thread takes them while backward goes on.
    done: torch.futures.Future[None] = torch.futures.Future()
    _background().submit(_ring, flat, done)
    return c10d._create_work_from_future(done)  # type: ignore[attr-defined]  # not in its stubs


def _ring(flat, done):
    try:
        ring_reduce_scatter(flat)
        done.set_result(None)
    except Exception as error:
        done.set_exception(error)


@functools.cache
def _background() -> ThreadPoolExecutor:
    # One thread: two rings at once would take each other's messages.
    return ThreadPoolExecutor(1, "reduce-scatter")


def current_backward() -> int:
    """A number of its own for the backward that autograd is just running, or -1 outside of one."""
    return torch._C._current_graph_task_id()


@torch.no_grad()
def clip_grad_norm_(pieces, max_norm: float) -> torch.Tensor:
    """Scales gradients of sharded parameters so that their norm over all ranks is ``max_norm``.

    For `torch.nn.utils.clip_grad_norm_`, each rank's pieces would be all there is: every rank would
    find another norm, and scale by another factor. Here the ranks add up the squares first.

    ``pieces``: this rank's, of any shapes and dtypes, none of them held by another rank too, such
    as ``model.parameters()`` of a `FullyShardedModel`. Gradients of a smaller norm stay as they
    are. Returns the norm before, a tensor that is equal on all ranks. Every rank calls it.
    """
    pieces = list(pieces)
    gradients = [piece.grad for piece in pieces if piece.grad is not None]
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    wide = [norm.double().square() for norm in norms]
    device = pieces[0].device if pieces else None
    total = torch.stack(wide).sum() if wide else torch.zeros((), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return norm
