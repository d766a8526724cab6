"""Exercise 4.1: broadcast the initial weights."""

import torch
import torch.distributed as dist
from torch import nn

from dplab.checks.exercise import Exercise, Mistake
from dplab.measure import CallLog


def broadcast_weights(model, group=None):
    """Overwrites the parameters and buffers of all ranks with those of the group's rank 0."""
    # Parameters and buffers are everything that a forward pass reads.
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, group_src=0, group=group)

IN_A_PAIR = ", in a group of two ranks"


def own_pair():
    """Of four ranks, 0 and 2 are a group, and 1 and 3 another one; this rank's."""
    return [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]


def named(facts, where):
    return {f"{fact}{where}": value for fact, value in facts.items()}

_WITHOUT_GROUP = ("You left out the group. Pass it on to each call: where only some of the ranks "
                  "train, they are all that there are.")


def broadcasts_the_trained(model, group=None):
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, group_src=0, group=group)


def broadcasts_no_buffers(model, group=None):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, group_src=0, group=group)


def broadcasts_nothing_frozen(model, group=None):
    broadcasts_the_trained(model, group)
    for buffer in model.buffers():
        dist.broadcast(buffer, group_src=0, group=group)


def broadcasts_the_state_dict(model, group=None):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, group_src=0, group=group)


def broadcasts_floats(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            dist.broadcast(tensor.data, group_src=0, group=group)


def broadcasts_copies(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach().clone(), group_src=0, group=group)


def every_rank_is_the_source(model, group=None):
    rank = dist.get_rank(group)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, group_src=rank, group=group)


def last_rank_is_the_source(model, group=None):
    last = dist.get_world_size(group) - 1
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, group_src=last, group=group)


def only_rank_0_broadcasts(model, group=None):
    if dist.get_rank(group) == 0:
        broadcast_weights(model, group)


def only_the_others_broadcast(model, group=None):
    if dist.get_rank(group) != 0:
        broadcast_weights(model, group)


def draws_anew(model, group=None):
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def average_weights(model, group=None):
    for parameter in model.parameters():
        parameter.data /= dist.get_world_size(group)
        dist.all_reduce(parameter.data, group=group)


def averages_everything(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data /= dist.get_world_size(group)
            dist.all_reduce(tensor.data, group=group)


def sums_everything_and_divides(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(tensor.data, group=group)
        tensor.data /= dist.get_world_size(group)


def sums_everything_and_copies_the_mean(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(tensor.data, group=group)
        tensor.data.copy_(tensor.data / dist.get_world_size(group))


def puts_copies_in_their_place(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        received = tensor.detach().clone()
        dist.broadcast(received, group_src=0, group=group)
        tensor.data = received


def leaves_it_to_ddp(model, group=None):
    nn.parallel.DistributedDataParallel(model, process_group=group)


def broadcasts_to_all(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0)


def rank_0_of_all_ranks(model, group=None):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0, group=group)

OWN_COLLECTIVE = "that you call a collective yourself"

SAME_MEMORY = "that each value is overwritten where it lies in memory"

_AVERAGED = ("You averaged the ranks' values. The ranks agree then, but not on rank 0's model, and "
             "an average of random weights is a poor start.")


class BroadcastWeights(Exercise):
    number = "4.1"
    title = "Broadcast the initial weights"
    minutes = 5
    with_groups = True
    hints = (
        "What does a forward pass read? Print the names in `model.named_parameters()`, and look "
        "for what is missing there.",
        "A model's state is more than what the optimizer trains: frozen parameters, and buffers "
        "such as BatchNorm's running statistics.",
        "Loop over `model.parameters()` and `model.buffers()`, and call `dist.broadcast(tensor, "
        "group_src=0, group=group)` for each. A parameter's `.data` is the tensor without its "
        "history.",
    )
    solution = staticmethod(broadcast_weights)
    mistakes = (
        Mistake(broadcasts_the_trained, "You broadcast the trainable parameters only. Frozen "
                "parameters and buffers differ between ranks too, and the forward pass uses them."),
        Mistake(broadcasts_no_buffers, "You broadcast the parameters and left out the buffers: "
                "BatchNorm's running statistics still differ."),
        Mistake(broadcasts_nothing_frozen, "You left out the frozen parameters: they differ "
                "between ranks too, and the forward pass uses them."),
        Mistake(broadcasts_the_state_dict, "`state_dict()` leaves out buffers that are registered "
                "with `persistent=False`; `model.buffers()` has them."),
        Mistake(every_rank_is_the_source, "Every rank named itself as the source. All ranks must "
                "name the same one, `group_src=0`: the others receive in the same call."),
        Mistake(last_rank_is_the_source, "The ranks agree, but on the last rank's values: the "
                "source is rank 0 of the group, `group_src=0`."),
        Mistake(only_rank_0_broadcasts, "Only rank 0 calls broadcast. A collective is called by "
                "every rank: the others must call it too, to receive.", hangs=True),
        Mistake(only_the_others_broadcast, "Rank 0 does not call broadcast. A collective is called "
                "by every rank: the source has to send.", hangs=True),
        Mistake(broadcasts_copies, "Rank 0's values never reach the other ranks' models (only "
                "copies?). Broadcast the tensors themselves, or copy what came back into them."),
        Mistake(broadcasts_floats, "You left out what is not floating point: BatchNorm counts its "
                "batches in an integer buffer."),
        Mistake(draws_anew, "You draw the weights anew. Equal seeds do not make them rank 0's, "
                "which may have been loaded or trained: send them with `dist.broadcast`."),
        Mistake(average_weights, _AVERAGED),
        *(Mistake(attempt, _AVERAGED) for attempt in (
            averages_everything, sums_everything_and_divides,
            sums_everything_and_copies_the_mean)),
        Mistake(puts_copies_in_their_place, "The values are right, but they lie in other memory "
                "now. A view of the old tensors keeps the old values: copy into them with "
                "`copy_`."),
        Mistake(leaves_it_to_ddp, "The values come out right, but PyTorch's DDP sent them. Here "
                "you write what it does: call `dist.broadcast` yourself."),
        Mistake(broadcasts_to_all, _WITHOUT_GROUP),
        Mistake(rank_0_of_all_ranks, "`src=0` is rank 0 of all ranks, which is not in each group. "
                "Rank 0 of the group is `group_src=0`."),
    )

    def trial(self, attempt):
        facts = _broadcast_facts(attempt, None)
        if dist.get_world_size() == 4 and self.with_groups:
            facts |= named(_broadcast_facts(attempt, own_pair()), IN_A_PAIR)
        return facts

    def expected(self, world_size):
        asked = {SAME_MEMORY: True, OWN_COLLECTIVE: True}
        facts = _by_name(_replica(seed=0)) | asked
        if world_size < 4:
            return facts
        return [facts | named(_by_name(_replica(seed=rank % 2)) | asked, IN_A_PAIR)
                for rank in range(4)]


def _broadcast_facts(attempt, group):
    model = _replica(seed=dist.get_rank())
    before = _by_name(model)
    with CallLog() as log:
        attempt(model, group)
    after = _by_name(model)
    in_place = all(tensor.data_ptr() == before[name].data_ptr() for name, tensor in after.items())
    return after | {SAME_MEMORY: in_place,
                    OWN_COLLECTIVE: dist.get_world_size() == 1 or log.count() > 0}


def _replica(seed):
    """A small model with a frozen parameter and buffers: one an integer, one not persistent."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    model[1].running_mean.uniform_()
    model[1].num_batches_tracked.fill_(100 + seed)
    model.register_buffer("scale", torch.rand(3), persistent=False)
    return model


def _by_name(model):
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {f"`{name}`": tensor.data for name, tensor in tensors}
