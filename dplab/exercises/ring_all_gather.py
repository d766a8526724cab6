"""Exercise 3.3: the second half of the ring: all-gather."""

import torch
import torch.distributed as dist

from dplab.checks.exercise import Mistake
from dplab.exercises.exchange import (
    exchange,
    receive_first,
    receives_from_where_it_sends,
    send_first,
)
from dplab.exercises.ring_reduce_scatter import (
    _CIRCLE,
    _EMPTY_CIRCLE,
    _FINISHED,
    _FLOAT32,
    _NO_SUCH_RANK,
    _NOTHING,
    _ONE_STEP_LESS,
    _ONE_STEP_MORE,
    _SHARES_MEMORY,
    _STRAIGHT,
    _WITHOUT_GROUP,
    _WRONG_SIDE,
    OnARing,
    _inputs,
)


def ring_all_gather(chunk, group=None):
    """The chunks of all ranks, in the order of ranks, as one flat tensor."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = chunk.new_empty(ranks, len(chunk))
    chunks[rank] = chunk

    # Each rank first sends its own chunk, and then passes on the one that has just arrived.
    for step in range(ranks - 1):
        outgoing = chunks[(rank - step) % ranks]
        chunks[(rank - 1 - step) % ranks] = exchange(outgoing, right, left, group)
    return chunks.view(-1)


def _ring(group):
    """This rank, the number of ranks, and the neighbours right and left."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return rank, ranks, (rank + 1) % ranks, (rank - 1) % ranks


def _divided(whole):
    return lambda tensor, group=None: whole(tensor, group) / dist.get_world_size(group)


def _in_float32(whole):
    return lambda tensor, group=None: whole(tensor.float(), group).to(tensor.dtype)


def _among_all(whole):
    return lambda tensor, group=None: whole(tensor)


def _returning_nothing(whole):
    def attempt(tensor, group=None):
        whole(tensor, group)

    return attempt


def sends_its_own_chunk_each_time(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    chunks = chunk.repeat(ranks, 1)
    for step in range(1, ranks):
        chunks[(rank - step) % ranks] = exchange(chunk, right, left, group)
    return chunks.view(-1)


def keeps_the_order_of_arrival(chunk, group=None):
    _, ranks, right, left = _ring(group)
    found = [chunk]
    for _ in range(ranks - 1):
        found.append(exchange(found[-1], right, left, group))
    return torch.cat(found)


def puts_them_before_its_own(chunk, group=None):
    _, ranks, right, left = _ring(group)
    found = [chunk]
    for _ in range(ranks - 1):
        found.insert(0, exchange(found[0], right, left, group))
    return torch.cat(found)


def puts_them_one_place_further(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    chunks = chunk.repeat(ranks, 1)
    passing = chunk
    for step in range(1, ranks):
        passing = exchange(passing, right, left, group)
        chunks[(rank + step) % ranks] = passing
    return chunks.view(-1)


def gathers_one_step_more(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    chunks = chunk.repeat(ranks, 1)
    for step in range(ranks if ranks > 1 else 0):
        arriving = exchange(chunks[(rank - step) % ranks], right, left, group)
        chunks[(rank - 1 - step) % ranks] = arriving
    return chunks.view(-1)


def gathers_one_step_less(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    chunks = chunk.new_zeros(ranks, len(chunk))
    chunks[rank] = chunk
    for step in range(ranks - 2):
        arriving = exchange(chunks[(rank - step) % ranks], right, left, group)
        chunks[(rank - 1 - step) % ranks] = arriving
    return chunks.view(-1)


def adds_what_arrives(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    chunks = chunk.new_zeros(ranks, len(chunk))
    passing = chunks[rank] = chunk
    for step in range(1, ranks):
        passing = passing + exchange(passing, right, left, group)
        chunks[(rank - step) % ranks] = passing
    return chunks.view(-1)


def sends_all_that_it_has(chunk, group=None):
    rank, ranks, right, left = _ring(group)
    whole = chunk.new_zeros(ranks, len(chunk))
    whole[rank] = chunk
    passing = whole
    for _ in range(ranks - 1):
        passing = exchange(passing, right, left, group)
        whole = whole + passing
    return whole.view(-1)


def sends_to_every_rank(chunk, group=None):
    rank, ranks, *_ = _ring(group)
    chunks = chunk.repeat(ranks, 1)
    for distance in range(1, ranks):
        source = (rank - distance) % ranks
        chunks[source] = exchange(chunk, (rank + distance) % ranks, source, group)
    return chunks.view(-1)


def returns_rows(chunk, group=None):
    return ring_all_gather(chunk, group).view(-1, len(chunk))


def returns_the_input_on_one_rank(chunk, group=None):
    return chunk if dist.get_world_size(group) == 1 else ring_all_gather(chunk, group)


def calls_all_gather(chunk, group=None):
    whole = chunk.new_empty(dist.get_world_size(group) * len(chunk))
    dist.all_gather_single(whole, chunk, group=group)
    return whole


def _all_gather_of(rank, ranks, chunk, group):
    chunks = chunk.new_empty(ranks, len(chunk))
    chunks[rank] = chunk
    for step in range(ranks - 1):
        outgoing = chunks[(rank - step) % ranks]
        chunks[(rank - 1 - step) % ranks] = exchange(
            outgoing, (rank + 1) % ranks, (rank - 1) % ranks, group)
    return chunks.view(-1)


def gathers_by_its_rank_among_all(chunk, group=None):
    return _all_gather_of(dist.get_rank(), dist.get_world_size(group), chunk, group)


def gathers_for_all_ranks(chunk, group=None):
    return _all_gather_of(dist.get_rank(group), dist.get_world_size(), chunk, group)


def gathers_from_all_ranks(chunk, group=None):
    return _all_gather_of(dist.get_rank(group), dist.get_world_size(group), chunk, None)


def _gather_by(swap):
    """The second half, by another exchange."""
    def attempt(chunk, group=None):
        rank, ranks, right, left = _ring(group)
        chunks = chunk.repeat(ranks, 1)
        for step in range(1, ranks):
            arriving = swap(chunks[(rank - step + 1) % ranks].clone(), right, left, group)
            chunks[(rank - step) % ranks] = arriving
        return chunks.view(-1)

    return attempt


def gathers_without_modulo(chunk, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = chunk.repeat(ranks, 1)
    for step in range(1, ranks):
        chunks[rank - step] = exchange(chunks[rank - step + 1], rank + 1, rank - 1, group)
    return chunks.view(-1)


class RingAllGather(OnARing):
    number = "3.3"
    title = "The second half of the ring: all-gather"
    minutes = 15
    fact = "all chunks"
    hints = (
        "In the first step a rank has one chunk to send. Which new one does it have to send in "
        "the second?",
        "Pass on what has just arrived. What arrives first is the left neighbour's chunk; whose is "
        "the next one? Put each in its place, in the order of ranks.",
        "Make `chunks` of shape (N, len(chunk)), with your own in row r. In step s of N-1, what "
        "arrives is chunk (r-s) mod N, and what you send is the one from the step before.",
    )
    solution = staticmethod(ring_all_gather)
    mistakes = (
        Mistake(sends_its_own_chunk_each_time, "You send your own chunk in every step, so your "
                "neighbour gets it N-1 times and nothing else. Pass on the one that has just "
                "arrived."),
        Mistake(keeps_the_order_of_arrival, "All chunks are there, in the order in which they "
                "arrived, which is another one on each rank. Put chunk c in place c."),
        Mistake(puts_them_before_its_own, "All chunks are there, and this rank's own is the last "
                "one. They have to lie in the order of ranks: chunk c in place c."),
        Mistake(puts_them_one_place_further, "A chunk lies in the wrong place. What arrives from "
                "the left belongs to a rank further and further to the left."),
        Mistake(gathers_one_step_more, _ONE_STEP_MORE),
        Mistake(gathers_one_step_less, _ONE_STEP_LESS),
        Mistake(adds_what_arrives, "You add in the second half, too. The chunks that travel here "
                "are finished: copy them."),
        Mistake(sends_all_that_it_has, "You send room for all chunks in each step. One chunk is "
                "enough: the one that your neighbour does not have yet."),
        Mistake(sends_to_every_rank, _STRAIGHT),
        Mistake(_in_float32(ring_all_gather), _FLOAT32),
        Mistake(returns_rows, "The numbers are right, in rows. Return them flat, in one "
                "dimension: `view(-1)`."),
        Mistake(returns_the_input_on_one_rank, _SHARES_MEMORY),
        Mistake(calls_all_gather, _FINISHED),
        *(Mistake(attempt, _WITHOUT_GROUP) for attempt in (
            _among_all(ring_all_gather), gathers_by_its_rank_among_all, gathers_for_all_ranks,
            gathers_from_all_ranks)),
        Mistake(_gather_by(send_first), _CIRCLE, hangs=True),
        Mistake(_gather_by(receive_first), _EMPTY_CIRCLE, hangs=True),
        Mistake(_gather_by(receives_from_where_it_sends), _WRONG_SIDE, hangs=True),
        Mistake(gathers_without_modulo, _NO_SUCH_RANK),
        Mistake(_divided(ring_all_gather), "You divided by the world size. An all-gather computes "
                "nothing: every chunk arrives as it was."),
        Mistake(_returning_nothing(ring_all_gather), _NOTHING),
    )

    def given_to(self, name, rank, place, ranks):
        return _inputs(name, [rank], ranks)[0].chunk(ranks)[place].clone()

    def parts_of(self, tensors, rank):
        return ()

    def result_of(self, tensors, rank):
        return torch.cat([tensor.chunk(len(tensors))[each] for each, tensor in enumerate(tensors)])
