"""Exercises of chapter 08: bytes of model states, sharded optimizer state and gradients."""

import functools
import gc
import math
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab import parallel
from dplab.exercises.compare import AtMost
from dplab.exercises.exercise import Calculation, Exercise, Mistake
from dplab.exercises.trials import reduced, seeded
from dplab.measure import CallLog, sent_bytes


def _times(log, elements, *operations):
    """What this rank sends over rings, in all-gathers of ``elements``; rounded, for padding."""
    ranks = dist.get_world_size()
    sent = sum(sent_bytes(call) for call in log.calls
               if not operations or call.operation in operations)
    return round(sent / (4 * (ranks - 1) * _chunk_size(elements, ranks))) if ranks > 1 else 0


def _chunk_size(elements, world_size):
    return -(-elements // world_size)


# 8.1

# stage, parameters, ranks, K
CASES = (*((stage, 70_000_000_000, 8, 8) for stage in range(4)),
         *((stage, 7_500_000_000, 64, 12) for stage in range(4)),
         (2, 1_000_003, 3, 16), (3, 124_439_808, 1, 12))


def bytes_per_rank(stage, parameters, ranks, K):
    optimizer = K / ranks if stage >= 1 else K
    gradients = 2 / ranks if stage >= 2 else 2
    weights = 2 / ranks if stage >= 3 else 2
    return parameters * (weights + gradients + optimizer)


def _states(first=(3, 2, 1), sizes=(2, 2), optimizer=lambda K: K, total=sum, only=False,
            share=lambda ranks, stages: 1 / ranks):
    """The bytes with one thing wrong; ``first``: the stage from which on each part is sharded."""

    def attempt(stage, parameters, ranks, K):
        parts = []
        for begin, size in zip(first, (*sizes, optimizer(K)), strict=True):
            is_sharded = stage == begin if only else stage >= begin
            parts.append(parameters * size * (share(ranks, stage - begin) if is_sharded else 1.0))
        return total(parts)

    return attempt


class BytesPerRank(Calculation):
    slug = "bytes-per-rank"
    number = "8.1"
    title = "The memory of a configuration, on paper"
    name = "bytes_per_rank"
    minutes = 10
    hints = (
        "Three summands: parameters, gradients, optimizer state. Write them down for stage 0, "
        "where each rank holds all of them: 2 + 2 + K bytes for each parameter.",
        "Each stage divides one more summand by the ranks, and keeps what the stage before it "
        "divided: first the optimizer state, then gradients, then parameters.",
        "`K / ranks if stage >= 1 else K` is the first summand. What is sharded does not "
        "disappear: 1/N of it is still there.",
    )
    solution = staticmethod(bytes_per_rank)
    mistakes = (
        Mistake(_states((0, 0, 0)), "You divide everything by the ranks, whatever the stage. Only "
                "stage 3 shards everything; stage 0 is DDP, where each rank holds all of it."),
        Mistake(_states((4, 3, 2)), "Your stages are off by one: you begin to shard in stage 2. "
                "Stage 0 is DDP, and stage 1 shards the optimizer state."),
        Mistake(_states((3, 3, 1)), "Your stage 2 has whole gradients. It shards them, besides the "
                "optimizer state: 1/N of each stays on a rank."),
        *(Mistake(lambda *case, gone=gone: bytes_per_rank(*case) - 2 * case[1] / case[2] *
                  (case[0] in gone), "You leave out the gradients where they are sharded. They are "
                  "not gone: 1/N of them stays on each rank.") for gone in ((2,), (2, 3))),
        Mistake(_states((4, 4, 1)), "Your stages 2 and 3 shard no more than stage 1. Stage 2 adds "
                "the gradients, stage 3 the parameters."),
        Mistake(_states((4, 2, 1)), "Your stage 3 has whole parameters. It shards them, too."),
        Mistake(_states(only=True), "In each stage you shard one thing alone. A stage shards one "
                "thing *more*: stage 2 the optimizer state and the gradients, stage 3 everything."),
        Mistake(_states(share=lambda ranks, stages: 1 / ranks ** (1 + stages)), "In each stage you "
                "divide again what the stage before it has divided. A part is divided once, and "
                "stays so."),
        Mistake(_states(share=lambda ranks, stages: (ranks - 1) / ranks), "(N−1)/N is the part "
                "that a rank gives away, or is sent. It keeps 1/N."),
        Mistake(_states((1, 2, 3)), "You shard in the order parameters, gradients, optimizer "
                "state. It is the reverse: the optimizer state, which is largest, goes first."),
        Mistake(_states(sizes=(2, 0)), "You left out the gradients: they have 2 bytes for each "
                "parameter, beside the parameters' own 2."),
        Mistake(lambda stage, *rest: bytes_per_rank(stage or 3, *rest), "Your stage 0 divides all, "
                "as stage 3 does (a last `else`?). It is DDP: nothing is divided."),
        Mistake(lambda *case: bytes_per_rank(*case) + 2.0 * case[1] * (case[0] == 3), "In stage 3 "
                "you count the parameters twice, as shards and gathered. What is whole for a "
                "moment is no model state: count what a rank keeps."),
        *(Mistake(_states(sizes=sizes), "You took 4 bytes for parameters or gradients. In mixed "
                  "precision they have 2 each; what is kept in fp32 is in K.")
          for sizes in ((4, 4), (2, 4), (4, 2))),
        Mistake(_states(optimizer=lambda K: K + 4), "You added an fp32 copy of the parameters to "
                "K. K is all that the optimizer keeps: where there is such a copy, it is in K."),
        *(Mistake(_states(optimizer=lambda K, number=number: number), "You took a number for K. It "
                  "is 8 for Adam's two moments in fp32 and 12 with an fp32 master copy, so it is "
                  "an argument: use `K`.") for number in (8, 12)),
        Mistake(_states(total=lambda parts: sum(parts) / 1e9), "You return GB. The function "
                "returns bytes; divide when you print."),
        Mistake(_states(total=lambda parts: sum(parts) / 2**30), "You return GiB, of 2³⁰ bytes. "
                "The function returns bytes; and the GB of papers and data sheets are 10⁹."),
        Mistake(lambda stage, parameters, ranks, K: ranks * bytes_per_rank(stage, parameters,
                ranks, K), "You return the bytes of all ranks together. What has to fit is one "
                "rank's part."),
    )

    def trial(self, attempt):
        return {_of_case(*case): attempt(*case) for case in CASES}

    def expected(self, world_size):
        return {_of_case(*case): float(bytes_per_rank(*case)) for case in CASES}


def _of_case(*case):
    return "bytes_per_rank({}, {:_}, {}, {})".format(*case)


# 8.2

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
    slug = "sharded-optimizer"
    number = "8.2"
    title = "Shard the optimizer, gather the parameters"
    name = "ShardedOptimizer"
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


# 8.3

SHAPES = (((3, 5), (4,), (3,)), ((2,), (1,)))


def scatter_gradients(parameters):
    ranks = dist.get_world_size()
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters]) / ranks
    chunk = -(-len(flat) // ranks)
    flat = F.pad(flat, (0, ranks * chunk - len(flat)))
    for parameter in parameters:
        parameter.grad = None
    own = torch.empty(chunk)
    dist.reduce_scatter_single(own, flat)
    return own


def _scatter(own, flat):
    dist.reduce_scatter_single(own, flat)
    return own


def _chunk_of(flat, own):
    return flat.split(len(own))[dist.get_rank()]


def _scattered(reduce=_scatter, *, power=1, free=True, size=_chunk_size, order=list,
               of=lambda parameter: parameter.grad,
               pad=lambda flat, padding: F.pad(flat, (0, padding))):
    """Scatters gradients with one thing wrong; ``reduce(own, flat)`` returns this rank's chunk."""

    def attempt(parameters):
        ranks = dist.get_world_size()
        flat = torch.cat([of(each).flatten() for each in order(parameters)]) / ranks**power
        chunk = size(len(flat), ranks)
        flat = pad(flat, ranks * chunk - len(flat))
        if free:
            for parameter in parameters:
                parameter.grad = None
        return reduce(torch.zeros(chunk), flat)

    return attempt


_SLICED = ("The values are right, but every rank is sent everything, as in an all-reduce, with "
           "twice the bytes, and throws most of it away. Reduce-scatter sends it its own chunk.")


class ScatterGradients(Exercise):
    slug = "scatter-gradients"
    number = "8.3"
    title = "Reduce-scatter the gradients"
    name = "scatter_gradients"
    minutes = 15
    hints = (
        "One flat tensor of all gradients, divided by N, and padded with zeros at its end to a "
        "multiple of N: its r-th chunk is the one that rank r owns.",
        "`dist.reduce_scatter_single(own, flat)` adds up the ranks' `flat`, and `own` gets this "
        "rank's chunk of the sum. `own` has ⌈n/N⌉ elements.",
        "Set each parameter's `.grad` to None. And return a tensor of its own: a slice of the flat "
        "tensor would keep all of it in memory.",
    )
    solution = staticmethod(scatter_gradients)
    mistakes = (
        Mistake(_scattered(power=0), "You summed and did not divide by the world size: the chunk "
                "has to be the mean over the ranks."),
        Mistake(_scattered(power=2), "You divided by the world size twice (`ReduceOp.AVG` divides "
                "already)."),
        Mistake(_scattered(lambda own, flat: _chunk_of(reduced(flat), own).clone()), _SLICED),
        Mistake(_scattered(lambda own, flat: _chunk_of(reduced(flat), own)), _SLICED),
        Mistake(_scattered(lambda own, flat: reduced(flat)), "You return the whole gradient. A "
                "rank needs no more than the mean for its own chunk."),
        Mistake(_scattered(lambda own, flat: _scatter(own, flat.roll(-len(own)))), "Your chunk is "
                "the one of the next rank: rank r owns chunk r."),
        Mistake(_scattered(lambda own, flat: (dist.reduce(flat, 0), _chunk_of(flat, own).clone())[
                -1]), "`dist.reduce` puts the sum on one rank alone; the others cut their chunk "
                "out of something else. Each rank wants its own chunk: reduce-scatter."),
        Mistake(_scattered(lambda own, flat: _chunk_of(flat, own).clone()), "You took this rank's "
                "chunk of its own gradient: nothing was added up over the ranks."),
        Mistake(_scattered(free=False), "Each parameter still holds its whole gradient, so no "
                "memory is saved: set `.grad` to None."),
        Mistake(_scattered(lambda own, flat: parallel.ring_reduce_scatter(flat)), "You return a "
                "view, which keeps all of the flat tensor in memory: `clone()` the chunk."),
        Mistake(_scattered(pad=lambda flat, padding: F.pad(flat, (padding, 0))), "You put the "
                "padding in front, which shifts every element. It belongs at the end."),
        Mistake(_scattered(lambda own, flat: parallel.ring_reduce_scatter(flat).clone(),
                pad=lambda flat, padding: flat), "You cut without padding, into chunks whose sizes "
                "differ by one. Here all have ⌈n/N⌉ elements: pad with zeros first."),
        Mistake(lambda parameters: torch.cat([scatter_gradients([each]) for each in parameters]),
                "You cut each gradient by itself. The chunks are those of all gradients together, "
                "one behind the other: make one flat tensor first."),
        Mistake(_scattered(order=reversed), "You lay the gradients flat from the last to the "
                "first. Backward makes them in that order; the chunks are cut in the list's."),
        Mistake(_scattered(size=lambda n, ranks: n // ranks), "You rounded the chunk down, and the "
                "last elements are nobody's. Round up, and pad."),
        Mistake(_scattered(pad=lambda flat, padding: flat), "The world size does not divide the "
                "number of elements, so that `reduce_scatter_single` refuses: pad with zeros to a "
                "multiple of it."),
        Mistake(_scattered(size=_a_chunk_more), "Where the world size divides n you pad by a whole "
                "N, which is what `N - n % N` is there. `-n % N` is 0."),
        Mistake(_scattered(of=lambda parameter: parameter.detach()), "You sent the parameters' "
                "values; what has to be averaged is their `.grad`."),
    )

    def trial(self, attempt):
        facts = {}
        for shapes in SHAPES:
            parameters = _with_gradients(shapes, [dist.get_rank()])
            before = [parameter.detach().clone() for parameter in parameters]
            with CallLog() as log:
                chunk = attempt(parameters)
            held = chunk.untyped_storage().nbytes() if isinstance(chunk, torch.Tensor) else 0
            facts |= _of_chunk(shapes, chunk, held, [each.grad is None for each in parameters],
                               all(map(torch.equal, before, parameters)),
                               _times(log, sum(map(math.prod, shapes))))
        return facts

    def expected(self, world_size):
        expected = [{} for _ in range(world_size)]
        for shapes in SHAPES:
            gradients = [parameter.grad.flatten()
                         for parameter in _with_gradients(shapes, range(world_size))]
            size = sum(map(len, gradients))
            chunk = _chunk_size(size, world_size)
            flat = F.pad(torch.cat(gradients), (0, world_size * chunk - size))
            for facts, own in zip(expected, flat.split(chunk), strict=True):
                facts |= _of_chunk(
                    shapes, own, AtMost(4 * chunk, "a slice keeps the whole flat tensor alive"),
                    [True] * len(shapes), True,
                    AtMost(1, "one reduce-scatter of the gradients is enough"))
        return expected


def _with_gradients(shapes, ranks):
    """Parameters with the mean of these ranks' gradients."""
    parameters = [nn.Parameter(seeded(f"parameter {number}", *shape))
                  for number, shape in enumerate(shapes)]
    for number, parameter in enumerate(parameters):
        parts = [seeded(f"gradient {number} of rank {rank}", *parameter.shape) for rank in ranks]
        parameter.grad = torch.stack(parts).mean(dim=0)
    return parameters


def _of_chunk(shapes, chunk, held, freed, untouched, sent):
    of = f", for {len(shapes)} parameters"
    return {f"the chunk{of}": chunk,
            f"the bytes of memory behind the chunk{of}": held,
            f"which parameters' `.grad` is None{of}": freed,
            f"that the parameters are not changed{of}": untouched,
            f"how many times the bytes of one reduce-scatter this rank sends{of}": sent}


EXERCISES = (BytesPerRank, ShardTheOptimizer, ScatterGradients)
