"""What is held after a step: buckets, copies of weights, and what forward saves."""

import sys

import cloudpickle
import pytest
import torch
from torch import nn

from dplab import run
from dplab.measure import after_a_step, saved_bytes

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def small():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def loss(model):
    return model(torch.ones(2, 5)).sum()


def bytes_of(tensors):
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def held_under_ddp():
    found = []
    for views, autocast in ((False, False), (True, False), (True, True)):
        model, _, others = after_a_step(small(), loss, ddp=True, autocast=autocast,
                                        gradient_as_bucket_view=views)
        buckets = [each for each in others if each.dtype == torch.float32]
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append((bytes_of(buckets), bytes_of([*buckets, *gradients])))
    return found


def test_buckets_are_as_large_as_the_gradients_and_hold_them_as_views():
    size = 4 * (5 * 4 + 4 + 4 * 3 + 3)
    expected = [(size, 2 * size), (size, size), (size, size)]
    assert run(held_under_ddp, 2, backend="gloo") == [expected] * 2


def test_autocast_leaves_the_copies_of_the_weights_that_backward_needs():
    model, optimizer, copies = after_a_step(small(), loss, autocast=True)
    # Backward goes through both layers, but only the second one's weight is on its way to another.
    assert {tensor.dtype for tensor in copies} == {torch.bfloat16}
    assert bytes_of(copies) == 2 * 4 * 3
    assert set(optimizer.state) == set(model.parameters())
    assert after_a_step(small(), loss).others == []


@pytest.mark.parametrize("rows", [1, 6])
def test_saved_are_the_inputs_of_the_layers_without_their_weights(rows):
    # The input of the first layer, and the output of ReLU, which is the second layer's input.
    assert saved_bytes(small(), torch.ones(rows, 5)) == 4 * rows * (5 + 4)
    assert saved_bytes(nn.Linear(5, 4, bias=False), torch.ones(rows, 5)) == 4 * rows * 5
