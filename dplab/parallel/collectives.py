"""Sums over all ranks, built from nothing but send and receive.

An all-reduce is a reduce-scatter and an all-gather. On a ring each rank passes one of N chunks to
its right neighbour in each step: first the chunks grow by each rank's part on their way, then the
finished ones go round once more. So each rank sends 2(N−1)/N of the tensor, and nobody can do with
less where ranks do the adding.

The first part of this file is that idea alone, beside two other ways to the same sum. The second
part makes of it functions for tensors of any shape and length, in groups, without surprises.

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

Sources: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009 (the ring, and why none sends less); R. Thakur, R. Rabenseifner and W. Gropp,
"Optimization of collective communication operations in MPICH", 2005 (trees, and which algorithm
for which size).
"""

import torch
import torch.distributed as dist

# --- the idea ------------------------------------------------------------------------------------
# A message is a tensor of one dimension, changed in place; its chunks are views into it.


def _pass_and_add(chunks, group):
    """The ring's first half: afterwards, rank r's chunk r is the sum over the ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(chunks[0])

    # Chunk c starts at rank c+1 and collects each rank's part on its way round, to end at rank c.
    for step in range(ranks - 1):
        outgoing = chunks[(rank - 1 - step) % ranks]
        growing = chunks[(rank - 2 - step) % ranks]
        arriving = received[: len(growing)]
        _exchange(outgoing, (rank + 1) % ranks, arriving, (rank - 1) % ranks, group)
        growing += arriving


def _pass_on(chunks, group):
    """The ring's second half: afterwards, every rank has what rank r had in chunk r."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    # Each rank first sends its own chunk, and then the one that has just arrived.
    for step in range(ranks - 1):
        outgoing = chunks[(rank - step) % ranks]
        arriving = chunks[(rank - 1 - step) % ranks]
        _exchange(outgoing, (rank + 1) % ranks, arriving, (rank - 1) % ranks, group)


def _up_and_down_a_tree(message, group):
    """Rank 0 is the root, and the children of rank r are 2r+1 and 2r+2, as far as there are any."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    parent = (rank - 1) // 2
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < ranks]
    received = torch.empty_like(message)

    # Plain sends are safe here, even where they block: a rank waits for those below it on the way
    # up and for those above it on the way down, so nobody waits in a circle.
    for child in children:
        dist.recv(received, group_src=child, group=group)
        message += received
    if rank != 0:
        dist.send(message, group_dst=parent, group=group)
        dist.recv(message, group_src=parent, group=group)
    for child in children:
        dist.send(message, group_dst=child, group=group)


def _everything_to_everyone(message, group):
    """Each rank sends its tensor to each other rank, and adds up all of them."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = [torch.empty_like(message) for _ in range(ranks)]
    received[rank].copy_(message)
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        _exchange(message, to, received[source], source, group)

    # In the order of ranks, not of arrival: floating-point sums depend on the order, and a
    # different one on each rank would let the replicas drift apart.
    message.copy_(received[0])
    for other in received[1:]:
        message += other


def _exchange(outgoing, to, incoming, source, group):
    """Sends one tensor and receives another at the same time; ranks count within the group.

    If all ranks first sent and then received, all would wait where a send blocks until it is
    received (gloo, and MPI for large messages). Handed over as a pair, both are under way at once.
    """
    pair = [dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=source)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


# --- what production needs -----------------------------------------------------------------------
# Every rank of the group makes the same call, with the same number of elements and the same dtype;
# where these differ, ranks hang, fail or get garbage. Sums are made in the tensor's own dtype, and
# are equal on all ranks to the last bit, since each element is summed in one place or one order.


def naive_all_reduce(tensor: torch.Tensor, group=None) -> None:
    """Replaces ``tensor`` by its sum over the ranks: everyone sends everything to everyone.

    ``tensor`` has any shape, strides and numeric dtype, and needs N times its memory besides.
    Raises ValueError if autograd would have to record the sum, or for a rank outside the group.
    """
    _all_reduce(tensor, group, _everything_to_everyone)


def tree_all_reduce(tensor: torch.Tensor, group=None) -> None:
    """Replaces ``tensor`` by its sum over the ranks: up a binary tree, and down again.

    ``tensor`` has any shape, strides and numeric dtype, and needs its own memory once more.
    Raises ValueError if autograd would have to record the sum, or for a rank outside the group.
    """
    _all_reduce(tensor, group, _up_and_down_a_tree)


def ring_all_reduce(tensor: torch.Tensor, group=None) -> None:
    """Replaces ``tensor`` by its sum over the ranks: reduce-scatter, then all-gather.

    ``tensor`` has any shape, strides and numeric dtype, and needs 1/N of its memory besides.
    Raises ValueError if autograd would have to record the sum, or for a rank outside the group.
    """
    def around_the_ring(message, group):
        chunks = message.tensor_split(dist.get_world_size(group))
        _pass_and_add(chunks, group)
        _pass_on(chunks, group)

    _all_reduce(tensor, group, around_the_ring)


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
    chunks = _as_message(tensor).tensor_split(world_size)
    _pass_and_add(chunks, group)
    return chunks[rank]


def ring_all_gather(chunk: torch.Tensor, output: torch.Tensor, group=None) -> None:
    """Fills ``output`` with the chunks of all ranks, in the order of ranks.

    The reverse of `ring_reduce_scatter`: ``output`` has any shape and strides, its elements are
    cut in the same way, and rank r brings chunk r, of any shape. It may already lie in its
    place in ``output``. Raises ValueError if the chunk's size or dtype is not that of this rank's
    part of ``output``, if autograd would have to record it, or for a rank outside the group.
    """
    rank, world_size = _place_in(group)
    message = _as_message(output)
    chunks = message.tensor_split(world_size)
    if chunk.numel() != len(chunks[rank]) or chunk.dtype != output.dtype:
        raise ValueError(
            f"rank {rank}'s chunk of {output.numel()} elements of {output.dtype} on {world_size} "
            f"ranks has {len(chunks[rank])}; this one has {chunk.numel()} of {chunk.dtype}")
    chunks[rank].copy_(_as_message(chunk))
    _pass_on(chunks, group)
    _write_back(message, output)


def _all_reduce(tensor, group, sum_up):
    """Replaces a tensor of any shape by its sum, which ``sum_up(message, group)`` makes."""
    _place_in(group)
    message = _as_message(tensor)
    sum_up(message, group)
    _write_back(message, tensor)


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
