"""What checks give to attempts: what ranks contribute is independent, so a result tells its parts.
"""

import functools
import types
from collections import defaultdict

import pytest
import torch
from torch import nn

from dplab import run
from dplab.checks import every_exercise
from dplab.checks.exercise import Exercise

# With less, least squares would make a hundred times float32's rounding, or more, of a factor.
INDEPENDENT = 0.01
OTHERWISE = {"one-call-each": "shows its numbers: a digit is a rank's by its place",
             "seeds-of-ranks": "is given no tensor",
             "exact-resume": "saves what training has made: variances are all near 1"}


@pytest.mark.slow
@pytest.mark.parametrize("exercise", [
    pytest.param(each, id=each.slug) for each in every_exercise()
    if each.on_ranks and each.slug not in OTHERWISE and type(each).trial is not Exercise.trial])
def test_what_ranks_contribute_is_independent(exercise):
    for world_size in {2, 3, 4}.intersection(exercise.world_sizes):
        tensors = defaultdict(list)
        for rank in range(world_size):
            for fact, parts in exercise.parts(world_size, rank).items():
                parts = [*parts.values()] if isinstance(parts, dict) else parts
                assert len(parts) <= sum(part.numel() for part in parts[:1]), f"{fact} is too short"
                tensors[fact] += parts
        for given in run(given_to_a_rank, world_size, exercise, timeout=60, backend="gloo"):
            for argument, tensor in given:
                tensors[argument, tensor.shape].append(tensor)
        assert tensors, "the test has seen nothing"
        for name, found in tensors.items():
            if found and found[0].numel():
                assert_independent(found, f"{name} on {world_size} ranks")


def assert_independent(tensors, name):
    """The rows of a matrix; and those of the tensors that differ, if none is too short for that."""
    first = tensors[0]
    if (first.dim() == 2 and first.is_floating_point() and first.any()
            and "gradient" not in name):  # that of few samples has a low rank
        assert condition(first.double()) > INDEPENDENT / 10, f"rows of {name}"
    rows = torch.stack([each.flatten() for each in tensors]).double().nan_to_num(0, 0, 0)
    rows = rows[rows.any(dim=1)].unique(dim=0)
    if 1 < len(rows) <= rows.shape[1]:
        assert condition(nn.functional.normalize(rows, dim=1)) > INDEPENDENT, name


def condition(matrix):
    """Its smallest singular value beside the largest: 0 where rows are combinations of others."""
    singular = torch.linalg.svdvals(matrix)
    return (singular[-1] / singular[0]).item()


def given_to_a_rank(exercise):
    """What the course's solution is given in a check: tensors, by the name of the argument."""
    seen = []

    def noting(function):
        @functools.wraps(function)
        def called(*arguments, **options):
            for place, argument in enumerate(arguments):
                seen.extend(tensors_in(argument, f"argument {place} of {function.__name__}"))
            return function(*arguments, **options)

        return called

    attempt = exercise.solution
    if isinstance(attempt, type):
        attempt = type(attempt.__name__, (attempt,), {
            name: staticmethod(noting(member.__func__)) if isinstance(member, staticmethod)
            else noting(member) for name, member in vars(attempt).items()
            if isinstance(member, staticmethod | types.FunctionType)})
    else:
        attempt = noting(attempt)
    exercise.given = exercise.prepare()
    exercise.trial(attempt)
    return seen


def tensors_in(value, name):
    if isinstance(value, nn.Module):
        value = list(value.parameters()) + list(value.buffers())
    if isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from tensors_in(each, f"{name}[{place}]")
    elif isinstance(value, torch.Tensor):
        yield name, value.detach().clone()
        if value.is_leaf and value.grad is not None:
            yield f"the gradient of {name}", value.grad.clone()
