"""What a collective costs, by arithmetic: bytes sent, messages, seconds.

The α–β model: a message of n bytes takes α + n/β seconds, with the link's latency α and its
bandwidth β. A collective takes as long as its longest chain of messages, each of which can start
only when the one before it has arrived:

    seconds = messages · α + bytes in the chain / β

Adding up numbers is taken to cost nothing, and every rank has a link of its own, which sends and
receives at once. ``tensor_bytes`` is M: the whole tensor, also for a reduce-scatter or an
all-gather, where each rank keeps or brings one N-th of it.

Sources: R. Hockney, "The communication challenge for MPP", 1994 (the model); R. Thakur,
R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", 2005
(the formulas); P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009 (the ring, and the lower bound).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dplab.predict.checks import one_of, whole


@dataclass(frozen=True)
class Link:
    """What connects a rank to the others: ``bandwidth`` in bytes/s in each direction, ``latency``
    in seconds for each message. Raises ValueError if the bandwidth is not above zero, or the
    latency is negative.
    """

    name: str
    bandwidth: float
    latency: float = 0.0
    source: str = ""

    def __post_init__(self):
        if not self.bandwidth > 0:
            raise ValueError(f"a link needs a bandwidth above 0 bytes/s, not {self.bandwidth}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"a latency is 0 s or more, and finite, not {self.latency}")

    def seconds(self, nbytes: float, messages: float = 1) -> float:
        """The time of ``messages`` messages, one after the other, with ``nbytes`` in all."""
        return messages * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Algorithm:
    """How a collective goes; bytes in units of M, all as functions of the world size N.

    ``sent``: by a rank, on average over the ranks; ``chain``: in the longest chain of messages;
    ``messages``: in that chain.
    """

    collective: str
    sent: Callable[[int], float]
    chain: Callable[[int], float]
    messages: Callable[[int], int]


def _binary_tree_messages(world_size: int) -> int:
    """The longest chain of `parallel.tree_all_reduce`: a rank's children come one by one."""

    def children(rank):
        return [child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size]

    def up(rank):
        done = 0
        for child in children(rank):
            done = max(done, up(child)) + 1
        return done

    def down(rank):
        return max((place + down(child) for place, child in enumerate(children(rank), start=1)),
                   default=0)

    return up(0) + down(0)


ALGORITHMS: dict[str, Algorithm] = {
    "naive all-reduce": Algorithm(
        "all_reduce", lambda n: n - 1, lambda n: n - 1, lambda n: n - 1),
    "tree all-reduce": Algorithm(
        "all_reduce", lambda n: 2 * (n - 1) / n, _binary_tree_messages, _binary_tree_messages),
    "ring all-reduce": Algorithm(
        "all_reduce", lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    "ring reduce-scatter": Algorithm(
        "reduce_scatter", lambda n: (n - 1) / n, lambda n: (n - 1) / n, lambda n: n - 1),
    "ring all-gather": Algorithm(
        "all_gather", lambda n: (n - 1) / n, lambda n: (n - 1) / n, lambda n: n - 1),
    # In many small pieces, which a rank passes on while the next ones come.
    "pipelined broadcast": Algorithm(
        "broadcast", lambda n: (n - 1) / n, lambda n: int(n > 1), lambda n: n - 1),
    "pipelined reduce": Algorithm(
        "reduce", lambda n: (n - 1) / n, lambda n: int(n > 1), lambda n: n - 1),
    "direct gather": Algorithm(
        "gather", lambda n: (n - 1) / n**2, lambda n: (n - 1) / n, lambda n: n - 1),
    "direct scatter": Algorithm(
        "scatter", lambda n: (n - 1) / n**2, lambda n: (n - 1) / n, lambda n: n - 1),
    "direct all-to-all": Algorithm(
        "all_to_all", lambda n: (n - 1) / n, lambda n: (n - 1) / n, lambda n: n - 1),
    "tree barrier": Algorithm(
        "barrier", lambda n: 0, lambda n: 0, lambda n: 2 * math.ceil(math.log2(n))),
}

USUAL: dict[str, str] = {
    "all_reduce": "ring all-reduce", "reduce_scatter": "ring reduce-scatter",
    "all_gather": "ring all-gather", "broadcast": "pipelined broadcast",
    "reduce": "pipelined reduce", "gather": "direct gather", "scatter": "direct scatter",
    "all_to_all": "direct all-to-all", "barrier": "tree barrier",
}
"""By which of `ALGORITHMS` a collective is taken to go where nothing else is said: over rings."""

_NAME_ONE_PART = {"all_gather", "reduce_scatter", "gather", "scatter"}


def bytes_sent(algorithm: str, world_size: int, tensor_bytes: float) -> float:
    """Bytes that a rank sends, on average over the ranks; ``algorithm`` is one of `ALGORITHMS`."""
    return _find(algorithm).sent(whole(world_size, "the world size")) * tensor_bytes


def whole_bytes(collective: str, world_size: int, own_bytes: float) -> float:
    """The whole tensor's bytes, M, of a call that hands over ``own_bytes`` on each rank.

    ``collective``: one of `USUAL`. To an all-gather or a gather a rank gives one N-th of M, from a
    reduce-scatter or a scatter it takes one.
    """
    parts = world_size if one_of(collective, USUAL, "collective") in _NAME_ONE_PART else 1
    return own_bytes * parts


def messages(algorithm: str, world_size: int) -> int:
    """Messages that must follow one another, which is what latency multiplies."""
    return _find(algorithm).messages(whole(world_size, "the world size"))


def seconds(algorithm: str, world_size: int, tensor_bytes: float, link: Link) -> float:
    """Seconds that the collective takes where every rank has such a link of its own."""
    chain = _find(algorithm).chain(whole(world_size, "the world size")) * tensor_bytes
    return link.seconds(chain, messages(algorithm, world_size))


def bus_factor(collective: str, world_size: int) -> float:
    """By what size over time is multiplied to be comparable with a link's bandwidth.

    ``collective``: one of `USUAL`; it is what the longest chain of the usual algorithm carries, in
    units of M. Source: nccl-tests, doc/PERFORMANCE.md.
    """
    usual = USUAL[one_of(collective, USUAL, "collective")]
    return ALGORITHMS[usual].chain(whole(world_size, "the world size"))


def bus_bandwidth(collective: str, world_size: int, tensor_bytes: float, seconds: float) -> float:
    """Bytes/s that a rank's link must have carried if no algorithm sent less than a ring."""
    return bus_factor(collective, world_size) * tensor_bytes / seconds


def _find(algorithm):
    return ALGORITHMS[one_of(algorithm, ALGORITHMS, "algorithm")]
