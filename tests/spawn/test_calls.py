"""The ranks' calls side by side: those that do not agree, and waits without an end; no false alarm.
"""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from failing import failure

from dplab import run
from dplab.spawn.between import calls
from dplab.spawn.rank.recording import CallRecorder

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
    "reduce operation": (3, lambda x: dist.all_reduce(x, odd(dist.ReduceOp.MAX, dist.ReduceOp.MIN)),
                         "all_reduce of float32[2], MAX", "all_reduce of float32[2], MIN"),
    "root": (3, lambda x: dist.broadcast(x, odd(0, 1)),
             "broadcast of float32[2], root 0", "broadcast of float32[2], root 1"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_calls_that_do_not_agree(what):
    ranks, call, most, one = MISMATCHES[what]

    def work():
        x = torch.arange(2.0) + dist.get_rank()
        dist.all_reduce(x)
        time.sleep(0.1 * (dist.get_rank() == 0))  # who comes a little later is in the report, too
        call(x)
        return "fine"  # as it seems to a rank that got garbage

    error = failure(work, ranks)
    assert error.kind == "mismatched"
    assert error.rank == (1 if ranks > 2 else None)  # of two, either may be wrong
    head, *rest = str(error).splitlines()
    assert head == ("collective number 2 is not the same on every rank: "
                    f"the {'operation' if what == 'barrier' else what}s do not agree")
    for rank, called in ((0, most), (1, one)):
        at = rest[rest.index(f"  rank {rank} called {called}") + 1].strip()
        each = error.ranks[rank]
        assert at == each.at and at.startswith("test_calls.py, line ")
        assert (each.state, each.operation, each.number, each.peer) == (
            "called", called.split()[0].rstrip(","), 2, None)
        assert each.tensor == called.partition(" of ")[2].split(",")[0]


# Sends and receives

def neighbours():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % world_size, (rank - 1) % world_size


def send_first(elements=1):
    right, left = neighbours()
    dist.send(torch.ones(elements), right)
    dist.recv(torch.empty(elements), left)


def isend_first():
    right, left = neighbours()
    work = dist.isend(torch.ones(3_000_001), right)
    work.wait()
    dist.recv(torch.empty(3_000_001), left)


def receive_first():
    right, left = neighbours()
    dist.recv(torch.empty(5, dtype=torch.int64), left)
    dist.send(torch.ones(5, dtype=torch.int64), right)


def to_the_right_and_from_the_right():
    right, _ = neighbours()
    x, y = torch.ones(3), torch.empty(3)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right),
                                        dist.P2POp(dist.irecv, y, right)]):
        work.wait()


def receive_against_a_collective():
    if dist.get_rank() == 0:
        dist.recv(torch.empty(3), 1)
    dist.all_reduce(torch.ones(3))


def send_to_one_that_returns():
    if dist.get_rank() == 2:
        dist.send(torch.ones(3), 1)


def two_of_three():
    if dist.get_rank() == 2:
        time.sleep(30)
    else:
        dist.recv(torch.empty(3), 1 - dist.get_rank())


SENDS = "each sends, and nobody comes to receive"
RECEIVES = "each wants to receive, and nobody comes to send"
# function, ranks, what is said of them, and of single ranks: what they do, and in which line
DEADLOCKS = [
    (send_first, 4, f"ranks 0, 1, 2 and 3 wait for ever: {SENDS}", {
        rank: (f"waits in send of float32[1] to rank {(rank + 1) % 4}",
               "dist.send(torch.ones(elements), right)") for rank in range(4)}),
    (isend_first, 2, f"ranks 0 and 1 wait for ever: {SENDS}", {
        0: ("waits in send of float32[3000001] to rank 1", "work.wait()")}),
    (receive_first, 4, f"ranks 0, 1, 2 and 3 wait for ever: {RECEIVES}", {
        rank: (f"waits in recv of int64[5] from rank {(rank - 1) % 4}", "left)")
        for rank in range(4)}),
    (to_the_right_and_from_the_right, 3, "ranks 0, 1 and 2 wait for ever for each other", {
        1: ("waits in send of float32[3] to rank 2 and recv of float32[3] from rank 2",
            "work.wait()")}),
    (receive_against_a_collective, 3, "ranks 0, 1 and 2 wait for ever for each other", {
        0: ("waits in recv of float32[3] from rank 1", "dist.recv(torch.empty(3), 1)"),
        2: ("waits in all_reduce number 1 of float32[3]", "dist.all_reduce(torch.ones(3))")}),
    (send_to_one_that_returns, 3, "rank 2 waits for ever, and rank 1 has returned", {
        0: ("had returned", ""), 2: ("waits in send of float32[3] to rank 1", ", 1)")}),
    (two_of_three, 3, f"ranks 0 and 1 wait for ever: {RECEIVES}", {
        2: ("was running", "time.sleep(30)")}),
]


@pytest.mark.parametrize(("function", "ranks", "head", "reports"), DEADLOCKS)
def test_a_wait_without_an_end_is_found_long_before_the_timeout(function, ranks, head, reports):
    error = failure(function, ranks)
    lines = str(error).splitlines()
    assert lines[0] == head and error.kind == "stuck"
    assert error.rank == (1 if "returned" in head else None)
    assert lines[-1] == ("A send ends when the other rank receives." if SENDS in head else
                         "Every send needs a receive on the other rank, and every receive a send.")
    for rank, (doing, line) in reports.items():
        assert error.reports[rank].startswith(f"  rank {rank} {doing}"), error
        assert error.reports[rank].endswith(line)
    waiting = [each for each in error.ranks if each.operation in ("send", "recv")]
    assert waiting and all(each.number is None and each.peer is not None for each in waiting)


# No false alarm

def objects():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone, mine, sent = [None] * ranks, [None], [{"n": "x" * 99}, 2]
    dist.all_gather_object(everyone, "y" * (10 + 1000 * rank))
    dist.gather_object(rank, [None] * ranks if rank == 0 else None)
    dist.scatter_object_list(mine, [i for i in range(ranks)] if rank == 0 else None)
    dist.broadcast_object_list(sent if rank == 0 else [None, None])


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
    rank = dist.get_rank()
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())]
    for _ in range(1 + 3 * rank):
        dist.all_reduce(torch.ones(2 + rank), group=alone[rank])
    pair = dist.new_group([1, 2])
    if rank == 1:
        time.sleep(1.4)
        dist.send(torch.ones(3), 2, group=pair)
    elif rank == 2:
        dist.recv(torch.empty(3), 1, group=pair)


def waited_later():
    works = [dist.all_reduce(torch.ones(1000 + n), async_op=True) for n in range(20)]
    time.sleep(0.6 * dist.get_rank())
    for work in reversed(works):
        work.wait()


def thousands():
    total = torch.ones(1)
    for step in range(2500):
        dist.all_reduce(total.fill_(step % 7) if step % 2 else torch.ones(step % 5 + 1))


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


def late_receiver_behind_ranks_that_have_returned():
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    elif dist.get_rank() == 1:
        time.sleep(1.4)
        dist.recv(torch.empty(3), 0)


def any_source():
    if dist.get_rank() == 0:
        received = torch.empty(3)
        return sorted(dist.recv(received) for _ in range(2))
    time.sleep(1.2 * dist.get_rank())
    dist.send(torch.ones(3), 0)


def more_messages_than_the_log_holds():
    x = torch.zeros(1)
    for _ in range(6_000):
        if dist.get_rank() == 0:
            dist.send(x, 1)
        elif dist.get_rank() == 1:
            dist.recv(x, 0)
    time.sleep(1.2)


@pytest.mark.parametrize(("functions", "values"), [
    ([objects, scatters_and_exchanges, subgroups, waited_later, thousands,
      a_chain_behind_a_slow_rank, early_receives, late_receiver_behind_ranks_that_have_returned],
     [None] * 5 + [[7.0] * 3, [2.0, 0.0, 1.0], None]),
    ([any_source], [[[1, 2], None, None]]), ([more_messages_than_the_log_holds], [None]),
], ids=["in turn", "any source", "many"])
def test_who_is_only_late_gives_no_alarm(functions, values):
    def in_turn():
        return [function() for function in functions]

    returned = run(in_turn, 3)
    for number, value in enumerate(values):
        assert [found[number] for found in returned] == (value or [None] * 3)


def test_the_call_log_holds_any_call(tmp_path):
    group = type("Group", (), {"group_name": "a" * 64, "size": lambda self: 1000})()
    path = str(tmp_path / "calls")
    recorder, reader = CallRecorder(calls.map_log(path)), calls.CallReader(path)
    tensor = torch.empty((10**4,) * 2 + (1,) * 7, device="meta", dtype=torch.complex128)
    name = str(tmp_path / ("漢字" * 60 + ".py"))
    code = compile("all_reduce(group, 'reduce_scatter', [tensor] * 9, 'PREMUL_SUM', 999)",
                   name, "exec")
    for _ in range(3_000):
        exec(code, {"all_reduce": lambda *call: recorder.record(*call), "group": group,
                    "tensor": tensor})
    found = reader.new_calls()
    assert 2000 < len(found) <= 2048
    assert [call.number for call in found] == list(range(3_001 - len(found), 3_001))
    last = found[-1]
    assert (last.operation, last.dtype, last.reduce_operation, last.peer, last.line) == (
        "reduce_scatter", "complex128", "PREMUL_SUM", 999, 1)
    assert last.bytes == 9 * 16 * 10**8 and last.shape[:3] == (10**4, 10**4, 1)
    assert name.endswith(last.file) and last.file.endswith("漢字.py")
