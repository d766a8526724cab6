"""The recorded step of two A100s: its all-reduces are those that DDP's rule gives ResNet-50."""

import itertools
import json

import gpu_step
from sandbox import ROOT

from dplab.exercises.what_ddp_sends import what_ddp_sends

RECORDED = json.loads((ROOT / "chapters" / "data" / "gpu_step.json").read_text(encoding="utf-8"))


def test_each_step_sends_what_the_rule_says():
    sizes = [4 * elements for elements in gpu_step.resnet50()]
    predicted = what_ddp_sends(sizes, list(reversed(range(len(sizes)))), iteration=4)
    assert len(RECORDED["collectives"]) == 3
    for collectives in RECORDED["collectives"]:
        assert [4 * elements for *_, name, elements in collectives
                if name == "allreduce"] == predicted


def test_the_parameters_are_all_of_the_model():
    assert RECORDED["parameters"] == gpu_step.resnet50()
    assert sum(RECORDED["parameters"]) == 25_557_032  # torchvision's own count


def test_kernels_start_after_their_launch_and_do_not_overlap_on_their_stream():
    end = 0.0
    for launched, start, duration in RECORDED["kernels"]:
        assert launched < start
        assert start >= end - 0.2  # µs are rounded to a tenth
        end = start + duration


def test_the_cpu_fills_the_step_and_nothing_is_counted_twice():
    spans = RECORDED["cpu"]
    assert [name for name, *_ in spans] == ["zero_grad", "buffers", "forward", "backward",
                                            "optimizer"]
    for (_, _, end), (_, start, _) in itertools.pairwise(spans):
        assert start >= end
    assert sum(end - start for _, start, end in spans) > 0.95 * RECORDED["step_us"]
