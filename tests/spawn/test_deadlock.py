"""Ranks that wait for one another in sends and receives are found in seconds; slow ones are not."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from failing import failure

from dplab import run

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def neighbours():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % world_size, (rank - 1) % world_size


def deadlock(function, ranks, *args):
    error = failure(function, ranks, *args)  # in a fraction of the time limit
    assert error.kind == "stuck"
    return error


def send_first(elements):
    right, left = neighbours()
    dist.send(torch.ones(elements), right)
    dist.recv(torch.empty(elements), left)


def isend_first(elements):
    right, left = neighbours()
    work = dist.isend(torch.ones(elements), right)
    work.wait()
    dist.recv(torch.empty(elements), left)


@pytest.mark.parametrize(("function", "ranks", "elements", "line"), [
    (send_first, 4, 1, "dist.send(torch.ones(elements), right)"),
    (isend_first, 2, 3_000_001, "work.wait()"),
])
def test_a_ring_in_which_all_send_first(function, ranks, elements, line):
    error = deadlock(function, ranks, elements)
    assert str(error).endswith("A send ends when the other rank receives.")
    assert "wait for ever: each sends, and nobody comes to receive" in str(error)
    assert error.rank is None
    for rank, report in enumerate(error.reports):
        to = (rank + 1) % ranks
        assert f"rank {rank} waits in send of float32[{elements}] to rank {to}: " in report
        assert report.endswith(line)


def test_a_ring_in_which_all_receive_first():
    def receive_first():
        right, left = neighbours()
        dist.recv(torch.empty(5, dtype=torch.int64), left)
        dist.send(torch.ones(5, dtype=torch.int64), right)

    error = deadlock(receive_first, 4)
    assert "each wants to receive, and nobody comes to send" in str(error)
    for rank, line in enumerate(error.reports):
        assert f"rank {rank} waits in recv of int64[5] from rank {(rank - 1) % 4}" in line


def test_both_ends_of_a_pair_are_named():
    def to_the_right_and_from_the_right():
        right, _ = neighbours()
        x, y = torch.ones(3), torch.empty(3)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right),
                                            dist.P2POp(dist.irecv, y, right)]):
            work.wait()

    error = deadlock(to_the_right_and_from_the_right, 3)
    assert str(error).startswith("ranks 0, 1 and 2 wait for ever for each other")
    assert ("rank 1 waits in send of float32[3] to rank 2 and recv of float32[3] from rank 2"
            in error.reports[1])


def test_a_receive_against_a_collective():
    def work():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(3), 1)
        dist.all_reduce(torch.ones(3))

    error = deadlock(work, 3)
    assert str(error).startswith("ranks 0, 1 and 2 wait for ever for each other\n")
    assert "rank 0 waits in recv of float32[3] from rank 1" in error.reports[0]
    assert "rank 2 waits in all_reduce number 1 of float32[3]" in error.reports[2]


def test_a_peer_that_has_returned():
    def work():
        if dist.get_rank() == 2:
            dist.send(torch.ones(3), 1)

    error = deadlock(work, 3)
    assert str(error).startswith("rank 2 waits for ever, and rank 1 has returned\n")
    assert error.rank == 1
    assert error.reports[0].strip() == "rank 0 had returned"


def test_two_wait_for_each_other_while_a_third_works():
    def work():
        if dist.get_rank() == 2:
            time.sleep(30)
        else:
            dist.recv(torch.empty(3), 1 - dist.get_rank())

    error = deadlock(work, 3)
    assert str(error).startswith("ranks 0 and 1 wait for ever")


def a_chain_behind_a_slow_rank():
    received = torch.empty(3)
    if dist.get_rank() == 0:
        time.sleep(1.4)
        received.fill_(7)
    else:
        dist.recv(received, dist.get_rank() - 1)
    if dist.get_rank() < 2:
        dist.send(received, dist.get_rank() + 1)
    return received[0].item()


def early_receives():
    right, left = neighbours()
    received = torch.empty(3)
    work = dist.irecv(received, left)
    time.sleep(1.4)
    dist.send(torch.full((3,), float(dist.get_rank())), right)
    work.wait()
    return received[0].item()


def any_source():
    if dist.get_rank() == 0:
        received = torch.empty(3)
        return sorted(dist.recv(received) for _ in range(2))
    time.sleep(1.2 * dist.get_rank())
    dist.send(torch.ones(3), 0)


def in_a_group():
    pair = dist.new_group([1, 2])
    received = torch.full((3,), 5.0)
    if dist.get_rank() == 1:
        time.sleep(1.4)
        dist.send(received, 2, group=pair)
    elif dist.get_rank() == 2:
        dist.recv(received.zero_(), 1, group=pair)
        return received[0].item()


def more_messages_than_the_log_holds():
    x = torch.zeros(1)
    for _ in range(6_000):
        if dist.get_rank() == 0:
            dist.send(x, 1)
        elif dist.get_rank() == 1:
            dist.recv(x, 0)
    time.sleep(1.2)


@pytest.mark.parametrize(("function", "values"), [
    (a_chain_behind_a_slow_rank, [7.0, 7.0, 7.0]), (early_receives, [2.0, 0.0, 1.0]),
    (any_source, [[1, 2], None, None]), (in_a_group, [None, None, 5.0]),
    (more_messages_than_the_log_holds, [None] * 3),
])
def test_who_is_only_late_is_in_no_deadlock(function, values):
    assert run(function, 3) == values
