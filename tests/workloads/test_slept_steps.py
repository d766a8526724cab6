"""The job that sleeps in place of computing: its spans, its calls, and the parts put in it."""

import time

import pytest

import dplab
from dplab.measure import EmulatedLink, aligned, split_time
from dplab.workloads.slept_steps import Parts, Sizes, Worker, traced_steps

SIZES = Sizes(layers=3, forward=0.004, backward=0.010, optimizer=0.005, bucket_bytes=4000,
              batches=7)


@pytest.mark.slow
def test_a_step_has_a_kernel_for_each_layer_and_a_call_for_each_bucket():
    ranks = dplab.run(traced_steps, 2, Parts(), SIZES, backend="gloo", link=EmulatedLink(1e6))
    assert [len(steps) for steps in ranks] == [3, 3]  # 7 batches for 2 ranks; one is left over
    for step in list(zip(*ranks, strict=True))[1:]:
        for spans in aligned(step):
            names = [span.name for span in spans]
            assert [names.count(name) for name in ("data", "forward", "backward", "all_reduce",
                                                   "optimizer")] == [1, 3, 3, 3, 1]
        for kinds in split_time(aligned(step)):
            assert kinds["computing"] == pytest.approx(0.047, rel=0.3)
            assert kinds["exposed"] >= 0.003  # the last bucket: 4000 bytes at 1e6 a second


def test_a_sleep_that_was_too_long_shortens_the_next_one():
    worker = Worker(SIZES)
    worker._late = 0.400
    begin = time.monotonic()
    worker.kernel("forward", 0.405)
    assert time.monotonic() - begin < 0.300
