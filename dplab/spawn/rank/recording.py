"""In front of torch's ProcessGroup: records what this process calls."""

import functools
import mmap
import threading
import time

from ..between.calls import (
    COLLECTIVES,
    LOG_BYTES,
    POINT_TO_POINT,
    Call,
    CallWriter,
    learner_line,
)

WAIT = "wait_for_others"


class CallRecorder:
    """Notes this rank's calls in ``memory`` (`LOG_BYTES` of it), and tells every listener.

    A listener takes the call before it is launched, a work listener the call and its work after.
    """

    def __init__(self, memory):
        self.listeners = []
        self.work_listeners = []
        self._log = CallWriter(memory)
        self._numbers = {}
        self._lock = threading.Lock()

    def record(self, group, operation, tensors, reduce_operation, peer):
        kind = (group.group_name, operation in ("send", "recv"))
        first = tensors[0] if tensors else None
        file, line = learner_line(depth=2)  # who called the recorded method
        with self._lock:
            number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
            call = Call(
                operation=operation, number=number, group=kind[0], group_size=group.size(),
                shape=tuple(first.shape) if first is not None else (),
                dtype=str(first.dtype).removeprefix("torch.") if first is not None else "",
                reduce_operation=reduce_operation,
                bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                peer=peer, time=time.monotonic(), file=file, line=line)
            self._log.write(call)
        for listener in self.listeners:
            listener(call)
        return call


recorder: CallRecorder | None = None


def record_into(memory) -> None:
    """From now on, this process's calls are recorded there."""
    global recorder
    recorder = CallRecorder(memory)
    install()


def recorder_here() -> CallRecorder:
    """This process's recorder; under plain torchrun, where nobody records yet, a new one."""
    if recorder is None:
        record_into(mmap.mmap(-1, LOG_BYTES))
    assert recorder is not None
    return recorder


@functools.cache
def install() -> None:
    """Puts the recording in front of torch's ProcessGroup and Work, once per process."""
    import torch.distributed as dist

    for method, (operation, own) in {**COLLECTIVES, **POINT_TO_POINT}.items():
        if hasattr(dist.ProcessGroup, method):
            original = getattr(dist.ProcessGroup, method)
            setattr(dist.ProcessGroup, method, recorded(original, operation, own))

    wait = dist.Work.wait

    # a frame by which a stack shows that the rank waits for others
    def wait_for_others(work, *args, **kwargs):
        return wait(work, *args, **kwargs)

    dist.Work.wait = wait_for_others  # type: ignore[assignment, method-assign]  # in its place


def recorded(original, operation, own):
    """A method of ProcessGroup, recorded; ``own`` as in `COLLECTIVES`."""

    @functools.wraps(original)
    def call(group, *args, **kwargs):
        if recorder is None:
            return original(group, *args, **kwargs)
        options = args[-1] if args else kwargs.get("opts")
        point_to_point = operation in ("send", "recv")
        noted = recorder.record(
            group, operation,
            tensors_in(args[own]) if own is not None and len(args) > own else [],
            "" if point_to_point else _reduce_name(options),
            _peer(group, args) if point_to_point else getattr(options, "rootRank", -1))
        work = original(group, *args, **kwargs)
        for listener in recorder.work_listeners:
            listener(noted, work)
        return work

    return call


def tensors_in(value):
    """The tensors of a call's argument, which may be one tensor or lists of lists."""
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value]


def _reduce_name(options):
    """``"SUM"`` and so on; empty for a call that reduces nothing."""
    operation = getattr(options, "reduceOp", None)
    return str(getattr(operation, "op", operation)).rpartition(".")[2] if operation else ""


def _peer(group, args):
    """The other end of a send or receive, or -1 where it may be any. ValueError for a rank that
    there is not: gloo would hang, or take the process with it."""
    if len(args) <= 2:
        return -1
    if args[1] not in range(group.size()):
        raise ValueError(f"there is no rank {args[1]} to send to or to receive from: the ranks of "
                         f"this group are 0 to {group.size() - 1}")
    return args[1]
