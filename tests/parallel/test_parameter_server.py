"""The parameter server on real ranks, against one process that knows the order of the gradients."""

import sys
import time

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import dplab
from dplab.parallel.parameter_server import ParameterServer, train_as_worker

cloudpickle.register_pickle_by_value(sys.modules[__name__])

INPUTS, CLASSES = 7, 3


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 11), nn.Tanh(), nn.Linear(11, CLASSES))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)


def loss_on(model, worker, number):
    generator = torch.Generator().manual_seed(1000 * worker + number)
    x = torch.randn(5, INPUTS, generator=generator)
    return F.cross_entropy(model(x), torch.randint(CLASSES, (5,), generator=generator))


def serve(updates, *, turns=None, pauses=None):
    """On each rank: staleness (rank 0) or how many gradients it made, and its parameters.

    ``pauses``: for a worker and the number of its gradient, seconds that it takes longer.
    """
    rank = dist.get_rank()
    model = make(seed=rank)
    if rank == 0:
        seen = []
        server = ParameterServer(model, make_optimizer(model), lambda: seen.append(1))
        server.serve(updates, turns)
        assert len(seen) == updates
        answer = server.staleness
    else:
        def compute_loss(number):
            time.sleep((pauses or {}).get((rank, number), 0))
            return loss_on(model, rank, number)

        answer = train_as_worker(model, compute_loss)
    return answer, [parameter.detach() for parameter in model.parameters()]


def simulated(workers, turns):
    """The parameters after gradients in this order, each taken where its worker pulled last."""
    server, copies = make(seed=0), {worker: make(seed=0) for worker in workers}
    optimizer, numbers = make_optimizer(server), dict.fromkeys(workers, 0)
    for worker in turns:
        copies[worker].zero_grad()
        loss_on(copies[worker], worker, numbers[worker]).backward()
        for parameter, mine in zip(server.parameters(), copies[worker].parameters(), strict=True):
            parameter.grad = mine.grad
        optimizer.step()
        numbers[worker] += 1
        copies[worker].load_state_dict(server.state_dict())
    return list(server.parameters())


def assert_all_have(found, expected):
    for _, parameters in found:
        for mine, want in zip(parameters, expected, strict=True):
            torch.testing.assert_close(mine, want)


def test_staleness_counts_the_updates_since_the_pull_in_any_order():
    turns = [1, 1, 3, 2, 2, 1, 3, 3, 1, 2]
    found = dplab.run(serve, 4, 10, turns=turns, backend="gloo")
    assert found[0][0] == [0, 0, 2, 3, 0, 3, 3, 0, 2, 4]  # by hand
    assert [count for count, _ in found[1:]] == [5, 3, 4]  # two of them too late
    assert_all_have(found, simulated({1, 2, 3}, turns))


def test_without_turns_the_first_to_come_is_the_first_served():
    pauses = {(1, 0): 1.0}  # worker 1 is the last to have its first gradient
    found = dplab.run(serve, 3, 12, pauses=pauses, backend="gloo")
    assert found[0][0] == 12 * [0]
    assert [count for count, _ in found[1:]] == [1, 12]
    assert_all_have(found, simulated([1, 2], 12 * [2]))
