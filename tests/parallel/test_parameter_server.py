"""The parameter server on real ranks, against one process that knows the order of the gradients."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from failing import failure
from torch import nn
from torch.nn import functional as F

import dplab
from dplab.parallel.parameter_server import ParameterServer, train_as_worker

cloudpickle.register_pickle_by_value(sys.modules[__name__])

INPUTS, CLASSES = 7, 3
LEARNING_RATE, MOMENTUM = 0.2, 0.5


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, 11), nn.Tanh(), nn.Linear(11, CLASSES))
    model[0].bias.requires_grad_(False)
    return model


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def loss_on(model, worker, number):
    generator = torch.Generator().manual_seed(1000 * worker + number)
    x = torch.randn(5, INPUTS, generator=generator)
    return F.cross_entropy(model(x), torch.randint(CLASSES, (5,), generator=generator))


def serve(method, updates, *, pauses=None, **options):
    """On each rank: the pushes (rank 0) or how many gradients it made, and its parameters.

    ``pauses``: for a worker and the number of its gradient, seconds that it takes longer.
    """
    rank = dist.get_rank()
    model = make(seed=rank)
    if rank == 0:
        seen = []
        server = ParameterServer(model, make_optimizer(model), after_update=seen.append)
        getattr(server, method)(updates, **options)
        assert seen == list(range(1, updates + 1))
        answer = server.pushes
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
    # by hand: how many updates there were when the worker pulled, and how many there are now
    pulled, stalenesses = {1: 0, 2: 0, 3: 0}, []
    for now, worker in enumerate(turns):
        stalenesses.append(now - pulled[worker])
        pulled[worker] = now + 1
    assert stalenesses == [0, 0, 2, 3, 0, 3, 3, 0, 2, 4]

    found = dplab.run(serve, 4, "serve_asynchronously", 10, turns=turns, backend="gloo")
    pushes = found[0][0]
    assert [push.staleness for push in pushes[:10]] == stalenesses
    assert [(push.worker, push.applied) for push in pushes[10:]] == [(1, False), (3, False)]
    assert_all_have(found, simulated(pulled, turns))


def test_without_turns_the_first_to_come_is_the_first_served():
    pauses = {(1, 0): 1.0}  # worker 1 is the last to have its first gradient
    found = dplab.run(serve, 3, "serve_asynchronously", 12, pauses=pauses, backend="gloo")
    pushes, counts = found[0][0], [count for count, _ in found[1:]]
    assert {push.worker for push in pushes if push.applied} == {2}
    assert [push.applied for push in pushes] == 12 * [True] + [False]
    assert pushes[-1].worker == 1 and pushes[-1].staleness == 12
    assert counts == [1, 12]
    assert_all_have(found, simulated([1, 2], 12 * [2]))


def mean_of(workers_of_each_update):
    """Synchronous SGD in one process, from (worker, number of its gradient) for each update."""
    model = make(seed=0)
    optimizer = make_optimizer(model)
    for gradients in workers_of_each_update:
        optimizer.zero_grad()
        for worker, number in gradients:
            (loss_on(model, worker, number) / len(gradients)).backward()
        optimizer.step()
    return list(model.parameters())


def test_synchronously_without_backups_every_update_is_of_all_workers():
    found = dplab.run(serve, 4, "serve_synchronously", 6, backend="gloo")
    pushes = found[0][0]
    assert len(pushes) == 18
    assert all(push.applied and push.staleness == 0 for push in pushes)
    assert [count for count, _ in found[1:]] == 3 * [6]
    assert_all_have(found, mean_of([[(w, n) for w in (1, 2, 3)] for n in range(6)]))


@pytest.mark.slow
def test_late_gradients_are_dropped_and_never_applied():
    """Worker 3 sleeps through the first two updates; then the others sleep, until it has come."""
    pauses = {(3, 0): 1.5, (1, 2): 2.5, (2, 2): 2.5}
    found = dplab.run(serve, 4, "serve_synchronously", 3, backups=1, pauses=pauses,
                      backend="gloo")
    pushes = found[0][0]
    dropped = [push for push in pushes if not push.applied]
    assert [push.staleness for push in pushes if push.applied] == 6 * [0]
    assert (dropped[0].worker, dropped[0].staleness) == (3, 2)
    # its second gradient is fresh, and comes before those of the others, who sleep
    third = [push.worker for push in pushes if push.applied][4:]
    assert third[0] == 3
    late = ({1, 2} - set(third)).pop()
    assert [(push.worker, push.staleness) for push in dropped[1:]] == [(late, 1)]
    assert_all_have(found, mean_of([[(1, 0), (2, 0)], [(1, 1), (2, 1)],
                                    [(3, 1), (third[1], 2)]]))


@pytest.mark.parametrize("backups", [-1, 2])
def test_somebody_must_be_waited_for(backups):
    error = failure(serve, 3, "serve_synchronously", 3, backups=backups, backend="gloo")
    assert error.rank == 0 and "of 2 workers 0 to 1 can be backups" in str(error)


def test_what_it_cannot_serve_is_refused():
    def refused(model):
        ParameterServer(model, None)

    error = failure(refused, 2, make(0).double(), backend="gloo")
    assert "float32 on the CPU, not torch.float64 on cpu" in str(error)
    error = failure(refused, 1, make(0), backend="gloo")
    assert "needs a worker: start 2 ranks or more" in str(error)
