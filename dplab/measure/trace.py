"""What a rank did when: a trace of a step's spans.

The reader's code names its phases; collectives are noted by themselves, from launch to completion.
"""

import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dplab.predict.step import COMMUNICATION, COMPUTE, STALLED, Span
from dplab.spawn.rank import recording


class Trace:
    """Collects this rank's spans during a ``with`` block.

    ``with trace.phase("backward"):`` makes a span. Each collective that Python launches makes one
    of COMMUNICATION, from its launch to its end. ``spans`` has times in seconds on a clock that
    all ranks of a machine share; `aligned` makes them begin at zero.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._pending: list = []  # futures
        self._last_gradient = 0.0

    def __enter__(self):
        recording.recorder_here().work_listeners.append(self._launched)
        return self

    def __exit__(self, *_):
        recording.recorder.work_listeners.remove(self._launched)
        for noted in self._pending:
            noted.wait()

    @contextmanager
    def phase(self, name: str, lane: str = COMPUTE):
        """A span around the block. In a phase in which gradients of a watched model are computed,
        what comes after the last of them is a span of STALLED.
        """
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            computed = self._last_gradient if self._last_gradient > start else end
            self.spans.append(Span(name, lane, start, computed))
            if computed < end:
                self.spans.append(Span(f"{name}: wait", STALLED, computed, end))

    def watch(self, model: nn.Module) -> None:
        """Notes when the model's last gradient is computed; call it once, before training.

        DDP's reducer launches its all-reduces from C++, which nobody here sees. So a DDP model gets
        a hook that launches them from Python, as the reducer would.
        """
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, allreduce_hook)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def _gradient_is_ready(self, _):
        self._last_gradient = time.monotonic()

    def _launched(self, call, work):
        def completed(_):
            queued = getattr(work, "began", call.time) - call.time  # an emulated link knows
            self.spans.append(Span(call.operation, COMMUNICATION, call.time, time.monotonic(),
                                   call.bytes, max(0.0, queued)))

        if call.is_point_to_point:  # gloo's sends and receives tell nobody when they end
            return
        self._pending.append(work.get_future().then(completed))


def aligned(ranks: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """The spans of all ranks, each rank's in order of start, with the first one at zero."""
    begin = min(span.start for spans in ranks for span in spans)
    return [sorted((replace(span, start=span.start - begin, end=span.end - begin)
                    for span in spans), key=lambda span: (span.start, span.end))
            for spans in ranks]
