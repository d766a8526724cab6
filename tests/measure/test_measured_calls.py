"""What ranks call and send: the log of calls, messages, the kernel's counters, and units' order."""

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import MIB, least_on_the_wire, several
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dplab import run
from dplab.exercises.order_of_step import CASES, order_of_step
from dplab.measure import CallLog, UnitCalls, sent_bytes, sent_messages


def metered(nbytes):
    """Bytes on the wire per rank of an all-reduce, and of nothing."""
    tensor = torch.full((nbytes // 4,), float(dist.get_rank()))
    dist.all_reduce(tensor)  # connections are made on first use
    return least_on_the_wire(lambda: dist.all_reduce(tensor)), least_on_the_wire(lambda: None)


@pytest.mark.alone
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_ring_all_reduce_moves_what_arithmetic_says(ranks):
    size = 32 * MIB
    measured = run(metered, ranks, size, backend="gloo")
    assert len(set(measured)) == 1, "every rank reports the same"
    [sent, quiet] = measured[0]
    assert sent == pytest.approx(2 * (ranks - 1) / ranks * size, rel=0.02, abs=100_000)
    assert quiet < 100_000


def calls_of_every_kind(length):
    """The log of a call of each operation, of ``length`` float64; bytes and messages sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, parts = torch.ones(length).double(), [torch.ones(length).double() for _ in range(ranks)]
    whole, pair = torch.ones(length * ranks).double(), dist.new_group([ranks - 2, ranks - 1])
    dist.all_reduce(own)  # before the block: not logged
    with CallLog() as log, sent_messages() as sent:
        dist.all_reduce(torch.ones(3, length).double(), op=dist.ReduceOp.MAX)
        dist.reduce_scatter(own, parts)
        dist.all_gather(parts, own)
        dist.broadcast(own, src=1)
        dist.reduce(own, dst=0)
        dist.gather(own, parts if rank == 0 else None, dst=0)
        dist.scatter(own, parts if rank == 0 else None, src=0)
        dist.all_to_all_single(whole, whole.clone())
        dist.barrier()
        handle = dist.isend(own[rank:].fill_(rank), (rank + 1) % ranks)
        dist.recv(parts[0][(rank - 1) % ranks:], (rank - 1) % ranks)
        handle.wait()
        if rank >= ranks - 2:
            other = 2 * ranks - 3 - rank
            send, receive = ((dist.send, dist.recv) if rank < other else (dist.recv, dist.send))
            send(torch.full((2,), 7.0), other, group=pair)
            receive(torch.full((2,), 8.0), other, group=pair)
    dist.all_reduce(own)
    return log, [sent_bytes(call) for call in log.calls], sent


@several
def test_the_log_holds_every_call_with_its_facts_and_what_is_sent_for_it(world_size):
    length = 6 * world_size
    tensor, chunk, others = 8 * length, 8 * 6, world_size - 1
    in_all = [  # of an operation, by all ranks: facts, and the bytes that they send together
        ("all_reduce", (3, length), "MAX", 3 * world_size * 2 * others * chunk),  # 2(N−1) steps
        ("reduce_scatter", (length,), "SUM", world_size * others * tensor),
        ("all_gather", (length,), "", world_size * others * tensor),
        ("broadcast", (length,), "", others * tensor),  # once to each of the others
        ("reduce", (length,), "SUM", others * tensor), ("gather", (length,), "", others * tensor),
        ("scatter", (length,), "", others * tensor),
        ("all_to_all", (length * world_size,), "", world_size * others * tensor),
        ("barrier", (), "", 0)]
    for rank, (log, bytes_sent, messages) in enumerate(
            run(calls_of_every_kind, world_size, length, backend="gloo")):
        following, before = (rank + 1) % world_size, (rank - 1) % world_size
        assert [(call.operation, call.shape, call.reduce_operation) for call in log.calls[:9]] == [
            facts[:3] for facts in in_all]
        assert bytes_sent[:9] == pytest.approx([facts[3] / world_size for facts in in_all])
        assert [call.bytes for call in log.calls[:4]] == [3 * tensor, tensor, tensor, tensor]
        assert {call.dtype for call in log.calls[:8]} == {"float64"}
        sent, received = log.calls[9:11]
        assert (sent.operation, sent.peer, sent.shape) == ("send", following, (length - rank,))
        assert (received.operation, received.peer, received.shape) == (
            "recv", before, (length - before,))
        assert bytes_sent[9:11] == [8 * (length - rank), 0]
        assert [call.time for call in log.calls] == sorted(call.time for call in log.calls)
        assert [call.number for call in log.calls[:8]] == [*range(
            log.calls[0].number, log.calls[0].number + 8)]
        assert log.calls[3].peer == 1 and log.count("all_reduce") == 1
        assert log.count() == len(log.calls) == 11 + 2 * (rank >= world_size - 2)
        assert log.bytes("broadcast") == tensor
        assert log.bytes() == sum(call.bytes for call in log.calls)
        assert (messages[0].to, messages[0].tensor.tolist()) == (
            following, [float(rank)] * (length - rank))
        if rank >= world_size - 2:  # as all ranks count, not as the group does
            first = rank == world_size - 2
            assert (messages[1].to, messages[1].tensor.tolist()) == (
                following if first else before, [7.0 if first else 8.0] * 2)


def noted(blocks, kept, ahead):
    """What torch does where the last layer is left to the root; and the size of a gradient."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(blocks + 1)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    units = list(model)[:-1]
    for module in (*units, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False if kept else None)
    for unit, following in itertools.pairwise(units):
        if ahead:
            unit.set_modules_to_forward_prefetch([following])
    calls = UnitCalls(model)
    output = model(torch.randn(3, 4, requires_grad=True))
    calls.notes.append("|")
    output.clone().sum().backward()
    return calls.notes, model[0].weight.grad.full_tensor().abs().sum().item()


@pytest.mark.slow
def test_units_do_what_the_exercise_foretells_and_torch_still_reduces():
    found = run(lambda: [noted(*case[1:]) for case in CASES], 2, backend="gloo")
    for case, *ranks in zip(CASES, *found, strict=True):
        assert [notes for notes, _ in ranks] == [order_of_step(*case[1:])] * 2, case
        assert ranks[0][1] > 0 and ranks[0][1] == ranks[1][1]
