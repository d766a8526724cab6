"""What really happened: bytes on the wire, and what each rank called."""

from dplab.measure.call_log import CallLog
from dplab.measure.wire import WireMeter

__all__ = ["CallLog", "WireMeter"]
