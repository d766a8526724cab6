"""The timeline of a rank's memory over a step."""

import contextlib
import functools
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from wrapped_models import OPTIMIZERS, layers, prepared

from dplab import run
from dplab.measure import MemoryTimeline, state_bytes
from dplab.measure.memory_timeline import CATEGORIES
from dplab.predict import shards
from dplab.predict.activations import activations as kept
from dplab.predict.memory import States, budget
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads import transformer

cloudpickle.register_pickle_by_value(sys.modules[__name__])


WIDE, BATCH = 40, 6  # a layer of WIDE × WIDE; 4 ranks divide it, so that units have no padding
LAYER = 4 * (WIDE * WIDE + WIDE)  # bytes
LAYERS = 4


def timeline_of_a_step(implementation, make_optimizer=OPTIMIZERS["fp32, SGD"]):
    model, optimizer = prepared(implementation, make_optimizer, [WIDE] * (LAYERS + 1))
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


SHARDED = ["fully_shard", "fully_shard, reshard_after_forward=False", "FullyShardedModel"]


@functools.cache
def steps_on_4_ranks():
    """By implementation, what each rank finds."""
    kinds = ["DDP", *SHARDED, "ShardedGradientOptimizer"]
    ranks = run(lambda: {kind: timeline_of_a_step(kind) for kind in kinds}, 4, backend="gloo")
    return {kind: [found[kind] for found in ranks] for kind in kinds}


def most(samples, category, phase=None):
    return max(sample.bytes[category] for sample in samples
               if phase is None or phase.start <= sample.op <= phase.end)


def test_the_timeline_of_one_process():
    [(samples, phases, peak, at_peak, held)] = run(timeline_of_a_step, 1, "plain")
    forward, backward, optimizer = phases
    assert [phase.name for phase in phases] == ["forward", "backward", "optimizer"]
    assert forward.end == backward.start and backward.end == optimizer.start
    assert all(list(sample.bytes) == list(CATEGORIES) for sample in samples)
    assert [s.op for s in samples] == sorted(s.op for s in samples)
    assert [s.seconds for s in samples] == sorted(s.seconds for s in samples)

    states = LAYERS * LAYER
    assert {sample.bytes["parameters"] for sample in samples} == {states}
    assert not any(sample.bytes[category] for sample in samples
                   for category in ("optimizer", "gathered", "communication"))
    output = 4 * BATCH * WIDE  # a layer's; the square's is freed when the mean is there
    at_end_of_forward = [sample for sample in samples if sample.op <= forward.end][-1]
    assert at_end_of_forward.bytes["activations"] == LAYERS * output + 4
    assert samples[-1].bytes["activations"] == 4, "the loss"
    assert samples[0].bytes["gradients"] == 0
    grown = [sample.bytes["gradients"] for sample in samples if sample.op <= backward.end]
    assert grown == sorted(grown), "gradients only come, while backward goes on"
    assert grown[-1] == states == held.gradients
    assert peak == max(sample.total for sample in samples) == sum(at_peak.values())


def test_ddp_holds_its_buckets_all_along():
    for samples, *_ in steps_on_4_ranks()["DDP"]:
        assert {sample.bytes["communication"] for sample in samples} == {LAYERS * LAYER}


@pytest.mark.parametrize(("implementation", "gathered"),
                         list(zip(SHARDED, ([2, 2], [4, 4], [2, 2]), strict=True)))
def test_sharded_parameters_are_gathered_and_freed(implementation, gathered):
    for samples, phases, _, _, held in steps_on_4_ranks()[implementation]:
        shard = LAYERS * LAYER // 4
        assert {sample.bytes["parameters"] for sample in samples} == {shard}
        assert held == States(shard, shard, 0)
        assert samples[0].bytes["gathered"] == samples[-1].bytes["gathered"] == 0
        assert [most(samples, "gathered", phase) / LAYER for phase in phases[:2]] == gathered
        if implementation.startswith("fully_shard"):  # where whole gradients are some tensor's grad
            rises = [after.bytes["gradients"] - before.bytes["gradients"]
                     for before, after in itertools.pairwise(samples)]
            assert rises.count(4 * WIDE * WIDE) == LAYERS
        assert samples[-1].bytes["gradients"] == shard
        assert samples[-1].bytes["communication"] == 0


def test_whole_gradients_of_zero_2_live_in_buckets_and_shards_remain():
    for samples, phases, _, _, held in steps_on_4_ranks()["ShardedGradientOptimizer"]:
        whole = LAYERS * LAYER
        assert {sample.bytes["parameters"] for sample in samples} == {whole}
        assert held.gradients == whole // 4 == samples[-1].bytes["gradients"]
        assert most(samples, "communication", phases[1]) >= 4 * WIDE * WIDE
        assert most(samples, "gradients", phases[1]) < whole / 2 + LAYER


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


def letting_go(wait):
    """gloo's thread lets go of a buffer a moment after `wait` has returned: two steps whose peaks
    are compared both give it that moment."""
    def wait_and_let_go(*arguments):
        done = wait(*arguments)
        time.sleep(0.01)
        return done

    return wait_and_let_go


def test_the_peak_is_what_torchs_own_tracker_finds():
    kinds = ["plain", "DDP", "fully_shard", "fully_shard, reshard_after_forward=False"]

    def peaks():
        with mock.patch.object(dist.Work, "wait", letting_go(dist.Work.wait)):
            return [peaks_of_a_step(kind) for kind in kinds]

    for ranks in run(peaks, 2, backend="gloo"):
        for kind, (ours, theirs) in zip(kinds, ranks, strict=True):
            assert ours == theirs, kind


def test_mixed_precision_gathers_half_the_bytes_and_the_root_nothing():
    def gathered():
        model = layers([WIDE] * (LAYERS + 1))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        for _ in range(2):
            with MemoryTimeline(model) as memory:
                model(torch.randn(BATCH, WIDE)).sum().backward()
        return most(memory.samples, "gathered"), state_bytes(model)

    for ours, held in run(gathered, 2, backend="gloo"):
        assert ours == LAYER // 2, "one layer at a time, in bf16"
        assert held == States(LAYERS * LAYER / 2, LAYERS * LAYER / 2, 0)


def test_what_a_sharded_tensor_does_inside_is_seen():
    def most_while_gathering():
        model = layers([WIDE, WIDE])
        fully_shard(model)
        with MemoryTimeline(model) as memory, torch.no_grad():
            product = model[0].weight @ model[0].weight  # which gathers one of the two
        return most(memory.samples, "communication"), product.shape

    for held, shape in run(most_while_gathering, 2, backend="gloo"):
        assert shape == (WIDE, WIDE) and held >= 4 * WIDE * WIDE


SMALL_GPT = TransformerConfig(layers=6, d_model=64, heads=4, d_ff=256, vocabulary=97, context=32)


def step_of_a_transformer(stage):
    model = transformer.Transformer(SMALL_GPT)
    if stage == "ZeRO-3":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(97, (8, 33))
    for _ in range(3):
        with MemoryTimeline(model, optimizer) as memory:
            logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
        held = state_bytes(model, optimizer)
        optimizer.zero_grad()
    return memory.peak, most(memory.samples, "activations"), held


@functools.cache
def steps_of_a_transformer():
    return run(lambda: {stage: step_of_a_transformer(stage) for stage in ("DDP", "ZeRO-3")}, 2,
               backend="gloo")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "implementation"), [("DDP", "DDP"), ("ZeRO-3", "fully_shard")])
def test_a_transformers_step_peaks_where_its_budget_says(stage, implementation):
    predicted = budget(SMALL_GPT, 2, 80e9, stage=stage, precision="fp32", batch=8, sequence=32)
    states = shards.real_states(implementation, "fp32", 2, SMALL_GPT.units)
    most_activations = kept(SMALL_GPT, 8, 32, element=4).total
    measured = [steps[stage] for steps in steps_of_a_transformer()]
    for (peak, activations, held), expected in zip(measured, states, strict=True):
        assert held == expected
        assert activations == pytest.approx(most_activations, rel=0.01)
        assert peak == pytest.approx(predicted.total, rel=0.03)


# What follows needs no other rank.

def test_a_storage_counts_once_and_its_views_do_not():
    model = layers([4, 4])
    shared = torch.zeros(100)
    with MemoryTimeline(model) as memory:
        views = [shared[:50] + 0, shared.view(10, 10)]
        views.append(views[0][10:])
        del views[0]
        del views
    assert memory.samples[-1].total == 4 * 20 + 400, "the shared one, and no copy"
    assert most(memory.samples, "activations") == 200


def test_what_is_freed_is_noticed_at_once_and_a_resized_storage_too():
    model = layers([4, 4])
    with MemoryTimeline(model) as memory:
        first = torch.zeros(1000)
        del first
        second = torch.zeros(500)
        second.untyped_storage().resize_(0)
        second.untyped_storage().resize_(800)
    assert [sample.total - 80 for sample in memory.samples] == [0, 4000, 0, 2000, 0, 800]
    assert memory.samples[-1].bytes["gathered"] == 800
    assert torch.zeros(2).untyped_storage().resize_(40).nbytes() == 40


def test_recomputed_activations_are_activations():
    model = layers([WIDE] * 4)

    def most_in_forward(use_checkpoints):
        x = torch.randn(BATCH, WIDE, requires_grad=True)
        with MemoryTimeline(model) as memory:
            for layer in model:
                deep = nn.Sequential(layer, nn.GELU(), nn.GELU())
                x = checkpoint(deep, x, use_reentrant=False) if use_checkpoints else deep(x)
            end = memory._op
            x.sum().backward()
        kept = [sample for sample in memory.samples if sample.op <= end][-1].bytes["activations"]
        return kept, max(sample.bytes["activations"] for sample in memory.samples
                         if sample.op > end + 3)

    one = 4 * BATCH * WIDE
    assert most_in_forward(False)[0] == 3 * 3 * one
    kept, in_backward = most_in_forward(True)
    assert kept == 3 * one and in_backward > kept


def test_optimizer_state_and_that_of_an_optimizer_inside_are_told_from_the_rest():
    class Wrapped(torch.optim.Optimizer):
        def __init__(self, parameters):
            parameters = list(parameters)
            self.masters = [nn.Parameter(p.detach().double()) for p in parameters]
            self.inner = torch.optim.AdamW(self.masters)
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self):
            for master, own in zip(self.masters, self.param_groups[0]["params"], strict=True):
                master.grad = own.grad.double()
            self.inner.step()

    model = layers([5, 6])
    optimizer = Wrapped(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    with MemoryTimeline(model, optimizer) as memory:
        optimizer.step()
    count = 5 * 6 + 6
    masters, moments, steps = 8 * count, 2 * 8 * count, 2 * 4
    assert memory.samples[-1].bytes["optimizer"] == masters + moments + steps
    assert memory.samples[-1].bytes["gradients"] == (4 + 8) * count
    assert state_bytes(model, optimizer) == States(4 * count, 12 * count, masters + moments + steps)


def test_one_timeline_at_a_time_and_everything_is_put_back():
    resize = torch.UntypedStorage.resize_
    with MemoryTimeline(layers([2, 2])):
        with (pytest.raises(RuntimeError, match="active already"),
              MemoryTimeline(layers([2, 2]))):
            pass
        assert torch.UntypedStorage.resize_ is not resize
    assert torch.UntypedStorage.resize_ is resize
    with pytest.raises(ZeroDivisionError), MemoryTimeline(layers([2, 2])) as memory:
        torch.ones(3) / (1 // 0)
    assert torch.UntypedStorage.resize_ is resize and memory.peak > 0
    with MemoryTimeline(nn.Sequential()) as memory:
        pass
    assert memory.peak == 0
