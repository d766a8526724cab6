"""Dry runs: equal to real ranks, to arithmetic, and, block by block, to themselves."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_transformers import GPT, LLAMA
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dplab import dryrun, run
from dplab.dryrun.fake_step import Setup, dry_run
from dplab.measure import CallLog, MemoryTimeline, state_bytes
from dplab.predict import shards
from dplab.predict.activations import activations
from dplab.predict.catalogue import MODELS
from dplab.workloads.transformer import Transformer

LLAMA_70B = MODELS["Llama-3 70B"]
STATES = {"fp32": "fp32", "mixed": "fp32 shards, bf16 gathered", "bf16": "pure bf16"}
BATCH = 2


# Real ranks

def real_step(strategy, config, precision, units, reshard, shard_ranks=None):
    """Peak and bytes by category then, states, and calls of a real step, once all is warm.

    Of four steps the one with the lowest peak: gloo's threads may keep a tensor for a moment.
    """
    model = wrapped = Transformer(config)
    if strategy == "fully_shard":
        mixed = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        policy = mixed if precision == "mixed" else fsdp.MixedPrecisionPolicy()
        blocks = {"blocks": [*model.blocks], "root": [], 2: [[*model.blocks[:2]], model.blocks[2]]}
        mesh = shard_ranks and init_device_mesh(
            "cpu", (dist.get_world_size() // shard_ranks, shard_ranks),
            mesh_dim_names=("replicate", "shard"))
        for unit in [*blocks[units], model]:
            fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = (ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
                 if strategy == "ZeRO-1" else torch.optim.AdamW(model.parameters()))
    with torch.no_grad():
        tokens = torch.zeros(BATCH, config.context, dtype=torch.int64)
        targets = torch.zeros_like(tokens)

    def step():
        targets.detach()  # what no operation has used yet is not counted
        F.cross_entropy(wrapped(tokens).flatten(0, 1).float(), targets.flatten()).backward()
        optimizer.step()

    for _ in range(1 if strategy == "fully_shard" else 2):  # DDP's buckets change after the first
        step()
        optimizer.zero_grad()
    found = []
    for _ in range(4):
        with CallLog() as log, MemoryTimeline(model, optimizer) as memory:
            step()
        found.append((memory.peak, memory.at_peak, state_bytes(model, optimizer),
                      [(call.operation, call.bytes, call.dtype) for call in log.calls]))
        optimizer.zero_grad()
    return min(found, key=lambda each: each[0])


def setup(model, world_size=4, strategy="fully_shard", precision="mixed", checkpointing=False,
          optimizer=torch.optim.AdamW, full=True, sequence=64, batch=BATCH, **more):
    return Setup(strategy, model, world_size, batch, sequence, precision, checkpointing, optimizer,
                 full=full, **more)


def dry_runs(*jobs):
    """All in one process."""
    return run(lambda: [dry_run(each) for each in jobs], 1, backend="gloo", timeout=300)[0]


CASES = {
    2: [("fully_shard", GPT, "fp32", "blocks", None), ("fully_shard", GPT, "mixed", "root", None),
        ("fully_shard", GPT, "fp32", "blocks", False),
        ("fully_shard", LLAMA, "mixed", "blocks", None),
        ("DDP", GPT, "fp32", None, None), ("ZeRO-1", GPT, "fp32", None, None)],
    4: [("fully_shard", GPT, "mixed", 2, True), ("fully_shard", GPT, "mixed", "blocks", None, 2)]}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", CASES)
def test_a_step_is_that_of_real_ranks(world_size):
    """States and collectives, and, where the kernels are the same, the peak, to the byte."""
    cases = CASES[world_size]
    real = run(lambda: [real_step(*case) for case in cases], world_size, backend="gloo",
               timeout=300)
    dry_steps = dry_runs(*[
        setup(config, strategy=strategy, world_size=world_size, precision=precision,
              **({} if units is None else {"units": units, "reshard_after_forward": reshard,
                                           "shard_ranks": shard_ranks[0] if shard_ranks else None}))
        for strategy, config, precision, units, reshard, *shard_ranks in cases])
    for case, dry, *ranks in zip(cases, dry_steps, *real, strict=True):
        peak, at_peak, _, calls = ranks[0]
        assert dry.states == max((states for _, _, states, _ in ranks), key=lambda each: each.total)
        shared = ("all_gather", "reduce_scatter")  # a call hands over one part of these
        assert calls == [
            (each.operation, each.bytes // (each.ranks if each.operation in shared else 1),
             each.dtype) for each in dry.collectives
            if case[0] == "fully_shard" or each.operation == "broadcast"]  # DDP's are C++'s
        if case[:2] == ("fully_shard", GPT):
            assert (dry.peak, dry.at_peak) == (peak, at_peak), case
        if case[0] == "DDP":
            [all_reduce] = dry.collectives
            assert (all_reduce.operation, all_reduce.phase) == ("all_reduce", "backward")
            assert all_reduce.bytes == 4 * GPT.parameters


# Arithmetic

@pytest.mark.slow
def test_states_equal_the_prediction():
    cases = [(strategy, config, precision, world_size)
             for strategy in ("fully_shard", "DDP", "ZeRO-1")
             for config, precision, world_size in (
                 (replace(GPT, layers=1), "fp32", 3), (replace(LLAMA, layers=1), "bf16", 7),
                 (replace(GPT, layers=1), "mixed", 1))]
    cases.append(("fully_shard", GPT, "mixed", 1000))  # more ranks than most tensors have rows
    found = dry_runs(*[setup(config, world_size, strategy, precision)
                       for strategy, config, precision, world_size in cases])
    names = {"ZeRO-1": "ZeroRedundancyOptimizer"}
    for (strategy, config, precision, world_size), dry in zip(cases, found, strict=True):
        predicted = shards.real_states(names.get(strategy, strategy), STATES[precision],
                                       world_size, config.units)
        assert dry.states == max(predicted, key=lambda states: states.total)
        assert dry.parameters == config.parameters


def test_70b_on_8_ranks():
    dry = dryrun.fully_shard(LLAMA_70B, 8, sequence=4096, full=False)
    assert dry.states.total == pytest.approx(16 * LLAMA_70B.parameters / 8, rel=0.01)
    assert (dry.count("all_gather"), dry.count("reduce_scatter")) == (161, 81)
    end = next(phase.end for phase in dry.phases if phase.name == "forward")
    kept = max(sample.bytes["activations"] for sample in dry.samples if sample.op <= end)
    assert kept == pytest.approx(activations(LLAMA_70B, 1, 4096).total, rel=0.05)
    assert (dry.blocks, dry.traced_blocks, dry.extrapolated) == (80, 5, True)
    assert "5 of 80 blocks traced" in str(dry)


def test_what_is_kept_for_backward_is_what_arithmetic_says():
    config = replace(LLAMA_70B, layers=12, vocabulary=1000)
    plain, again = dry_runs(*[setup(config, checkpointing=checkpointing, full=False, sequence=4096,
                                  batch=1) for checkpointing in (False, True)])
    for dry, recompute in ((plain, "none"), (again, "full")):
        begin = next(phase.start for phase in dry.phases if phase.name == "backward")
        kept = [sample.bytes["activations"] for sample in dry.samples if sample.op <= begin][-1]
        expected = activations(config, 1, 4096, recompute=recompute)
        assert kept == pytest.approx(expected.total - expected.recomputed, rel=0.01)


def test_a_collective_counts_what_a_ring_sends():
    dry = dry_runs(setup(GPT, precision="fp32", reshard_after_forward=True))[0]
    assert dry.sent_bytes == pytest.approx(3 * 3 / 4 * 4 * GPT.parameters, rel=0.01)


def test_copies_of_shards_add_up_their_gradients_with_an_all_reduce():
    dry = dry_runs(setup(GPT, 8, precision="fp32", shard_ranks=4))[0]
    ranks = {(each.operation, each.ranks) for each in dry.collectives}
    assert ranks == {("all_gather", 4), ("reduce_scatter", 4), ("all_reduce", 2)}
    shard = dry.bytes("all_reduce")  # which travels whole among two
    assert shard == dry.bytes("reduce_scatter") / 4 == pytest.approx(GPT.parameters, rel=0.01)
    sent = 3 / 4 * (dry.bytes("all_gather") + dry.bytes("reduce_scatter")) + 2 * 1 / 2 * shard
    assert dry.sent_bytes == sent


def test_buckets_that_are_the_gradients_take_no_room_of_their_own():
    plain, views = dry_runs(*[setup(GPT, strategy="DDP", precision="fp32", bucket_views=flag)
                              for flag in (False, True)])
    for dry, name in ((plain, "communication"), (views, "gradients")):
        assert min(sample.bytes[name] for sample in dry.samples) == 4 * GPT.parameters
    assert max(sample.bytes["communication"] for sample in views.samples) == 0


# A few blocks in place of all

@pytest.mark.slow
def test_few_blocks_stand_for_all():
    cases = [(replace(LLAMA, layers=8), {}), (replace(GPT, layers=7), {"checkpointing": True}),
             (replace(GPT, layers=15), {"units": 2, "optimizer": torch.optim.SGD}),
             (replace(GPT, layers=6), {"reshard_after_forward": False, "precision": "bf16"})]
    found = iter(dry_runs(*[setup(config, full=full, **more) for config, more in cases
                            for full in (True, False)]))
    for (config, _), whole, few in zip(cases, found, found, strict=True):
        assert few.traced_blocks < few.blocks == whole.traced_blocks == config.layers
        assert few.samples == whole.samples
        assert few.phases == whole.phases
        assert few.collectives == whole.collectives
        assert (few.states, few.parameters) == (whole.states, whole.parameters)



@pytest.mark.slow
def test_blocks_that_do_not_repeat_are_all_traced():
    foreach = functools.partial(torch.optim.AdamW, foreach=True)
    variants = ({"optimizer": foreach}, {"units": "root"},
                {"units": lambda model: list(model.blocks[4:])})
    for dry in dry_runs(*[setup(replace(GPT, layers=6), full=False, **more) for more in variants]):
        assert (dry.traced_blocks, dry.blocks, dry.extrapolated) == (6, 6, False)
        assert "traced in full" in str(dry)


# A model of one's own

def five_layers():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)])


def rows():
    return torch.zeros(32, 64)


def all_but_the_head(model):
    return list(model[:4])


def test_gathers_of_a_policy():
    policies = [
        (all_but_the_head, True, 10, 5), (all_but_the_head, None, 9, 5),
        (all_but_the_head, False, 5, 5), ("root", None, 1, 1), (nn.Linear, None, 10, 5),
        (lambda model: [model[0], [model[1], model[2]]], None, 5, 3)]
    runs = dry_runs(*[setup(five_layers, precision="fp32", inputs=rows, units=units,
                            reshard_after_forward=reshard) for units, reshard, *_ in policies])
    for dry, (units, reshard, *expected) in zip(runs, policies, strict=True):
        found = [dry.count("all_gather"), dry.count("reduce_scatter")]
        assert found == expected, (units, reshard)
        assert dry.bytes("reduce_scatter") == 4 * dry.parameters, (units, reshard)


def test_the_copies_that_autocast_makes_of_weights_count_as_gathered():
    dry = dry_runs(setup(LLAMA, strategy="DDP", precision="mixed"))[0]
    linear = [each for each in Transformer(LLAMA).modules() if isinstance(each, torch.nn.Linear)]
    cast = 2 * sum(layer.weight.numel() for layer in linear)  # to bf16; LLAMA has no biases
    assert max(sample.bytes["gathered"] for sample in dry.samples) == cast
