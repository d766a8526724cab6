"""How long a collective takes on a cluster, by NCCL as it was measured.

    node = Cluster(GPUS["H100"], 1, LINKS["NVLink 4"], LINKS["400 Gb/s"])
    collective_seconds(node.of(1024), "all-gather", 436e6)

A group has two kinds of link: inside a node each GPU has a fast one, between nodes each node has
some slower ones. NCCL has several algorithms, each with protocols for small and for large
tensors; it predicts the time of every pair and takes the shortest. So does `nccl_candidates`:

    seconds = overhead + NCCL's latency for the pair + bytes / (share · bandwidth of the links)

The latency is that of NCCL's own tuner: so much for a call, so much for each step. A ring of N
ranks has N−1 steps; this is what makes all-gathers slow on thousands of ranks, where no tree can
replace the ring. The protocol LL has cheap steps at half the bandwidth or less, LL128 is between,
Simple has all the bandwidth. NVLS lets the switch of a node add (NVLink 4 and 5, more than 4 GPUs);
between nodes it goes on as a tree. The overhead of a call and the share of the makers' bandwidth
come from published measurements in ``collectives.json``, each with its source; tables marked
``held_out`` there give no rate. `Cluster.pace` says which of the measured rates.

`basis` says which measurements a cluster's times rest on. A network of 25 or 40 Gb/s is taken for
Ethernet with TCP, which reached a smaller share of its line rate. Any other is taken for InfiniBand
or RoCE, unless its link's name begins with "EFA" or "TCPX", which were measured to have more
overhead; at 10 Gb/s, TCP fills the link as well (google/nccl-fastsocket, issue 2).
Left out: SHARP in InfiniBand's switches, PAT, congestion by other jobs, and that computing slows
sending (only the reverse was measured often enough: `computing_slowdown`).

Sources: NCCL 2.30.7, src/graph/tuning.cc (algorithms, protocols,
latencies); stas00/ml-engineering 744d01e, network/README.md (when a switch adds).
"""

import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from typing import Any

from dplab.predict import cost
from dplab.predict.catalogue import LINKS, Gpu
from dplab.predict.checks import DERIVED, one_of, whole
from dplab.predict.job import Cluster
from dplab.predict.pace import at_pace

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
PROTOCOLS = ("LL", "LL128", "Simple")


def collective_seconds(cluster: Cluster, collective: str, nbytes: float, *,
                       ranks: int | None = None, local: int | None = None) -> float:
    """Seconds of one of `COLLECTIVES`, of ``nbytes``, the whole tensor: of the fastest candidate.

    By default among all ranks. A group of ``ranks`` has ``local`` members in each of its nodes;
    where that is not all of a node's GPUs, like groups work at once and share its NICs. Raises
    ValueError for another collective, for a group that fits no nodes, and for a link that is none
    of `LINKS` by its name.
    """
    return min(nccl_candidates(cluster, collective, nbytes, ranks=ranks, local=local).values())


def nccl_candidates(cluster: Cluster, collective: str, nbytes: float, *,
                    ranks: int | None = None, local: int | None = None) -> dict[str, float]:
    """Seconds by each algorithm and protocol among which NCCL chooses, such as "ring LL128".

    Arguments and errors are those of `collective_seconds`. Of one rank: 0 s.
    """
    one_of(collective, COLLECTIVES, "collective")
    nodes, local, families = group = _group(cluster, ranks, local)
    if nodes * local == 1:
        return {"none": 0.0}
    tuned = _tuned(cluster, collective, nbytes, *group)
    if not _has_latency(cluster):
        return tuned
    network = families[1] if nodes > 1 else ""
    return {name: max(_least_seconds(), seconds + _overhead(network, name.split()[1], cluster.pace))
            for name, seconds in tuned.items()}


def basis(cluster: Cluster) -> list[tuple[str, bool]]:
    """What NCCL's times on this cluster rest on: a sentence for each kind of link in use, and
    whether that very link was measured.
    """
    said = []
    for place, link in enumerate((cluster.inside, cluster.between)[:min(cluster.nodes, 2)]):
        family = _family(link)
        measured = "NVLink 3" if family == "PCIe" else family
        rows = [row for row in _training() if (row["nodes"] > 1) == bool(place)
                and measured in _families_of(row) and not (place and row["per_node"] > 8)]
        gpus = ", ".join(sorted({row["gpu"] for row in rows}))
        reached = f"what {gpus} reached over {measured} (collectives.json)"
        if family == _ETHERNET:
            said.append((f"{link.name}: {reached} in large all-reduces is taken, with the "
                         f"overhead of {_CLOUD}", False))
        elif not link.name.endswith(tuple(row["between" if place else "inside"] for row in rows)):
            said.append((f"Nobody measured {link.name}: {reached} is taken", False))
        else:
            said.append((f"{link.name}: {reached}", True))
    return said


def computing_slowdown(cluster: Cluster) -> float:
    """By what factor computing takes longer while a collective runs beside it on the GPU.

    NCCL's kernels hold some SMs, and both use the GPU's memory and power: 1.2 in the middle of the
    published studies. 1 for one rank.
    """
    if cluster.ranks == 1:
        return 1.0
    left = [1 / row["slowdown"] if "slowdown" in row else 1 - row["share"]
            for row in _published()["contention"]["studies"]]
    return 1 / at_pace(left, cluster.pace)


def _group(cluster, ranks=None, local=None):
    """The nodes of a group, its members in each, and the families of the links that it uses."""
    ranks = cluster.ranks if ranks is None else whole(ranks, "ranks")
    local = min(ranks, cluster.per_node) if local is None else whole(local, "local")
    if local > cluster.per_node or ranks % local or ranks > cluster.ranks:
        raise ValueError(f"{ranks} ranks, {local} to a node, do not fit this cluster of "
                         f"{cluster.nodes} × {cluster.per_node} GPUs")
    links = [cluster.inside, cluster.between][:min(2, ranks // local)]
    return ranks // local, local, [_family(link) for link in links]


def _has_latency(cluster):
    """False where the cluster is asked about without any, as `Prediction.savings` does."""
    return cluster.inside.latency > 0 or cluster.between.latency > 0


def _tuned(cluster, collective, nbytes, nodes, local, families):
    """Seconds without overhead, by algorithm and protocol, as NCCL's tuner reckons them."""
    tuner, ranks = _published()["tuner"], nodes * local
    hardware, kind = tuner["hardware"], families[0].split()[0]
    base = {name: [1e-6 * micros * _has_latency(cluster) for micros in each]
            for name, each in tuner["base"].items()}

    def step(algorithm, place):
        """Seconds of a step inside a node and between nodes, in proportion to the links' own."""
        inside, between = hardware[kind][algorithm][place], hardware["network"][algorithm][place]
        if algorithm == "ring" and nodes > 1:
            inside = max(inside, tuner["network_overhead"][place])
            if local == 1:  # no step inside hides anything of one between
                between = hardware["network"]["tree"][place]
        return (cluster.inside.latency * inside / hardware[kind]["ring"][-1],
                cluster.between.latency * between / hardware["network"]["ring"][-1])

    # Bytes/s that a ring reaches on a GPU's link inside, and on the node's links to the network.
    inside = cluster.inside.bandwidth * _at(_ring_shares, families[0], pace=cluster.pace)
    network = math.inf if nodes == 1 else (
        cluster.nics / cluster.per_node * local * cluster.between.bandwidth
        * _at(_network_shares, families[1], collective, pace=cluster.pace))
    ring = min(network, inside) if local > 1 else network
    # Of the tensor a tree sends each byte up and down: between nodes 2(k−1)/k times.
    tree_between = 2 * (nodes - 1) / nodes / (network * tuner["tree_share"])
    tree_inside = 2 / (inside * tuner["tree_share"]) if local > 1 else 0
    doublings = math.log2(nodes)
    times = 2 if collective == "all-reduce" else 1  # a reduce-scatter and an all-gather
    found = {}
    for place, (protocol, share) in enumerate(zip(PROTOCOLS, tuner["protocol_share"], strict=True)):
        inner, outer = step("ring", place)
        speed = ring * share
        if protocol == "LL":
            over = families[0] if nodes == 1 else "two nodes" if nodes == 2 else "more nodes"
            speed = min(speed, 1e9 * tuner["LL_most"].get(over, math.inf))
        found[f"ring {protocol}"] = base["ring"][place] + times * (
            nodes * (local - 1) * inner + (nodes - 1) * outer
            + (ranks - 1) / ranks * nbytes / speed)
        if collective == "all-reduce":
            inner, outer = step("tree", place)
            found[f"tree {protocol}"] = (
                base["tree"][place] + 2 * ((local - 1) * inner + doublings * outer)
                + max(tree_between, tree_inside) * nbytes / share)
    if collective == "all-reduce" and local > 4 and families[0] in ("NVLink 4", "NVLink 5"):
        inner, outer = step("NVLS", -1)
        switch = cluster.inside.bandwidth * _at(_switch_shares, families[0], pace=cluster.pace)
        found["NVLS Simple"] = (inner + 2 * doublings * outer
                                + max(tree_between, 1 / switch) * nbytes)
    return found


# Families of links

_NEAREST = {"NVLink 2": "NVLink 3", "PCIe 4": "PCIe", "PCIe 5": "PCIe",
            **{f"NVLink {generation}": f"NVLink {generation}" for generation in (3, 4, 5)}}
_CLOUD = "EFA or TCPX"
_ETHERNET = "Ethernet with TCP"
_FABRIC = "InfiniBand or RoCE"
_ON_ETHERNET = ("25 Gb/s", "40 Gb/s")


def _family(link):
    """The measured family that a link belongs to by its name, or the nearest."""
    if link.name in _ON_ETHERNET:
        return _ETHERNET
    if link.name.endswith("Gb/s"):
        return _CLOUD if link.name.startswith(("EFA", "TCPX")) else _FABRIC
    if link.name not in _NEAREST:
        raise ValueError(f"no link like {link.name!r} was measured: take one of LINKS, with "
                         "another bandwidth where yours differs")
    return _NEAREST[link.name]


# Rates, from the tables that are not held out

@functools.cache
def _published() -> Any:
    text = resources.files(__package__).joinpath("collectives.json").read_text("utf-8")
    return json.loads(text)


def published_tables() -> list[dict]:
    """The tables of ``collectives.json``."""
    return _published()["tables"]


def published_points() -> list[dict]:
    """The single measurements of ``collectives.json``, each with its size and its source."""
    return _published()["points"]


def table_cluster(row: dict, pace: str = "typical") -> Cluster:
    """The cluster on which a table or a point of ``collectives.json`` was measured."""
    gpu = Gpu(row["gpu"], math.inf, math.inf, math.inf)
    between = LINKS[row["between"] or "400 Gb/s"]
    network = row.get("network") or ""
    if network.startswith(("EFA", "TCPX")):
        between = replace(between, name=f"{network} {between.name}")
    return Cluster(gpu, row["nodes"], LINKS[row["inside"]], between, row["per_node"],
                   row["nics"] or DERIVED, pace)


def table_rows(table: dict) -> Iterator[tuple[float, float]]:
    """(bytes, seconds) of each row of a table of ``collectives.json``."""
    factor = cost.bus_factor(table["collective"].replace("-", "_"),
                             table["nodes"] * table["per_node"])
    for nbytes, micros, bus in table["rows"]:
        yield nbytes, 1e-6 * micros if micros else factor * nbytes / (1e9 * bus)


@functools.cache
def _training() -> list[dict]:
    """Tables and points that rates may come from, each with the bus bandwidth of its largest."""
    found = []
    for table in _published()["tables"]:
        if not table["held_out"]:
            *_, (nbytes, seconds) = table_rows(table)
            ranks = table["nodes"] * table["per_node"]
            found.append({**table, "bus": 1e-9 * cost.bus_bandwidth(
                table["collective"].replace("-", "_"), ranks, nbytes, seconds)})
    for row in (*_published()["points"], *_published()["unsized"]):
        found.append({"inside": "", "name": row["source"].split(",")[0], **row})
    return found


def _families_of(row):
    between = row.get("network") if row["nodes"] > 1 else None
    return (row["inside"], between and (
        _ETHERNET if between == "TCP" else
        _CLOUD if between.startswith(("EFA", "TCPX")) else _FABRIC))


@functools.cache
def _ring_shares(family: str) -> list[float]:
    """Of the bandwidth inside a node, what rings reached; PCIe: not measured, as NVLink 3."""
    family = "NVLink 3" if family == "PCIe" else family
    return [row["bus"] * 1e9 / LINKS[family].bandwidth for row in _training()
            if row["nodes"] == 1 and row["inside"] == family and (
                row["collective"] != "all-reduce" or row.get("algorithm") == "Ring"
                or family == "NVLink 3")]


@functools.cache
def _switch_shares(family: str) -> list[float]:
    """Of that, the algorithm bandwidth that an all-reduce reached where the switch can add."""
    return [row["bus"] * 1e9 / cost.bus_factor("all_reduce", row["per_node"])
            / LINKS[family].bandwidth for row in _training()
            if row["nodes"] == 1 and row["inside"] == family and 4 < row["per_node"] <= 8
            and row["collective"] == "all-reduce" and row.get("algorithm") != "Ring"]


@functools.cache
def _network_shares(family: str, collective: str) -> list[float]:
    """Of a node's bandwidth to the network, what the collective reached where latency is small.

    That is on up to 32 nodes, or 4 where the size is not told. An all-reduce that reached more than
    the network's bandwidth went as a tree on two nodes, and a forced algorithm tells nothing.
    Where only all-reduces were measured, theirs is taken for each: a ring sends alike in all.
    """
    def line_rate(row):  # in GB/s, of a link whose name gives it in Gb/s
        return float(row["between"].removesuffix(" Gb/s")) / 8

    every = [(row["collective"] == "all-reduce", row["bus"] / (row["nics"] * line_rate(row)))
             for row in _training()
             if _families_of(row)[1] == family and row["per_node"] <= 8
             and row["nodes"] <= (32 if row["inside"] else 4)
             and row.get("algorithm") in (None, "Ring")]
    alike = [share for reduces, share in every if reduces == (collective == "all-reduce")]
    return [share for share in alike or [share for _, share in every] if share <= 1]


@functools.cache
def _at(shares: Callable[..., list[float]], *which: str, pace: str) -> float:
    """One of the functions above at that pace."""
    return at_pace(shares(*which), pace)


@functools.cache
def _overhead(network: str, protocol: str, pace: str) -> float:
    """Of `_overheads` that at this pace: at the fast one it is small."""
    return -at_pace([-each for each in _overheads(network)[protocol]], pace)


@functools.cache
def _least_seconds() -> float:
    """Of the fastest call that was measured, whatever it did: none is predicted to be faster."""
    return min(seconds for table in _published()["tables"] if not table["held_out"]
               for _, seconds in table_rows(table))


@functools.cache
def _overheads(network: str) -> dict[str, list[float]]:
    """By protocol: seconds that whole nodes' collectives took beyond what the tuner reckons.

    Row by row up to 64 MiB, each under the protocol that the tuner takes for it. ``network``: the
    family between the nodes, "" for one node. Ethernet has no such rows, and gets the larger of the
    others: over TCP two V100s took 2 ms for 1 MiB (gist.github.com/cswinter/3bc2cbcc).
    """
    if network == _ETHERNET:
        return _overheads(_CLOUD)
    found: dict[str, list[float]] = {protocol: [] for protocol in PROTOCOLS}
    for table in _published()["tables"]:
        if table["held_out"] or table["per_node"] < 8 or (
                (_families_of(table)[1] or "") != network):
            continue
        cluster = table_cluster(table)
        for nbytes, seconds in table_rows(table):
            if nbytes <= 2**26:
                tuned = _tuned(cluster, table["collective"], nbytes, *_group(cluster))
                taken = min(tuned, key=tuned.__getitem__)
                found[taken.split()[1]].append(seconds - tuned[taken])
    every = [each for overheads in found.values() for each in overheads]
    return {protocol: overheads or every for protocol, overheads in found.items()}
