"""Who holds how many elements, exactly: shards that do not divide, and padding.

``fully_shard`` cuts each tensor by its rows; ``ZeroRedundancyOptimizer`` gives each tensor as a
whole to one rank. Sources: torch 2.13, distributed/fsdp/_fully_shard and
distributed/optim/zero_redundancy_optimizer.py.
"""

import math
from collections.abc import Iterable, Sequence
from heapq import heapreplace
from operator import itemgetter

from dplab.predict.checks import one_of, whole
from dplab.predict.precision import Precision, States, precision_of
from dplab.predict.transformer_config import Shape, numel

# Each way of splitting gives, for every rank, the elements that it stores and in how many tensors.


def _replicated(units, ranks):
    shapes = _together(units)[0]
    return [(numel(shapes), len(shapes))] * ranks


def _owned(units, ranks):
    """Whole tensors, the largest first, each to the rank that has least so far."""
    held, counts = [(0, rank) for rank in range(ranks)], [0] * ranks  # a heap: the least first
    for size in sorted((numel([shape]) for shape in _together(units)[0]), reverse=True):
        elements, rank = held[0]
        heapreplace(held, (elements + size, rank))
        counts[rank] += 1
    return [(elements, counts[rank]) for elements, rank in sorted(held, key=itemgetter(1))]


def _rows(units, ranks):
    """Each tensor by its first dimension, in pieces of ⌈rows/N⌉, as `torch.chunk` makes them."""
    pieces = [(math.ceil(shape[0] / ranks), shape) for shape in _together(units)[0]]
    return [(sum(min(most, max(0, shape[0] - rank * most)) * math.prod(shape[1:])
                 for most, shape in pieces), len(pieces)) for rank in range(ranks)]


def _padded_rows(units, ranks):
    return [_rows(units, ranks)[0]] * ranks


IMPLEMENTATIONS = {
    "DDP": (_replicated, _replicated, _replicated),
    "ZeroRedundancyOptimizer": (_replicated, _replicated, _owned),
    "fully_shard": (_padded_rows, _padded_rows, _rows),
}
"""How each splits parameters, gradients and optimizer state, by its name."""


def real_states(implementation: str, precision: Precision | str, world_size: int,
                units: Iterable[Sequence[Shape]]) -> list[States]:
    """The bytes of model states on each rank, in rank order, after a step, before ``zero_grad``.

    Exact, where all tensors are of one dtype. ``implementation``: one of `IMPLEMENTATIONS`.
    ``units``: the shapes of the trainable tensors, each tied one once, in lists such as
    `TransformerConfig.units`. Buckets and gathered parameters are not model states. Raises
    ValueError for an unknown implementation or precision.
    """
    ways = IMPLEMENTATIONS[one_of(implementation, IMPLEMENTATIONS, "implementation")]
    precision = precision_of(precision)
    ranks, units = whole(world_size, "the world size"), [list(unit) for unit in units]
    parameters, gradients, optimizer = (way(units, ranks) for way in ways)
    return [States(parameters[rank][0] * precision.parameters,
                   gradients[rank][0] * precision.gradients,
                   optimizer[rank][0] * precision.optimizer
                   + optimizer[rank][1] * precision.per_tensor) for rank in range(ranks)]


def padded_parameters(implementation: str, world_size: int,
                      units: Iterable[Sequence[Shape]]) -> int:
    """The elements of all parameters, with the padding that travels along in its collectives.

    The course's own classes lay tensors side by side: ShardedOptimizer all of them,
    FullyShardedModel those of a unit.
    """
    ranks, units = whole(world_size, "the world size"), [list(unit) for unit in units]
    if implementation == "fully_shard":
        return ranks * sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:])
                           for shape in _together(units)[0])
    cut = _together(units) if implementation == "ShardedOptimizer" else units
    return ranks * sum(math.ceil(numel(unit) / ranks) for unit in cut)


def _together(units):
    return [[shape for unit in units for shape in unit]]
