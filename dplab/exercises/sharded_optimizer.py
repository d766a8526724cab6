"""An optimizer whose state is divided among the ranks: ZeRO's first stage."""

import gc
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.exercises.ring_all_gather import ring_all_gather
from dplab.measure import CallLog, sent_bytes


class ShardedOptimizer:
    def __init__(self, flat, make_optimizer):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.flat = flat
        chunk = -(-len(flat) // ranks)
        self.padding = ranks * chunk - len(flat)
        self.mine = slice(rank * chunk, (rank + 1) * chunk)
        self.own = F.pad(flat, (0, self.padding))[self.mine].clone()
        self.optimizer = make_optimizer([self.own])

    def step(self, gradient):
        self.own.grad = F.pad(gradient, (0, self.padding))[self.mine].clone()
        self.optimizer.step()
        whole = ring_all_gather(self.own)
        self.flat.copy_(whole[: len(self.flat)])


class WithTorch:
    """The same with torch's all-gather, into a padded copy that goes when the step is done."""

    def __init__(self, flat, make_optimizer):
        self.flat = flat
        self.padding = -len(flat) % dist.get_world_size()
        self.own = self.chunk_of(F.pad(flat, (0, self.padding))).clone()
        self.optimizer = make_optimizer([self.own])

    def step(self, gradient):
        self.own.grad = self.chunk_of(F.pad(gradient, (0, self.padding))).clone()
        self.optimizer.step()
        whole = F.pad(self.flat, (0, self.padding))
        dist.all_gather_single(whole, self.own)
        self.flat.copy_(whole[: len(self.flat)])

    def chunk_of(self, padded):
        return padded.chunk(dist.get_world_size())[dist.get_rank()]


OWN = "the bytes of memory behind what `__init__` leaves on this rank, beside all parameters"
HELD = ("a chunk of parameters and one of gradients are enough, and a view keeps all of the tensor "
        "that it was cut from")
VIEW = ("The values are right, but this rank's chunk is a view, and keeps the whole padded copy of "
        "the parameters in memory: clone the chunk.")
SIZES = (23, 3)  # the second has fewer elements than the largest number of ranks
# A rank's new values are among all others, where they are not gathered.
IN_PLACE = {"whole = F.pad(self.flat, (0, self.padding))":
            "whole = F.pad(self.flat, (0, self.padding))\nself.chunk_of(whole).copy_(self.own)"}
GATHERING = "dist.all_gather_single(whole, self.own)"


class ShardTheOptimizer(Exercise):
    number = "8.2"
    title = "Shard the optimizer"
    minutes = 25
    solution = ShardedOptimizer
    also_right = (WithTorch,)
    too_long = (f"{Exercise.too_long} In an all-gather all chunks have the same length: round n/N "
                "up, and pad to N times that.")

    def trial(self, attempt):
        facts, ranks = {}, dist.get_world_size()
        for size in SIZES:
            made, least = [], size - (ranks - 1) * chunk_size(size, ranks)

            def make_optimizer(parameters, made=made):
                optimizer = _adam(parameters)
                made.append(weakref.ref(optimizer))
                return optimizer

            flat, after = seeded("parameters", size), []
            optimizer = attempt(flat, make_optimizer)
            own = held_beside([flat], optimizer, [each() for each in made])
            for gradient in _mean_gradients(size):
                with CallLog() as log:
                    optimizer.step(gradient)
                after.append(flat.clone())
            nbytes, elements, kept = _held_by(made)
            facts |= _of_optimizer(size, after, nbytes, elements >= least, kept, own,
                                   times_sent(log, size), times_sent(log, size, "all_reduce"))
        return facts

    def expected(self, world_size):
        facts = {}
        for size in SIZES:
            flat, after, chunk = seeded("parameters", size), [], chunk_size(size, world_size)
            optimizer = _adam([flat])
            for flat.grad in _mean_gradients(size):
                optimizer.step()
                after.append(flat.clone())
            state = AtMost(8 * chunk + 16, "⌈n/N⌉ elements have that much: no rank keeps more")
            sent = AtMost(1, "one all-gather of the parameters is enough")
            kept = AtMost(4 * chunk, "a slice keeps all of the tensor that it was cut from: clone "
                          "it, or clear `.grad` after the step")
            own = AtMost(8 * chunk, HELD)
            facts |= _of_optimizer(size, after, state, True, kept, own, sent, sent)
        return facts

    hints = (
        "Chunks of ⌈n/N⌉ elements: `F.pad` makes the length a multiple of N, and rank r owns the "
        "r-th chunk. Give `make_optimizer` a copy of that chunk alone, in a list, once.",
        "In `step`: the chunk's `.grad` is the same chunk of the padded gradient. After the "
        "optimizer's step, each rank has one chunk that is new, and misses those of the others.",
        "Your ring all-gather puts the chunks of all ranks, in their order, into one tensor. Copy "
        "it into `flat`, without the padding.",
    )
    slips = (
        # This rank's chunk.
        Slip("The values are right, but every rank keeps the whole state: nothing is sharded. "
             "Give `make_optimizer` this rank's chunk alone.",
             {"slice(rank * chunk, (rank + 1) * chunk)": "slice(None)",
              "ranks * chunk - len(flat)": "0", "ring_all_gather(self.own)": "self.own"}),
        Slip("You rounded the chunks down: the last elements belong to nobody and keep their old "
             "values. Round up, and pad.",
             {"-(-len(flat) // ranks)": "len(flat) // ranks",
              "self.flat.copy_(whole[: len(self.flat)])": "self.flat[: len(whole)] = whole"}),
        Slip("The ranks' chunks are of different sizes, as `tensor_split`, `chunk` or a slice "
             "that ends early make them, and an all-gather wants equal ones. Pad to a multiple of "
             "the world size.",
             {"-len(flat) % dist.get_world_size()": "0", "padded.chunk(": "padded.tensor_split("},
             {"-len(flat) % dist.get_world_size()": "0", "padded.chunk(": "padded.tensor_split(",
              GATHERING: "dist.all_gather(list(whole.tensor_split(dist.get_world_size())), "
              "self.own)"}),
        Slip("The values are right, but where N divides n you pad by a whole N, as `N - n % N` "
             "does. `-n % N` is 0.", {"-(-len(flat) // ranks)": "len(flat) // ranks + 1"}),
        Slip("Every rank owns the first chunk: where a rank's chunk begins must depend on the "
             "rank.", {"slice(rank * chunk, (rank + 1) * chunk)": "slice(chunk)"}),
        # The step.
        Slip("Every rank takes the first part of the gradient, and needs that of its own chunk.",
             {"F.pad(gradient, (0, self.padding))[self.mine]":
              "F.pad(gradient, (0, self.padding))[: len(self.own)]"}),
        Slip("The tensor that you gave `make_optimizer` has no `.grad` in `step`, so that nothing "
             "is updated. Keep that tensor, and set its `.grad`: not `flat`'s, nor a new slice's.",
             {"make_optimizer([self.own])": "make_optimizer([self.own.clone()])"}),
        Slip("You make a new optimizer in each step, so Adam forgets its moments. Make it once, "
             "in `__init__`.",
             {"self.optimizer = make_optimizer([self.own])": "self.make = make_optimizer",
              "self.optimizer.step": "self.optimizer = self.make([self.own])\n"
              "self.optimizer.step"},
             {"self.optimizer = make_optimizer([self.own])": "self.make = make_optimizer",
              "self.optimizer.step": "self.make([self.own]).step"}),
        Slip("The chunk's `.grad` adds up over the steps. Set it to this step's gradient, or "
             "clear it after `step()`.",
             {"self.own.grad = ": "old = 0 if self.own.grad is None else self.own.grad\n"
              "self.own.grad = old + "}),
        Slip("The gradient is the mean already. To all-reduce it again changes nothing but the "
             "bytes: three times as many as needed.",
             {"self.own.grad = ": "gradient = gradient / dist.get_world_size()\n"
              "dist.all_reduce(gradient)\nself.own.grad = "}),
        Slip("The chunk's `.grad` is a slice, and keeps the whole gradient in memory until the "
             "next step: clone it.",
             {"F.pad(gradient, (0, self.padding))[self.mine].clone()":
              "F.pad(gradient, (0, self.padding))[self.mine]"},
             {"F.pad(gradient, (0, self.padding))).clone()":
              "F.pad(gradient, (0, self.padding)))"}),
        Slip(VIEW, {"F.pad(flat, (0, self.padding))[self.mine].clone()":
                    "F.pad(flat, (0, self.padding))[self.mine]"},
             {"F.pad(flat, (0, self.padding))).clone()": "F.pad(flat, (0, self.padding)))"}),
        Slip("You keep a padded copy of all parameters beside this rank's chunk. Make it in "
             "`step`, where it goes when the step is done.",
             {"self.flat = flat": "self.flat, self.padded = flat, "
              "F.pad(flat, (0, -len(flat) % dist.get_world_size()))"}),
        Slip("You divided the gradient by the world size; it is the mean already.",
             {"pad(gradient": "pad(gradient / dist.get_world_size()"}),
        Slip("You did not take the optimizer from `make_optimizer`, so its state cannot be "
             "counted.",
             {"make_optimizer([self.own])": "torch.optim.Adam([self.own], lr=0.1, eps=0.01)"}),
        # All parameters.
        Slip("You forgot the all-gather: after the step each rank has new values in its own "
             "chunk, and old ones in all others.", IN_PLACE | {GATHERING: "pass"}),
        Slip("Only this rank's own part of `flat` is new. All-gather the updated *parameters*, "
             "not the gradients, and write them into `flat` itself.",
             IN_PLACE | {GATHERING: "dist.all_gather_single(whole.clone(), self.own.grad)"}),
        Slip("The new values stay in tensors of your own, and `flat` never changes. Write them "
             "into it, with `flat.copy_(...)`.",
             {"self.flat.copy_(whole[: len(self.flat)])": "self.flat = whole[: len(self.flat)]"}),
        Slip("You gathered the optimizer's states. No rank needs those of another: what has to be "
             "gathered are the updated *parameters*.",
             IN_PLACE | {GATHERING: "for name in (\"exp_avg\", \"exp_avg_sq\"):\n"
              "    state = self.optimizer.state[self.own][name]\n"
              "    dist.all_gather_single(whole.clone(), state)"}),
        Slip("The values are right, but you gather twice the bytes. After each rank's update the "
             "others miss its new parameters, and nothing else: states and gradients stay where "
             "they are, before and after.",
             {GATHERING: f"dist.all_gather_single(whole, self.own.grad)\n{GATHERING}"}),
        Slip("The values are right, but an all-reduce of a tensor that is mostly zeros sends "
             "twice the bytes: nothing has to be added. All-gather the chunks.",
             {GATHERING: "whole.zero_()\nself.chunk_of(whole).copy_(self.own)\n"
              "dist.all_reduce(whole)"}),
        Slip("You added up or averaged the ranks' values. Each element has one owner, whose value "
             "counts: gather the owners' parts, and add nothing.",
             IN_PLACE | {GATHERING: "dist.all_reduce(whole)"},
             IN_PLACE | {GATHERING: "dist.all_reduce(whole.div_(dist.get_world_size()))"}),
        Slip("You broadcast the whole of `flat` from rank 0, which has updated only its own "
             "chunk. Every chunk has to come from its owner.",
             IN_PLACE | {GATHERING: "dist.broadcast(whole, 0)"}),
        Slip("Every rank named itself as the source. All name the same one, for each chunk its "
             "owner; or use one all-gather.",
             IN_PLACE | {GATHERING: "for chunk in whole.chunk(dist.get_world_size()):\n"
              "    dist.broadcast(chunk, src=dist.get_rank())"}),
    )


def times_sent(log, elements, *operations, group=None):
    """What this rank sends over rings, in all-gathers of ``elements``; rounded, for padding."""
    ranks = dist.get_world_size(group)
    sent = sum(sent_bytes(call) for call in log.calls
               if not operations or call.operation in operations)
    return round(sent / (4 * (ranks - 1) * chunk_size(elements, ranks))) if ranks > 1 else 0


def held_beside(given, attempt, optimizers):
    """The bytes of memory behind what an attempt and its optimizers hold, the given aside."""
    def tensors_in(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple | set):
            for each in value.values() if isinstance(value, dict) else value:
                yield from tensors_in(each)

    held = [getattr(attempt, "__dict__", {}),
            [group["params"] for each in optimizers if each is not None
             for group in each.param_groups]]
    found = {each.untyped_storage()._cdata: each.untyped_storage().nbytes()
             for each in tensors_in(held)}
    return sum(found.values()) - sum(found.get(storage, 0) for storage in {
        each.untyped_storage()._cdata for each in given})


def chunk_size(elements, world_size):
    return -(-elements // world_size)


def _adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1, eps=0.01)


def _mean_gradients(size):
    return [seeded(f"gradient of step {step}", size) for step in range(3)]


def _held_by(made):
    """Of the optimizers that are still alive: the bytes of state, the elements that have one, and
    the bytes of memory behind the gradients.
    """
    gc.collect()
    alive = [each() for each in made if each() is not None]
    states = [state for optimizer in alive for state in optimizer.state.values()]
    gradients = {each.grad.untyped_storage()._cdata: each.grad.untyped_storage().nbytes()
                 for optimizer in alive for group in optimizer.param_groups
                 for each in group["params"] if each.grad is not None}
    return (sum(tensor.nbytes for state in states for tensor in state.values()),
            sum(state["exp_avg"].numel() for state in states if "exp_avg" in state),
            sum(gradients.values()))


def _of_optimizer(size, after, nbytes, has_state, kept, own, sent, added_up):
    of = f", for {size} elements"
    return {**{f"`flat` after step {step}{of}": flat for step, flat in enumerate(after, start=1)},
            f"the bytes of optimizer state on this rank{of}": nbytes,
            f"the bytes of memory behind the optimizer's gradients after a step{of}": kept,
            f"{OWN}{of}": own,
            f"that `make_optimizer` made what holds this rank's state{of}": has_state,
            f"how many times the bytes of one all-gather this rank sends in a step{of}": sent,
            f"how many of these are for all-reduces{of}": added_up}
