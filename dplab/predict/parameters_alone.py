"""What can be said of a model that is no transformer, from its parameters and parts alone.

Model states and bytes on the wire follow from the parameters; how long sending takes, from the
cluster. Activations and computing do not follow: they need the model's kernels, and none were
measured here. So no time of a step is given, and nothing that would follow from it, but the time
for which computing has to last so that it hides what is sent.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dplab.predict import memory
from dplab.predict.choose import CHOICES, STORED, limit_of
from dplab.predict.job import Cluster
from dplab.predict.network import collective_seconds
from dplab.predict.precision import Precision
from dplab.predict.published import TABLE
from dplab.predict.traffic import ALL_REDUCE, BROADCAST, collectives

NOT_SAID = (
    "Activations and computing are not predicted, and so no time of a step, days or money: they "
    "need the kernels of this model, which were not measured here. Batch, tokens and settings are "
    "not used. What is left must hold the activations.",
    "Measure one GPU: sending can hide where backward, or under FSDP forward and backward, lasts "
    "longer than sending. FSDP's states have two gathered parts with them, FSDP, kept all.")


def said(values: Mapping[str, Any], cluster: Cluster) -> dict:
    """For each strategy: bytes of states, left free, and sent by a GPU in a step; seconds of that.

    ``values``, as `fields.read` gives them: the parameters; the parts that are gathered or reduced
    one at a time, taken as equal; the precision. ``published``: how such models scaled for others.
    """
    parameters, parts = values["parameters"], values["parts"]
    stored = STORED[values["precision"]]
    return {"title": f"{parameters:,} parameters in {parts:,} parts on {cluster.ranks:,} × "
                     f"{cluster.gpu.name}",
            "rows": [_row(name, parameters, parts, cluster, stored) for name in CHOICES
                     if name == "DDP" or (cluster.ranks > 1 and name != "HSDP")],
            "not_said": NOT_SAID,
            "published": [f"{row['what']}: a GPU keeps {row['published']:.0%} of its speed "
                          f"({TABLE['tables'][row['table']]['source']})"
                          for row in TABLE["efficiencies"]
                          if row["kind"] == "ResNet-50" and row["overlap"]]}


def _row(name: str, parameters: int, parts: int, cluster: Cluster, stored: Precision) -> dict:
    strategy, ranks, part = CHOICES[name], cluster.ranks, math.ceil(parameters / parts)
    held = memory.states(strategy.stage, stored, ranks, parameters).total
    if not strategy.replicated:
        held += (min(2, parts) if strategy.reshard else parts) * part * stored.gathered
    units: list[Sequence[tuple[int, ...]]] = [[(part,)]] * parts
    sent = [] if ranks == 1 else collectives(
        strategy.sends, ranks, [*units, []], **strategy.on_wire(stored))
    return {"name": name, "what": strategy.what, "bytes": held, "left": limit_of(cluster) - held,
            "sent": sum(each.bytes_sent for each in sent),
            "seconds": sum(_seconds(each, cluster, parts) for each in sent)}


def _seconds(each, cluster, parts):
    """Of all its calls. An owner's broadcasts take what one all-gather of them all would."""
    if each.algorithm == BROADCAST:
        return collective_seconds(cluster, "all-gather", each.tensor_bytes)
    calls = each.count or parts
    name = "all-reduce" if each.algorithm == ALL_REDUCE else each.algorithm.removeprefix("ring ")
    return calls * collective_seconds(cluster, name, each.tensor_bytes / calls)
