"""The mesh of hybrid sharding: a copy in as few hosts as have room for it."""

import functools
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import fully_shard

from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.measure import CallLog


def hybrid_mesh(hosts, states, room):
    """A row of ranks for each copy: those of the fewest hosts that have room and divide all."""
    rows = [[rank for rank, each in enumerate(hosts) if each == host]
            for host in dict.fromkeys(hosts)]
    shared = next(count for count in range(1, len(rows) + 1)
                  if len(rows) % count == 0 and states <= room * count * len(rows[0]))
    table = torch.tensor(rows).view(-1, shared * len(rows[0]))
    return DeviceMesh("cpu", table, mesh_dim_names=("replicate", "shard"))


def by_sorting(hosts, states, room):
    """The same with the ranks sorted by their hosts."""
    ranks, count = sorted(range(len(hosts)), key=lambda rank: hosts[rank]), len(set(hosts))
    local, shared = len(hosts) // count, 1
    while count % shared or states > room * shared * local:
        shared += 1
    rows = [ranks[first:first + shared * local] for first in range(0, len(ranks), shared * local)]
    return DeviceMesh("cpu", rows, mesh_dim_names=("dp", "shards"))


# By the number of ranks: on which host each rank runs, and how many ranks have room for a copy.
CASES = {1: (("a", 1),), 2: (("aa", 1), ("ab", 1), ("ab", 2)), 3: (("aaa", 1), ("abc", 2)),
         4: (("abab", 2), ("bbaa", 2), ("abba", 2), ("aaaa", 1), ("abcd", 2), ("abcd", 3))}
STATES = 1200
SAME = "that all ranks give `DeviceMesh` the same table"
EQUAL = "that all rows of the table, one for each copy, are equally long"
COUNTS = ("the number of hosts among which this rank gathers a unit",
          "the number of ranks among which it gathers a unit",
          "the number of ranks among which it reduces and scatters",
          "the number of ranks with which it all-reduces its shard")
WIDTHS = (6, 9, 13, 4)
TABLE, BY_NUMBER = "torch.tensor(rows).view(-1, ", "torch.arange(len(hosts)).view(-1, "


class HybridMesh(Exercise):
    number = "10.4"
    title = "As few hosts as hold a copy"
    minutes = 20
    seconds = 12.0
    world_sizes = (4, 2, 3, 1)
    communicates = False
    again = False  # each trial makes groups, and their numbers grow
    solution = staticmethod(hybrid_mesh)
    also_right = (by_sorting,)

    def trial(self, attempt):
        facts = {SAME: True, EQUAL: True}
        for hosts, enough in CASES[dist.get_world_size()]:
            try:
                with mock.patch.object(DeviceMesh, "__init__", _compared(DeviceMesh.__init__)):
                    mesh = attempt(list(hosts), STATES, _room(enough))
            except _Refused as refused:
                return {SAME: True, refused.args[0]: False}
            facts[_name("the number of the mesh's dimensions", hosts, enough)] = getattr(
                mesh, "ndim", None)
            model = layers()
            for module in (*model, model):
                fully_shard(module, mesh=mesh)
            with CallLog() as log:
                model(input_of(dist.get_rank())).square().mean().backward()
            gathers, reduces, replicas = (_partners(log.calls, operation) for operation in (
                "all_gather", "reduce_scatter", "all_reduce"))
            facts |= _counts(hosts, enough, len({hosts[rank] for rank in gathers}), len(gathers),
                             len(reduces), len(replicas))
            gradients = [each.grad.full_tensor().flatten() for each in model.parameters()]
            facts[_name("the gradient", hosts, enough)] = torch.cat(gradients)
        return facts

    def expected(self, world_size):
        facts, model = {SAME: True, EQUAL: True}, layers()
        for rank in range(world_size):
            (model(input_of(rank)).square().mean() / world_size).backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters()])
        for hosts, enough in CASES[world_size]:
            count, local = len(set(hosts)), hosts.count(hosts[0])
            shared = min(each for each in range(1, count + 1)
                         if count % each == 0 and each * local >= enough)
            facts |= {_name("the number of the mesh's dimensions", hosts, enough): 2,
                      **_counts(hosts, enough, shared, shared * local, shared * local,
                                count // shared),
                      _name("the gradient", hosts, enough): gradient}
        return facts

    hints = (
        "Draw the ranks as a table. In which direction do the gathers go, and which ranks hold the "
        "same shard? A row of the table is the ranks that share a copy.",
        "`fully_shard` replicates over the first dimension of a mesh and shards over the second. "
        "`init_device_mesh` fills the table with 0, 1, 2, … row by row, which is right only if the "
        "launcher put neighbours on the same host.",
        "Collect the ranks of each host in a list. Find the least number of hosts that divides all "
        "of them and whose ranks together have room. Join so many lists into a row, and give the "
        "list of rows to `DeviceMesh(\"cpu\", rows, mesh_dim_names=(\"replicate\", \"shard\"))`.",
    )
    slips = (
        Slip("You fill the table row by row, 0, 1, 2 and so on, as `init_device_mesh` does. Here "
             "the neighbours may be on different hosts, and then every gather leaves the host.",
             {TABLE: BY_NUMBER}),
        Slip("Rows and columns are exchanged. `fully_shard` shards over the *second* dimension of "
             "a mesh, so a row has to be the ranks that share a copy.",
             {'"cpu", table,': '"cpu", table.T,'}),
        Slip("The table's first dimension is as long as a copy has ranks. It is the number of "
             "copies.",
             {TABLE: BY_NUMBER, "(-1, shared * len(rows[0])": "(shared * len(rows[0]), -1"}),
        Slip("That mesh has one dimension: all ranks share one copy, and every gather leaves the "
             "host.", {'"cpu", table, mesh_dim_names=("replicate", "shard")':
                       '"cpu", list(range(len(hosts)))'}),
        Slip("All hosts share one copy, although fewer have room for it.",
             {" and states <= room * count * len(rows[0])": " and count == len(rows)"}),
        Slip("Each host gets a copy, whether its ranks have room for it or not.",
             {" and states <= room * count * len(rows[0])": ""}),
        Slip("`room` is that of one rank, and a host has several.",
             {"room * count * len(rows[0])": "room * count"},
             {"room * shared * local:": "room * shared:"}),
        Slip("Not all copies get the same number of hosts: the number that share a copy has to "
             "divide the number of hosts.",
             {"len(rows) % count == 0 and ": ""}, {"count % shared or ": ""}),
        Slip("The ranks do not give the same table. `DeviceMesh` waits for ever then: each rank "
             "needs the whole table, with the rows of all hosts.",
             {"in dict.fromkeys(hosts)]": "in [hosts[dist.get_rank()]]]"},
             {"in dict.fromkeys(hosts)]":
              "in dict.fromkeys([hosts[dist.get_rank()], *hosts])]"}),
    )


class _Refused(Exception):
    """A table of which no mesh can be made; says which demand it does not meet."""


def _compared(build):
    """The building of a mesh, after a look at all ranks' tables: unlike ones would hang it, and
    torch's own words about rows of several lengths name no row.
    """
    @functools.wraps(build)
    def init(self, device_type, mesh=None, **options):
        if mesh is not None:
            try:
                table, equal = torch.as_tensor(mesh).tolist(), True
            except ValueError:
                table, equal = [list(map(int, row)) for row in mesh], False
            tables = [None] * dist.get_world_size()
            dist.all_gather_object(tables, table)
            if any(each != tables[0] for each in tables):
                raise _Refused(SAME)
            if not equal:
                raise _Refused(EQUAL)
        build(self, device_type, mesh, **options)
    return init


def _room(enough):
    """What a rank has if so many ranks, and no fewer, have room for a copy."""
    return (STATES + 100) // enough


def _counts(hosts, enough, *numbers):
    return {_name(what, hosts, enough): number
            for what, number in zip(COUNTS, numbers, strict=True)}


def layers():
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(seeded(name, *parameter.shape) / 2)
    return model


def input_of(rank):
    return seeded(f"input of rank {rank}", 5, WIDTHS[0])


def _partners(calls, operation):
    """The ranks of the groups in which this rank makes such calls; itself, if in none."""
    found = {rank for call in calls if call.operation == operation
             for rank in dist.get_process_group_ranks(_resolve_process_group(call.group))}
    return sorted(found or {dist.get_rank()})


def _name(what, hosts, enough):
    return (f"{what}, with the ranks on hosts {', '.join(hosts)}, {STATES:,} bytes of states and "
            f"room for {_room(enough):,} on each rank")
