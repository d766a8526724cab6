"""The algorithms that the course builds, as readable reference code. It needs torch alone."""

from dplab.parallel.manual_ddp import ManualDDP, average_gradients, broadcast_module

__all__ = ["ManualDDP", "average_gradients", "broadcast_module"]
