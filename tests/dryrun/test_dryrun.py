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

from dplab import RankError, dryrun, run
from dplab.dryrun.fake_step import dry_run
from dplab.dryrun.setup import Setup
from dplab.measure import CallLog, MemoryTimeline, state_bytes
from dplab.predict import shards
from dplab.predict.activations import activations
from dplab.predict.catalogue import MODELS
from dplab.workloads.transformer import Transformer

LLAMA_70B = MODELS["Llama-3 70B"]
BATCH = 2


def setup(model, world_size=4, strategy="fully_shard", batch=BATCH, **more):
    return Setup(strategy, model, world_size, batch, **more)


def dry_runs(*jobs):
    """All in one process."""
    return run(lambda: [dry_run(each) for each in jobs], 1, backend="gloo", timeout=300)[0]


# --- real ranks -----------------------------------------------------------------------------------

def real_step(strategy, config, precision, units, reshard, shard_ranks=None):
    """Peak and bytes by category then, states, and calls of a real step, once all is warm.

    Where the peak counts, it is the lowest of three steps: gloo's threads may keep a tensor for a
    moment.
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
    for _ in range(3 if (strategy, config) == ("fully_shard", GPT) else 1):
        with CallLog() as log, MemoryTimeline(model, optimizer) as memory:
            step()
        found.append((memory.peak, memory.at_peak, state_bytes(model, optimizer),
                      [(call.operation, call.bytes, call.dtype) for call in log.calls]))
        optimizer.zero_grad()
    return min(found, key=lambda each: each[0])


CASES = {
    2: [("fully_shard", GPT, "mixed", "root", None), ("fully_shard", GPT, "fp32", "blocks", False),
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
        setup(config, world_size, strategy, precision=precision,
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


# --- arithmetic -----------------------------------------------------------------------------------

@pytest.mark.slow
def test_states_equal_the_prediction():
    predicted_as = {"fp32": "fp32", "mixed": "fp32 shards, bf16 gathered", "bf16": "pure bf16"}
    cases = [(strategy, config, precision, world_size)
             for strategy in ("fully_shard", "DDP", "ZeRO-1")
             for config, precision, world_size in (
                 (replace(GPT, layers=1), "fp32", 3), (replace(LLAMA, layers=1), "bf16", 7))]
    cases.append(("fully_shard", GPT, "mixed", 1000))  # more ranks than most tensors have rows
    found = dry_runs(*[setup(config, world_size, strategy, precision=precision)
                       for strategy, config, precision, world_size in cases])
    for (strategy, config, precision, world_size), dry in zip(cases, found, strict=True):
        name = "ZeroRedundancyOptimizer" if strategy == "ZeRO-1" else strategy
        predicted = shards.real_states(name, predicted_as[precision], world_size, config.units)
        assert dry.states == max(predicted, key=lambda states: states.total)
        assert dry.parameters == config.parameters


def test_70b_on_8_ranks():
    dry = dryrun.fully_shard(LLAMA_70B, 8, sequence=4096, full=False)
    assert dry.states.total == pytest.approx(16 * LLAMA_70B.parameters / 8, rel=0.01)
    assert (dry.count("all_gather"), dry.count("reduce_scatter")) == (161, 81)
    end = next(phase.end for phase in dry.phases if phase.name == "forward")
    kept = max(sample.bytes["activations"] for sample in dry.samples if sample.op <= end)
    assert kept == pytest.approx(activations(LLAMA_70B, 1, 4096).total, rel=0.05)
    assert "5 of 80 blocks traced" in str(dry)


def test_what_is_held_for_a_while_is_what_arithmetic_says():
    """What backward needs; what HSDP adds up; DDP's buckets; and autocast's copies of weights."""
    config = replace(LLAMA_70B, layers=12, vocabulary=1000)
    whole, again, copies, plain, views, cast = dry_runs(
        *[setup(config, checkpointing=checkpointing, full=False, sequence=4096, batch=1)
          for checkpointing in (False, True)],
        setup(GPT, 8, precision="fp32", shard_ranks=4),
        *[setup(GPT, strategy="DDP", precision="fp32", bucket_views=flag)
          for flag in (False, True)],
        setup(LLAMA, strategy="DDP", precision="mixed"))
    for dry, recompute in ((whole, "none"), (again, "full")):
        begin = next(phase.start for phase in dry.phases if phase.name == "backward")
        kept = [sample.bytes["activations"] for sample in dry.samples if sample.op <= begin][-1]
        expected = activations(config, 1, 4096, recompute=recompute)
        assert kept == pytest.approx(expected.total - expected.recomputed, rel=0.01)

    ranks = {(each.operation, each.ranks) for each in copies.collectives}
    assert ranks == {("all_gather", 4), ("reduce_scatter", 4), ("all_reduce", 2)}
    shard = copies.bytes("all_reduce")  # which travels whole among two
    assert shard == copies.bytes("reduce_scatter") / 4 == pytest.approx(GPT.parameters, rel=0.01)

    def least_and_most(dry, category):
        held = [sample.bytes[category] for sample in dry.samples]
        return min(held), max(held)

    assert least_and_most(plain, "communication")[0] == 4 * GPT.parameters
    assert least_and_most(views, "gradients")[0] == 4 * GPT.parameters
    assert least_and_most(views, "communication")[1] == 0
    linear = [each for each in Transformer(LLAMA).modules() if isinstance(each, nn.Linear)]
    in_bf16 = 2 * sum(layer.weight.numel() for layer in linear)  # LLAMA has no biases
    assert least_and_most(cast, "gathered")[1] == in_bf16


# --- a few blocks in place of all -----------------------------------------------------------------

@pytest.mark.slow
def test_few_blocks_stand_for_all():
    cases = [(replace(LLAMA, layers=7), {"checkpointing": True}),
             (replace(GPT, layers=15), {"units": 2, "optimizer": torch.optim.SGD}),
             (replace(GPT, layers=7), {"reshard_after_forward": False, "precision": "bf16"})]
    found = iter(dry_runs(*[setup(config, full=full, **more) for config, more in cases
                            for full in (True, False)]))
    for (config, _), whole, few in zip(cases, found, found, strict=True):
        assert few.traced_blocks < few.blocks == whole.traced_blocks == config.layers
        for each in ("samples", "phases", "collectives", "states", "parameters"):
            assert getattr(few, each) == getattr(whole, each), each


@pytest.mark.slow
def test_blocks_that_do_not_repeat_are_all_traced():
    foreach = functools.partial(torch.optim.AdamW, foreach=True)
    variants = ({"optimizer": foreach}, {"units": "root"},
                {"units": lambda model: list(model.blocks[4:])})
    for dry in dry_runs(*[setup(replace(GPT, layers=6), full=False, **more) for more in variants]):
        assert dry.traced_blocks == dry.blocks == 6
        assert "traced in full" in str(dry)


# --- a model of one's own -------------------------------------------------------------------------

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


class Sorter(nn.Module):
    def __init__(self, question):
        super().__init__()
        self.layer, self.question = nn.Linear(64, 64), question

    def forward(self, x):
        x = self.layer(x)
        if self.question == "item" and x.sum().item() > 0:
            return -x
        if self.question == "nonzero":
            return x[x.nonzero()[:, 0]]
        return x @ torch.ones(3, 3)


@pytest.mark.parametrize(("strategy", "question", "operator", "line"), [
    (functools.partial(dryrun.fully_shard, units="root"), "item", "_local_scalar_dense",
     "x.sum().item()"), (dryrun.ddp, "nonzero", "nonzero", "x.nonzero()")])
def test_a_question_about_values_names_the_operator_and_the_line(strategy, question, operator,
                                                                 line):
    with pytest.raises(dryrun.UnsupportedOperator, match=operator) as caught:
        strategy(lambda: Sorter(question), 4, inputs=rows)
    assert line in str(caught.value) and "test_dryrun.py" in str(caught.value)


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: dryrun.fully_shard(GPT, 2, precision="fp8"), ValueError, "no precision 'fp8'"),
    (lambda: dryrun.fully_shard(GPT, 8, shard_ranks=3), ValueError, "do not divide 8 ranks"),
    (lambda: dryrun.fully_shard(five_layers(), 2), TypeError, "makes an nn.Module"),
    (lambda: dryrun.fully_shard(five_layers, 2), TypeError, "needs inputs"),
    (lambda: dryrun.fully_shard(five_layers, 2, inputs=rows, units=nn.Conv2d), ValueError,
     "no units for .*Conv2d"),
    (lambda: dryrun.ddp(lambda: Sorter("shape"), 4, inputs=rows), RankError,
     r"test_dryrun\.py, in forward"),
])
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_two_runs_are_equal_and_the_callers_process_group_is_left_alone(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1,
                            store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        first, second = (dryrun.fully_shard(GPT, 3) for _ in range(2))
        assert first.samples == second.samples
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
