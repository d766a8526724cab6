"""The emulated link, traces of steps and how their time splits.

The link gives the same values as gloo, no earlier than it allows. Most times are bounded from below
only: how much longer a busy machine takes is not the link's doing.
"""

import functools
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from failing import failure
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from dplab import run
from dplab.measure import CallLog, EmulatedLink, Trace, aligned, from_last_launch, split_time
from dplab.parallel import OverlappedDDP, ring_all_reduce, ring_reduce_scatter, tree_all_reduce
from dplab.predict import cost
from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Span

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LENGTH = 1_200  # float32, which 1 to 4 ranks divide equally
FAST, SLOW = EmulatedLink(bandwidth=1e9, latency=1e-5), EmulatedLink(bandwidth=1e6, latency=0.02)
SLACK = 1e-3  # seconds by which two looks at a clock may differ


def numbers():
    return torch.arange(float(LENGTH)) * (dist.get_rank() + 1) + dist.get_rank() ** 2


def neighbours(received, sent):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, sent, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, (rank - 1) % world_size)]):
        work.wait()


def from_anyone():
    if dist.get_rank():
        return dist.send(numbers(), 0)
    received = torch.empty(dist.get_world_size() - 1, LENGTH)
    return sorted((dist.recv(each), each.tolist()) for each in received)


def late_receive():
    """A receive that comes late holds no collective up."""
    if dist.get_rank() > 1:
        return dist.all_reduce(numbers())
    received = torch.empty(LENGTH)
    pending = dist.irecv(received, 1) if dist.get_rank() == 0 else None
    dist.all_reduce(numbers())
    if dist.get_rank() == 1:
        dist.recv(received, 0)
        dist.send(numbers(), 0)
    else:
        dist.send(numbers(), 1)
        pending.wait()
    return received


def within_a_group(x):
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=group)


def actions():
    """By name, what all ranks do together: a function and its arguments, among them outputs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, part, whole = numbers, torch.zeros(LENGTH // ranks), torch.zeros(LENGTH * ranks)
    chunks, many = list(x().chunk(ranks)), torch.zeros(ranks, LENGTH)
    return {
        "all_reduce": (dist.all_reduce, x()),
        "maximum": (dist.all_reduce, x().double(), dist.ReduceOp.MAX),
        "broadcast": (dist.broadcast, x(), ranks - 1),
        "reduce": (lambda x: dist.reduce(x, dst=0) or (x.zero_() if rank else x), x()),
        "all_gather": (dist.all_gather, list(many.clone()), x()),
        "all_gather_single": (dist.all_gather_single, whole, x()),
        "reduce_scatter": (dist.reduce_scatter, part.clone(), chunks),
        "reduce_scatter_single": (dist.reduce_scatter_single, part.clone(), x()),
        "gather": (dist.gather, x(), None if rank else list(many.clone()), 0),
        "scatter": (dist.scatter, part.clone(), None if rank else chunks, 0),
        "all_to_all": (dist.all_to_all_single, torch.zeros(LENGTH), x()),
        "neighbours": (neighbours, torch.zeros(LENGTH), x()),
        "from_anyone": (from_anyone,),
        "late receive": (late_receive,),
        "objects": (dist.all_gather_object, [None] * ranks, {"rank": rank}),
        "ring": (ring_all_reduce, x()),
        "half a ring": (ring_reduce_scatter, x()),
        "tree": (tree_all_reduce, x()),
        "within a group": (within_a_group, x()),
    }


def run_all():
    """For each action its result and arguments, of which some are outputs; and its seconds."""
    found = {}
    for name, (action, *arguments) in actions().items():
        dist.barrier()
        start = time.monotonic()
        value = action(*arguments)
        found[name] = tree_leaves((value, arguments)), time.monotonic() - start
    return found


@pytest.mark.parametrize(("ranks", "link"), [(2, FAST), (3, SLOW), (4, FAST)])
def test_values_are_those_of_gloo_and_no_collective_ends_before_the_link_allows(ranks, link):
    least = {
        "all_reduce": ("ring all-reduce", 1), "broadcast": ("pipelined broadcast", 1),
        "all_gather_single": ("ring all-gather", ranks), "all_gather": ("ring all-gather", ranks),
        "reduce_scatter_single": ("ring reduce-scatter", 1),
        "reduce_scatter": ("ring reduce-scatter", 1), "all_to_all": ("direct all-to-all", 1),
        "ring": ("ring all-reduce", 1), "half a ring": ("ring reduce-scatter", 1)}
    predicted = cost.Link("link", link.bandwidth, link.latency)
    plain, emulated = (run(run_all, ranks, **how) for how in ({"backend": "gloo"}, {"link": link}))
    for rank, (right, found) in enumerate(zip(plain, emulated, strict=True)):
        for name in right:
            for a, b in zip(right[name][0], found[name][0], strict=True):
                equal = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                assert equal, (rank, name)
        for name, (algorithm, parts) in least.items():
            needed = cost.seconds(algorithm, ranks, 4 * LENGTH * parts, predicted)
            assert found[name][1] > needed - SLACK, name


def model_of(rank):
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 3))


def train(wrap, watched=False, steps=3):
    model = wrap(model_of(0 if wrap is fully_shard else dist.get_rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if watched:
        Trace().watch(model)
    with CallLog() as log:
        dist.barrier()
        start = time.monotonic()
        for step in range(steps):
            torch.manual_seed(100 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(7, 31)).square().mean().backward()
            optimizer.step()
        seconds = time.monotonic() - start
    weights = [parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
               for parameter in model.parameters()]
    return [weight.detach() for weight in weights], seconds, log


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_wrappers_train_alike_and_slower_and_calls_of_ddps_reducer_are_seen(wrap):
    link = EmulatedLink(bandwidth=1e9, latency=0.05)
    plain, slow = run(train, 2, wrap, backend="gloo"), run(train, 2, wrap, link=link)
    watched = run(train, 2, wrap, True, backend="gloo")
    numbers_sent = 3 * sum(parameter.numel() for parameter in model_of(0).parameters())
    for (weights, _, _), (same, seconds, log), (traced, *_) in zip(
            plain, slow, watched, strict=True):
        assert all(map(torch.equal, weights, same))
        assert all(torch.allclose(*pair, rtol=0, atol=1e-6)
                   for pair in zip(weights, traced, strict=True))
        assert seconds > 3 * 2 * 0.05 - SLACK
        assert wrap is fully_shard or log.bytes("all_reduce") == 4 * numbers_sent


def disagrees():
    dist.all_reduce(numbers()[: LENGTH - dist.get_rank()])


def test_a_mismatch_is_reported_as_without_it_and_another_backend_is_refused():
    error = failure(disagrees, 2, link=FAST)
    assert error.kind == "mismatched" and "the shapes do not agree" in str(error)
    with pytest.raises(ValueError, match="backend='gloo'"):
        FAST.install("nccl")


def test_threads_that_wake_late_change_nothing_of_what_the_link_carries():
    def step(late):
        return [[Span("backward", COMPUTE, 0, 0.014),
                 Span("all_reduce", COMMUNICATION, 0.014, 0.5 + late * rank, 22_000, 0.002 * rank),
                 Span("optimizer", COMPUTE, 0.6, 0.7)] for rank in range(2)]

    on_time, late = (SLOW.carried(step(late)) for late in (0, 0.011))
    assert on_time == late
    assert on_time[1][1].start == pytest.approx(0.016)
    assert on_time[1][1].seconds == pytest.approx(SLOW.seconds("all_reduce", 2, 22_000))


LAYERS, WIDTH = 4, 96
BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # of one layer's gradients


def traced_step(wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))
    trace = Trace()
    trace.watch(model)
    for step in range(3):
        if step == 2:
            dist.barrier()
            trace.__enter__()
        with trace.phase("forward"):
            loss = model(torch.randn(8, WIDTH)).square().mean()
        with trace.phase("backward"):
            loss.backward()
        if isinstance(model, OverlappedDDP):
            with trace.phase("wait", STALLED):
                model.finish_gradient_sync()
        with trace.phase("optimizer"):
            time.sleep(0.05)
    trace.__exit__()
    begin = [span for span in trace.spans if span.name == "forward"][-1].start
    return [span for span in trace.spans if span.start >= begin]


@pytest.mark.parametrize(("wrap", "link"), [
    (functools.partial(DistributedDataParallel, bucket_cap_mb=BYTES / 2**20), None),
    (functools.partial(OverlappedDDP, bucket_mb=BYTES / 2**20), EmulatedLink(1e9, 0.02))],
    ids=["DDP on gloo", "OverlappedDDP on a link"])
def test_a_step_has_its_phases_and_one_span_for_each_bucket(wrap, link):
    for spans in run(traced_step, 2, wrap, link=link, backend="gloo"):
        phases = {span.name: span for span in spans if span.lane == COMPUTE}
        assert list(phases) == ["forward", "backward", "optimizer"]
        assert phases["optimizer"].seconds >= 0.05
        sends = sorted((s for s in spans if s.lane == COMMUNICATION), key=lambda span: span.start)
        assert len(sends) == LAYERS
        for span in sends:
            assert span.name == "all_reduce" and BYTES <= span.nbytes <= BYTES + 8
            assert phases["backward"].start < span.start < span.end
            assert span.end < phases["optimizer"].start + 0.01
            assert not link or span.seconds > 2 * link.latency - SLACK
        assert sends[0].start < phases["backward"].end
        waits = [span for span in spans if span.lane == STALLED]
        assert waits and waits[-1].end <= phases["optimizer"].start
        assert not link or sum(span.seconds for span in waits) > 0.02


def launched_late():
    """Two all-reduces at once, rank 1 late with both: whether the second is done at once; spans."""
    dist.barrier()
    with Trace() as trace:
        time.sleep(0.1 * dist.get_rank())
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
        done = works[1].is_completed()
        for work in works:
            work.wait()
    return done, sorted(trace.spans, key=lambda span: span.end)


def test_a_collective_on_a_link_blocks_nobody_and_is_queued_until_ranks_and_link_are_ready():
    found = run(launched_late, 2, link=EmulatedLink(1e9, 0.02), backend="gloo")
    assert not any(done for done, _ in found)
    early, late = (spans for _, spans in found)
    assert early[0].queued > 0.05  # waits for rank 1
    for first, second in (early, late):  # two messages of 20 ms each, one after the other
        begin = first.start + first.queued
        assert begin == pytest.approx(late[0].start, abs=0.02)
        assert second.start + second.queued == pytest.approx(begin + 0.04, abs=SLACK)
        assert min(span.seconds - span.queued for span in (first, second)) > 0.04 - SLACK


# Rank 0 launches at 103 and 106; rank 1 computes longer, launches at 105 and 108, and wakes late.
RANKS = aligned([
    [Span("all_reduce", COMMUNICATION, 103, 107, queued=2), Span("data", STALLED, 100, 101),
     Span("backward", COMPUTE, 101, 104), Span("all_reduce", COMMUNICATION, 106, 110, 1024, 2.5)],
    [Span("backward", COMPUTE, 100, 108), Span("all_reduce", COMMUNICATION, 105, 107),
     Span("all_reduce", COMMUNICATION, 108, 110.5), Span("optimizer", COMPUTE, 111, 112)]])


def test_spans_begin_at_zero_in_order_and_each_moment_is_of_one_kind():
    assert [(span.name, span.start, span.end) for span in RANKS[0]] == [
        ("data", 0, 1), ("backward", 1, 4), ("all_reduce", 3, 7), ("all_reduce", 6, 10)]
    assert RANKS[0][3].nbytes == 1024 and RANKS[0][2].queued == 2
    assert split_time(RANKS) == [
        {"computing": 3, "exposed": 4, "waiting": 2, "idle": 3},  # idle: 0 to 1 and 10 to 12
        {"computing": 9, "exposed": 2, "waiting": 0.5, "idle": 0.5}]


def test_before_the_last_launch_and_after_the_first_end_a_rank_waits():
    first, second = from_last_launch(RANKS)
    assert [(span.lane, span.start, span.end) for span in first if span.name == "all_reduce"] == [
        (STALLED, 3, 5), (COMMUNICATION, 5, 7), (STALLED, 6, 8), (COMMUNICATION, 8, 10)]
    # The second one waits for the link, for half a second more than for rank 1.
    assert [span.queued for span in first if span.lane == COMMUNICATION] == [0, 0.5]
    assert [(span.lane, span.start, span.end) for span in second if span.name == "all_reduce"] == [
        (STALLED, 5, 5), (COMMUNICATION, 5, 7), (STALLED, 8, 8), (COMMUNICATION, 8, 10),
        (STALLED, 10, 10.5)]
    assert [kinds["exposed"] for kinds in split_time([first, second])] == [4, 2]
