"""What really happened: bytes on the wire, calls, spans in time, memory; the emulated link."""

from dplab.measure.after_a_step import after_a_step, saved_bytes
from dplab.measure.call_log import CallLog, sent_bytes, sent_messages
from dplab.measure.emulated_link import EmulatedLink
from dplab.measure.machine import available_cores, describe_machine
from dplab.measure.memory_limit import memory_limit
from dplab.measure.memory_timeline import MemoryTimeline, state_bytes
from dplab.measure.split import from_last_launch, split_time
from dplab.measure.torchrun_jobs import TorchrunNodes, torchrun_log
from dplab.measure.trace import Trace, aligned
from dplab.measure.unit_calls import UnitCalls
from dplab.measure.whole_units import Whole, WholeUnits
from dplab.measure.wire import WireMeter

__all__ = ["CallLog", "EmulatedLink", "MemoryTimeline", "TorchrunNodes", "Trace", "UnitCalls",
           "Whole", "WholeUnits", "WireMeter", "after_a_step", "aligned", "available_cores",
           "describe_machine", "from_last_launch", "memory_limit",
           "saved_bytes", "sent_bytes", "sent_messages", "split_time", "state_bytes",
           "torchrun_log"]
