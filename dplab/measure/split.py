"""Where the time of a step goes: for each rank, seconds that add up to the step."""

from dataclasses import replace
from itertools import pairwise


def split_time(ranks):
    calls = [[span for span in spans if span.lane == "communication"] for spans in ranks]
    # The link carries a collective from the moment at which the last rank has launched it, until
    # the first rank notes its end. The others note it a moment later, when their thread has woken.
    carried = [(max(call.start for call in same), min(call.end for call in same))
               for same in zip(*calls, strict=True)]
    moments = sorted({moment for spans in ranks for span in spans
                      for moment in (span.start, span.end)})

    def is_in(intervals, moment):
        return any(start <= moment < end for start, end in intervals)

    split = []
    for spans, own in zip(ranks, calls, strict=True):
        computes = [(span.start, span.end) for span in spans if span.lane == "compute"]
        launched = [(call.start, call.end) for call in own]
        seconds = dict.fromkeys(("computing", "exposed", "waiting", "idle"), 0.0)
        for start, end in pairwise(moments):  # nothing begins or ends in between
            kind = ("computing" if is_in(computes, start) else
                    "exposed" if is_in(carried, start) else
                    "waiting" if is_in(launched, start) else "idle")
            seconds[kind] += end - start
        split.append(seconds)
    return split


def from_last_launch(ranks):
    """The same spans, in which a rank waits while the link does not carry its collective.

    What is left of the collective is what `split_time` takes for carried. For a drawing.
    """
    calls = [[span for span in spans if span.lane == "communication"] for spans in ranks]
    carried = [(max(span.start for span in same), min(span.end for span in same))
               for same in zip(*calls, strict=True)]
    found = []
    for spans, own in zip(ranks, calls, strict=True):
        parts = [span for span in spans if span.lane != "communication"]
        for span, (start, end) in zip(own, carried, strict=True):
            parts += [replace(span, lane="stalled", end=start), span.cut(start, end)]
            if end < span.end:
                parts.append(replace(span, lane="stalled", start=end))
        found.append(sorted(parts, key=lambda span: (span.start, span.end)))
    return found
