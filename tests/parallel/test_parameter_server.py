"""The parameter server on real ranks, against one process that knows the order of the gradients."""

import time

import torch
import torch.distributed as dist
from odd_models import INPUTS, assert_all_equal, batch
from torch import nn

import dplab
from dplab.parallel.parameter_server import ParameterServer, train_as_worker


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, 11), nn.Tanh(), nn.Linear(11, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)


def loss_on(model, worker, number):
    return model(batch(1000 * worker + number, 5)[0].float()).square().mean()


def serve(updates, turns=None, pause=0.0):
    """On each rank: staleness (rank 0) or how many gradients it made, and its parameters.

    ``pause``: seconds that worker 1 takes longer for its first gradient.
    """
    rank = dist.get_rank()
    model, optimizer = make(seed=rank)
    if rank == 0:
        seen = []
        server = ParameterServer(model, optimizer, lambda: seen.append(1))
        server.serve(updates, turns)
        assert len(seen) == updates
        return server.staleness, model.state_dict()

    def compute_loss(number):
        if (rank, number) == (1, 0):
            time.sleep(pause)
        return loss_on(model, rank, number)

    return train_as_worker(model, compute_loss), model.state_dict()


def played(turns):
    """The parameters after gradients in this order, each taken where its worker pulled last."""
    server, optimizer = make(seed=0)
    copies, numbers = {worker: make(seed=0)[0] for worker in turns}, dict.fromkeys(turns, 0)
    for worker in turns:
        copies[worker].zero_grad()
        loss_on(copies[worker], worker, numbers[worker]).backward()
        for parameter, mine in zip(server.parameters(), copies[worker].parameters(), strict=True):
            parameter.grad = mine.grad
        optimizer.step()
        numbers[worker] += 1
        copies[worker].load_state_dict(server.state_dict())
    return server.state_dict()


def assert_served(found, staleness, counts, turns):
    assert found[0][0] == staleness
    assert [count for count, _ in found[1:]] == counts
    assert_all_equal([state for _, state in found], played(turns), 1e-5)


def test_staleness_counts_the_updates_since_the_pull_in_any_order():
    turns = [1, 1, 3, 2, 2, 1, 3, 3, 1, 2]
    by_hand = [0, 0, 2, 3, 0, 3, 3, 0, 2, 4]
    assert_served(dplab.run(serve, 4, 10, turns, backend="gloo"), by_hand,
                  [5, 3, 4], turns)  # two of them came too late


def test_without_turns_the_first_to_come_is_the_first_served():
    found = dplab.run(serve, 3, 12, pause=1.0, backend="gloo")
    assert_served(found, 12 * [0], [1, 12], 12 * [2])
