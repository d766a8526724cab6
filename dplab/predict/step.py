"""The timeline of one data-parallel step, from the layers' compute times, the buckets and the link.

Backward computes the gradients of the last layer first. A bucket's all-reduce starts when its last
gradient is there and the all-reduce before it is done; the optimizer starts when backward and all
all-reduces are done. All ranks are taken to be equally fast, and, unless told otherwise, computing
and sending not to disturb each other.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
section 3.2 (the schedule); `cost` has the time of each all-reduce.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dplab.predict import cost

COMPUTE, COMMUNICATION, STALLED = "compute", "communication", "stalled"


@dataclass(frozen=True)
class Layer:
    """What a layer costs on one rank: seconds, and the bytes of its gradients on the wire."""

    forward_seconds: float
    backward_seconds: float
    gradient_bytes: float
    name: str = ""


@dataclass(frozen=True)
class Span:
    """Something that a rank did from ``start`` to ``end``, in seconds since the step began.

    ``lane`` is COMPUTE, COMMUNICATION or STALLED; ``nbytes`` is the size of what a collective
    carries. ``queued``: of a collective, the seconds at its start in which it waited for the link
    or for another rank, as far as they are known.
    """

    name: str
    lane: str
    start: float
    end: float
    nbytes: float = 0
    queued: float = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def cut(self, start: float, end: float) -> "Span":
        """The part from ``start`` to ``end``, in which it is ``queued`` only as far as it still is
        there.
        """
        began = min(max(start, self.start + self.queued), end)
        return replace(self, start=start, end=end, queued=began - start)


def bucket_layers(layers: Sequence[Layer], bucket_bytes: float) -> list[list[int]]:
    """The layers' indices in reverse, in buckets that close when they reach ``bucket_bytes``."""
    buckets: list[list[int]] = []
    room = 0.0
    for index in reversed(range(len(layers))):
        if room <= 0:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(index)
        room -= layers[index].gradient_bytes
    return buckets


def end_beside(sending: Iterable[Span], start: float, seconds: float, slowdown: float) -> float:
    """When computing ends that starts at ``start`` and alone takes ``seconds``.

    During each of the spans ``sending``, in order of their starts, it takes ``slowdown`` times as
    long.
    """
    now, left = start, seconds
    if slowdown == 1:
        return now + left
    for span in sending:
        alone = min(left, max(0.0, span.start - now))
        now, left = now + alone, left - alone
        beside = min(left * slowdown, max(0.0, span.end - now))
        now, left = now + beside, left - beside / slowdown
        if left <= 0 or span.start > now:
            break
    return now + max(0.0, left)


def ddp_spans(layers: Sequence[Layer], world_size: int,
              link: cost.Link | Callable[[float], float], *, bucket_bytes: float,
              overlap: bool = True, slowdown: float = 1.0,
              optimizer_seconds: float = 0.0) -> list[Span]:
    """One rank's step: forward, each layer's backward, each bucket's all-reduce, the optimizer.

    ``layers`` in the order of forward. ``link``: over which a ring goes, or the seconds of an
    all-reduce of so many bytes. Without ``overlap`` all all-reduces wait for the end of backward;
    with it, backward beside an all-reduce takes ``slowdown`` times as long.
    """
    def seconds(nbytes):
        if isinstance(link, cost.Link):
            return cost.seconds("ring all-reduce", world_size, nbytes, link)
        return link(nbytes)

    buckets = bucket_layers(layers, bucket_bytes)
    last = {bucket[-1]: number for number, bucket in enumerate(buckets)}
    now = sum(layer.forward_seconds for layer in layers)
    computing, sending, free = [Span("forward", COMPUTE, 0.0, now)], [], 0.0
    going: deque[Span] = deque()  # of those sent, all but those that ended before now

    def send(number, ready):
        nonlocal free
        nbytes = sum(layers[index].gradient_bytes for index in buckets[number])
        start = max(free, ready)
        free = start + seconds(nbytes)
        sending.append(Span(f"all-reduce {number}", COMMUNICATION, start, free, nbytes))
        going.append(sending[-1])

    for index in reversed(range(len(layers))):
        while going and going[0].end <= now:
            going.popleft()
        end = end_beside(going, now, layers[index].backward_seconds, slowdown)
        computing.append(Span(f"backward {layers[index].name or index}", COMPUTE, now, end))
        now = end
        if overlap and index in last:
            send(last[index], now)
    if not overlap:
        for number in range(len(buckets)):
            send(number, now)

    start = max(now, free)
    return [*computing, *sending, Span("optimizer", COMPUTE, start, start + optimizer_seconds)]


def sharded_spans(layers: Sequence[Layer], collective: Callable[[float], float], *,
                  ahead: bool) -> list[Span]:
    """One rank's step in which each layer is gathered before it computes, and reduced after.

    ``collective``: the seconds of an all-gather, or a reduce-scatter, of so many bytes. All of them
    share one link. Without ``ahead`` nothing overlaps; with it, a gather is launched when the layer
    before it begins to compute, and nobody waits for a reduce-scatter before the step ends.
    """
    spans, begin, end, free = [], 0.0, 0.0, 0.0
    unsent: list[Layer] = []  # its gradient is to be reduced

    def send(name, layer, launched):
        nonlocal free
        start = max(launched, free)
        free = start + collective(layer.gradient_bytes)
        spans.append(Span(name, COMMUNICATION, start, free, layer.gradient_bytes))
        return free

    for name, order in (("forward", layers), ("backward", list(reversed(layers)))):
        for layer in order:
            if unsent and not ahead:
                end = send("reduce-scatter", unsent.pop(), end)
            arrived = send("all-gather", layer, begin if ahead else end)
            if unsent:
                send("reduce-scatter", unsent.pop(), end)
            begin = max(end, arrived)
            end = begin + (layer.forward_seconds if name == "forward" else layer.backward_seconds)
            spans.append(Span(name, COMPUTE, begin, end))
            unsent += [layer] if name == "backward" else []
    for layer in unsent:
        send("reduce-scatter", layer, end)
    return spans


def step_seconds(spans: Iterable[Span]) -> float:
    """From the first start to the last end."""
    spans = list(spans)
    return max(span.end for span in spans) - min(span.start for span in spans)


def exposed_seconds(spans: Iterable[Span]) -> float:
    """How long this rank communicates without computing: what overlap has not hidden."""
    spans = list(spans)
    busy = _union(span for span in spans if span.lane == COMPUTE)
    return sum(end - start - _covered(busy, start, end)
               for start, end in _union(span for span in spans if span.lane == COMMUNICATION))


def _union(spans):
    """The intervals that the spans cover, apart from each other and in order."""
    merged = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def _covered(intervals, start, end):
    return sum(max(0.0, min(end, last) - max(start, first)) for first, last in intervals)
