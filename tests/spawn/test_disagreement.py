"""`RankError`: calls that do not agree, ranks that wait for each other; and no false alarm."""

import ctypes
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from failing import failure
from kernel import no_ranks_left
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab import run

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def gather(x):
    parts = [torch.empty(2) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)


def odd(ordinary, other):
    """What rank 1 does differently."""
    return other if dist.get_rank() == 1 else ordinary


MISMATCHES = {
    "operation": (2, lambda x: dist.all_reduce(x) if odd(1, 0) else gather(x),
                  "all_reduce of float32[2], SUM", "all_gather of float32[2]"),
    "barrier": (4, lambda x: dist.all_reduce(x) if odd(1, 0) else dist.barrier(),
                "all_reduce of float32[2], SUM", "barrier"),
    "shape": (4, lambda x: dist.all_reduce(odd(x, torch.ones(3))),
              "all_reduce of float32[2], SUM", "all_reduce of float32[3], SUM"),
    "dtype": (2, lambda x: dist.all_reduce(odd(x, x.double())),
              "all_reduce of float32[2], SUM", "all_reduce of float64[2], SUM"),
    "reduce operation": (4, lambda x: dist.all_reduce(x, odd(dist.ReduceOp.SUM, dist.ReduceOp.MAX)),
                         "all_reduce of float32[2], SUM", "all_reduce of float32[2], MAX"),
    "root": (3, lambda x: dist.broadcast(x, odd(0, 1)),
             "broadcast of float32[2], root 0", "broadcast of float32[2], root 1"),
}
DIFFERS = {"barrier": "operation"}


@pytest.mark.parametrize("what", MISMATCHES)
def test_calls_that_do_not_agree(what):
    ranks, call, most, one = MISMATCHES[what]

    def work():
        x = torch.arange(2.0) + dist.get_rank()
        dist.all_reduce(x)
        call(x)

    error = failure(work, ranks)
    assert error.kind == "mismatched"
    assert error.rank == (1 if ranks > 2 else None)  # of two, either may be wrong
    head, *rest = str(error).splitlines()
    assert head == ("collective number 2 is not the same on every rank: "
                    f"the {DIFFERS.get(what, what)}s do not agree")
    assert f"  rank 1 called {one}" in rest
    assert f"  rank 0 called {most}" in rest
    if what != "operation":  # the gather has a line of its own
        assert sum("test_disagreement.py, line" in line for line in rest) >= 2


def test_garbage_is_found_when_every_rank_returns():
    def work():
        dist.all_reduce(torch.ones(2), odd(dist.ReduceOp.MAX, dist.ReduceOp.MIN))
        return "fine"

    error = failure(work, 2)
    assert error.kind == "mismatched" and "MIN" in str(error) and "MAX" in str(error)


def test_a_rank_that_returns_early_is_found_before_the_timeout():
    def work():
        total = torch.ones(3, 2)
        dist.all_reduce(total)
        if dist.get_rank() == 1:
            return
        dist.all_reduce(total)

    error = failure(work, 4)
    assert (error.kind, error.rank) == ("stuck", 1)
    assert "still wait" in str(error) and "all_reduce number 2 of float32[3, 2]" in str(error)
    assert error.reports[1] == "  rank 1 had returned"
    for rank in (0, 2, 3):
        assert error.reports[rank].startswith(f"  rank {rank} waits in all_reduce number 2")
        assert error.reports[rank].endswith("dist.all_reduce(total)")


def test_a_rank_that_loops_for_ever():
    def work():
        if dist.get_rank() == 1:
            while True:
                pass
        dist.barrier()

    error = failure(work, 3, timeout=1.5)
    assert (error.kind, error.rank) == ("stuck", 1)
    assert str(error).startswith("rank 1 did not come to barrier number 1 within 1.5 s")
    assert "rank 1 was running: test_disagreement.py" in error.reports[1]
    assert error.reports[0].startswith("  rank 0 waits in barrier number 1")
    assert error.reports[0].endswith("dist.barrier()")
    advice = str(error).splitlines()[-1]
    assert "Rank 1 is busy" in advice and "loop" in advice and "timeout=" in advice


def test_a_rank_deep_in_c_code():
    def work():
        if dist.get_rank() == 1:
            ctypes.PyDLL(None).sleep(100)  # holds the interpreter's lock
        dist.barrier()

    error = failure(work, 2, timeout=1)
    assert (error.kind, error.rank) == ("stuck", 1)
    assert "rank 1 does not answer: it is stopped, or inside C code" in error.reports[1]


def test_uneven_inputs_stop_inside_ddp():
    def work():
        model = DistributedDataParallel(nn.Linear(3, 2))
        for _ in range(2 + dist.get_rank()):
            model(torch.ones(4, 3)).sum().backward()

    error = failure(work, 2)
    assert (error.kind, error.rank) == ("stuck", 0)
    assert "rank 0 returned, and rank 1 still waits in all_reduce number" in str(error)
    assert "backward()" in error.reports[1]


def objects():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone, mine, sent = [None] * ranks, [None], [{"n": "x" * 99}, 2]
    dist.all_gather_object(everyone, "y" * (10 + 1000 * rank))
    dist.gather_object(rank, [None] * ranks if rank == 0 else None)
    dist.scatter_object_list(mine, [i for i in range(ranks)] if rank == 0 else None)
    dist.broadcast_object_list(sent if rank == 0 else [None, None])
    return [len(one) for one in everyone], mine


def scatters_and_exchanges():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = torch.empty(3)
    dist.scatter(part, [torch.full((3,), float(i)) for i in range(ranks)] if rank == 1 else None, 1)
    dist.gather(part, [torch.empty(3) for _ in range(ranks)] if rank == 0 else None)
    inputs = [torch.full((rank + 1,), float(to)) for to in range(ranks)]
    outputs = [torch.empty(source + 1) for source in range(ranks)]
    dist.all_to_all_single(torch.cat(outputs), torch.cat(inputs), list(range(1, ranks + 1)),
                           [rank + 1] * ranks)
    dist.reduce_scatter_tensor(part, torch.ones(3 * ranks))
    dist.all_gather_into_tensor(torch.empty(3 * ranks), part)
    dist.reduce(part, 1)
    dist.all_reduce(torch.ones(4) if rank else torch.ones(2, 2))


def subgroups():
    halves = [dist.new_group([0]), dist.new_group([1])]
    alone = dist.new_group([0])
    rank = dist.get_rank()
    for _ in range(1 + 3 * rank):
        dist.all_reduce(torch.ones(2 + rank), group=halves[rank])
    if rank == 0:
        dist.broadcast(torch.ones(7).double(), 0, group=alone)
    dist.barrier()


def point_to_point():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.full((3 + rank,), float(rank))
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    got = torch.empty(3 + left)
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right),
                                           dist.P2POp(dist.irecv, got, left)]):
        request.wait()
    if rank == 0:
        dist.send(x, 1)
        time.sleep(1.5)  # the others have returned long before
    elif rank == 1:
        dist.recv(torch.empty(3), 0)
    return got.tolist()


def waited_later():
    works = [dist.all_reduce(torch.ones(1000 + n), async_op=True) for n in range(20)]
    time.sleep(1.2 * dist.get_rank())
    for work in reversed(works):
        work.wait()


def thousands():
    total = torch.ones(1)
    for step in range(5000):
        dist.all_reduce(total.fill_(step % 7) if step % 2 else torch.ones(step % 5 + 1))
        if step % 1000 == 0:
            dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "functions"), [
    (2, [objects, scatters_and_exchanges, subgroups, waited_later, thousands, point_to_point]),
    (4, [objects, scatters_and_exchanges, point_to_point]),
], ids=["two", "four"])
def test_no_false_alarm(ranks, functions):
    def one_after_another():
        for function in functions[:-1]:
            function()
            dist.barrier()
        return functions[-1]()

    assert len(run(one_after_another, ranks)) == ranks
    no_ranks_left()


# Sends and receives

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
