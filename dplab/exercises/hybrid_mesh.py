"""The mesh of hybrid sharding: a copy of the model in each host, wherever its ranks run."""

import itertools

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


def hybrid_mesh(hosts):
    """A row of ranks for each host, in which the model is sharded."""
    rows = [[rank for rank, each in enumerate(hosts) if each == host]
            for host in dict.fromkeys(hosts)]
    return DeviceMesh("cpu", rows, mesh_dim_names=("replicate", "shard"))


def by_first_ranks(hosts):
    """The same with a dict of rows."""
    rows = {}
    for rank, host in enumerate(hosts):
        rows.setdefault(host, []).append(rank)
    return DeviceMesh("cpu", torch.tensor(list(rows.values())), mesh_dim_names=("dp", "shards"))


# By the number of ranks: on which host each rank runs.
HOSTS = {1: ("a",), 2: ("aa", "ab"), 3: ("aaa", "abc"),
         4: ("abab", "aabb", "bbaa", "abba", "aaaa")}
WIDTHS = (6, 9, 13, 4)
ROWS = ("rows = [[rank for rank, each in enumerate(hosts) if each == host]\n"
        "            for host in dict.fromkeys(hosts)]")
LOCAL = "hosts.count(hosts[0])"


class HybridMesh(Exercise):
    number = "10.4"
    title = "A copy of the model in each host"
    minutes = 15
    seconds = 12.0
    world_sizes = (4, 2, 3, 1)
    communicates = False
    again = False  # each trial makes groups, and their numbers grow
    solution = staticmethod(hybrid_mesh)
    also_right = (by_first_ranks,)

    def trial(self, attempt):
        facts = {}
        for hosts in HOSTS[dist.get_world_size()]:
            mesh = attempt(list(hosts))
            facts[_name("the number of the mesh's dimensions", hosts)] = getattr(mesh, "ndim", None)
            model = layers()
            for module in (*model, model):
                fully_shard(module, mesh=mesh)
            with CallLog() as log:
                model(input_of(dist.get_rank())).square().mean().backward()
            facts |= {_name(name, hosts): _partners(log.calls, operation)
                      for name, operation in WITH.items()}
            gradients = [each.grad.full_tensor().flatten() for each in model.parameters()]
            facts[_name("the gradient", hosts)] = torch.cat(gradients)
        return facts

    def expected(self, world_size):
        return [self._right(rank, world_size) for rank in range(world_size)]

    def _right(self, rank, ranks):
        facts, model = {}, layers()
        for each in range(ranks):
            (model(input_of(each)).square().mean() / ranks).backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters()])
        for hosts in HOSTS[ranks]:
            row = [each for each in range(ranks) if hosts[each] == hosts[rank]]
            rows = [[each for each in range(ranks) if hosts[each] == host]
                    for host in dict.fromkeys(hosts)]
            column = [other[row.index(rank)] for other in rows]
            facts |= {_name("the number of the mesh's dimensions", hosts): 2,
                      **{_name(name, hosts): sorted(column) if operation == "all_reduce"
                         else row
                         for name, operation in WITH.items()},
                      _name("the gradient", hosts): gradient}
        return facts

    hints = (
        "Draw the ranks as a table. In which direction do the gathers go, and which ranks hold the "
        "same shard? A row of the table is the ranks of one host.",
        "`fully_shard` replicates over the first dimension of a mesh and shards over the second. "
        "`init_device_mesh` fills the table with 0, 1, 2, … row by row, which is right only if the "
        "launcher put neighbours on the same host.",
        "Collect the ranks of each host in a list, and give the list of these lists to "
        "`DeviceMesh(\"cpu\", rows, mesh_dim_names=(\"replicate\", \"shard\"))`.",
    )
    slips = (
        Slip("You fill the table row by row, 0, 1, 2 and so on, as `init_device_mesh` does. Here "
             "the neighbours may be on different hosts, and then every gather leaves the host.",
             {ROWS: "rows = torch.arange(len(hosts)).view(len(set(hosts)), -1)"}),
        Slip("Rows and columns are exchanged. `fully_shard` shards over the *second* dimension of "
             "a mesh, so a row has to be the ranks of one host.",
             {'"cpu", rows,': '"cpu", torch.tensor(rows).T,'}),
        Slip("The table's first dimension is as long as a host has ranks. It is the number of "
             "hosts.",
             {ROWS: f"rows = torch.arange(len(hosts)).view({LOCAL}, -1)"}),
        Slip("That mesh has one dimension: all ranks share one copy, and every gather leaves the "
             "host.", {'"cpu", rows, mesh_dim_names=("replicate", "shard")':
                       '"cpu", list(range(len(hosts)))'}),
    )


WITH = {"the ranks with which this rank gathers a unit": "all_gather",
        "the ranks with which it reduces and scatters": "reduce_scatter",
        "the ranks with which it all-reduces its shard": "all_reduce"}


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


def _name(what, hosts):
    return f"{what}, with the ranks on hosts {', '.join(hosts)}"
