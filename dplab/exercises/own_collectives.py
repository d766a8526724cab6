"""The reader's rings in the place of the collectives that torch's `fully_shard` calls."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.exercises.ring_all_gather import ring_all_gather
from dplab.exercises.ring_reduce_scatter import ring_reduce_scatter
from dplab.measure import CallLog


def use_own_rings(model):
    """Lets each unit of the model gather and reduce over the rings of chapter 03."""

    class RingGather(AllGather):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            output_tensor.copy_(ring_all_gather(input_tensor, group))

    class RingScatter(ReduceScatter):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            total = ring_reduce_scatter(input_tensor, group)
            if op == dist.ReduceOp.AVG:
                total /= group.size()
            output_tensor.copy_(total)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(RingGather())
            module.set_custom_reduce_scatter(RingScatter())


WIDTHS = (5, 7, 11, 10)  # of three layers; no number of ranks divides all rows
PLAIN, WIDE, SUMMED, HYBRID = ("in float32", "gathered in bfloat16, reduced in float32",
                               "where `op` is SUM", "in groups of two")
GATHERS, REDUCES = ("the number of torch's own all-gathers {}",
                    "the number of torch's own reduce-scatters {}")
GROUP = "the number of ranks among which this rank gathers and reduces {}"
LEFT = "a unit still calls torch's collective: each unit has its own, and the root is one too"
LOOP, MEAN = "for module in model.modules():", "if op == dist.ReduceOp.AVG:"


class OwnCollectives(Exercise):
    number = "10.5"
    title = "Your ring inside torch's FSDP"
    minutes = 25
    seconds = 12.0
    world_sizes = (2, 3, 4, 1)
    solution = staticmethod(use_own_rings)

    def trial(self, attempt):
        torch.use_deterministic_algorithms(True)  # then what nobody has filled is NaN, not chance
        facts = {}
        for case in _cases(dist.get_world_size()):
            model = model_of(case)
            attempt(model)
            if case == SUMMED:
                model.set_force_sum_reduction_for_comms(True)
            with CallLog() as log:
                output = model(input_of(dist.get_rank(), case))
                (output.float() * target_of(dist.get_rank(), case)).sum().backward()
            facts |= {f"the output {case}": output.detach().float(),
                      GATHERS.format(case): log.count("all_gather"),
                      REDUCES.format(case): log.count("reduce_scatter"),
                      GROUP.format(case): max((call.group_size for call in log.calls
                                               if call.operation != "all_reduce"), default=0),
                      **{f"the gradient of `{name}` on this rank, {case}": _grad(parameter)
                         for name, parameter in model.named_parameters()}}
        return facts

    def expected(self, world_size):
        return [self._right(rank, world_size) for rank in range(world_size)]

    def _right(self, rank, ranks):
        facts = {}
        for case in _cases(ranks):
            dtype = torch.bfloat16 if case == WIDE else torch.float32
            model = layers_of(case).to(dtype)
            facts |= {f"the output {case}": model(input_of(rank, case).to(dtype)).detach().float(),
                      GATHERS.format(case): AtMost(0, LEFT), REDUCES.format(case): AtMost(0, LEFT),
                      GROUP.format(case): AtMost(2 if case == HYBRID else ranks,
                                                 "a unit lies within its own group")}
            by_rank = gradients_of(case, ranks)
            for name, _ in model.named_parameters():
                mean = sum(each[name] for each in by_rank) / ranks
                facts[f"the gradient of `{name}` on this rank, {case}"] = _own(
                    mean, rank, ranks, case)
        return facts

    def parts(self, world_size, rank):
        """Of each gradient, what each rank's loss brings."""
        return {f"the gradient of `{name}` on this rank, {case}": [
                    _own(each[name], rank, world_size, case) / world_size for each in by_rank]
                for case in _cases(world_size) for by_rank in [gradients_of(case, world_size)]
                for name in by_rank[0]}

    def quantities(self, world_size, rank):
        return {"the ranks": world_size}

    hints = (
        "A unit calls your object as it would call torch's: the result has to be in "
        "`output_tensor` when the call returns. What do your rings return, and who divides?",
        "Two classes, each with `allocate` (an empty tensor of this size) and `__call__`. Your "
        "ring adds and does not divide, so look at `op`: for `dist.ReduceOp.AVG`, FSDP leaves the "
        "division by the number of the group's ranks to you.",
        "Go through `model.modules()`. What `fully_shard` has wrapped is an `FSDPModule`, and each "
        "of them, the root as well, has `set_custom_all_gather` and `set_custom_reduce_scatter`.",
    )
    slips = (
        Slip("Gradients are sums over the ranks. Where `op` is `dist.ReduceOp.AVG`, the mean is "
             "asked for, and your ring does not divide.", {MEAN: "if False:"}),
        Slip("You divide even where `op` is SUM. FSDP divides by itself then, so the gradient is "
             "divided twice.", {MEAN: "if True:"}),
        Slip("You divide by all ranks of the job. With a mesh of two dimensions the group is "
             "smaller, and FSDP divides by the rest: `group.size()`.",
             {"group.size()": "dist.get_world_size()"}),
        Slip("You change the model's own collectives only. Each unit calls its own: go through "
             "`model.modules()`.", {LOOP: "for module in [model]:"}),
        Slip("You leave the root out. It is a unit as well.",
             {LOOP: "for module in list(model.modules())[1:]:"}),
        Slip("The gathers are yours, and the reduce-scatters still torch's.",
             {"module.set_custom_reduce_scatter(RingScatter())": "pass"}),
        Slip("FSDP reads the tensor that it has handed to you. What you return, or give the name "
             "`output_tensor`, does not reach it: copy the result into it.",
             {"output_tensor.copy_(ring_all_gather(input_tensor, group))":
              "return ring_all_gather(input_tensor, group)"},
             {"output_tensor.copy_(total)": "return total"}),
        Slip("You write into `output_tensor` before you have read `input_tensor`, and in a gather "
             "the input lies in the output.",
             {"output_tensor.copy_(ring": "output_tensor.zero_(); output_tensor.copy_(ring"}),
        Slip("Your rings take all ranks. Pass `group` on: in a mesh of two dimensions a unit is "
             "gathered and reduced within a row.",
             {"ring_all_gather(input_tensor, group)": "ring_all_gather(input_tensor)"},
             {"ring_reduce_scatter(input_tensor, group)": "ring_reduce_scatter(input_tensor)"},
             {"ring_all_gather(input_tensor, group)": "ring_all_gather(input_tensor)[: len("
                                                      "output_tensor)]"}),
    )


def _cases(ranks):
    """The last one with a mesh of two dimensions."""
    return (PLAIN, WIDE, SUMMED, HYBRID) if ranks == 4 else (PLAIN, WIDE, SUMMED)


def layers_of(case):
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
    with torch.no_grad():
        for number, layer in enumerate(layers):
            layer.weight.copy_(seeded(f"weight {number} {case}", *layer.weight.shape) / 3)
            layer.bias.copy_(seeded(f"bias {number} {case}", *layer.bias.shape))
    return nn.Sequential(*layers)


def model_of(case):
    """The layers, of which the first two are units, and the root has the last."""
    ranks = dist.get_world_size()
    mesh = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            if case == HYBRID else init_device_mesh("cpu", (ranks,)))
    policy = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if case == WIDE else ()))
    model = layers_of(case)
    for module in (model[0], model[1], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def input_of(rank, case):
    return seeded(f"input of rank {rank} {case}", 5, WIDTHS[0])


def target_of(rank, case):
    return seeded(f"target of rank {rank} {case}", 5, WIDTHS[-1])


def gradients_of(case, ranks):
    """Of each rank's own loss, by the parameter's name."""
    dtype, found = torch.bfloat16 if case == WIDE else torch.float32, []
    for rank in range(ranks):
        model = layers_of(case).to(dtype)
        output = model(input_of(rank, case).to(dtype))
        (output.float() * target_of(rank, case)).sum().backward()
        found.append({name: each.grad.float() for name, each in model.named_parameters()})
    return found


def _grad(parameter):
    gradient = parameter.grad
    return None if gradient is None else gradient.to_local().detach().clone()


def _own(whole, rank, ranks, case):
    """A rank's rows: in groups of two, half of them."""
    shards, place = (2, rank % 2) if case == HYBRID else (ranks, rank)
    return whole.chunk(shards)[place]
