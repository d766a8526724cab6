"""Exercises of chapter 03: the two halves of a ring, and what a ring costs."""

import functools
import math

import torch
import torch.distributed as dist

from dplab import parallel
from dplab.exercises.compare import AtMost
from dplab.exercises.exercise import WRONG, Calculation, Exercise, Mistake
from dplab.measure import CallLog

# Lengths that no world size above 2 divides, and one that is shorter than the world size.
INPUTS = {"10 float32": (10, torch.float32), "2 float64": (2, torch.float64),
          "7 int64": (7, torch.int64)}


class OnARing(Exercise):
    """Base of the two halves: every input is summed, and its sends are counted."""

    seconds = 5.0
    halves: int

    def judge(self, *objects):
        verdict = super().judge(*objects)
        if "(SIGABRT)" in verdict.detail:  # gloo's way out
            verdict.outcome, verdict.why = WRONG, _TOO_LONG
            # which a check does not show: they are gloo's
            verdict.detail = verdict.detail.replace("; its last words stand in the output", "")
        return verdict

    def parts(self, world_size, rank):
        of_ranks = {name: [_input(length, dtype, other) for other in range(world_size)]
                    for name, (length, dtype) in INPUTS.items()}
        if self.halves == 1:
            of_ranks = {name: [tensor.tensor_split(world_size)[rank] for tensor in tensors]
                        for name, tensors in of_ranks.items()}
        return {f"{self.fact} of {name} numbers": parts for name, parts in of_ranks.items()}

    def trial(self, attempt):
        facts = {}
        for name, (length, dtype) in INPUTS.items():
            tensor = _input(length, dtype, dist.get_rank())
            with CallLog() as log:
                returned = attempt(tensor)
            sent = [call for call in log.calls if call.operation == "send"]
            others = len(log.calls) - len(sent) - log.count("recv")
            facts |= self._named(name, returned if self.halves == 1 else tensor, log.bytes("send"),
                                 len(sent), len({call.peer for call in sent}), others)
        return facts

    def expected(self, world_size):
        ranks = [{} for _ in range(world_size)]
        steps = self.halves * (world_size - 1)
        for name, (length, dtype) in INPUTS.items():
            total = _sum(length, dtype, world_size)
            limits = (
                AtMost(steps * math.ceil(length / world_size) * dtype.itemsize,
                       "one chunk in each step is enough"),
                # Exact, to tell a step too few; but a ring may leave out empty messages.
                steps if length >= world_size else AtMost(steps, "a ring has N-1 steps per half"),
                AtMost(1, "on a ring, a rank sends to one neighbour only"),
                AtMost(0, "build it from send and receive"))
            for rank, chunk in enumerate(total.tensor_split(world_size)):
                ranks[rank] |= self._named(name, total if self.halves == 2 else chunk, *limits)
        return ranks

    def _named(self, name, tensor, nbytes, messages, peers, others):
        return {f"{self.fact} of {name} numbers": tensor,
                f"the number of bytes sent for {name} numbers": nbytes,
                f"the number of messages sent for {name} numbers": messages,
                f"the number of ranks sent to for {name} numbers": peers,
                f"the number of collectives for {name} numbers": others}


def _input(length, dtype, rank):
    numbers = torch.arange(length, dtype=torch.float64)
    if dtype == torch.int64:  # odd, and too large for a float32
        return (2**25 + 100 * numbers + 7**rank).to(dtype)
    return torch.sin(1.7 * numbers + 5 * rank + 1).to(dtype)


def _sum(length, dtype, world_size):
    return torch.stack([_input(length, dtype, rank) for rank in range(world_size)]).sum(dim=0)


_ONE_STEP_MORE = ("You go around once too often: N-1 steps are enough for one half. In the first, "
                  "another step adds a part a second time.")
_NO_SUCH_RANK = ("There is no rank N, nor a rank -1: the neighbours are (rank + 1) % N and "
                 "(rank - 1) % N.")
_TOO_LONG = ("A message is longer than the tensor that receives it, and gloo gives up. Both must "
             "be the same chunk: receive into a tensor with the length and dtype of the chunk that "
             "your neighbour sends in this step. The one that you send may be shorter.")


# 3.1


def exchange(outgoing, to, incoming, source):
    pair = [dist.P2POp(dist.isend, outgoing, to), dist.P2POp(dist.irecv, incoming, source)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


def ring_reduce_scatter(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = tensor.tensor_split(world_size)
    for step in range(world_size - 1):
        outgoing = chunks[(rank - 1 - step) % world_size]
        growing = chunks[(rank - 2 - step) % world_size]
        arriving = torch.empty_like(growing)
        exchange(outgoing, right, arriving, left)
        growing += arriving
    return chunks[rank]


def _send_first(outgoing, to, incoming, source):
    dist.send(outgoing, to)
    dist.recv(incoming, source)


def _receive_first(outgoing, to, incoming, source):
    dist.recv(incoming, source)
    dist.send(outgoing, to)


def _from_the_wrong_side(outgoing, to, incoming, source):
    exchange(outgoing, to, incoming, to)


def _without_modulo(outgoing, to, incoming, source):
    exchange(outgoing, dist.get_rank() + 1, incoming, dist.get_rank() - 1)


def _as_float32(outgoing, to, incoming, source):
    arriving = torch.empty(len(incoming))
    exchange(outgoing.float(), to, arriving, source)
    incoming.copy_(arriving)


_add, _overwrite, _forget = torch.Tensor.add_, torch.Tensor.copy_, torch.add


def _without_remainder(tensor, parts):
    size = len(tensor) // parts
    return tensor[: size * parts].view(parts, size)


def _half(*, start=-1, steps=-1, way=1, move=1, combine=_add, swap=exchange, keep=0,
          cut=torch.tensor_split):
    """One half of a ring: N + ``steps`` steps; a rank first sends chunk rank + ``start``."""

    def attempt(tensor):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        chunks = cut(tensor, world_size)
        for step in range(world_size + steps):
            first = rank + way * (start - move * step)
            outgoing, growing = chunks[first % world_size], chunks[(first - way) % world_size]
            arriving = torch.zeros_like(growing)
            swap(outgoing, (rank + way) % world_size, arriving, (rank - way) % world_size)
            combine(growing, arriving)
        return chunks[(rank + keep) % world_size]

    return attempt


def _whole_tensor(tensor, sums=False):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    passing = tensor if sums else tensor.clone()
    for _ in range(world_size - 1):
        arriving = torch.empty_like(tensor)
        exchange(passing, (rank + 1) % world_size, arriving, (rank - 1) % world_size)
        tensor += arriving
        passing = tensor if sums else arriving


def _into_the_tuple(tensor):
    chunks = tensor.tensor_split(dist.get_world_size())
    for arriving in chunks[1:]:
        chunks[0] += arriving


def _common(ring, whole):
    """In either exercise. ``whole`` makes an attempt from an all-reduce."""
    return (
        Mistake(_into_the_tuple, "`chunks[i] += …` adds, and then assigns to an item of the tuple "
                "that `tensor_split` returns, which fails. Write `chunks[i].add_(…)`."),
        Mistake(ring(steps=0), _ONE_STEP_MORE),
        Mistake(ring(steps=-2), "You stop one step early: to collect the parts of N ranks, a chunk "
                "has to travel N-1 times."),
        Mistake(ring(move=0), "You send the same chunk in every step. The chunk to send moves on "
                "with the step: it is the one that you added to last."),
        Mistake(ring(cut=_without_remainder), "You drop the remainder: where N does not divide the "
                "length, the last elements are in no chunk. `tensor_split(N)` makes chunks that "
                "differ by at most one."),
        Mistake(ring(cut=torch.chunk), "`torch.chunk` may make fewer than N chunks, or cut "
                "elsewhere. `tensor_split(N)` always makes N."),
        Mistake(ring(swap=_as_float32), "What travels is float32, which rounds large integers and "
                "float64. Receive in the tensor's own dtype: `torch.empty_like(chunk)`."),
        Mistake(whole(_whole_tensor), "You pass the whole tensor around. In each step, send only "
                "one of the N chunks: that is where a ring saves its bytes."),
        Mistake(whole(lambda tensor: _whole_tensor(tensor, sums=True)), "You send your sum so "
                "far, whole, and add the sum that arrives: parts are added more than once. Send "
                "one chunk in each step, another one each time."),
        Mistake(whole(lambda tensor: dist.all_reduce(tensor)), "You called a finished collective. "
                "Here, you build one: from send and receive alone."),
        Mistake(ring(swap=_send_first), "Every rank sends before it receives, and each send waits "
                "until its neighbour receives: all wait in a circle. Hand both over as a pair, as "
                "`exchange` does.", hangs=True),
        Mistake(ring(swap=_receive_first), "Everybody waits to receive, and nobody comes to send, "
                "around the whole circle. Hand both over as a pair, as `exchange` does.",
                hangs=True),
        Mistake(ring(swap=_from_the_wrong_side), "You receive from the neighbour that you send "
                "to. On a ring, what you send goes to one side, and what arrives comes from the "
                "other.", hangs=True),
        Mistake(ring(swap=_without_modulo), _NO_SUCH_RANK),
    )


def _own_chunk_after(all_reduce):
    def attempt(tensor):
        all_reduce(tensor)
        return tensor.tensor_split(dist.get_world_size())[dist.get_rank()]

    return attempt


def _straight_to_its_rank(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world_size)
    total = chunks[rank].clone()
    for distance in range(1, world_size):
        arriving, to = torch.empty_like(total), (rank + distance) % world_size
        exchange(chunks[to], to, arriving, (rank - distance) % world_size)
        total += arriving
    return total


def _returns_everything(tensor):
    ring_reduce_scatter(tensor)
    return tensor


def _reduce_scatter_in_place(tensor):
    ring_reduce_scatter(tensor)


class RingReduceScatter(OnARing):
    slug = "ring-reduce-scatter"
    number = "3.1"
    title = "The first half of the ring: reduce-scatter"
    name = "ring_reduce_scatter"
    minutes = 25
    fact = "this rank's chunk of the sum"
    halves = 1
    hints = (
        "Take one chunk and follow it: it visits every rank once, each adds its own part, and its "
        "way must end at the rank that is to keep it. Where does chunk c have to start?",
        "Going right, chunk c starts at rank c+1. So rank r first sends chunk r-1; in the next "
        "step it sends the one that has just arrived from the left, with its own part added.",
        "In each of N-1 steps: `exchange(outgoing, right, arriving, left)`, then add `arriving` to "
        "this rank's part. In step s, chunk (r-1-s) mod N goes out, and the one before it arrives.",
    )
    solution = staticmethod(ring_reduce_scatter)
    mistakes = (
        *_common(_half, _own_chunk_after),
        Mistake(_half(combine=_overwrite), "The chunk that arrives overwrites yours. It holds the "
                "sum of the ranks that it has passed: add it to your own part."),
        *(Mistake(attempt, "You return chunk r as it was. Either you sent it first: to complete it "
                  "on rank r, start one chunk further back. Or what arrives is added elsewhere, to "
                  "another chunk or a new tensor: `chunk.add_(…)`, with the same chunk.")
          for attempt in (_half(start=0), _half(combine=_forget))),
        *(Mistake(_half(start=0, way=way, keep=way), "The chunk is complete, but it is a "
                  "neighbour's. Rank r has to end with chunk r: start with another chunk, so that "
                  "its way ends there.") for way in (1, -1)),
        Mistake(_straight_to_its_rank, "The sums are right, and the bytes as few as can be; but "
                "you send to every rank directly. On a ring, each rank needs one link only, to "
                "its neighbour: pass the chunks on."),
        Mistake(lambda tensor: ring_reduce_scatter(tensor) / dist.get_world_size(), "You divided "
                "by the world size: this exercise asks for the sum."),
        Mistake(_returns_everything, "You return the whole tensor, and only chunk r of it is "
                "complete on rank r: return that one."),
        Mistake(_reduce_scatter_in_place, "You return nothing: return chunk r of the sum."),
    )


# 3.2


def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = tensor.tensor_split(world_size)
    chunks[rank].copy_(ring_reduce_scatter(tensor))
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        arriving = chunks[(rank - 1 - step) % world_size]
        exchange(outgoing, right, arriving, left)


def _ring(start=-1, second=None, **first):
    """Both halves with something wrong: options of `_half`; both cut and exchange alike."""
    both = {name: first[name] for name in ("cut", "swap") if name in first}
    second = {"start": start + 1, "combine": _overwrite, **both, **(second or {})}

    def attempt(tensor):
        _half(start=start, **first)(tensor)
        _half(**second)(tensor)

    return attempt


def _beginning_with(start):
    """In rings whose ranks first send chunk rank + ``start``."""
    ring = functools.partial(_ring, start)
    return (
        Mistake(ring({"combine": _add}), "You add in the second half, too. The chunks that travel "
                "there are finished: overwrite."),
        Mistake(ring({"start": start + 2}), "The second half starts with the wrong chunk. Pass "
                "on the one first that this rank has completed: the last that it added to."),
        Mistake(ring({"steps": -2}), "The second half stops one step early: a finished chunk has "
                "to travel N-1 times to be on all ranks."),
        Mistake(ring({"combine": _forget}), "What arrives in the second half does not get into the "
                "tensor. Assigning to its name, or to an item of a list, leaves the caller's as it "
                "was: receive into its chunks, or `copy_`."),
    )


def _divided(divide):
    def attempt(tensor):
        ring_all_reduce(tensor)
        divide(tensor, dist.get_world_size())

    return attempt


def _into_a_new_tensor(tensor):
    ring_all_reduce(tensor.clone())


class RingAllReduce(OnARing):
    slug = "ring-all-reduce"
    number = "3.2"
    title = "The whole ring: all-reduce"
    name = "ring_all_reduce"
    minutes = 20
    fact = "the sum"
    halves = 2
    hints = (
        "After your reduce-scatter, rank r holds chunk r of the sum. What is left is to bring each "
        "finished chunk to the others: N-1 more steps on the same ring.",
        "In the second half nothing is added: a finished chunk overwrites what lies in its place. "
        "In each step, pass on the chunk that you got last.",
        "Receive straight into `tensor.tensor_split(N)[...]`: the chunks are views of the tensor. "
        "In step s of the second half, rank r sends chunk (r-s) mod N.",
    )
    solution = staticmethod(ring_all_reduce)
    mistakes = (
        *_common(_ring, lambda all_reduce: all_reduce),
        *_beginning_with(-1),
        *_beginning_with(0),
        *(Mistake(_ring(combine=combine), "Nothing is added up: each chunk ends as that of a "
                  "single rank. Either the first half overwrites, or its sum goes into a new "
                  "tensor or a copy (`chunk.add_(…)` adds in place); or the second half "
                  "starts with a chunk that this rank has not completed.")
          for combine in (_overwrite, _forget)),
        *(Mistake(_divided(divide), "You divided by the world size: this exercise asks for the "
                  "sum.") for divide in (torch.Tensor.div_, torch.Tensor.floor_divide_,
                                         lambda tensor, ranks: tensor.copy_(tensor / ranks))),
        Mistake(_into_a_new_tensor, "The sum is in a new tensor: write it into the one that you "
                "were given, as `dist.all_reduce` does."),
        *(Mistake(half, "This is the first half alone: one chunk is complete on each rank. The "
                  "all-gather is missing, which brings each chunk to all ranks.")
          for half in (_reduce_scatter_in_place, _half(start=0), _half(start=0, way=-1))),
        Mistake(_ring(second={"steps": 0}), _ONE_STEP_MORE),
        Mistake(parallel.naive_all_reduce, "You send the whole tensor to every rank. On a ring, "
                "each rank sends one chunk in each step, to one neighbour."),
    )


# 3.3

# Gradients, bytes of each, ranks, Gb/s, µs.
CASES = ((7_000_000_000, 4, 8, 400, 14.0), (25_000_000, 2, 64, 100, 14.0),
         (1000, 4, 1024, 3600, 3.4))


def predict_all_reduce(gradients, bytes_each, world_size, gigabits, microseconds):
    nbytes = gradients * bytes_each
    messages = 2 * (world_size - 1)
    bandwidth = gigabits * 1e9 / 8
    seconds = messages * (microseconds * 1e-6 + nbytes / world_size / bandwidth)
    bus_bandwidth = messages / world_size * nbytes / seconds
    return seconds, bus_bandwidth / 1e9


def _predict(*, gigabit=1e9 / 8, microsecond=1e-6, latencies=lambda n: 2 * (n - 1),
             moved=lambda n: 2 * (n - 1) / n, bus=lambda n: 2 * (n - 1) / n, giga=1e9, each=None):
    def attempt(gradients, bytes_each, world_size, gigabits, microseconds):
        nbytes = gradients * (each or bytes_each)
        seconds = (latencies(world_size) * microseconds * microsecond
                   + moved(world_size) * nbytes / (gigabits * gigabit))
        return seconds, bus(world_size) * nbytes / seconds / giga

    return attempt


def _in_units(per_second):
    def attempt(*case):
        seconds, bus = predict_all_reduce(*case)
        return per_second * seconds, bus

    return attempt


def _link_for_bus(*case):
    return predict_all_reduce(*case)[0], case[3] / 8


class PredictAllReduce(Calculation):
    slug = "predict-all-reduce"
    number = "3.3"
    title = "Predict an all-reduce"
    name = "predict_all_reduce"
    minutes = 15
    hints = (
        "First bring everything to bytes and seconds: 1 Gb/s is 1e9 / 8 bytes/s, 1 µs is 1e-6 s.",
        "A ring all-reduce has 2(N-1) messages, one after the other, of M/N bytes each. A message "
        "of n bytes takes the latency, and n over the bandwidth.",
        "Bus bandwidth = 2(N-1)/N · M / seconds; divide by 1e9 for GB/s.",
    )
    solution = staticmethod(predict_all_reduce)
    mistakes = (
        *(Mistake(_predict(gigabit=unit), "Mind bits and bytes: links are sold in bits per second, "
                  "tensors are counted in bytes. 400 Gb/s are 50 GB/s.") for unit in (1e9, 8e9)),
        *(Mistake(_predict(microsecond=unit), f"A microsecond is 1e-6 s, and not {unit:g} s.")
          for unit in (1e-3, 1)),
        *(Mistake(attempt, "Links are sold in powers of ten: 1 Gb/s is 1e9 bits per second, and "
                  "1 GB is 1e9 bytes, not 2**30.") for attempt in (
              _predict(gigabit=2**30 / 8), _predict(giga=2**30),
              _predict(gigabit=2**30 / 8, giga=2**30))),
        *(Mistake(_in_units(factor), f"The seconds are asked, and you return {unit}: the number "
                  "is too large.") for factor, unit in ((1e3, "milliseconds"),
                                                        (1e6, "microseconds"))),
        Mistake(_predict(microsecond=0), "The latency is missing; small tensors have little else."),
        *(Mistake(_predict(latencies=count), "The latency counts once for each message that waits "
                  "for the one before it, and a ring all-reduce has 2(N-1) of them.")
          for count in (lambda n: 1, lambda n: 2, lambda n: n - 1, lambda n: n, math.log2,
                        lambda n: 2 * math.log2(n))),
        *(Mistake(_predict(moved=lambda n: 2 * (n - 1), bus=factor), "Here each message takes as "
                  "long as the whole tensor. It carries one chunk, M/N bytes, and has the link for "
                  "itself.")
          for factor in (lambda n: 2 * (n - 1) / n, lambda n: 1, lambda n: 2 * (n - 1))),
        Mistake(_predict(moved=lambda n: 1 / n), "Each of the 2(N-1) messages carries a chunk: "
                "mind the brackets, both terms are multiplied."),
        Mistake(_predict(latencies=lambda n: 2 * n, moved=lambda n: 2), "Each half of the ring has "
                "N-1 steps, not N: nobody sends to itself."),
        *(Mistake(_predict(latencies=lambda n: n - 1, moved=lambda n: (n - 1) / n, bus=factor),
                  "This is one half of the ring. An all-reduce is a reduce-scatter and then an "
                  "all-gather: twice as many messages and bytes.")
          for factor in (lambda n: 2 * (n - 1) / n, lambda n: (n - 1) / n)),
        *(Mistake(_predict(moved=factor), "A rank sends 2(N-1)/N M: neither M, nor 2 M, which it "
                  "comes near to with many ranks.") for factor in (lambda n: 1, lambda n: 2)),
        *(Mistake(_predict(bus=factor), "The seconds are right. The bus bandwidth of an all-reduce "
                  "is 2(N-1)/N times the tensor's bytes over the seconds.")
          for factor in (lambda n: 1, lambda n: (n - 1) / n)),
        Mistake(_predict(bus=lambda n: 2 * (n - 1)), "The seconds are right. Bus bandwidth counts "
                "the bytes that one rank sends, and these are those of all ranks."),
        Mistake(_predict(gigabit=2e9 / 8), "You doubled the bandwidth. It is given for each "
                "direction, and a rank sends in one while it receives in the other."),
        Mistake(_predict(giga=1), "The seconds are right; the bus bandwidth is asked in GB/s."),
        Mistake(_predict(giga=1e9 / 8), "The seconds are right. The bus bandwidth is asked in "
                "gigabytes per second, and this is gigabits."),
        Mistake(_link_for_bus, "The seconds are right. You return the link's bandwidth, which is "
                "the most that can be; what is asked follows from the seconds, latency and all."),
        Mistake(_predict(each=1), "You counted the gradients, and not their bytes: each has "
                "`bytes_each` of them."),
    )

    def trial(self, attempt):
        facts = {}
        for case in CASES:
            answer = attempt(*case)
            alone = not isinstance(answer, tuple | list) and getattr(answer, "ndim", 0) == 0
            facts |= _named(case, *(answer, None) if alone else answer)
        return facts

    def expected(self, world_size):
        return {fact: value for case in CASES
                for fact, value in _named(case, *predict_all_reduce(*case)).items()}


def _named(case, seconds, bus):
    gradients, bytes_each, ranks, gigabits, microseconds = case
    where = (f"for {gradients:g} gradients of {bytes_each} bytes on {ranks} ranks, {gigabits} Gb/s "
             f"and {microseconds:g} µs")
    return {f"the time in seconds {where}": seconds, f"the bus bandwidth in GB/s {where}": bus}


EXERCISES = (RingReduceScatter, RingAllReduce, PredictAllReduce)
