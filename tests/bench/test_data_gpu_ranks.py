"""The recorded steps of two NCCL ranks on a GPU, and what the script makes of a trace."""

import itertools
import json
import statistics

import gpu_ranks
import pytest
from sandbox import ROOT

from dplab.exercises.predict_step import predict_step
from dplab.exercises.what_ddp_sends import what_ddp_sends
from dplab.predict.step import Layer

RECORDED = json.loads((ROOT / "chapters" / "data" / "gpu_ranks.json").read_text(encoding="utf-8"))
BYTES = [2 * elements for _, elements in RECORDED["parameters"]]


def by_readiness(run):
    return sorted(range(len(BYTES)), key=run["ready"].__getitem__)


@pytest.mark.parametrize("samples", gpu_ranks.BATCHES)
def test_each_rank_sends_what_the_rule_says(samples):
    for rank in RECORDED["ranks"]:
        run = rank["steps"][samples]
        assert [2 * elements for *_, elements in run["trace"]["collectives"]] == what_ddp_sends(
            BYTES, by_readiness(run), iteration=9)


def test_the_scheduler_predicts_the_step_of_each_bucket_size():
    """Chapter 05 says: within 4 %."""
    rank = RECORDED["ranks"][0]
    run, alone = rank["steps"]["16"], rank["all_reduce"]
    times = [run["forward"], *(run["ready"][place] for place in by_readiness(run))]
    layers = [Layer(0, until - since, BYTES[place]) for place, since, until
              in zip(by_readiness(run), times[:-1], times[1:], strict=True)][::-1]
    latency = statistics.median(alone["4096"]) / 2
    bandwidth = 2**28 / statistics.median(alone[str(2**28)])
    for cap, seconds in rank["caps"].items():
        backward, _ = predict_step(layers, int(cap) * 2**20, 2, bandwidth, latency)
        predicted = run["forward"] + backward + run["end"] - run["backward"]
        assert predicted == pytest.approx(statistics.median(seconds), rel=0.04)


def test_collectives_of_a_rank_follow_one_another_and_end_together_on_both():
    for samples in gpu_ranks.BATCHES:
        ends = []
        for rank in RECORDED["ranks"]:
            trace = rank["steps"][samples]["trace"]
            spans = [(trace["zero"] + start, trace["zero"] + start + duration)
                     for _, start, duration, *_ in trace["collectives"]]
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            ends.append([end for _, end in spans])
        assert ends[0] == pytest.approx(ends[1], rel=0, abs=6_000)  # µs


def event(name, category, start, duration, **args):
    return {"name": name, "cat": category, "ts": 5e9 + start, "dur": duration, "args": args}


def test_a_trace_in_short():
    """Kernels that lie near each other are one; those launched before the step do not count."""
    events = [
        event("aten::mm", "kernel", 3.0, 9.0, correlation=1),
        event("step", "user_annotation", 10.0, 900.0),
        event("forward", "user_annotation", 20.0, 30.0),
        event("cudaLaunchKernel", "cuda_runtime", 30.0, 2.0, correlation=2),
        event("cudaLaunchKernel", "cuda_runtime", 40.0, 2.0, correlation=3),
        event("backward", "user_annotation", 60.0, 50.0),
        event("cuLaunchKernelEx", "cuda_driver", 70.0, 2.0, correlation=4),
        event("cudaLaunchKernel", "cuda_runtime", 90.0, 2.0, correlation=5),
        event("gemm", "kernel", 130.0, 40.0, correlation=2),
        event("gelu", "kernel", 175.0, 25.0, correlation=3),
        event("gemm", "kernel", 300.0, 50.0, correlation=4),
        event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", 310.0, 80.0, correlation=5,
              **{"Collective name": "allreduce", "In msg nelems": 77}),
    ]
    short = gpu_ranks.in_short(events)
    assert short["compute"] == [["forward", 120.0, 70.0], ["backward", 290.0, 50.0]]
    assert short["collectives"] == [["allreduce", 300.0, 80.0, 80.0, 77]]
    assert short["cpu"] == [["forward", 10.0, 30.0], ["backward", 50.0, 50.0]]
    assert (short["step"], short["kernels"], short["queued"]) == (900.0, 3, 135.0)
