"""Sums over all ranks, built from nothing but send and receive.

An all-reduce leaves the sum of all ranks' tensors on every rank. How much each rank sends for it,
and how many messages must follow one another, is the algorithm's choice: send everything to
everyone, gather the sum along a tree, or pass parts of it around a ring. The ring sends the least
that is possible where ranks do the adding, and nearly the same amount for any number of ranks.

With N ranks and M bytes in the tensor:

    ====================  ========================  =========================================
                          bytes sent by a rank      messages that must follow one another
    ====================  ========================  =========================================
    naive_all_reduce      (N−1) M                   N−1 of M
    tree_all_reduce       at most 3 M, on average   at most 4 log₂N of M: up and down, and on
                          2(N−1)/N M                each level one child after the other
    ring_reduce_scatter   (N−1)/N M                 N−1 of M/N
    ring_all_gather       (N−1)/N M                 N−1 of M/N
    ring_all_reduce       2(N−1)/N M                2(N−1) of M/N
    ====================  ========================  =========================================

All take a ``group``, by default the one of all ranks. Every rank of it makes the same call, with
the same number of elements and the same dtype; where these differ, ranks hang, fail or get garbage.
Sums are made in the tensor's own dtype and are equal on all ranks to the last bit, because each
element is summed in one place, or in one order.

Sources: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009 (the ring, and why none sends less); R. Thakur, R. Rabenseifner and W. Gropp,
"Optimization of collective communication operations in MPICH", 2005 (trees, and which algorithm
for which size).
"""

import torch
import torch.distributed as dist


def naive_all_reduce(tensor: torch.Tensor, group=None) -> None:
    """Replaces ``tensor`` by its sum over the ranks: everyone sends everything to everyone.

    ``tensor`` has any shape, strides and numeric dtype, and needs N times its memory besides.
    Raises ValueError if autograd would have to record the sum, or for a rank outside the group.
    """
    rank, world_size = _place_in(group)
    mine = _as_message(tensor)
    received = [torch.empty_like(mine) for _ in range(world_size)]
    received[rank].copy_(mine)

    for distance in range(1, world_size):
        to, source = (rank + distance) % world_size, (rank - distance) % world_size
        _send_and_receive(mine, to, received[source], source, group)

    # In the order of ranks, not of arrival: floating-point sums depend on the order, and a
    # different one on each rank would let the replicas drift apart.
    mine.copy_(received[0])
    for other in received[1:]:
        mine += other
    _write_back(mine, tensor)


def tree_all_reduce(tensor: torch.Tensor, group=None) -> None:
    """Replaces ``tensor`` by its sum over the ranks: up a binary tree, and down again.

    Rank 0 is the root, and the children of rank r are 2r+1 and 2r+2, as far as there are any.
    ``tensor`` has any shape, strides and numeric dtype, and needs its own memory once more.
    Raises ValueError if autograd would have to record the sum, or for a rank outside the group.
    """
    rank, world_size = _place_in(group)
    parent = (rank - 1) // 2
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size]
    mine = _as_message(tensor)
    received = torch.empty_like(mine)

    # Plain sends are safe here, even where they block: a rank waits for those below it on the way
    # up and for those above it on the way down, so nobody waits in a circle.
    for child in children:
        dist.recv(received, group_src=child, group=group)
        mine += received
    if rank != 0:
        dist.send(mine, group_dst=parent, group=group)
        dist.recv(mine, group_src=parent, group=group)
    for child in children:
        dist.send(mine, group_dst=child, group=group)
    _write_back(mine, tensor)


def ring_reduce_scatter(tensor: torch.Tensor, group=None) -> torch.Tensor:
    """This rank's chunk of the sum over the ranks.

    The tensor's elements, in row-major order, are cut into N chunks by ``tensor_split``: sizes
    differ by at most one, the first chunks being the longer ones. Rank r gets chunk r, as a tensor
    of one dimension, empty where there are fewer elements than ranks.

    ``tensor`` has any shape, strides and numeric dtype. It serves as working space: afterwards
    only the returned chunk, which is a view into it if it is contiguous, means anything. Pass a
    clone to keep it. Besides, one chunk of memory is needed. Raises ValueError if autograd would
    have to record the sum, or for a rank outside the group.
    """
    rank, world_size = _place_in(group)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = _as_message(tensor).tensor_split(world_size)
    received = torch.empty_like(chunks[0])

    # Chunk c starts at rank c+1 and collects each rank's part on its way round, to end at rank c.
    for step in range(world_size - 1):
        outgoing = chunks[(rank - 1 - step) % world_size]
        growing = chunks[(rank - 2 - step) % world_size]
        arriving = received[: len(growing)]
        _send_and_receive(outgoing, right, arriving, left, group)
        growing += arriving
    return chunks[rank]


def ring_all_gather(chunk: torch.Tensor, output: torch.Tensor, group=None) -> None:
    """Fills ``output`` on every rank with all ranks' chunks, in the order of ranks.

    The reverse of `ring_reduce_scatter`: ``output`` has any shape and strides, its elements are
    cut in the same way, and rank r brings chunk r, in any shape. ``chunk`` may already lie at its
    place in ``output``. Raises ValueError if the chunk's size or dtype is not that of this rank's
    part of ``output``, if autograd would have to record it, or for a rank outside the group.
    """
    rank, world_size = _place_in(group)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    message = _as_message(output)
    chunks = message.tensor_split(world_size)
    if chunk.numel() != len(chunks[rank]) or chunk.dtype != output.dtype:
        raise ValueError(
            f"rank {rank}'s chunk of {output.numel()} elements of {output.dtype} on {world_size} "
            f"ranks has {len(chunks[rank])}; this one has {chunk.numel()} of {chunk.dtype}")
    chunks[rank].copy_(_as_message(chunk))

    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        arriving = chunks[(rank - 1 - step) % world_size]
        _send_and_receive(outgoing, right, arriving, left, group)
    _write_back(message, output)


def ring_all_reduce(tensor: torch.Tensor, group=None) -> None:
    """Replaces ``tensor`` by its sum over the ranks: reduce-scatter, then all-gather.

    ``tensor`` has any shape, strides and numeric dtype, and needs 1/N of its memory besides.
    Raises ValueError if autograd would have to record the sum, or for a rank outside the group.
    """
    message = _as_message(tensor)
    chunk = ring_reduce_scatter(message, group)
    ring_all_gather(chunk, message, group)
    _write_back(message, tensor)


def _send_and_receive(outgoing, to, incoming, source, group) -> None:
    """Sends one tensor and receives another at the same time; ranks count within the group.

    If all ranks first sent and then received, all would wait where a send blocks until it is
    received (NCCL, and MPI for large messages). Handed over as a pair, both are under way at once.
    """
    pair = [dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=source)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


def _place_in(group) -> tuple[int, int]:
    """This rank's number in the group, and how many there are."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in this group, so it has no part in this")
    return rank, dist.get_world_size(group)


def _as_message(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order in one dimension: a view where it can be, else a copy."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError("this tensor requires grad, and autograd does not see what other ranks "
                         "send: pass tensor.detach(), or call this inside torch.no_grad()")
    return tensor.contiguous().view(-1)


def _write_back(message: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies a message into the tensor it was made from, or does nothing if it is a view of it."""
    tensor.copy_(message.view_as(tensor))  # copy_ returns at once if both are the same memory
