"""Everything that a forward pass reads, in every dtype, is sent from rank 0 to the others."""

import itertools

import torch
import torch.distributed as dist
from torch import nn

from dplab.checks.compare import wrong_facts
from dplab.checks.exercise import WITHOUT_GROUP, Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded, whole_numbers
from dplab.measure import CallLog


def broadcast_weights(model, group=None):
    """Overwrites the parameters and buffers of all ranks with those of the group's rank 0."""
    # Parameters and buffers are everything that a forward pass reads.
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, group_src=0, group=group)


def by_way_of_copies(model, group=None):
    """The same: a copy of each tensor travels."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        received = tensor.detach().clone()
        dist.broadcast(received, group_src=0, group=group)
        tensor.data.copy_(received)


EVERYTHING = "[*model.parameters(), *model.buffers()]"  # as it stands in the right answer
TRAINED = "filter(lambda each: each.requires_grad, model.parameters())"
FLOATS = f"filter(torch.is_floating_point, {EVERYTHING})"
SENT = "dist.broadcast(tensor.data, group_src=0, group=group)"
SUMMED = "dist.all_reduce(tensor.data, group=group)"

IN_A_PAIR = ", in a group of two ranks"


class InPairsToo(Exercise):
    """Base of what ranks do in a group: of four, 0 and 2 are also one, and 1 and 3 another.

    ``facts_of(attempt, group)`` are the facts on this rank; ``right(ranks)`` those expected of each
    of these ranks, or a list with those of each, and ``parts_of(ranks)`` their parts.
    """

    with_groups = True

    def trial(self, attempt):
        facts = self.facts_of(attempt, None)
        if dist.get_world_size() == 4 and self.with_groups:
            pair = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
            facts |= named(self.facts_of(attempt, pair), IN_A_PAIR)
        return facts

    def expected(self, world_size):
        return self._with_pairs(self.right, world_size)

    def parts(self, world_size, rank):
        return self._with_pairs(self.parts_of, world_size)[rank]

    def parts_of(self, ranks):
        return {}

    def _with_pairs(self, said_of, world_size):
        """What is said of all ranks and, of four, of each rank's pair."""
        def of_each(ranks):
            said = said_of(ranks)
            return said if isinstance(said, list) else [said] * len(ranks)

        facts = of_each(range(world_size))
        if world_size < 4:
            return facts
        pairs = [of_each([rank, rank + 2]) for rank in (0, 1)]
        return [facts[rank] | named(pairs[rank % 2][rank // 2], IN_A_PAIR) for rank in range(4)]


def named(facts, where):
    return {f"{fact}{where}": value for fact, value in facts.items()}


class BroadcastWeights(InPairsToo):
    number = "4.1"
    title = "Broadcast the initial weights"
    minutes = 5
    solution = staticmethod(broadcast_weights)
    also_right = (by_way_of_copies,)

    def facts_of(self, attempt, group):
        model = _replica(dist.get_rank())
        memory, trained = _places_in(model), _trained_in(model)
        with CallLog() as log:
            attempt(model, group)
        return _facts(model, _places_in(model) == memory, _trained_in(model) == trained,
                      dist.get_world_size() == 1 or log.count() > 0)

    def right(self, ranks):
        return _facts(_replica(ranks[0]), True, True, True)

    def parts_of(self, ranks):
        values = {f"rank {rank}'s values": _values_of(_replica(rank)) for rank in ranks}
        return {fact: {name: each[fact] for name, each in values.items()}
                for fact in _values_of(_replica(0))}

    def described(self, difference, got, world_size):
        """The first value that differs, and the names of the others."""
        words = super().described(difference, got, world_size)
        wrong = wrong_facts(self.expected_of_all(world_size), got, self.tolerance)
        others = [fact for fact in got[difference.rank] if fact.startswith("the ")
                  and fact != difference.fact and (difference.rank, fact) in wrong]
        return words + ("\nAlso not as expected: " + ", ".join(others) if others else "")

    hints = (
        "What does a forward pass read? Print the names in `model.named_parameters()`, and look "
        "for what is missing there.",
        "A model's state is more than what the optimizer trains: frozen parameters, and buffers "
        "such as BatchNorm's running statistics.",
        "Loop over `model.parameters()` and `model.buffers()`, and call `dist.broadcast(tensor, "
        "group_src=0, group=group)` for each. A parameter's `.data` is the tensor without its "
        "history.",
    )
    slips = (
        Slip("You broadcast the trainable parameters only. Frozen parameters and buffers differ "
             "between ranks too, and the forward pass uses them.",
             {EVERYTHING: TRAINED}),
        Slip("You broadcast the parameters and left out the buffers: BatchNorm's running "
             "statistics still differ.", {EVERYTHING: "model.parameters()"}),
        Slip("You left out the frozen parameters: they differ between ranks too, and the forward "
             "pass uses them.",
             {"*model.parameters()": f"*{TRAINED}"}),
        Slip("`state_dict()` leaves out buffers that are registered with `persistent=False`. A "
             "forward pass may read them too.", {EVERYTHING: "model.state_dict().values()"}),
        Slip("You left out what is not floating point: BatchNorm counts its batches in an integer "
             "buffer.", {EVERYTHING: FLOATS}),
        Slip("Every rank named itself as the source. All ranks must name the same one, "
             "`group_src=0`: the others receive in the same call.",
             {"group_src=0": "group_src=dist.get_rank(group)"}),
        Slip("The ranks agree, but on the last rank's values: the source is rank 0 of the group, "
             "`group_src=0`.", {"group_src=0": "group_src=dist.get_world_size(group) - 1"}),
        Slip("Only rank 0 calls broadcast. A collective is called by every rank: the others must "
             "call it too, to receive.",
             {"dist.broadcast": "dist.get_rank(group) == 0 and dist.broadcast"}, hangs=True),
        Slip("Rank 0 does not call broadcast. A collective is called by every rank: the source has "
             "to send.",
             {"dist.broadcast": "dist.get_rank(group) != 0 and dist.broadcast"}, hangs=True),
        Slip("Rank 0's values never reach the other ranks' models (only copies?). Broadcast the "
             "tensors themselves, or copy what came back into them.",
             {"tensor.data.copy_(received)": "tensor = received"}),
        Slip("You draw the weights anew. Equal seeds do not make them rank 0's, which may have "
             "been loaded or trained: send them with `dist.broadcast`.",
             {f"for tensor in {EVERYTHING}": "torch.manual_seed(0)\nfor module in model.modules()",
              SENT: "getattr(module, 'reset_parameters', int)()"}),
        Slip("You averaged the ranks' values. The ranks agree then, but not on rank 0's model, and "
             "an average of random weights is a poor start.",
             *({EVERYTHING: those, SENT: f"{SUMMED}\ntensor.data.copy_(tensor.data / "
                "dist.get_world_size(group))"}
               for those in (EVERYTHING, "model.parameters()", FLOATS)),
             {SENT: f"{SUMMED}\ntensor.data /= dist.get_world_size(group)"}),
        Slip("You summed the ranks' values: every rank has to end with rank 0's.",
             {SENT: SUMMED}),
        Slip("Values lie in other memory now. A view of the old tensors keeps the old values: copy "
             "into them with `copy_`.",
             {"tensor.data.copy_(received)": "tensor.data = received"}),
        Slip("A copy in another dtype travels, and some values are rounded: float32 has no room "
             "for all digits of a float64, and no float for those of a large integer. Send each "
             "tensor in its own dtype.",
             *({"detach().clone()": f"detach().{dtype}()"} for dtype in ("float", "double"))),
        Slip("Parameters are frozen that were not: `requires_grad` is False now, and they are no "
             "longer trained. Send `tensor.data`, and leave `requires_grad` as it is.",
             {"for tensor in [": "model.requires_grad_(False)\nfor tensor in ["}),
        Slip("The values come out right, but PyTorch's DDP sent them. Here you write what it does: "
             "call `dist.broadcast` yourself.",
             {EVERYTHING: "[nn.parallel.DistributedDataParallel(model, process_group=group)]",
              SENT: "pass"}),
        Slip(WITHOUT_GROUP, {", group_src=0, group=group": ", src=0"}),
        Slip("`src=0` is rank 0 of all ranks, which is not in each group. Rank 0 of the group is "
             "`group_src=0`.", {"group_src=0": "src=0"}),
    )


def _replica(rank):
    """A model whose values differ from rank to rank."""
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(6, affine=False, dtype=torch.float64))
    model[0].bias.requires_grad_(False)
    model.register_buffer("scale", torch.empty(6), persistent=False)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        name = f"`{name}` of rank {rank}"
        tensor.data.copy_(seeded(name, *tensor.shape, dtype=torch.float64)
                          if tensor.is_floating_point() else 2**57 + whole_numbers(name))
    return model


def _values_of(model):
    """Each value; of a float64, what it has beyond a float32 once more: an error there is small."""
    named = {"the parameter `0.weight`": model[0].weight.data,
             "the frozen parameter `0.bias`": model[0].bias.data,
             "the buffer `1.running_mean`": model[1].running_mean,
             "the buffer `1.running_var`": model[1].running_var,
             "the integer buffer `1.num_batches_tracked`": model[1].num_batches_tracked,
             "the unsaved buffer `scale`": model.scale}
    return named | {"what a float32 lacks of `1.running_mean`":
                    model[1].running_mean - model[1].running_mean.float()}


def _facts(model, in_place, as_trained, communicated):
    return {**_values_of(model),
            "that each value is overwritten where it lies in memory": in_place,
            "that the same parameters are frozen as before": as_trained,
            "that you call a collective yourself": communicated}


def _places_in(model):
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


def _trained_in(model):
    return [parameter.requires_grad for parameter in model.parameters()]
