"""The meters: bytes on the wire by the kernel's counters, and the log of calls."""

import pytest
import torch
import torch.distributed as dist
from job import two_ranks_under_torchrun
from ranks import MIB, least_on_the_wire, several

from dplab import run
from dplab.measure import CallLog, sent_bytes
from dplab.spawn.between import calls
from dplab.spawn.rank import recording


def metered_all_reduce(nbytes):
    tensor = torch.full((nbytes // 4,), float(dist.get_rank()))
    dist.all_reduce(tensor)  # connections are made on first use
    return least_on_the_wire(lambda: dist.all_reduce(tensor))


@pytest.mark.alone
@several
def test_a_ring_all_reduce_moves_what_arithmetic_says(world_size):
    size = 32 * MIB
    measured = run(metered_all_reduce, world_size, size, backend="gloo")
    assert len(set(measured)) == 1, "every rank reports the same"
    assert measured[0] == pytest.approx(2 * (world_size - 1) / world_size * size, rel=0.02)


@pytest.mark.alone
def test_the_meter_counts_only_its_block():
    def quiet():
        dist.all_reduce(torch.ones(4 * MIB))
        return least_on_the_wire(lambda: None)

    assert run(quiet, 2, backend="gloo")[0] < 100_000


@pytest.mark.alone
def test_one_rank_sends_nothing():
    assert run(metered_all_reduce, 1, 16 * MIB, backend="gloo")[0] < 100_000


def calls_of_every_kind():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(2))  # before the block: not logged
    with CallLog() as log:
        dist.all_reduce(torch.ones(3, 5), op=dist.ReduceOp.MAX)
        dist.broadcast(torch.ones(7, dtype=torch.float64), src=1)
        dist.all_gather([torch.empty(2) for _ in range(ranks)], torch.ones(2))
        output = torch.empty(4)
        dist.reduce_scatter(output, [torch.ones(4) for _ in range(ranks)])
        handle = dist.isend(torch.full((rank + 1,), 1.0), (rank + 1) % ranks)
        dist.recv(torch.empty((rank - 1) % ranks + 1), (rank - 1) % ranks)
        handle.wait()
        dist.barrier()
    dist.all_reduce(torch.ones(2))
    return log.calls, log.count(), log.count("all_reduce"), log.bytes("broadcast"), str(log)


def test_the_log_holds_every_call_with_its_facts():
    ranks = 3
    for rank, result in enumerate(run(calls_of_every_kind, ranks, backend="gloo")):
        calls, count, all_reduces, broadcast_bytes, text = result
        facts = [(call.operation, call.shape, call.dtype, call.reduce_operation, call.bytes)
                 for call in calls]
        assert facts == [
            ("all_reduce", (3, 5), "float32", "MAX", 60),
            ("broadcast", (7,), "float64", "", 56),
            ("all_gather", (2,), "float32", "", 8),
            ("reduce_scatter", (4,), "float32", "SUM", 16),
            ("send", (rank + 1,), "float32", "", 4 * (rank + 1)),
            ("recv", ((rank - 1) % ranks + 1,), "float32", "", 4 * ((rank - 1) % ranks + 1)),
            ("barrier", (), "", "", 0),
        ]
        assert [call.number for call in calls] == [2, 3, 4, 5, 1, 2, 6]
        assert calls[1].peer == 1
        assert calls[4].peer == (rank + 1) % ranks
        assert calls[5].peer == (rank - 1) % ranks
        assert [call.time for call in calls] == sorted(call.time for call in calls)
        assert (count, all_reduces, broadcast_bytes) == (7, 1, 56)
        assert text.startswith("  1  all_reduce of float32[3, 5], MAX")


def sent_for_each_call(length):
    """Bytes sent for one call of each operation, to which a rank gives ``length`` float64."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, parts = torch.ones(length).double(), [torch.ones(length).double() for _ in range(ranks)]
    whole = torch.ones(length * ranks).double()
    with CallLog() as log:
        dist.all_reduce(own)
        dist.reduce_scatter(own, parts)
        dist.all_gather(parts, own)
        dist.broadcast(own, src=0)
        dist.reduce(own, dst=0)
        dist.gather(own, parts if rank == 0 else None, dst=0)
        dist.scatter(own, parts if rank == 0 else None, src=0)
        dist.all_to_all_single(whole, whole.clone())
        dist.barrier()
        handle = dist.isend(own, (rank + 1) % ranks)
        dist.recv(parts[0], (rank - 1) % ranks)
        handle.wait()
    return {call.operation: sent_bytes(call) for call in log.calls}


@several
def test_bytes_sent_for_a_call_are_what_all_ranks_send_over_their_number(world_size):
    length = 6 * world_size
    tensor, chunk, others = 8 * length, 8 * 6, world_size - 1
    in_all = {
        "all_reduce": world_size * 2 * others * chunk,  # a chunk in each of 2(N−1) steps
        "reduce_scatter": world_size * others * tensor, "all_gather": world_size * others * tensor,
        "broadcast": others * tensor, "reduce": others * tensor,  # once to each of the others
        "gather": others * tensor, "scatter": others * tensor,
        "all_to_all": world_size * others * tensor,  # here of N times the elements
        "barrier": 0, "send": world_size * tensor, "recv": 0}
    for sent in run(sent_for_each_call, world_size, length, backend="gloo"):
        assert sent == pytest.approx({name: of_all / world_size for name, of_all in in_all.items()})


def a_log_that_is_written_faster_than_read(folder):
    recording.record_into(calls.map_log(f"{folder}/log"))
    reader = calls.CallReader(f"{folder}/log")
    numbers = []
    for burst in (3, 1, 5000):
        for _ in range(burst):
            dist.all_reduce(torch.ones(1))
        numbers.append([call.number for call in reader.new_calls()])
    return numbers, reader._slot(2900)  # where call 4949 stands by now


def test_a_reader_that_is_overtaken_reads_the_last_calls_and_no_torn_one(tmp_path):
    [(numbers, overwritten)] = run(a_log_that_is_written_faster_than_read, 1, tmp_path)
    assert numbers[:2] == [[1, 2, 3], [4]]
    assert numbers[2] == list(range(5004 - 2046, 5005))
    assert overwritten is None


@pytest.mark.slow
def test_what_watches_calls_works_under_plain_torchrun(tmp_path):
    done = two_ranks_under_torchrun(
        tmp_path,
        "import torch, torch.distributed as dist\n"
        "from dplab.measure import CallLog, Trace\n"
        "from dplab.predict.step import COMMUNICATION\n"
        "dist.init_process_group('gloo')\n"
        "with CallLog() as log:\n"
        "    dist.all_reduce(torch.ones(6))\n"
        "assert (log.count('all_reduce'), log.bytes()) == (1, 24), str(log)\n"
        "with Trace() as trace:\n"
        "    dist.all_reduce(torch.ones(6))\n"
        "[span] = trace.spans\n"
        "assert (span.lane, span.nbytes) == (COMMUNICATION, 24), span\n"
        "dist.destroy_process_group()\n")
    assert done.returncode == 0, done.stderr
