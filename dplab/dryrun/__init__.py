"""Paper-scale training steps on a laptop: the real code on fake tensors and fake ranks.

`fully_shard`, `ddp` and `zero_1` run torch's own implementations in a process of their own, on
tensors that have shapes and no data, as one rank of a process group that sends nothing.
"""

from dplab.dryrun.findings import Collective, DryRun, UnsupportedOperator
from dplab.dryrun.strategies import ddp, fully_shard, zero_1

__all__ = ["Collective", "DryRun", "UnsupportedOperator", "ddp", "fully_shard", "zero_1"]
