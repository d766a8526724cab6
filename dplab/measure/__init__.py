"""What really happened: bytes on the wire, what each rank called; and the emulated link."""

from dplab.measure.call_log import CallLog
from dplab.measure.emulated_link import EmulatedLink
from dplab.measure.wire import WireMeter

__all__ = ["CallLog", "EmulatedLink", "WireMeter"]
