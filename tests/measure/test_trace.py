"""Traces of real steps: what is in them, in which order, and the file for Perfetto."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dplab import run
from dplab.measure import EmulatedLink, Trace, aligned
from dplab.parallel import OverlappedDDP
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Span

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LAYERS, WIDTH = 4, 96
BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # of one layer's gradients
LINK = EmulatedLink(bandwidth=1e9, latency=0.02)


def traced_step(wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = Trace()
    trace.watch(model)
    x = torch.randn(8, WIDTH)
    for step in range(3):
        optimizer.zero_grad()
        if step == 2:
            dist.barrier()
            trace.__enter__()
        with trace.phase("forward"):
            loss = model(x).square().mean()
        with trace.phase("backward"):
            loss.backward()
        if isinstance(model, OverlappedDDP):
            with trace.phase("wait", STALLED):
                model.finish_gradient_sync()
        with trace.phase("optimizer"):
            time.sleep(0.05)
            optimizer.step()
    trace.__exit__()
    weights = [parameter.detach() for parameter in model.parameters()]
    begin = [span for span in trace.spans if span.name == "forward"][-1].start
    return [span for span in trace.spans if span.start >= begin], weights


def ddp(model):
    return DistributedDataParallel(model, bucket_cap_mb=BYTES / 2**20)


def overlapped(model):
    return OverlappedDDP(model, bucket_mb=BYTES / 2**20)


@pytest.mark.parametrize(("wrap", "link"), [(ddp, None), (overlapped, LINK)],
                         ids=["DDP on gloo", "OverlappedDDP on a link"])
def test_a_step_has_its_phases_and_one_span_for_each_bucket(wrap, link):
    for spans, _ in run(traced_step, 2, wrap, link=link, backend="gloo"):
        phases = {span.name: span for span in spans if span.lane == COMPUTE}
        assert list(phases) == ["forward", "backward", "optimizer"]
        assert phases["optimizer"].seconds >= 0.05
        sends = sorted((s for s in spans if s.lane == COMMUNICATION), key=lambda span: span.start)
        assert len(sends) == LAYERS
        for span in sends:
            assert span.name == "all_reduce" and BYTES <= span.nbytes <= BYTES + 8
            assert phases["backward"].start < span.start < span.end
            assert span.end < phases["optimizer"].start + 0.01
            if link:
                assert span.seconds > 2 * link.latency - 1e-3
        assert sends[0].start < phases["backward"].end
        waits = [span for span in spans if span.lane == STALLED]
        assert waits and waits[-1].end <= phases["optimizer"].start
        if link:
            assert sum(span.seconds for span in waits) > 0.02


def test_a_watched_ddp_trains_as_an_unwatched_one():
    def plain(wrap):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, WIDTH)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    for (_, watched), weights in zip(run(traced_step, 2, ddp), run(plain, 2, ddp), strict=True):
        for a, b in zip(watched, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


RANKS = [[Span("backward", COMPUTE, 105.0, 107.0), Span("forward", COMPUTE, 103.0, 105.0)],
         [Span("all_reduce", COMMUNICATION, 104.0, 106.5, 1024)]]


def test_aligned_spans_begin_at_zero_and_keep_their_distances():
    first, second = aligned(RANKS)
    assert [(span.name, span.start, span.end) for span in first] == [
        ("forward", 0.0, 2.0), ("backward", 2.0, 4.0)]
    assert (second[0].start, second[0].end, second[0].nbytes) == (1.0, 3.5, 1024)


def launched_late():
    """Two all-reduces at once; rank 1 is late with both."""
    dist.barrier()
    with Trace() as trace:
        time.sleep(0.1 * dist.get_rank())
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
    return sorted(trace.spans, key=lambda span: span.end)


def test_a_collective_on_a_link_is_queued_while_another_rank_or_the_link_is_not_ready():
    early, late = run(launched_late, 2, link=EmulatedLink(1e9, 0.02), backend="gloo")
    assert early[0].queued == pytest.approx(0.1, abs=0.03)  # waits for rank 1
    assert late[0].queued == pytest.approx(0, abs=0.02)
    assert late[1].queued == pytest.approx(0.04, abs=0.02)  # waits for the one before it
    for span in (*early, *late):  # two messages of 20 ms
        assert span.seconds - span.queued == pytest.approx(0.04, abs=0.02)
