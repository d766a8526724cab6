"""What a rank's memory holds: over a step, after it, whole units, and within a limit."""

import contextlib
import itertools
import sys
import time
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from wrapped_models import OPTIMIZERS, UNITS, WIDTHS, layers, prepared

from dplab import RankError, run
from dplab.measure import (
    MemoryTimeline,
    WholeUnits,
    after_a_step,
    memory_limit,
    saved_bytes,
    state_bytes,
)
from dplab.measure.memory_limit import _counted
from dplab.measure.storages import CATEGORIES
from dplab.predict import shards
from dplab.predict.memory import States

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDE, BATCH, LAYERS = 40, 6, 4  # layers of WIDE × WIDE; 4 ranks divide them, so nothing is padded
LAYER = 4 * (WIDE * WIDE + WIDE)  # bytes
SHARDED = {"fully_shard": [2, 2], "fully_shard, reshard_after_forward=False": [4, 4],
           "FullyShardedModel": [2, 2]}
"""How many layers are gathered at most in forward and in backward."""


def timeline_of_a_step(implementation):
    model, optimizer = prepared(implementation, OPTIMIZERS["fp32, SGD"], [WIDE] * (LAYERS + 1))
    x = torch.randn(BATCH, WIDE)
    for last in (False, False, True):
        with MemoryTimeline(model, optimizer) as memory:
            with memory.phase("forward"):
                loss = model(x).square().mean()
            with memory.phase("backward"):
                loss.backward()
            with memory.phase("optimizer"):
                optimizer.step()
            if last:
                time.sleep(0.2)  # gloo's thread lets go of the last buffer after wait() returned
        held = state_bytes(model, optimizer)
        optimizer.zero_grad()
    return memory.samples, memory.phases, memory.peak, memory.at_peak, held


def most(samples, category, phase=None):
    return max(sample.bytes[category] for sample in samples
               if phase is None or phase.start <= sample.op <= phase.end)


def test_the_timeline_of_one_process():
    [(samples, phases, peak, at_peak, held)] = run(timeline_of_a_step, 1, "plain")
    assert [phase.name for phase in phases] == ["forward", "backward", "optimizer"]
    forward, backward, optimizer = phases
    assert 0 == forward.start < forward.end == backward.start < backward.end == optimizer.start
    assert [sum(phase.holds(each) for phase in phases) for each in samples if each.op] == [
        1 for each in samples if each.op]
    assert all(list(sample.bytes) == list(CATEGORIES) for sample in samples)
    for times in ([s.op for s in samples], [s.seconds for s in samples]):
        assert times == sorted(times)
    states, output = LAYERS * LAYER, 4 * BATCH * WIDE  # a layer's; the square's is soon freed
    assert {sample.bytes["parameters"] for sample in samples} == {states}
    assert not any(most(samples, each) for each in ("optimizer", "gathered", "communication"))
    kept = [sample.bytes["activations"] for sample in samples if sample.op <= forward.end][-1]
    assert kept == LAYERS * output + 4 and samples[-1].bytes["activations"] == 4  # the loss
    grown = [sample.bytes["gradients"] for sample in samples if sample.op <= backward.end]
    assert grown == sorted(grown) and grown[0] == 0, "gradients only come, while backward goes on"
    assert grown[-1] == states == held.gradients
    assert peak == max(sample.total for sample in samples) == sum(at_peak.values())


def test_the_timelines_of_ddp_and_of_sharded_models():
    kinds = ["DDP", *SHARDED, "ShardedGradientOptimizer"]
    whole, shard = LAYERS * LAYER, LAYERS * LAYER // 4
    for found in run(lambda: {kind: timeline_of_a_step(kind) for kind in kinds}, 4, backend="gloo"):
        for kind, (samples, phases, _, _, held) in found.items():
            kept = shard if kind in SHARDED else whole
            assert {sample.bytes["parameters"] for sample in samples} == {kept}, kind
            gathered = [most(samples, "gathered", phase) / LAYER for phase in phases[:2]]
            assert gathered == SHARDED.get(kind, [0, 0]), kind
            assert samples[0].bytes["gathered"] == samples[-1].bytes["gathered"] == 0
            assert samples[-1].bytes["gradients"] == held.gradients == (
                whole if kind == "DDP" else shard)
            if kind == "DDP":  # its buckets are there all along
                assert {sample.bytes["communication"] for sample in samples} == {whole}
            elif kind in SHARDED:
                assert held == States(shard, shard, 0) and samples[-1].bytes["communication"] == 0
            else:  # AdamW inside; whole gradients live in buckets
                assert 2 * shard < held.optimizer < 2 * shard + LAYER
                assert samples[-1].bytes["optimizer"] == held.optimizer
                assert most(samples, "communication", phases[1]) >= 4 * WIDE * WIDE
                assert most(samples, "gradients", phases[1]) < whole / 2 + LAYER
            if kind.startswith("fully_shard"):  # where whole gradients are some tensor's grad
                rises = [after.bytes["gradients"] - before.bytes["gradients"]
                         for before, after in itertools.pairwise(samples)]
                assert rises.count(4 * WIDE * WIDE) == LAYERS


def peaks_of_a_step(implementation):
    """By `MemoryTimeline`, and by the tracker that torch has for its own use."""
    model, optimizer = prepared(implementation, OPTIMIZERS["fp32"], [WIDE] * (LAYERS + 1))
    x, found = torch.randn(BATCH, WIDE), []
    for watch in ("nobody", "nobody", "ours", "theirs"):
        memory = contextlib.nullcontext()
        if watch == "ours":
            memory = MemoryTimeline(model, optimizer)
        elif watch == "theirs" and implementation.startswith("fully_shard"):
            memory = FSDPMemTracker(model, optimizer)
            memory.track_inputs((x,))
        elif watch == "theirs":
            memory = MemTracker()
            memory.track_external(model, optimizer, x)
        with memory:
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)  # DDP waits in C++, where nobody lets go
        if watch == "ours":
            found.append(memory.peak)
        elif watch == "theirs":
            found.append(memory.get_tracker_snapshot("peak")[x.device]["Total"])
    return found


def test_the_peak_is_what_torchs_own_tracker_finds():
    kinds = ["plain", "DDP", "fully_shard"]

    def peaks():
        wait = dist.Work.wait

        def wait_and_let_go(*arguments):  # as gloo's thread does with a buffer a moment later
            done = wait(*arguments)
            time.sleep(0.01)
            return done

        with mock.patch.object(dist.Work, "wait", wait_and_let_go):
            return [peaks_of_a_step(kind) for kind in kinds]

    for ranks in run(peaks, 2, backend="gloo"):
        for kind, (ours, theirs) in zip(kinds, ranks, strict=True):
            assert ours == theirs, kind


def test_what_mixed_precision_gathers_and_what_a_sharded_tensor_does_inside():
    def gathered():
        model = layers([WIDE] * (LAYERS + 1))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        for _ in range(2):
            with MemoryTimeline(model) as memory:
                model(torch.randn(BATCH, WIDE)).sum().backward()
        with MemoryTimeline(model) as inside, torch.no_grad():
            product = model[0].weight @ model[0].weight  # which gathers one of the two
        return (most(memory.samples, "gathered"), state_bytes(model),
                most(inside.samples, "communication"), product.shape)

    for ours, held, inside, shape in run(gathered, 2, backend="gloo"):
        assert ours == LAYER // 2, "one layer at a time, in bf16"
        assert held == States(LAYERS * LAYER / 2, LAYERS * LAYER / 2, 0)
        assert shape == (WIDE, WIDE) and inside >= 4 * WIDE * WIDE


def test_a_storage_counts_once_while_anyone_holds_it_and_with_the_size_that_it_has():
    model, resize = layers([4, 4]), torch.UntypedStorage.resize_
    shared = torch.zeros(100)
    with pytest.raises(ZeroDivisionError), MemoryTimeline(model) as memory:
        views = [shared[:50] + 0, shared.view(10, 10)]
        views.append(views[0][10:])
        del views[0]
        del views
        first = torch.zeros(1000)
        del first
        second = torch.zeros(500)
        second.untyped_storage().resize_(0)
        second.untyped_storage().resize_(800)
        raise ZeroDivisionError
    held = [sample.total - 4 * 20 - 400 for sample in memory.samples]
    assert held == [-400, 0, 200, 0, 4000, 0, 2000, 0, 800]
    assert memory.samples[-1].bytes["gathered"] == 800 and most(memory.samples, "activations") == (
        4000)
    assert torch.UntypedStorage.resize_ is resize


CASES = [(implementation, precision) for implementation, precisions in {
    "plain": OPTIMIZERS, "DDP": ["fp32"], "ZeroRedundancyOptimizer": ["fp32"],
    "fully_shard": OPTIMIZERS,
}.items() for precision in precisions]


def states_after_steps():
    found = []
    for implementation, precision in CASES:
        model, optimizer = prepared(implementation, OPTIMIZERS[precision])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTHS[0])).square().mean().backward()
            optimizer.step()
        found.append(state_bytes(model, optimizer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_states_are_those_predicted_to_the_byte(ranks):
    measured = run(states_after_steps, ranks, backend="gloo")
    for case, (implementation, precision) in enumerate(CASES):
        way = "DDP" if implementation == "plain" else implementation
        expected = shards.real_states(way, precision, ranks, UNITS)
        assert [rank[case] for rank in measured] == expected, (implementation, precision)


def test_parameters_that_are_tied_frozen_or_unused_count_as_they_are():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False),
                           "frozen": nn.Linear(2, 2), "norm": nn.BatchNorm1d(3)})
    model["b"].weight = model["a"].weight
    model["frozen"].requires_grad_(False)
    model["a"](model["b"](torch.ones(1, 3))).sum().backward()
    assert state_bytes(model) == States(4 * (9 + 6 + 6), 4 * 9, 0)


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


def test_after_a_step_buckets_copies_of_weights_and_what_forward_saved_are_left():
    size = 4 * (5 * 4 + 4 + 4 * 3 + 3)
    assert run(held_under_ddp, 2, backend="gloo") == [[(size, 2 * size), *[(size, size)] * 2]] * 2
    model, optimizer, copies = after_a_step(small(), loss, autocast=True)
    # Backward goes through both layers, but only the second one's weight is on its way to another.
    assert {tensor.dtype for tensor in copies} == {torch.bfloat16}
    assert bytes_of(copies) == 2 * 4 * 3
    assert set(optimizer.state) == set(model.parameters())
    assert after_a_step(small(), loss).others == []
    for rows in (1, 6):  # what goes into the first layer, and into the second one, which ReLU made
        assert saved_bytes(small(), torch.ones(rows, 5)) == 4 * rows * (5 + 4)
        assert saved_bytes(nn.Linear(5, 4, bias=False), torch.ones(rows, 5)) == 4 * rows * 5


def test_a_unit_is_whole_from_its_last_element_until_its_memory_is_written_anew_or_let_go():
    def touched(tensor):
        for _ in range(6):
            tensor.view(-1)

    with WholeUnits([torch.sin(torch.arange(40.0)), torch.cos(torch.arange(40.0)),
                     torch.arange(7.0) + 1]) as seen:
        memory = torch.arange(44.0)  # with padding
        memory[:20].sin_()
        half = seen.operations
        memory[20:].sin_()
        view = memory.view(4, 11)
        touched(view)
        del memory
        seen.mark("a view holds it")
        touched(view)
        del view
        seen.mark("nobody holds it")
        memory = torch.arange(40.0).sin_()
        touched(memory)
        torch.arange(40.0, out=memory)
        memory.cos_()
        touched(memory)
        torch.ones(40)
    first, second, third = seen.spans
    assert [span.unit for span in seen.spans] == [0, 0, 1]
    assert half < first.start < seen.marks["a view holds it"]
    assert first.end == seen.marks["nobody holds it"] < second.start
    assert second.end < third.start < third.end == seen.operations


MB = 10**6


def hold(megabytes, limited):
    """Makes tensors of 1 MB in the block, one after another, and a larger one after it."""
    held = []
    try:
        with limited(32 * MB):
            for _ in range(3):  # what is freed may be held again
                held = None
                held = []
                for _ in range(megabytes):
                    held.append(torch.ones(MB // 4))
    finally:
        after = torch.ones(64 * MB // 4).nbytes
    return len(held), after


@pytest.mark.parametrize("limited", [memory_limit, _counted])
def test_a_rank_with_a_limit_runs_out_of_memory_alone_and_is_as_before_afterwards(limited):
    assert run(hold, 2, 20, limited, backend="gloo") == [(20, 64 * MB)] * 2
    with pytest.raises(RankError) as failure:
        run(hold, 2, 40, limited, backend="gloo")
    assert "memory" in str(failure.value).lower() and failure.value.kind == "raised"
    assert "torch.ones(MB // 4)" in str(failure.value)
