"""Exercises of chapter 06: the communication of a run, and two ways to have less of it."""

import contextlib
import dataclasses
import operator
import statistics
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dplab.exercises.compare import AtMost
from dplab.exercises.exercise import Calculation, Exercise, Mistake
from dplab.exercises.trials import optimizer_for
from dplab.measure import CallLog, Trace
from dplab.predict import step

# 6.1

# When the data is there, forward and backward end; and the optimizer's seconds. Rank 1 computes
# longest, and rank 2 is the last to come and to end, since it waits for data.
RANKS = ((0.003, 0.022, 0.062, 0.005), (0.0, 0.033, 0.088, 0.007), (0.042, 0.062, 0.103, 0.012),
         (0.002, 0.027, 0.071, 0.004))
# When each bucket is ready, as a share of backward; and the seconds of its all-reduce.
BUCKETS = ((0.30, 0.004), (0.45, 0.009), (0.90, 0.006), (1.00, 0.013))
NUMBERS = ("`compute`", "`communication`", "`exposed`", "`ratio`")


def communication_ratio(ranks):
    def of_lane(lane, spans):
        return [(span.start, span.end) for span in spans if span.lane == lane]

    def seconds(intervals):
        return sum(end - start for start, end in intervals)

    busy = max((of_lane(step.COMPUTE, spans) for spans in ranks), key=seconds)
    collectives = zip(*(of_lane(step.COMMUNICATION, spans) for spans in ranks), strict=True)
    under_way = [(max(start for start, _ in same), same[0][1]) for same in collectives]

    communication = exposed = now = 0.0
    for then in sorted({time for interval in busy + under_way for time in interval}):
        if any(start <= now < end for start, end in under_way):
            communication += then - now
            if not any(start <= now < end for start, end in busy):
                exposed += then - now
        now = then
    return seconds(busy), communication, exposed, communication / seconds(busy)


def _of_lane(spans, *lanes):
    return [span for span in spans if span.lane in lanes]


def _sum(spans):
    return sum(span.seconds for span in spans)


def _last_of_all(calls):
    """What is left where the name is a key: the latest launch of all, and the last one's end."""
    return calls[-1].end - max(call.start for call in calls)


def _exposed_beside(it, *spans):
    """What is exposed if these spans compute."""
    computing = [dataclasses.replace(span, lane=step.COMPUTE) for span in spans]
    return step.exposed_seconds(it.calls + computing)


def _analysis(*, rank=max, begin=max, busy=(step.COMPUTE,), communication=step.exposed_seconds,
              exposed=lambda it: step.exposed_seconds(it.calls + it.busy),
              ratio=lambda compute, calls, exposed, seconds: calls / compute):
    """An analysis with one thing wrong. ``begin`` combines a collective's launches on all ranks, if
    they are not each rank's own; ``rank`` combines the ranks' analyses."""

    def attempt(ranks):
        called, analyses = [_of_lane(spans, step.COMMUNICATION) for spans in ranks], []
        for spans, calls in zip(ranks, called, strict=True):
            if begin:
                calls = [dataclasses.replace(same[0], start=begin(span.start for span in same))
                         for same in zip(*called, strict=True)]
            computing = [dataclasses.replace(span, lane=step.COMPUTE)
                         for span in _of_lane(spans, *busy)]
            it = SimpleNamespace(calls=calls, busy=computing, spans=spans)
            analyses.append((_sum(computing), communication(calls), exposed(it)))
        found = list(rank(analyses))
        return *found, ratio(*found, step.step_seconds(ranks[0]))

    return attempt


class CommunicationRatio(Calculation):
    slug = "communication-ratio"
    number = "6.1"
    title = "The communication ratio of a run"
    name = "communication_ratio"
    minutes = 25
    hints = (
        "When is each collective under way? From its latest launch on all ranks to its end.",
        "For lengths, cut time at every start and end. In between nothing begins or ends: ask of "
        "each piece whether a collective is under way, and whether the rank computes.",
        "The rank is the one whose computing spans add up to most; its launches do not matter.",
    )
    solution = staticmethod(communication_ratio)
    mistakes = (
        Mistake(_analysis(communication=_sum), "You add up the spans of collectives that are in "
                "flight together: the time that they share counts once. Merge what overlaps."),
        Mistake(_analysis(communication=_last_of_all), "You tell collectives apart by name, and "
                "all have the same: only one is left. On all ranks they have the same *order*."),
        Mistake(_analysis(communication=step.step_seconds), "You measure from the first launch to "
                "the last end. In between there are pauses in which nothing is under way."),
        Mistake(_analysis(busy=(step.COMPUTE, step.WAITING)), "You count waiting as computing. Of "
                "the three lanes only `step.COMPUTE` is work of this rank."),
        Mistake(_analysis(exposed=lambda it: step.exposed_seconds(it.calls)), "You count all of "
                "communication as exposed. What runs while the rank computes is hidden."),
        Mistake(_analysis(exposed=lambda it: step.hidden_seconds(it.calls + it.busy)), "You return "
                "what is hidden: communication while the rank computes. Exposed is the rest."),
        Mistake(_analysis(exposed=lambda it: step.exposed_seconds([it.calls[-1], *it.busy])),
                "You count the last collective only. Those before it may be exposed, too."),
        Mistake(_analysis(exposed=lambda it: max(
                    0.0, step.exposed_seconds(it.calls) - _sum(it.busy))), "You subtract compute "
                "from communication. They neither begin nor end together: look at pieces of time."),
        Mistake(_analysis(exposed=lambda it: _exposed_beside(it, *(
                    span for span in it.spans if span.lane != step.COMMUNICATION))), "You take it "
                "that waiting hides communication. A rank that waits computes nothing: what is "
                "under way meanwhile is exposed."),
        Mistake(_analysis(exposed=lambda it: _exposed_beside(it, dataclasses.replace(
                    it.busy[0], end=it.busy[-1].end))), "You take it that the rank computes from "
                "its first computing span to the end of its last. In between it waits: look at "
                "each span by itself."),
        *(Mistake(_analysis(exposed=exposed), "You count waiting for data and for slower ranks, "
                  "too. Exposed is only the time in which a collective is under way.")
          for exposed in (lambda it: _sum(_of_lane(it.spans, step.WAITING)),
                          lambda it: step.step_seconds(it.spans) - _sum(it.busy))),
        *(Mistake(_analysis(ratio=ratio), "The ratio that is asked for is communication / compute. "
                  "Yours has something else above or below the line.") for ratio in (
            lambda compute, calls, exposed, seconds: calls / seconds,
            lambda compute, calls, exposed, seconds: exposed / compute,
            lambda compute, calls, exposed, seconds: compute / calls)),
        Mistake(_analysis(rank=lambda ranks: ranks[0]), "You looked at rank 0 only. Take compute "
                "of the rank that computes longest, and the last launch of all ranks."),
        *(Mistake(_analysis(rank=rank), "You averaged over the ranks, or added them up. They work "
                  "at the same time, and all wait for the slowest one: its numbers decide.")
          for rank in (lambda ranks: map(statistics.mean, zip(*ranks, strict=True)),
                       lambda ranks: map(sum, zip(*ranks, strict=True)))),
        Mistake(_analysis(rank=lambda ranks: map(max, zip(*ranks, strict=True))), "`exposed` is of "
                "a faster rank, which waits for the others. Take the rank that computes longest."),
        *(Mistake(_analysis(begin=None, rank=rank), "You count a collective from its launch on one "
                  "rank. Until the last one has come, it waits for a straggler, not for the link.")
          for rank in (max, lambda ranks: map(max, zip(*ranks, strict=True)),
                       lambda ranks: (max(ranks)[0], *ranks[0][1:]))),
    )

    def trial(self, attempt):
        facts = {}
        for name, recording in _recordings().items():
            answer = attempt(recording)
            answer = answer if isinstance(answer, tuple | list) else [answer]
            facts |= _of_recording(name, [number.item() if isinstance(number, torch.Tensor)
                                          else number for number in answer])
        return facts

    def expected(self, world_size):
        facts = {}
        for name, recording in _recordings().items():
            facts |= _of_recording(name, [round(number, 9)
                                          for number in communication_ratio(recording)])
        return facts


def _of_recording(name, numbers):
    return {f"{what} of {name}": number for what, number in zip(NUMBERS, numbers, strict=False)}


def _recordings():
    """By name: the spans of all ranks of a step."""
    steps = {f"a step on {size} rank{'s' * (size > 1)}": _recording(size) for size in (1, 2, 3, 4)}
    return steps | {"a step on 2 ranks with a slow link": [
        [step.Span(name, lane, start, end) for lane, name, start, end in sorted(
            spans, key=operator.itemgetter(2, 3))] for spans in SLOW_LINK]}


# Communication takes longer than computing, some of it goes on while the rank does nothing, and the
# last collective begins after all computing.
SLOW_LINK = tuple(
    ((step.COMMUNICATION, "broadcast", start, 0.013), (step.COMPUTE, "forward", *forward),
     (step.COMMUNICATION, "all_reduce", launches[0], 0.050),
     (step.COMMUNICATION, "all_reduce", launches[1], 0.080), (step.COMPUTE, "backward", *backward),
     (step.WAITING, "wait", backward[1], 0.080), (step.COMPUTE, "optimizer", 0.081, end),
     (step.COMMUNICATION, "all_reduce", last, 0.112))
    for start, forward, launches, backward, end, last in (
        (0.000, (0.002, 0.010), (0.020, 0.030), (0.014, 0.034), 0.087, 0.088),
        (0.001, (0.003, 0.012), (0.022, 0.033), (0.015, 0.037), 0.086, 0.089)))


def _recording(world_size):
    """The spans of all ranks; all-reduces follow one another on the link."""
    ranks, free = [[] for _ in range(world_size)], 0.0
    for share, seconds in BUCKETS:
        launches = [forward + share * (backward - forward)
                    for _, forward, backward, _ in RANKS[:world_size]]
        free = max(free, *launches) + seconds
        for spans, launch in zip(ranks, launches, strict=True):
            spans.append(step.Span("all_reduce", step.COMMUNICATION, launch, free, 2**20))
    for spans, (data, forward, backward, optimizer) in zip(ranks, RANKS, strict=False):
        spans += [step.Span("data", step.WAITING, 0.0, data),
                  step.Span("forward", step.COMPUTE, data, forward),
                  step.Span("backward", step.COMPUTE, forward, backward),
                  step.Span("wait", step.WAITING, backward, free),
                  step.Span("optimizer", step.COMPUTE, free + 0.001, free + 0.001 + optimizer)]
        spans.sort(key=lambda span: (span.start, span.end))
    return ranks


# 6.2

STEPS = ((5, 5, 5, 2), (4,), (3, 6, 1))  # the samples of each micro-batch


def accumulated_step(model, optimizer, micro_batches):
    samples = sum(len(y) for _, y in micro_batches)
    optimizer.zero_grad()
    for number, (x, y) in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), y, reduction="sum") / samples
            loss.backward()
    optimizer.step()


_SCALES = {"samples": lambda n, total, k: n / total, "count": lambda n, total, k: 1 / k,
           "none": lambda n, total, k: 1.0, "sum": lambda n, total, k: n}


def _accumulate(*, sync=operator.eq, forward_too=True, scale="samples", zero="first",
                steps="last", ranks=lambda: 1):
    """A step with one thing wrong. ``sync(number, count)``: is this micro-batch synchronised?"""

    def attempt(model, optimizer, micro_batches):
        samples, count = sum(len(y) for _, y in micro_batches), len(micro_batches)
        for number, (x, y) in enumerate(micro_batches, start=1):
            if zero == "each" or (zero == "first" and number == 1):
                optimizer.zero_grad()
            quiet = contextlib.nullcontext if sync(number, count) else model.no_sync
            with quiet() if forward_too else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y) * _SCALES[scale](len(y), samples, count)
            with quiet():
                (loss / ranks()).backward()
            if steps == "each":
                optimizer.step()
        if steps == "last":
            optimizer.step()

    return attempt


def _whole_batch(model, optimizer, micro_batches):
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    accumulated_step(model, optimizer, [(x, y)])


class AccumulatedStep(Exercise):
    slug = "accumulate-then-send"
    number = "6.2"
    title = "Accumulate gradients, send them once"
    name = "accumulated_step"
    minutes = 15
    tolerance = 1e-4
    hints = (
        "`backward` adds to `.grad`: clear once, call it for each micro-batch, take one step.",
        "`with model.no_sync():` around forward *and* backward keeps DDP quiet. The last "
        "micro-batch stays outside: its backward averages all that has been added up.",
        "For the mean over all samples, a micro-batch of n samples counts n / (this rank's samples "
        "in all micro-batches). DDP divides by the number of ranks.",
    )
    solution = staticmethod(accumulated_step)
    mistakes = (
        *(Mistake(_accumulate(scale=scale), "The losses are added up and not divided: the gradient "
                  "is many times too large.") for scale in ("none", "sum")),
        Mistake(_accumulate(scale="count"), "You divide by the number of micro-batches: samples of "
                "a short one get too much weight. The mean loss of a micro-batch counts with its "
                "share of the samples."),
        *(Mistake(_accumulate(zero="each", scale=scale), "`zero_grad` runs before every "
                  "micro-batch, so only the last one's gradient is left. Clear once, before the "
                  "first.") for scale in _SCALES),
        *(Mistake(_accumulate(steps="each", zero=zero, scale=scale), "The optimizer takes a step "
                  "after each micro-batch. Take one, at the end: until then the gradients add up.")
          for zero in ("each", "first") for scale in _SCALES),
        Mistake(_accumulate(zero="never"), "The gradients of the step before are still there, and "
                "the new ones are added to them: clear them."),
        Mistake(_whole_batch, "The weights come out right, but all micro-batches are in memory at "
                "once: you put them together, or add up their losses. Call `backward` for each one "
                "before the next forward."),
        *(Mistake(_accumulate(sync=operator.gt, scale=scale), "The gradients are never "
                  "synchronised: the last micro-batch, too, is inside `no_sync`, or goes round DDP "
                  "as `model.module`.") for scale in _SCALES),
        Mistake(_accumulate(sync=lambda number, count: number == 1), "You synchronise the first "
                "micro-batch: what later ones add is each rank's own. It must be the *last*."),
        Mistake(_accumulate(sync=operator.lt), "It is the wrong way round: only the last "
                "micro-batch is inside `no_sync`. All but the last belong there."),
        Mistake(_accumulate(forward_too=False), "Only `backward` is inside `no_sync`. DDP decides "
                "in *forward* whether the backward after it synchronises: both belong inside."),
        Mistake(_accumulate(sync=operator.le), "Every micro-batch is synchronised. The weights "
                "come out right, but the gradients are sent as often as there are micro-batches: "
                "all but the last belong inside `no_sync`."),
        Mistake(_accumulate(ranks=dist.get_world_size), "You divide by the number of ranks. DDP's "
                "average does that already."),
    )

    def trial(self, attempt):
        module, optimizer = _classifier()
        model = nn.parallel.DistributedDataParallel(module)
        Trace().watch(model)  # its all-reduces come from Python then, where a CallLog sees them
        facts = {}
        for number, sizes in enumerate(STEPS, start=1):
            batches, watch = _micro_batches(number, sizes, dist.get_rank()), _Watch(model)
            with CallLog() as log:
                attempt(model, optimizer, batches)
            sent = (watch.half_quiet, log.bytes()) if dist.get_world_size() > 1 else (0, 0)
            facts |= _of_step(number, module, watch.most, *sent)
        return facts

    def expected(self, world_size):
        module, optimizer = _classifier()
        nbytes, facts = sum(4 * parameter.numel() for parameter in module.parameters()), {}
        for number, sizes in enumerate(STEPS, start=1):
            _whole_batch(module, optimizer, [batch for rank in range(world_size)
                                             for batch in _micro_batches(number, sizes, rank)])
            facts |= _of_step(number, module, AtMost(max(sizes), "one micro-batch at a time"),
                              AtMost(1, "DDP decides in forward whether backward synchronises"),
                              AtMost(nbytes + 16, "each gradient is sent once; room for a count"))
        return facts


class _Watch:
    """Follows a DDP model: samples whose graphs are in memory, backwards that are half quiet."""

    def __init__(self, model):
        self.model, self.samples, self.most, self.half_quiet = model, 0, 0, 0
        model.module.register_forward_hook(self.forward)

    def forward(self, module, _, output):
        if not output.requires_grad:
            return
        synchronised = self.model.require_backward_grad_sync
        self.samples += len(output)
        self.most = max(self.most, self.samples)
        output.register_hook(lambda gradient: self.backward(len(gradient), synchronised))

    def backward(self, samples, synchronised):
        self.samples -= samples
        self.half_quiet += synchronised and not self.model.require_backward_grad_sync


def _classifier():
    torch.manual_seed(6)
    module = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    return module, optimizer_for(module)


def _micro_batches(number, sizes, rank):
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(sum(sizes), 7, generator=generator)
    y = torch.randint(3, (sum(sizes),), generator=generator)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def _of_step(number, module, samples, half_quiet, nbytes):
    return {**{f"`{name}` after step {number}": parameter.detach().clone()
               for name, parameter in module.named_parameters()},
            f"the samples in memory at once in step {number}": samples,
            f"the backwards in `no_sync`, with forward outside, in step {number}": half_quiet,
            f"the bytes handed to collectives in step {number}": nbytes}


# 6.3

ELEMENTS, SENT, ROUNDS = 1000, 37, 4


def sparse_average(gradient, residual, k):
    whole = gradient + residual
    indices = whole.abs().topk(k).indices
    values = whole[indices]
    residual.copy_(whole)
    residual[indices] = 0

    world_size = dist.get_world_size()
    all_values = [torch.empty_like(values) for _ in range(world_size)]
    all_indices = [torch.empty_like(indices) for _ in range(world_size)]
    dist.all_gather(all_values, values)
    dist.all_gather(all_indices, indices)
    total = torch.zeros_like(gradient)
    total.index_add_(0, torch.cat(all_indices), torch.cat(all_values))
    return total / world_size


def _gathered(tensor, shared=False):
    every = [torch.empty_like(tensor)] * dist.get_world_size()
    every = every if shared else [each.clone() for each in every]
    dist.all_gather(every, tensor)
    return torch.cat(every)


def _place(indices, values, accumulate=True):
    return torch.zeros(ELEMENTS).index_put((indices,), values, accumulate=accumulate)


def _total(it, shared=False, accumulate=True):
    return _place(_gathered(it.indices, shared), _gathered(it.values, shared), accumulate)


def _by_senders(it):
    """The mean of those who sent an element, times N for the division that follows."""
    senders = _place(_gathered(it.indices), torch.ones(len(it.indices) * dist.get_world_size()))
    return _total(it) / senders.clamp(min=1) * dist.get_world_size()


def _summed(tensor):
    return _gathered(tensor).view(-1, len(tensor)).sum(dim=0)


def _sparse(*, whole=lambda it: it.gradient + it.residual, score=lambda it: it.whole.abs(),
            value=lambda it: it.whole, rest=lambda it: it.whole - it.sent, total=_total,
            divisor=dist.get_world_size):
    """A sparse average with one thing wrong."""

    def attempt(gradient, residual, k):
        it = SimpleNamespace(gradient=gradient, residual=residual)
        it.whole = whole(it)
        it.indices = score(it).topk(k).indices
        it.values = value(it)[it.indices]
        it.sent = _place(it.indices, it.values)
        it.mean = total(it) / divisor()
        residual.copy_(rest(it))
        return it.mean

    return attempt


class SparseAverage(Exercise):
    slug = "sparse-average"
    number = "6.3"
    title = "Send the largest elements, keep the rest"
    name = "sparse_average"
    minutes = 25
    hints = (
        "Choose from gradient *plus* residual: `whole.abs().topk(k).indices` says where.",
        "What stays is the whole with zeros where something was sent: `residual.copy_(...)`. It "
        "depends on what this rank sent, and not on the others.",
        "`dist.all_gather` values and indices, into lists of one tensor for each rank. Add each "
        "rank's values at its indices to a tensor of zeros, and divide by the world size.",
    )
    solution = staticmethod(sparse_average)
    mistakes = (
        Mistake(_sparse(score=lambda it: it.whole), "You chose the largest values. A large "
                "negative element matters as much: choose by `abs()`."),
        Mistake(_sparse(value=lambda it: it.whole.abs()), "You send magnitudes: the signs are "
                "lost. Take the indices from `abs().topk(k)`, and the values from the tensor."),
        Mistake(_sparse(rest=lambda it: it.residual), "Nothing stays in `residual`: what you do "
                "not send is lost. Write the rest into the tensor itself; an assignment to its "
                "name leaves the caller's as it was."),
        Mistake(_sparse(whole=lambda it: it.gradient), "You keep what is left, and never send it: "
                "choose from gradient plus residual."),
        Mistake(_sparse(rest=lambda it: it.gradient.where(it.sent == 0, 0)), "You keep the rest of "
                "this gradient, and lose what was left before: it is gradient *and* residual."),
        Mistake(_sparse(rest=lambda it: it.whole), "What was sent is still in the residual, so it "
                "is sent again and again: set it to zero there."),
        Mistake(_sparse(rest=lambda it: it.residual + it.whole - it.sent), "The old residual is "
                "part of what is left, and you add it once more: overwrite it."),
        Mistake(_sparse(score=lambda it: it.gradient.abs()), "You choose by the gradient alone: "
                "what is left may wait for ever. Take the largest of gradient plus residual."),
        Mistake(_sparse(rest=lambda it: it.whole - it.mean), "You subtract the mean of the ranks "
                "from what stays. What a rank still owes is what *itself* has not sent."),
        Mistake(_sparse(rest=lambda it: it.whole.where(it.mean == 0, 0)), "You clear what *any* "
                "rank sent. This rank's own part there is lost, if it did not send it."),
        Mistake(_sparse(score=lambda it: -it.whole.abs()), "You chose the smallest elements: "
                "`argsort()` goes upwards."),
        Mistake(_sparse(divisor=lambda: 1), "You return the sum: divide by the world size."),
        Mistake(_sparse(total=_by_senders), "You divide an element by the number of ranks that "
                "sent it. The others count as zeros: divide by the world size."),
        Mistake(_sparse(total=lambda it: _total(it, accumulate=False)), "Where several ranks "
                "chose the same index, only one counts. `t[i] += v` adds once where `i` has an "
                "index twice: go rank by rank, or use `index_add_`."),
        Mistake(_sparse(total=lambda it: _total(it, shared=True)), "`[tensor] * n` is n names "
                "for one tensor, and the last rank's data overwrites the others': make n tensors."),
        Mistake(_sparse(total=lambda it: _place(it.indices, _summed(it.values))), "You add up the "
                "ranks' values, but each rank chose other indices: gather those, too."),
        Mistake(_sparse(total=lambda it: _summed(it.sent)), "The mean is right, but the zeros "
                "travel, too: as many bytes as without choosing. Gather k values and k indices."),
        Mistake(_sparse(whole=lambda it: it.gradient / dist.get_world_size() + it.residual,
                        divisor=lambda: 1), "You divide before you keep the rest, so the residual "
                "is too small by the world size: it is this rank's own. Divide the sum."),
    )

    def trial(self, attempt):
        residual, facts = torch.zeros(ELEMENTS), {}
        for number in range(1, ROUNDS + 1):
            with CallLog() as log:
                mean = attempt(_gradient(number, dist.get_rank()), residual, SENT)
            facts |= _of_round(number, mean, residual.clone(), log.bytes())
        return facts

    def expected(self, world_size):
        residuals, ranks = torch.zeros(world_size, ELEMENTS), [{} for _ in range(world_size)]
        enough = AtMost(12 * SENT, "k float32 values and k int64 indices are enough")
        for number in range(1, ROUNDS + 1):
            whole = residuals + torch.stack([_gradient(number, r) for r in range(world_size)])
            smallest = whole.abs().topk(SENT).values[:, -1:]
            residuals = whole.where(whole.abs() < smallest, 0)
            mean = (whole - residuals).mean(dim=0)
            for facts, residual in zip(ranks, residuals, strict=True):
                facts |= _of_round(number, mean, residual, enough)
        return ranks


def _of_round(number, mean, residual, nbytes):
    return {f"the mean in step {number}": mean, f"the residual after step {number}": residual,
            f"the bytes handed to collectives in step {number}": nbytes}


def _gradient(number, rank):
    """Partly common to all ranks, so that some choose the same elements."""
    common, own = (torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))
                   for seed in (number, 100 * number + rank))
    return common + 0.6 * own


EXERCISES = (CommunicationRatio, AccumulatedStep, SparseAverage)
