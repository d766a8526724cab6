"""Exercise 8.2: shard the optimizer, gather the parameters."""

import functools
import gc
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise, Mistake
from dplab.checks.trials import reduced, seeded
from dplab.measure import CallLog, sent_bytes


def _times(log, elements, *operations):
    """What this rank sends over rings, in all-gathers of ``elements``; rounded, for padding."""
    ranks = dist.get_world_size()
    sent = sum(sent_bytes(call) for call in log.calls
               if not operations or call.operation in operations)
    return round(sent / (4 * (ranks - 1) * _chunk_size(elements, ranks))) if ranks > 1 else 0


def _chunk_size(elements, world_size):
    return -(-elements // world_size)

_adam = functools.partial(torch.optim.Adam, lr=0.1, eps=0.01)

SIZES = (23, 3)  # the second has fewer elements than the largest number of ranks


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
        self.own.grad = F.pad(gradient, (0, self.padding))[self.mine]
        self.optimizer.step()
        whole = torch.empty(len(self.flat) + self.padding)
        dist.all_gather_single(whole, self.own)
        self.flat.copy_(whole[: len(self.flat)])


def _sharded(share=None, *, owner=lambda rank, ranks: rank, size=_chunk_size, anew=False,
             keep=True, added=False, prepare=lambda gradient: gradient,
             of_gradient=lambda padded, mine: padded[mine], make=None):
    """A sharded optimizer with one thing wrong; ``share`` returns all parameters, with padding."""

    class Attempt:
        def __init__(self, flat, make_optimizer):
            rank, ranks = dist.get_rank(), dist.get_world_size()
            self.flat, self.make = flat, make or make_optimizer
            self.chunk = size(len(flat), ranks)
            self.padding = max(0, ranks * self.chunk - len(flat))
            place = owner(rank, ranks)
            self.mine = slice(place * self.chunk, (place + 1) * self.chunk)
            self.padded = F.pad(flat, (0, self.padding))
            self.own = self.padded[self.mine]
            self.optimizer = self.make([self.own])

        def step(self, gradient):
            padded = F.pad(prepare(gradient), (0, self.padding))
            before = self.own.grad if added and self.own.grad is not None else 0
            self.own.grad = before + of_gradient(padded, self.mine)
            if anew:
                self.optimizer = self.make([self.own])
            self.optimizer.step()
            if not keep:
                del self.optimizer
            whole = share(self) if share else self.gather(self.own)
            covered = min(len(self.flat), len(whole))
            self.flat[:covered] = whole[:covered]

        def gather(self, chunk):
            whole = torch.zeros(dist.get_world_size() * len(chunk))
            dist.all_gather_single(whole, chunk)
            return whole

        def moments(self):
            state = self.optimizer.state[self.own]
            return torch.cat([state["exp_avg"], state["exp_avg_sq"]])

    return Attempt


def _uneven_gather(self):
    chunks = list(self.flat.tensor_split(dist.get_world_size()))
    dist.all_gather(chunks, chunks[dist.get_rank()].clone())
    return self.flat


def _a_chunk_more(elements, world_size):
    return elements // world_size + 1


class _Unsharded:
    def __init__(self, flat, make_optimizer):
        self.flat, self.optimizer = flat, make_optimizer([flat])

    def step(self, gradient):
        self.flat.grad = gradient
        self.optimizer.step()

_ADDED = ("You added up or averaged the ranks' values. Each element has one owner, whose value "
          "counts: gather the owners' parts, and add nothing.")


class ShardTheOptimizer(Exercise):
    number = "8.2"
    title = "Shard the optimizer, gather the parameters"
    minutes = 25
    hints = (
        "Chunks of ⌈n/N⌉ elements: `F.pad` makes the length a multiple of N, and rank r owns the "
        "r-th chunk. Give `make_optimizer` that chunk alone, in a list, once.",
        "In `step`: the chunk's `.grad` is the same chunk of the padded gradient. After the "
        "optimizer's step, each rank has one chunk that is new, and misses those of the others.",
        "`dist.all_gather_single(whole, own)` puts the chunks of all ranks, in their order, into "
        "`whole`. Copy it into `flat`, without the padding.",
    )
    solution = ShardedOptimizer
    mistakes = (
        Mistake(_Unsharded, "The values are right, but every rank keeps the whole state: nothing "
                "is sharded. Give `make_optimizer` this rank's chunk alone."),
        Mistake(_sharded(lambda self: self.padded), "You forgot the all-gather: after the step "
                "each rank has new values in its own chunk, and old ones in all others."),
        Mistake(_sharded(lambda self: (self.gather(self.own.grad), self.padded)[-1]), "Only this "
                "rank's own part of `flat` is new. All-gather the updated *parameters*, not the "
                "gradients, and write them into `flat` itself."),
        Mistake(_sharded(lambda self: (self.gather(self.own), self.flat)[-1]), "The new values "
                "stay in tensors of your own, and `flat` never changes. Write them into it, with "
                "`flat.copy_(...)`."),
        Mistake(_sharded(lambda self: (self.gather(self.moments()), self.padded)[-1]), "You "
                "gathered the optimizer's states. No rank needs those of another: what has to be "
                "gathered are the updated *parameters*."),
        Mistake(_sharded(lambda self: (self.gather(self.own.grad), self.gather(self.own))[-1]),
                "The values are right, but you gather twice the bytes. After each rank's update "
                "the others miss its new parameters, and nothing else: states and gradients stay "
                "where they are, before and after."),
        Mistake(_sharded(size=lambda n, ranks: n // ranks), "You rounded the chunks down: the last "
                "elements belong to nobody and keep their old values. Round up, and pad."),
        Mistake(_sharded(_uneven_gather), "The ranks' chunks are of different sizes, as "
                "`tensor_split`, `chunk` or a slice that ends early make them, and an all-gather "
                "wants equal ones. Pad to a multiple of the world size."),
        Mistake(_sharded(size=_a_chunk_more), "The values are right, but where N divides n you "
                "pad by a whole N, as `N - n % N` does. `-n % N` is 0."),
        Mistake(_sharded(make=lambda parameters: _adam([torch.zeros(1)])), "The tensor that you "
                "gave `make_optimizer` has no `.grad` in `step`, so that nothing is updated. Keep "
                "that tensor, and set its `.grad`: not `flat`'s, nor a new slice's."),
        Mistake(_sharded(lambda self: reduced(F.pad(self.own, (self.mine.start, len(self.padded) -
                self.mine.stop)))), "The values are right, but an all-reduce of a tensor that is "
                "mostly zeros sends twice the bytes: nothing has to be added. All-gather the "
                "chunks."),
        Mistake(_sharded(lambda self: reduced(self.padded)), _ADDED),
        Mistake(_sharded(lambda self: reduced(self.padded.div_(dist.get_world_size()))), _ADDED),
        Mistake(_sharded(lambda self: (dist.broadcast(self.padded, 0), self.padded)[-1]),
                "You broadcast the whole of `flat` from rank 0, which has updated only its own "
                "chunk. Every chunk has to come from its owner."),
        Mistake(_sharded(lambda self: ([dist.broadcast(chunk, src=dist.get_rank()) for chunk in
                self.padded.split(self.chunk)], self.padded)[-1]), "Every rank named itself as the "
                "source. All name the same one, for each chunk its owner; or use one all-gather."),
        Mistake(_sharded(owner=lambda rank, ranks: 0), "Every rank owns the first chunk: where a "
                "rank's chunk begins must depend on the rank."),
        Mistake(_sharded(of_gradient=lambda padded, mine: padded[: mine.stop - mine.start]),
                "Every rank takes the first part of the gradient, and needs that of its own "
                "chunk."),
        *(Mistake(_sharded(anew=True, keep=keep), "You make a new optimizer in each step, so Adam "
                  "forgets its moments. Make it once, in `__init__`.") for keep in (True, False)),
        Mistake(_sharded(added=True), "The chunk's `.grad` adds up over the steps. Set it to this "
                "step's gradient, or clear it after `step()`."),
        Mistake(_sharded(prepare=lambda gradient: reduced(gradient / dist.get_world_size())),
                "The gradient is the mean already. To all-reduce it again changes nothing but the "
                "bytes: three times as many as needed."),
        Mistake(_sharded(prepare=lambda gradient: gradient / dist.get_world_size()), "You divided "
                "the gradient by the world size; it is the mean already."),
        Mistake(_sharded(make=_adam), "You did not take the optimizer from `make_optimizer`, so "
                "its state cannot be counted."),
    )

    def trial(self, attempt):
        facts, ranks = {}, dist.get_world_size()
        for size in SIZES:
            made, least = [], size - (ranks - 1) * _chunk_size(size, ranks)

            def make_optimizer(parameters, made=made):
                optimizer = _adam(parameters)
                made.append(weakref.ref(optimizer))
                return optimizer

            flat, after = seeded("parameters", size), []
            optimizer = attempt(flat, make_optimizer)
            for gradient in _mean_gradients(size):
                with CallLog() as log:
                    optimizer.step(gradient)
                after.append(flat.clone())
            nbytes, elements = _held_by(made)
            facts |= _of_optimizer(size, after, nbytes, elements >= least, _times(log, size),
                                   _times(log, size, "all_reduce"))
        return facts

    def expected(self, world_size):
        facts = {}
        for size in SIZES:
            flat, after, chunk = seeded("parameters", size), [], _chunk_size(size, world_size)
            optimizer = _adam([flat])
            for flat.grad in _mean_gradients(size):
                optimizer.step()
                after.append(flat.clone())
            state = AtMost(8 * chunk + 16, "⌈n/N⌉ elements have that much: no rank keeps more")
            sent = AtMost(1, "one all-gather of the parameters is enough")
            facts |= _of_optimizer(size, after, state, True, sent, sent)
        return facts


def _mean_gradients(size):
    return [seeded(f"gradient of step {step}", size) for step in range(3)]


def _held_by(made):
    """The bytes of state in the optimizers that are still alive, and the elements that have one."""
    gc.collect()
    alive = [each() for each in made if each() is not None]
    states = [state for optimizer in alive for state in optimizer.state.values()]
    return (sum(tensor.nbytes for state in states for tensor in state.values()),
            sum(state["exp_avg"].numel() for state in states if "exp_avg" in state))


def _of_optimizer(size, after, nbytes, has_state, sent, added_up):
    of = f", for {size} elements"
    return {**{f"`flat` after step {step}{of}": flat for step, flat in enumerate(after, start=1)},
            f"the bytes of optimizer state on this rank{of}": nbytes,
            f"that `make_optimizer` made what holds this rank's state{of}": has_state,
            f"how many times the bytes of one all-gather this rank sends in a step{of}": sent,
            f"how many of these are for all-reduces{of}": added_up}
