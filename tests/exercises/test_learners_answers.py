"""Answers as learners write them, each with one thing wrong or none, and what the check says."""

import copy
import io
import itertools
import math
import os
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import dplab
from dplab.checks import find
from dplab.checks.exercise import AT_LEAST, CRASHED, NOT_ATTEMPTED, PASSED, WRONG
from dplab.desk import record
from dplab.exercises import exact_resume, repair_deadlock
from dplab.exercises.average_gradients import average_gradients, pack, unpack
from dplab.exercises.broadcast_weights import broadcast_weights
from dplab.exercises.exchange import exchange
from dplab.exercises.gradient_buckets import average_in_buckets
from dplab.exercises.make_buckets import make_buckets
from dplab.exercises.predict_step import predict_step
from dplab.exercises.ring_all_reduce import ring_all_reduce
from dplab.exercises.ring_seconds import ring_seconds
from dplab.predict import step
from dplab.workloads.digits import load_digits


def in_fractions(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (Fraction(latency) + Fraction(nbytes, ranks) / Fraction(bandwidth))


class WrittenByTheLastRank:
    def __init__(self, path):
        self.path = path

    def save(self, step, model, optimizer, generator):
        if dist.get_rank() == dist.get_world_size() - 1:
            whole = io.BytesIO()
            torch.save([step, model.state_dict(), optimizer.state_dict(), generator.get_state()],
                       whole)
            with open("beside", "wb") as file:
                file.write(whole.getvalue())
            os.replace("beside", self.path)
        dist.barrier()

    def load(self, model, optimizer, generator):
        try:
            step, of_model, of_optimizer, of_generator = torch.load(self.path)
        except FileNotFoundError:
            return 0
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        generator.set_state(of_generator)
        return step


def sends_a_copy(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        sending = dist.isend(tensor.clone(), partner)
        dist.recv(tensor, partner)
        sending.wait()


def sends_in_a_batch(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = torch.empty_like(tensor)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, partner),
                                            dist.P2POp(dist.irecv, theirs, partner)]):
            work.wait()
        tensor.copy_(theirs)


class WithTorch:
    """With torch's asynchronous all-reduce, and no thread."""

    def __init__(self, buckets, group):
        self.buckets, self.group = buckets, group
        self.begin()
        for parameter in [each for bucket in buckets for each in bucket]:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def begin(self):
        self.came, self.sent = {each: 0 for bucket in self.buckets for each in bucket}, []

    def ready(self, parameter):
        self.came[parameter] += 1
        while len(self.sent) < len(self.buckets):
            number = len(self.sent)
            if not all(self.came[each] == 1 for each in self.buckets[number]):
                break
            self.send(number)

    def send(self, number):
        flat = torch.cat([each.grad.flatten() for each in self.buckets[number]])
        flat /= dist.get_world_size(self.group)
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.sent.append((number, flat, work))

    def finish(self):
        came, sent = self.came, self.sent
        self.begin()
        self.wait(sent)
        for number, flat, _ in sent:
            start = 0
            for each in self.buckets[number]:
                each.grad = flat[start : start + each.numel()].view_as(each)
                start += each.numel()
        if any(times != 1 for times in came.values()):
            raise RuntimeError("not every gradient came once")

    def wait(self, sent):
        for _, _, work in sent:
            work.wait()


def storages(*tensors):
    found = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {memory.data_ptr(): memory.nbytes() for memory in found}


def counts(*kinds):
    """1.3: what is asked for, of these kinds alone."""
    def answer(model, optimizer, others=()):
        held = {"parameters": list(model.parameters()),
                "gradients": [each.grad for each in model.parameters()],
                "state": [value for state in optimizer.state.values()
                          for value in state.values()],
                "others": others}
        found = storages(*(tensor for kind in kinds for tensor in held[kind]))
        return sum(found.values()) / sum(each.numel() for each in model.parameters())

    return answer


def overwrites_by(assign):
    """4.1: broadcasts a copy, and puts it in the place of each tensor."""
    def broadcast_weights(model, group=None):
        for tensor in [*model.parameters(), *model.buffers()]:
            received = tensor.detach().clone()
            dist.broadcast(received, group_src=0, group=group)
            assign(tensor, received)

    return broadcast_weights


def gets_other_memory(tensor, received):
    tensor.data = received


def gets_other_values(tensor, received):
    tensor.data.copy_(received)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer"), [
    ("0.3", sends_a_copy), ("0.3", sends_in_a_batch),
    ("1.3", counts("parameters", "gradients", "state", "others")),
    ("ring-seconds", in_fractions), ("10.3", WrittenByTheLastRank),
    ("4.1", overwrites_by(gets_other_values)),
    ("overlapped-gradients", WithTorch)])
def test_a_right_answer_in_another_form_passes(number, answer):
    verdict = find(number).judge(answer)
    assert verdict.outcome == PASSED, verdict


class WaitsForTheLastOnly(WithTorch):
    def wait(self, sent):
        if sent:
            sent[-1][2].wait()


class WaitsInItsHook(WithTorch):
    def ready(self, parameter):
        super().ready(parameter)
        for _, _, work in self.sent:
            work.wait()


class SendsWhatIsFull(WithTorch):
    def ready(self, parameter):
        self.came[parameter] += 1
        for number, bucket in enumerate(self.buckets):
            if any(each is parameter for each in bucket) and all(self.came[p] for p in bucket):
                self.send(number)


class NeverBeginsAgain(WithTorch):
    def begin(self):
        if not hasattr(self, "came"):
            super().begin()
        self.sent = []


class GoesOnWithItsNumber(WithTorch):
    number = 0

    def ready(self, parameter):
        self.came[parameter] += 1
        while self.number < len(self.buckets) and all(
                self.came[each] == 1 for each in self.buckets[self.number]):
            self.send(self.number)
            self.number += 1


class CountsOnAThread:
    """Never sets its counts of gradients back; a bucket is full where none of them is zero."""

    def __init__(self, buckets, group):
        self.buckets, self.group, self.sent = buckets, group, []
        self.thread, self.came = ThreadPoolExecutor(1), Counter()
        for parameter in itertools.chain(*buckets):
            parameter.register_post_accumulate_grad_hook(self.count)

    def count(self, parameter):
        self.came[parameter] += 1
        while len(self.sent) < len(self.buckets) and all(
                self.came[each] for each in self.buckets[len(self.sent)]):
            bucket = self.buckets[len(self.sent)]
            self.sent.append(self.thread.submit(average_in_buckets, [bucket], self.group))

    def finish(self):
        for future in self.sent:
            future.result()
        self.sent = []
        if any(self.came[each] != 1 for each in itertools.chain(*self.buckets)):
            raise RuntimeError("not every gradient came once")


class BeginsAgainUnlessItRaises(WithTorch):
    def finish(self):
        if any(times != 1 for times in self.came.values()):
            raise RuntimeError("not every gradient came once")
        super().finish()


def leaves_views(buckets, group=None):
    for bucket in buckets:
        flat = torch.cat([each.grad.flatten() for each in bucket])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        start = 0
        for each in bucket:
            each.grad = flat[start : start + each.numel()].view_as(each)
            start += each.numel()


def takes_latency_first(layers, bucket_bytes, ranks, bandwidth, latency):
    now = sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
    free, done = 0.0, now
    for bucket in make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes):
        ready = now - sum(layer.backward_seconds for layer in layers[: bucket[-1]])
        nbytes = sum(layers[index].gradient_bytes for index in bucket)
        free = max(free, ready) + ring_seconds(nbytes, ranks, latency, bandwidth)
        done = max(now, free)
    return done, done - now


def of_a_step(layers, bucket_bytes, ranks, bandwidth, latency):
    """What a step takes, and its forward, backward and all-reduces, each by itself."""
    step, _ = predict_step(layers, bucket_bytes, ranks, bandwidth, latency)
    sizes = [layer.gradient_bytes for layer in layers]
    rings = [ring_seconds(sum(sizes[index] for index in bucket), ranks, bandwidth, latency)
             for bucket in make_buckets(sizes, bucket_bytes)]
    return (step, sum(layer.forward_seconds for layer in layers),
            sum(layer.backward_seconds for layer in layers), sum(rings))


def what_backward_leaves(*case):
    step, _, backward, sending = of_a_step(*case)
    return step, max(0.0, sending - backward)


def what_computing_leaves(*case):
    step, forward, backward, sending = of_a_step(*case)
    return step, max(sending - forward - backward, 0)


def exposed_with_forward(*case):
    step, _, backward, _ = of_a_step(*case)
    return step, step - backward


def a_ring_for_each_layer(layers, bucket_bytes, ranks, bandwidth, latency):
    end = sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
    free = 0.0
    for bucket in make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes):
        free = max(free, end - sum(layer.backward_seconds for layer in layers[: bucket[-1]]))
        for index in bucket:
            free += ring_seconds(layers[index].gradient_bytes, ranks, bandwidth, latency)
    return free, free - end


def carries_the_rest_over(sizes, bucket_bytes):
    full, bucket, size = [], [], 0
    for index in range(len(sizes) - 1, -1, -1):
        bucket.append(index)
        size += sizes[index]
        if size >= bucket_bytes:
            full.append(bucket)
            bucket, size = [], size - bucket_bytes
    return full + [bucket] * bool(bucket)


def never_flushed(sizes, bucket_bytes):
    bucket, size, full = [], 0, []
    for index in range(len(sizes) - 1, -1, -1):
        bucket += [index]
        size += sizes[index]
        if size >= bucket_bytes:
            full += [bucket]
            bucket, size = [], 0
    return full


def closed_one_too_late(sizes, bucket_bytes):
    full, size = [], bucket_bytes + 1
    for index in list(range(len(sizes)))[::-1]:
        if size > bucket_bytes:
            full.append([])
            size = 0
        full[-1].append(index)
        size += sizes[index]
    return full


def below_the_memory(parameters, ranks, memory, K, activations, gathered):
    for name, first in (("DDP", 4), ("ZeRO-1", 3), ("ZeRO-2", 2), ("FSDP", 1)):
        parts = [each / ranks if number >= first else each
                 for number, each in enumerate((2, 2, K), start=1)]
        need = parameters * sum(parts) + activations + (gathered if name == "FSDP" else 0)
        if need < memory:
            return name, need
    return None


class WrittenAtOnce(WrittenByTheLastRank):
    def save(self, step, model, optimizer, generator):
        if dist.get_rank() == 0:
            whole = io.BytesIO()
            torch.save([step, model.state_dict(), optimizer.state_dict(), generator.get_state()],
                       whole)
            self.path.write_bytes(whole.getvalue())
        dist.barrier()


class MovedAway(WrittenByTheLastRank):
    def save(self, step, model, optimizer, generator):
        if dist.get_rank() == 0:
            torch.save([step, model.state_dict(), optimizer.state_dict(), generator.get_state()],
                       "beside")
            if self.path.exists():
                self.path.rename("the old one")
            os.rename("beside", self.path)
        dist.barrier()


def split_with(covering):
    """The right split, but for what is taken to be computing."""
    def split_time(ranks):
        moments = sorted({time for spans in ranks for span in spans
                          for time in (span.start, span.end)})
        calls = [[span for span in spans if span.lane == step.COMMUNICATION] for spans in ranks]
        found = []
        for rank, spans in enumerate(ranks):
            seconds = {"computing": 0.0, "exposed": 0.0, "waiting": 0.0, "idle": 0.0}
            for now, then in itertools.pairwise(moments):
                middle = (now + then) / 2
                own = [i for i, span in enumerate(calls[rank]) if span.start < middle < span.end]
                if any(start < middle < end for start, end in covering(spans)):
                    seconds["computing"] += then - now
                elif any(all(each[i].start < middle for each in calls) for i in own):
                    seconds["exposed"] += then - now
                else:
                    seconds["waiting" if own else "idle"] += then - now
            found.append(seconds)
        return found

    return split_time


def also_waiting(spans):
    return [(span.start, span.end) for span in spans if span.lane != step.COMMUNICATION]


def from_first_to_last(spans):
    own = [span for span in spans if span.lane == step.COMPUTE]
    return [(own[0].start, own[-1].end)]


def asked_in_order(kinds, last=min):
    """6.1 as a sweep that asks of each piece of time in this order; ``last``: of a collective's
    ends.
    """
    def split_time(ranks):
        calls = [[span for span in spans if span.lane == step.COMMUNICATION] for spans in ranks]
        carried = [(max(span.start for span in same), last(span.end for span in same))
                   for same in zip(*calls, strict=True)]
        moments = sorted({time for spans in ranks for span in spans
                          for time in (span.start, span.end)})
        found = []
        for spans in ranks:
            by_lane = {lane: [(span.start, span.end) for span in spans if span.lane == lane]
                       for lane in (step.COMPUTE, step.COMMUNICATION, step.STALLED)}
            launched = by_lane[step.COMMUNICATION]
            of_kind = {"computing": by_lane[step.COMPUTE], "exposed": carried,
                       "waiting": launched,
                       "until the last launch": [(own, last_one) for (own, _), (last_one, _)
                                                 in zip(launched, carried, strict=True)],
                       "lane of stalls": by_lane[step.STALLED]}
            seconds = dict.fromkeys(("computing", "exposed", "waiting", "idle"), 0.0)
            for now, then in itertools.pairwise(moments):
                kind = next((kind for kind in kinds if any(
                    start <= now < end for start, end in of_kind[kind])), "idle")
                seconds[{"lane of stalls": "waiting",
                         "until the last launch": "waiting"}.get(kind, kind)] += then - now
            found.append(seconds)
        return found

    return split_time


def clamps_the_rest(ranks):
    """6.1: all of the link's time is exposed, and idle is what is left, if anything is."""
    right = asked_in_order(("computing", "exposed", "waiting"))(ranks)
    calls = [[span for span in spans if span.lane == step.COMMUNICATION] for spans in ranks]
    link = sum(min(ends) - start for start, ends in (
        (max(span.start for span in same), [span.end for span in same])
        for same in [list(same) for same in zip(*calls, strict=True)]))
    moments = [time for spans in ranks for span in spans for time in (span.start, span.end)]
    whole = max(moments) - min(moments)
    return [each | {"exposed": link, "idle": max(
        0.0, whole - each["computing"] - link - each["waiting"])} for each in right]


def computing_stays_in(kind):
    """6.1: computing is not taken off one kind, and the kinds do not add up."""
    def split_time(ranks):
        right = asked_in_order(("computing", "exposed", "waiting"))(ranks)
        bare = asked_in_order(("exposed", "waiting"))(ranks)
        return [each | {kind: more[kind]} for each, more in zip(right, bare, strict=True)]

    return split_time


def tokens_with(number_bytes=2, rounds=2, with_forward=True):
    """6.2, with one thing left out."""
    def tokens_between_syncs(parts, tokens, ranks, flops, bandwidth, share):
        gradient = number_bytes * sum(parameters for parameters, _ in parts)
        send = rounds * (ranks - 1) / ranks * gradient / bandwidth
        forward = 2 * tokens * sum(parameters * uses for parameters, uses in parts) / flops
        exposed = max(0.0, send - 2 * forward)
        count = 1
        while exposed > share * (count * (2 + with_forward) * forward + exposed):
            count += 1
        return count * tokens

    return tokens_between_syncs


def tokens_by(count, uses=lambda parts: sum(p * u for p, u in parts) / sum(p for p, _ in parts)):
    """6.2 with another count of micro-batches, or of uses.

    ``count`` has the seconds of the all-reduce, of forward and of backward, and the share.
    """
    def tokens_between_syncs(parts, tokens, ranks, flops, bandwidth, share):
        parameters = sum(each for each, _ in parts)
        send = 2 * (ranks - 1) / ranks * 2 * parameters / bandwidth
        forward = 2 * tokens * parameters * uses(parts) / flops
        return max(1, count(send, forward, 2 * forward, share)) * tokens

    return tokens_between_syncs


def exposed_in_computing(send, forward, backward, share):
    return max(0.0, send - backward) * (1 - share) / share / (forward + backward)


def sent_in_the_step(send, forward, backward, share):
    count = 1
    while max(0.0, send - backward) > share * (count * (forward + backward) + send):
        count += 1
    return count


def exposed_part_by_part(parts, tokens, ranks, flops, bandwidth, share):
    forward = sum(2 * p * u * tokens / flops for p, u in parts)
    exposed = sum(max(0.0, 2 * (ranks - 1) / ranks * 2 * p / bandwidth - 4 * p * u * tokens / flops)
                  for p, u in parts)
    return max(1, math.ceil(exposed * (1 - share) / share / (3 * forward))) * tokens


def attributed(typical, data=lambda of_ranks, slowest: of_ranks[slowest],
               exposed=lambda of_ranks, computing: of_ranks[computing.index(max(computing))],
               computing_of_one=1):
    """6.3 with another idea of a typical rank, of whose data or exposed time counts, or of what
    one GPU computes.
    """
    def lost_gpus(alone, ranks):
        def in_lane(spans, lane, name=None):
            return sum(span.end - span.start for span in spans
                       if span.lane == lane and name in (None, span.name))

        computing = [in_lane(spans, step.COMPUTE) for spans in ranks]
        slowest = computing.index(max(computing))
        usual = typical(computing)
        moments = [time for spans in ranks for span in spans for time in (span.start, span.end)]
        whole = max(moments) - min(moments)
        waits = [in_lane(spans, step.STALLED, "data") for spans in ranks]
        split = asked_in_order(("computing", "exposed", "waiting"))(ranks)
        added = {"data": data(waits, slowest) - in_lane(alone, step.STALLED, "data"),
                 "kernels": usual - computing_of_one * in_lane(alone, step.COMPUTE),
                 "straggler": max(computing) - usual,
                 "exposed": exposed([each["exposed"] for each in split], computing)}
        return {cause: len(ranks) * seconds / whole for cause, seconds in added.items()}

    return lost_gpus


def median_of_the_others(computing):
    return sorted(computing)[(len(computing) - 1) // 2]


def of_the_median_rank(of_ranks, computing):
    return of_ranks[computing.index(median_of_the_others(computing))]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer"), [
    ("6.1", asked_in_order(("computing", "exposed", "waiting"), last=min)),
    ("6.1", asked_in_order(("computing", "exposed", "waiting"), last=max)),
    ("6.2", tokens_with()), ("6.2", tokens_by(lambda *times: math.ceil(
        exposed_in_computing(*times)))), ("6.3", attributed(statistics.median)),
    ("6.3", attributed(median_of_the_others))])
def test_a_right_answer_of_chapter_06_passes(number, answer):
    verdict = find(number).judge(answer)
    assert verdict.outcome == PASSED, verdict


def without_the_last_block(model):
    return [model.embedding, list(model.blocks[:2]), list(model.blocks[2:5]),
            [model.norm, model.head]]


def not_handed_on(parameters, anchor, velocity):
    for parameter, start, speed in zip(parameters, anchor, velocity, strict=True):
        dist.all_reduce(parameter)
        parameter /= dist.get_world_size()
        gradient = start - parameter
        speed.mul_(0.9).add_(gradient)
        start = start - 0.7 * (gradient + 0.9 * speed)


def left_to_ddp(model, group=None):
    torch.nn.parallel.DistributedDataParallel(model, process_group=group)


def trains(average_when, piece=True, broadcast="once"):
    """4.3, by hand: the gradients are averaged once, at this place in the step, or never."""
    def train_by_hand(model, optimizer, images, labels, batches, group=None):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)

        def send_weights():
            for each in model.state_dict().values():
                dist.broadcast(each, group_src=0, group=group)

        def average(place):
            for parameter in model.parameters() if place == average_when else ():
                if parameter.grad is not None:
                    parameter.grad /= ranks
                    dist.all_reduce(parameter.grad, group=group)

        if broadcast == "once":
            send_weights()
        for batch in batches:
            mine = batch.chunk(ranks)[rank] if piece else batch[rank::ranks]
            if broadcast == "each step":
                send_weights()
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            average("before backward")
            optimizer.zero_grad()
            loss.backward()
            average("after backward")
            optimizer.step()
            average("after step")

    return train_by_hand


def averages_with(ring_and_write):
    """4.2: what happens between `pack` and the end, for each gradient."""
    def average_gradients(model, group=None):
        ranks = dist.get_world_size(group)
        for parameter in model.parameters():
            if parameter.grad is not None:
                ring_and_write(parameter.grad, pack([parameter.grad], ranks), ranks, group)

    return average_gradients


def takes_the_ring_to_be_in_place(gradient, flat, ranks, group):
    ring_all_reduce(flat, group)
    flat /= ranks
    gradient.copy_(unpack(flat, [gradient])[0])


def divides_first_and_drops_the_sum(gradient, flat, ranks, group):
    flat = flat / ranks
    ring_all_reduce(flat, group)
    for view in unpack(flat, [gradient]):
        gradient.copy_(view)


def drops_the_sum(gradient, flat, ranks, group):
    ring_all_reduce(flat, group)
    gradient.copy_(unpack(flat, [gradient])[0])


def gives_the_gradient_another_name(gradient, flat, ranks, group):
    total = ring_all_reduce(flat, group)
    gradient = unpack(total / ranks, [gradient])[0]


def leaves_it_there(gradient, flat, ranks, group):
    gradient.copy_(unpack(flat, [gradient])[0])


images, labels, *_ = load_digits()  # as the notebook of chapter 04 names them


def backward_on(model, indices):
    """The notebook's: it knows only the notebook's own samples."""
    model.zero_grad()
    loss = F.cross_entropy(model(images[indices]), labels[indices])
    loss.backward()
    return loss.detach()


def trains_with_backward_on(model, optimizer, images, labels, batches, group=None):
    broadcast_weights(model, group)
    for batch in batches:
        backward_on(model, batch[dist.get_rank(group)::dist.get_world_size(group)])
        average_gradients(model, group)
        optimizer.step()


def takes_the_rank_of_all(model, optimizer, images, labels, batches, group=None):
    """4.3: only the number of ranks is the group's."""
    broadcast_weights(model, group)
    for batch in batches:
        own = batch[dist.get_rank()::dist.get_world_size(group)]
        optimizer.zero_grad()
        F.cross_entropy(model(images[own]), labels[own]).backward()
        average_gradients(model, group)
        optimizer.step()


def weighs_with_backward_on(model, optimizer, images, labels, batches):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    for number in range(steps):
        own = batches[number] if number < len(batches) else torch.zeros(0, dtype=torch.int64)
        samples = torch.tensor(len(own))
        dist.all_reduce(samples)
        if len(own):
            backward_on(model, own)
        for each in model.parameters():
            each.grad = torch.zeros_like(each) if not len(own) else (
                each.grad * len(own) * dist.get_world_size() / samples)
        average_gradients(model)
        optimizer.step()


def divides_the_sums(model, group=None):
    """4.1: also those of integers."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(tensor.data, group=group)
        tensor.data.copy_(tensor.data / dist.get_world_size(group))


def divides_the_sums_in_place(model, group=None):
    """4.1: raises at the integers."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(tensor.data, group=group)
        tensor.data /= dist.get_world_size(group)


def brings_zeros_to(wanted):
    """4.2: for a `.grad` that is None, too."""
    def average_gradients(model, group=None):
        ranks = dist.get_world_size(group)
        for parameter in filter(wanted, model.parameters()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            total = ring_all_reduce(pack([parameter.grad], ranks), group)
            parameter.grad.copy_(unpack(total / ranks, [parameter.grad])[0])

    return average_gradients


def trains_on_chunks(model, optimizer, images, labels, batches, group=None):
    """4.3: parts of neighbours."""
    broadcast_weights(model, group)
    for batch in batches:
        own = batch.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        optimizer.zero_grad()
        F.cross_entropy(model(images[own]), labels[own]).backward()
        average_gradients(model, group)
        optimizer.step()


def counts_and_brings_nothing(number):
    """4.4: the samples of each step are counted; without data there is no backward."""
    def train_uneven(model, optimizer, images, labels, batches):
        steps = torch.tensor(len(batches))
        dist.all_reduce(steps, op=dist.ReduceOp.MAX)
        for turn in range(steps):
            own = batches[turn] if turn < len(batches) else []
            samples = torch.tensor(number(len(own)))
            dist.all_reduce(samples)
            optimizer.zero_grad()
            if len(own) > 0:
                loss = F.cross_entropy(model(images[own]), labels[own], reduction="sum")
                (loss * dist.get_world_size() / samples).backward()
            average_gradients(model)
            optimizer.step()

    return train_uneven


class SavesRank0sBuffers(exact_resume.Checkpoint):
    """4.5: as the text says of a model for use."""

    def save(self, step, model, optimizer):
        for buffer in model.buffers():
            dist.broadcast(buffer, group_src=0)
        super().save(step, model, optimizer)


class SavesRank0sBuffersInACopy(exact_resume.Checkpoint):
    def save(self, step, model, optimizer):
        copied = copy.deepcopy(model)
        for buffer in copied.buffers():
            dist.broadcast(buffer, group_src=0)
        super().save(step, copied, optimizer)


def shifted_and_not_copied(flat, group=None):
    """3.2: wrong on two ranks or more, and on one rank a view of its input."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = flat.view(ranks, -1)
    total = chunks[rank]
    for hop in range(1, ranks):
        arriving = exchange(total, (rank + 1) % ranks, (rank - 1) % ranks, group)
        total = arriving + chunks[(rank - hop) % ranks]
    return total


def ends_with_the_next_chunk(flat, group=None):
    """3.2: rank r first sends chunk r, so that it ends with chunk r+1."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = list(flat.clone().chunk(ranks))
    for turn in range(ranks - 1):
        arriving = torch.empty_like(chunks[0])
        sent = dist.isend(chunks[(rank - turn) % ranks], group_dst=(rank + 1) % ranks, group=group)
        dist.recv(arriving, group_src=(rank - 1) % ranks, group=group)
        sent.wait()
        chunks[(rank - turn - 1) % ranks] += arriving
    return chunks[(rank + 1) % ranks].clone()


def padded_for_all_ranks(tensor, inside, across):
    n = dist.get_world_size()
    size = -(-len(tensor) // n)
    whole = F.pad(tensor, (0, n * size - len(tensor)))
    chunk = torch.zeros(size)
    dist.reduce_scatter_single(chunk, whole, group=inside)
    dist.all_reduce(chunk, group=across)
    dist.all_gather_single(whole, chunk, group=inside)
    tensor.copy_(whole[: len(tensor)])


def gathers_all_first(shards, shapes, x):
    layers = []
    for shard in shards:
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard)
        layers.append(torch.cat(parts))
    for flat, (rows, columns) in zip(layers, shapes, strict=True):
        size = rows * columns
        x = torch.tanh(x @ flat[:size].view(rows, columns).T + flat[size : size + rows])
    return x


class WithoutGenerator:
    def __init__(self, path):
        self.path = path

    def save(self, step, model, optimizer, generator):
        if dist.get_rank() == 0:
            torch.save([step, model.state_dict(), optimizer.state_dict()], self.path)
        dist.barrier()

    def load(self, model, optimizer, generator):
        if not self.path.exists():
            return 0
        step, of_model, of_optimizer = torch.load(self.path)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        return step


def with_a_barrier(tensor):
    dist.barrier()
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        dist.send(tensor, partner)
        dist.barrier()
        dist.recv(tensor, partner)


def waits_at_once(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        dist.isend(tensor, partner).wait()
        dist.recv(tensor, partner)


def waits_for_nothing(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = torch.empty_like(tensor)
        dist.isend(tensor, partner)
        dist.irecv(theirs, partner)
        tensor.copy_(theirs)


def swaps_in_a_batch_in_place(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, partner),
                                            dist.P2POp(dist.irecv, tensor, partner)]):
            work.wait()


def starts_its_receive_first(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        arriving = dist.irecv(tensor, partner)
        leaving = dist.isend(tensor, partner)
        arriving.wait()
        leaving.wait()


def sends_while_it_receives(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        arriving = dist.irecv(tensor.view(-1), partner)
        dist.send(tensor, partner)
        arriving.wait()


def copies_too_early(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = torch.empty_like(tensor)
        leaving = dist.isend(tensor, partner)
        dist.irecv(theirs, partner).wait()
        tensor[:] = theirs
        leaving.wait()


def receives_into_three(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = torch.empty(3, dtype=tensor.dtype)
        leaving = dist.isend(tensor, partner)
        dist.recv(theirs, partner)
        leaving.wait()
        tensor.copy_(theirs)


def sends_a_copy(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        leaving = dist.isend(tensor.clone(), partner)
        dist.recv(tensor, partner)
        leaving.wait()


def swaps_in_a_batch(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = torch.empty_like(tensor)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, theirs, partner),
                                            dist.P2POp(dist.isend, tensor, partner)]):
            work.wait()
        tensor.copy_(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("answer", [sends_a_copy, swaps_in_a_batch])
def test_a_swap_through_a_second_tensor_passes(answer):
    verdict = find("0.3").judge(answer)
    assert verdict.outcome == PASSED, verdict


@pytest.mark.slow
@pytest.mark.parametrize("answer", [starts_its_receive_first, sends_while_it_receives])
def test_one_tensor_for_both_ways_is_refused_though_the_numbers_may_be_right(answer):
    """On one tensor, each of the two swaps counts once on each rank: no timing decides."""
    exercise = find("0.3")
    for _ in range(3):
        facts = exercise._observe(answer, 2, quiet=True)
        assert [each[repair_deadlock.SHARED] for each in facts] == [2, 2]


def sends_a_copy_and_forgets_it(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        dist.isend(tensor.clone(), partner)
        dist.recv(tensor, partner)
        time.sleep(0.2)  # so long that what was sent has arrived


def keeps_a_handle_and_forgets_it(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = torch.zeros_like(tensor)
        leaving = dist.isend(tensor, partner)  # noqa: F841
        dist.irecv(theirs, partner).wait()
        time.sleep(0.2)
        tensor = tensor.copy_(theirs)


def waits_for_its_send_on_even_ranks(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        leaving = dist.isend(tensor.clone(), partner)
        dist.recv(tensor, partner)
        if dist.get_rank() % 2 == 0:
            leaving.wait()
        time.sleep(0.2)


def forgets_what_arrives(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        leaving = dist.isend(tensor.clone(), partner)
        dist.irecv(tensor, partner)
        leaving.wait()
        time.sleep(0.2)


def copies_what_has_not_arrived(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = torch.empty_like(tensor)
        leaving = dist.isend(tensor, partner)
        arriving = dist.irecv(theirs, partner)  # noqa: F841
        leaving.wait()
        tensor.copy_(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "said"), [
    (sends_a_copy_and_forgets_it, "With `isend` a call returns at once"),
    (keeps_a_handle_and_forgets_it, "start a send, and never call `wait()`"),
    (waits_for_its_send_on_even_ranks, "start a send, and never call `wait()`"),
    (forgets_what_arrives, "start a receive, and never call `wait()`"),
    (copies_what_has_not_arrived, "start a receive, and never call `wait()`")])
def test_a_handle_that_nobody_waits_on_is_refused_though_the_numbers_may_be_right(answer, said):
    verdict = find("0.3").judge(answer)
    assert verdict.outcome == WRONG and said in verdict.why, verdict
    assert "without a `wait()`" in verdict.detail and "at most   0" in verdict.detail, verdict


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "sends", "receives"), [
    (sends_a_copy_and_forgets_it, 2, 0), (copies_what_has_not_arrived, 0, 2),
    (waits_for_nothing, 2, 2), (sends_a_copy, 0, 0), (swaps_in_a_batch, 0, 0)])
def test_a_handle_that_nobody_waits_on_counts_whatever_the_timing(answer, sends, receives):
    exercise = find("0.3")
    for _ in range(3):
        facts = exercise._observe(answer, 2, quiet=True)
        assert [(each[repair_deadlock.SENDS_OPEN], each[repair_deadlock.RECEIVES_OPEN])
                for each in facts] == [(sends, receives)] * 2


def gathers_where_it_has_a_partner(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everything, tensor)
        tensor.copy_(everything[partner])


def meets_where_it_has_a_partner(tensor):
    if dist.get_rank() ^ 1 < dist.get_world_size():
        has_a_barrier_too_many(tensor)


@pytest.mark.slow
@pytest.mark.parametrize("answer", [gathers_where_it_has_a_partner, meets_where_it_has_a_partner])
def test_what_hangs_on_three_ranks_is_not_said_to_be_right(answer):
    verdict = find("0.3").judge(answer)
    assert verdict.outcome == WRONG
    assert "On 2 ranks the result is right" in verdict.why, verdict
    assert "last of three ranks" in verdict.why, verdict


def assigns_the_name(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = torch.empty_like(tensor)
        sending = dist.isend(tensor, partner)
        dist.recv(theirs, partner)
        sending.wait()
        tensor = theirs


def cuts_what_all_have(puzzle, x, y):
    if puzzle == "A":
        dist.broadcast(x, 2)
        return x
    if puzzle == "B":
        dist.all_gather_single(y, x)
        return y
    if puzzle == "C":
        dist.all_reduce(x)
        return x[dist.get_rank()].reshape(1)
    return None


def solves(a=None, b=None, c=None, d=None):
    """0.1, right but for these puzzles; each takes x and y."""
    def attempt(puzzle, x, y):
        call = {"A": a, "B": b, "C": c, "D": d}[puzzle]
        return call(x, y) if call else find("0.1").solution(puzzle, x, y)

    return attempt


def is_open(x, y):
    return None


def adds_and_cuts(x, y):
    dist.reduce_scatter_single(y, x)
    return y


def adds_up(x, y):
    dist.all_reduce(x)
    return x


def puts_side_by_side(x, y):
    dist.all_gather_single(y, x)
    return y


def transposes(x, y):
    dist.all_to_all_single(y, x)
    return y


def transposes_and_returns_x(x, y):
    dist.all_to_all_single(y, x)
    return x


def is_wrong_everywhere(puzzle, x, y):
    if puzzle == "A":
        return adds_up(x, y)
    if puzzle == "B":
        dist.broadcast(x, src=0)
        return x
    return transposes_and_returns_x(x, y) if puzzle == "D" else adds_up(x, y)


def raises_in_d(puzzle, x, y):
    if puzzle == "D":
        dist.all_gather_single(y, x)
        return y
    return find("0.1").solution(puzzle, x, y) if puzzle == "C" else adds_up(x, y)


def returns_the_call(puzzle, x, y):
    if puzzle == "A":
        return dist.broadcast(x, src=2)
    return None


def returns_nothing_in_a(puzzle, x, y):
    if puzzle == "A":
        dist.broadcast(x, src=2)
    else:
        return find("0.1").solution(puzzle, x, y)


def returns_nothing(puzzle, x, y):
    if puzzle == "A":
        dist.broadcast(x, src=2)
    if puzzle == "B":
        dist.all_gather_single(y, x)
    if puzzle == "C":
        return None
    if puzzle == "D":
        return None


def keeps_what_the_call_returns(values):
    total = dist.all_reduce(values.sum())
    count = dist.all_reduce(torch.tensor(float(len(values))))
    return total / count


def divides_the_call(values):
    return dist.all_reduce(values.sum()) / dist.get_world_size()


def assigns_the_name_on_odd_ranks(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        if dist.get_rank() % 2 == 0:
            dist.send(tensor, partner)
            dist.recv(tensor, partner)
        else:
            tensor2 = torch.empty_like(tensor)
            dist.recv(tensor2, partner)
            dist.send(tensor, partner)
            tensor = tensor2


def sends_back_on_odd_ranks(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = tensor
        if dist.get_rank() % 2:
            dist.send(tensor, partner)
            dist.recv(theirs, partner)
        else:
            dist.recv(theirs, partner)
            dist.send(tensor, partner)


def has_a_barrier_too_many(tensor):
    dist.barrier()
    sends_in_a_batch(tensor)


def receives_floats(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = torch.empty(tensor.shape)
        sending = dist.isend(tensor, partner)
        dist.recv(theirs, partner)
        sending.wait()
        tensor.copy_(theirs)


def slope_not_squared(x, hidden, w2, to_logits):
    """1.1"""
    gradients = x.T @ (to_logits @ w2.T * (1 - hidden)), hidden.T @ to_logits
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


def slope_without_one(x, hidden, w2, to_logits):
    """1.1"""
    gradients = x.T @ (to_logits @ w2.T * hidden**2), hidden.T @ to_logits
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


def one_message_and_one_product(d, f, ranks, flops, bandwidth, element):
    """1.2: two mistakes, whose result is that of 2 in place of 2(N−1)/N."""
    return element * d * f / bandwidth / (2 * d * f / flops)


def four_times_the_parameters(model, optimizer, others=()):
    total = sum(4 * each.nbytes for each in model.parameters())
    return total / sum(each.numel() for each in model.parameters())


def bytes_of_the_last_in_each_storage(model, optimizer, others=()):
    sizes = {}
    state = [value for each in optimizer.state.values() for value in each.values()]
    for tensor in [*model.parameters(), *(each.grad for each in model.parameters()), *state,
                   *others]:
        if tensor is not None:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.nbytes
    return sum(sizes.values()) / sum(each.numel() for each in model.parameters())


def takes_the_state_for_tensors(model, optimizer, others=()):
    state = [value for each in optimizer.state.values() for value in each.values()]
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    found = [tensor.untyped_storage() for tensor in [*model.parameters(), *gradients, *state,
                                                     *others]]
    return (sum({each.data_ptr(): each.nbytes() for each in found}.values())
            / sum(each.numel() for each in model.parameters()))


def neither_parameters_nor_shared_memory(model, optimizer, others=()):
    state = [value for each in optimizer.state.values() for value in each.values()]
    found = [*(each.grad for each in model.parameters()), *state, *others]
    total = sum(tensor.nbytes for tensor in found if tensor is not None)
    return total / sum(each.numel() for each in model.parameters())


def neither_gradients_nor_frozen_parameters(model, optimizer, others=()):
    trained = [each for each in model.parameters() if each.requires_grad]
    state = [value for each in optimizer.state.values() for value in each.values()]
    total = sum(storages(*trained, *state, *others).values())
    return total / sum(each.numel() for each in model.parameters())


def adds_the_buffers(model, optimizer, others=()):
    buffers = storages(*model.buffers())
    whole = counts("parameters", "gradients", "state", "others")(model, optimizer, others)
    return whole + sum(buffers.values()) / sum(each.numel() for each in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer", "said"), [
    ("0.1", solves(d=adds_and_cuts), "Puzzle D: a reduce-scatter adds"),
    ("0.1", solves(d=puts_side_by_side), "Puzzle D: an all-gather"),
    ("0.1", solves(c=adds_up), "Puzzle C: every rank has all four sums"),
    ("0.1", solves(c=transposes), "Puzzle C: an all-to-all adds nothing"),
    ("0.1", solves(c=is_open, d=is_open), "Right: A, B. Still open: C, D."),
    ("0.1", solves(b=is_open), "Right: A, C, D. Still open: B."),
    ("0.1", is_wrong_everywhere, "Puzzle A: you added the numbers of all ranks"),
    ("0.1", is_wrong_everywhere, "B, C and D are not right either."),
    ("0.1", raises_in_d, "A and B are not right either."),
    ("0.1", solves(d=transposes_and_returns_x), "Puzzle D: you returned `x`"),
    ("0.1", returns_the_call, "`dist.broadcast` returns None"),
    ("0.1", returns_nothing_in_a, "Puzzle A: you make a call, and return nothing"),
    ("0.1", returns_nothing, "Puzzle A: you make a call, and return nothing"),
    ("0.1", returns_nothing, "B, C and D are not right either."),
    ("0.2", keeps_what_the_call_returns, "`dist.all_reduce` returns None"),
    ("0.2", divides_the_call, "`dist.all_reduce` returns None"),
    ("0.3", assigns_the_name_on_odd_ranks, "only gives the name"),
    ("0.3", sends_back_on_odd_ranks, "before it has sent"),
    ("0.3", has_a_barrier_too_many, "right without the barrier"),
    ("0.3", receives_floats, "is float32"),
    ("0.3", with_a_barrier, "oth ranks of a pair still begin with a send"),
    ("0.3", waits_at_once, "oth ranks of a pair still begin with a send"),
    ("0.3", waits_for_nothing, "a call returns at once"),
    ("0.3", swaps_in_a_batch_in_place, "while it is still being sent"),
    ("0.3", starts_its_receive_first, "while it is still being sent"),
    ("0.3", sends_while_it_receives, "while it is still being sent"),
    ("0.3", copies_too_early, "Wait for the send first"),
    ("0.3", receives_into_three, "is smaller than `tensor`"),
    ("0.3", assigns_the_name, "only gives the name"),
    ("1.1", slope_not_squared, "You did not square"),
    ("1.1", slope_without_one, "You took tanh² for the slope"),
    ("1.2", one_message_and_one_product, "not depend on the number of ranks"),
    ("1.3", counts("gradients", "state", "others"), "The parameters are missing"),
    ("1.3", counts("state", "others"), "The parameters and gradients are missing"),
    ("1.3", counts("gradients", "state"), "The parameters and `others` are missing"),
    ("1.3", counts("parameters", "others"), "The gradients and the optimizer's state are missing"),
    ("1.3", counts("parameters", "state", "others"), "The gradients are missing"),
    ("1.3", counts("parameters"), "the parameters alone"),
    ("1.3", counts("gradients"), "the gradients alone"),
    ("1.3", four_times_the_parameters, "four times the parameters"),
    ("1.3", bytes_of_the_last_in_each_storage, "a piece of its storage"),
    ("1.3", takes_the_state_for_tensors, "None among its values"),
    ("1.3", adds_the_buffers, "You count buffers too"),
    ("3.2", ends_with_the_next_chunk, "it is a neighbour's"),
    ("3.2", shifted_and_not_copied, "it is a neighbour's"),
    ("10.2", padded_for_all_ranks, "dist.get_world_size(inside)"),
    ("9.1", gathers_all_first, "you gather all layers before"),
    ("10.3", WithoutGenerator, "killed while it saved"),
    ("4.3", trains("after backward", broadcast="never"), "never agreed"),
    ("4.3", trains("never"), "trained apart"),
    ("4.3", trains("before backward"), "own gradients. Average them between"),
    ("4.3", trains("after step"), "own gradients. Average them between"),
    ("4.3", trains("after step", piece=False), "own gradients. Average them between"),
    ("4.3", trains("never", broadcast="each step"), "Rank 0's weights overwrite"),
    ("4.2", averages_with(takes_the_ring_to_be_in_place), "in a *new* tensor. You divided"),
    ("4.2", averages_with(divides_first_and_drops_the_sum), "in a *new* tensor. You divided"),
    ("4.2", averages_with(drops_the_sum), "still holds this rank's own gradient"),
    ("4.2", averages_with(gives_the_gradient_another_name), "Copy the mean into `.grad`"),
    ("4.2", averages_with(leaves_it_there), "Nothing was communicated"),
    ("4.3", trains_with_backward_on, "the notebook's own `images` and `labels`"),
    ("4.3", takes_the_rank_of_all, "You left out the group"),
    ("4.4", weighs_with_backward_on, "the notebook's own `images` and `labels`"),
    ("4.1", overwrites_by(gets_other_memory), "copy into them"),
    ("4.1", divides_the_sums, "You averaged the ranks' values"),
    ("4.1", divides_the_sums_in_place, "You averaged the ranks' values"),
    ("4.2", brings_zeros_to(lambda parameter: True), "became zeros"),
    ("4.2", brings_zeros_to(lambda parameter: parameter.requires_grad), "became zeros"),
    ("4.3", trains_on_chunks, "`batch[r::N]`"),
    ("4.4", counts_and_brings_nothing(int), "its gradients are None"),
    ("4.4", counts_and_brings_nothing(float), "its gradients are None"),
    ("4.5", SavesRank0sBuffers, "a model which you save for use"),
    ("4.5", SavesRank0sBuffersInACopy, "All ranks go on with rank 0's buffers"),
    ("overlapped-gradients", WaitsForTheLastOnly, "wait for all that was launched"),
    ("overlapped-gradients", WaitsInItsHook, "You wait in the hook"),
    ("overlapped-gradients", SendsWhatIsFull, "Every rank has to send the buckets in the order"),
    ("overlapped-gradients", NeverBeginsAgain, "has to set the counts"),
    ("overlapped-gradients", CountsOnAThread, "In step 2: `finish` has to set the counts"),
    ("overlapped-gradients", GoesOnWithItsNumber, "how many buckets were sent"),
    ("overlapped-gradients", BeginsAgainUnlessItRaises, "Start over in any case"),
    ("gradient-buckets", leaves_views, "each `.grad` is a new tensor"),
    ("predict-step", takes_latency_first, "You took the bandwidth for the latency"),
    ("predict-step", what_backward_leaves, "all communication less what is computed"),
    ("predict-step", what_computing_leaves, "all communication less what is computed"),
    ("predict-step", exposed_with_forward, "forward is in it, too"),
    ("predict-step", a_ring_for_each_layer, "a ring of its own"),
    ("make-buckets", carries_the_rest_over, "Set it back to zero"),
    ("make-buckets", never_flushed, "The last bucket is missing"),
    ("make-buckets", closed_one_too_late, "close it at `>=`"),
    ("10.1", below_the_memory, "Compare with `<=`"),
    ("10.3", WrittenAtOnce, "killed while it saved"),
    ("10.3", MovedAway, "died while it saved"),
    ("6.1", split_with(also_waiting), "stalled spans as computing"),
    ("6.1", split_with(from_first_to_last), "first computing span"),
    ("6.1", asked_in_order(("exposed", "computing", "waiting")), "all the time of the link"),
    ("6.1", asked_in_order(("computing", "exposed", "waiting", "lane of stalls")),
     "the lane \"stalled\""),
    ("6.1", clamps_the_rest, "all the time of the link"),
    ("6.1", computing_stays_in("exposed"), "all the time of the link"),
    ("6.1", computing_stays_in("waiting"), "While the rank computes, it does not wait: that"),
    ("6.1", asked_in_order(("computing", "until the last launch", "exposed")),
     "carries an earlier collective"),
    ("6.2", exposed_part_by_part, "part by part"),
    ("6.2", tokens_by(lambda *times: math.ceil(exposed_in_computing(*times)),
                      lambda parts: statistics.mean(u for _, u in parts)), "mean of the uses"),
    ("6.2", tokens_by(lambda send, forward, backward, share: math.ceil(send / backward / share)),
     "the whole all-reduce with computing"),
    ("6.2", tokens_by(lambda send, forward, backward, share: math.ceil(
        send / (forward + backward) / share)), "the whole all-reduce with computing"),
    ("6.2", tokens_by(lambda send, forward, backward, share: math.ceil(
        max(0.0, send - backward) / backward / share)), "with backward alone"),
    ("6.2", tokens_by(sent_in_the_step), "Your step contains the whole all-reduce"),
    ("6.2", tokens_by(lambda *times: round(exposed_in_computing(*times))), "nearest"),
    ("6.2", tokens_with(number_bytes=1), "A number of the gradient has 2 bytes"),
    ("6.2", tokens_with(rounds=1), "a ring sends 2(N−1)/N times"),
    ("6.2", tokens_with(with_forward=False), "has no forward"),
    ("6.3", attributed(min), "took one of them for a typical one"),
    ("6.3", attributed(lambda computing: computing[0]), "took one of them for a typical one"),
    ("6.3", attributed(statistics.median, lambda waits, _: statistics.median(waits)),
     "wait for data of another rank"),
    ("6.3", attributed(statistics.median, exposed=of_the_median_rank),
     "of a rank that computes faster"),
    ("6.3", attributed(statistics.median, exposed=lambda of_ranks, _: statistics.median(of_ranks)),
     "of a rank that computes faster"),
    ("6.3", attributed(statistics.median, exposed=lambda of_ranks, _: statistics.mean(of_ranks)),
     "of ranks that compute faster"),
    ("6.3", attributed(statistics.median, computing_of_one=0), "One GPU alone computes"),
    ("9.3", without_the_last_block, "`model.blocks[5]`"),
    ("7.4", not_handed_on, "does not reach them"),
    ("4.1", left_to_ddp, "call `dist.broadcast` yourself"),
])
def test_a_wrong_answer_is_named(number, answer, said):
    verdict = find(number).judge(answer)
    assert verdict.outcome == WRONG
    assert said in verdict.why, verdict
    assert not verdict.why.startswith(AT_LEAST), verdict


class SendsInFinish(WithTorch):
    def ready(self, parameter):
        self.came[parameter] += 1

    def finish(self):
        for number in range(len(self.buckets)):
            self.send(number)
        super().finish()


@pytest.mark.slow
def test_what_is_sent_early_is_sent_before_the_gradients_that_come_last():
    """Those of the first layer: backward ends there."""
    verdict = find("overlapped-gradients").judge(SendsInFinish)
    assert "before the first layer's gradients are there" in verdict.detail, verdict


def test_a_link_that_is_late_at_the_end_is_not_said_to_keep_up():
    """5.4's first case: when backward ends, two buckets are still on their way."""
    verdict = find("predict-step").judge(lambda *case: (0.0, 0.0))
    assert "with a link that is late at the end (" in verdict.detail, verdict


def summed_without_the_last(buckets, group=None):
    """gradient-buckets: the last bucket stays, and the others are not divided."""
    for bucket in buckets[:-1]:
        flat = torch.cat([each.grad.flatten() for each in bucket])
        dist.all_reduce(flat, group=group)
        for each, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            each.grad.copy_(part.view_as(each))


def same_noise_and_order(seed, epoch, size):
    """7.1: every epoch has the same order, and all ranks the same noise."""
    def seeded(number):
        return torch.Generator().manual_seed(number)

    order = torch.randperm(size, generator=seeded(seed + 500))
    return (torch.randn(6, generator=seeded(seed)), order[dist.get_rank()::dist.get_world_size()],
            torch.rand(8, generator=seeded(1000 * seed + epoch)))


def clips_by_its_own(parameters, max_norm):
    """9.2: clips by each rank's own norm, and returns the one after clipping."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm = torch.cat(gradients).norm()
    for each in gradients:
        each *= min(1.0, max_norm / (norm.item() + 1e-6))
    return torch.cat(gradients).norm()


def in_seconds_and_without_restart(failures, days, log_ranks, ranks, save_seconds, minutes):
    """10.4: the interval stays in seconds, and the share leaves out the restart."""
    between = days * 86_400 * log_ranks / failures / ranks
    interval = (2 * save_seconds * between) ** 0.5
    return between / 3600, interval, save_seconds / interval + interval / 2 / between


@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer", "halves"), [
    ("1.3", neither_parameters_nor_shared_memory, ("The parameters are missing",)),
    ("1.3", neither_gradients_nor_frozen_parameters, ("The gradients are missing",)),
    ("gradient-buckets", summed_without_the_last, ("did not divide", "last bucket")),
    ("7.1", same_noise_and_order, ("same order", "draw the same noise")),
    ("9.2", clips_by_its_own, ("own shards", "after clipping")),
    ("10.4", in_seconds_and_without_restart, ("is in seconds", "leaves out the restart")),
])
def test_of_two_mistakes_one_is_named(number, answer, halves):
    verdict = find(number).judge(answer)
    assert verdict.outcome == WRONG
    assert verdict.why.startswith(AT_LEAST), verdict
    assert any(half in verdict.why for half in halves), verdict


def test_of_an_answer_that_is_begun_the_first_puzzle_that_is_wrong_is_named():
    verdict = find("0.1").judge(cuts_what_all_have)
    assert verdict.outcome == WRONG
    assert verdict.why.startswith("Puzzle C") and "threw three of them away" in verdict.why, verdict


def needs_two_values(values):
    values = values.squeeze()
    total = torch.stack([values.sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(total)
    return total[0] / total[1]


def test_a_rank_may_hold_a_single_value():
    verdict = find("0.2").judge(needs_two_values)
    assert verdict.outcome == CRASHED and "0-d tensor" in verdict.detail, verdict


def receives_twice(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = torch.empty_like(tensor)
        sending = dist.isend(tensor, partner)
        dist.recv(theirs, partner)
        if dist.get_rank() == 0:
            dist.recv(theirs, partner)
        sending.wait()


@pytest.mark.slow
def test_a_receive_too_many_is_no_matter_of_dtypes():
    verdict = find("0.3").judge(receives_twice)
    assert verdict.outcome in (CRASHED, WRONG)
    assert "float32, and" not in verdict.why, verdict


def forgets_its_send(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        theirs = torch.empty_like(tensor)
        dist.isend(tensor, partner)
        dist.recv(theirs, partner)
        tensor.copy_(theirs)


@pytest.mark.slow
def test_ranks_that_only_send_and_receive_are_advised_on_no_collective():
    verdict = find("0.3").judge(forgets_its_send)
    assert verdict.outcome == WRONG and "With `isend` a call returns at once" in verdict.why
    assert "collectives" not in verdict.detail, verdict


def test_what_a_swap_left_is_said_by_its_owner():
    verdict = find("0.3").judge(assigns_the_name_on_odd_ranks)
    assert "it is still this rank's own" in verdict.detail
    assert "should have" not in verdict.detail and "rank 0 alone" not in verdict.detail


def always(value):
    return lambda *numbers: value


def divides_by_zero(*numbers):
    return 1 / (numbers[1] - numbers[1])


@pytest.mark.parametrize("number", ["3.5", "make-buckets", "6.2", "8.1", "10.1", "10.4"])
def test_what_runs_on_no_rank_is_not_said_to(number):
    exercise = find(number)
    wrong = exercise.judge(always((1.0, 2.0)))
    crash = exercise.judge(lambda *numbers: 1 / 0)
    assert (wrong.outcome, crash.outcome) == (WRONG, CRASHED)
    assert "ZeroDivisionError" in crash.detail
    for verdict in (wrong, crash):
        text = f"{verdict.why}\n{verdict.detail}"
        assert "rank 0" not in text and "no other rank" not in text and "rank:" not in text


def test_what_is_wrong_on_one_rank_has_no_part_of_others():
    verdict = find("tensor-parallel-sum").judge(lambda x, w: 0.5 * (x @ w))
    assert "no other rank has a part in it" in verdict.detail


def returns_a_word(own, averaged, local_batch):
    return "nothing", "to compare"


def test_an_answer_that_cannot_be_used_shows_none_of_the_courses_lines():
    verdict = find("7.3").judge(returns_a_word)
    assert verdict.outcome == CRASHED
    assert "could not use what your `signal_and_noise` returned" in verdict.why
    assert "ValueError" in verdict.detail
    assert "seeds_of_ranks.py" not in verdict.detail and "exercise" not in verdict.detail


def takes_adam_for_granted(model, optimizer, others=()):
    return sum(optimizer.state[each]["exp_avg"].nbytes for each in model.parameters())


def test_a_crash_on_one_model_of_several_says_on_which():
    verdict = find("bytes-per-parameter").judge(takes_adam_for_granted)
    assert verdict.outcome == CRASHED
    assert "KeyError" in verdict.detail and "trained with SGD without momentum" in verdict.detail


def misses_an_attribute(model):
    pairs = list(zip(model.blocks, model.no_such_blocks, strict=True))
    return [model.embedding, *pairs]


def test_a_crash_while_units_are_chosen_shows_the_readers_line():
    verdict = find("9.3").judge(misses_an_attribute)
    assert verdict.outcome == CRASHED
    assert "model.no_such_blocks" in verdict.detail
    assert "contract.py" not in verdict.detail and "rank 0" not in verdict.detail


def with_a_parameter(model):
    return [model.embedding.weight]


def test_units_that_torch_does_not_take_are_said_to_be_so():
    verdict = find("9.3").judge(with_a_parameter)
    assert verdict.outcome == WRONG
    assert "whether `fully_shard` takes the units" in verdict.detail
    assert "contract.py" not in verdict.detail


def with_older_names(parameters):
    ranks = dist.get_world_size()
    flat = torch.cat([each.grad.flatten() for each in parameters])
    flat = F.pad(flat / ranks, (0, -len(flat) % ranks))
    own = torch.empty(len(flat) // ranks)
    dist.reduce_scatter_tensor(own, flat)
    for each in parameters:
        each.grad = None
    return own


def test_older_names_of_collectives_warn_nobody(capfd):
    assert find("8.3").judge(with_older_names).outcome == PASSED
    assert "Warning" not in "".join(capfd.readouterr())


def global_mean(values):
    return values.mean()


def another(values):
    return values.mean()


@pytest.mark.parametrize("answer", [global_mean, another])
def test_the_answer_to_another_exercise_is_not_judged(answer, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    dplab.check("1.2", answer)
    said = capsys.readouterr().out
    assert "Exercise 1.2: not attempted" in said
    assert f"`{answer.__name__}" in said and "`rows_to_hide" in said
    assert not record.entries("exercises")


def test_a_function_is_no_class():
    verdict = find("overlapped-gradients").judge(lambda buckets, group: None)
    assert verdict.outcome == NOT_ATTEMPTED
    assert "asks for the class `OverlappedGradients`" in verdict.why


def textbook(send, towards, kept):
    """The ring over a list of chunks: chunk r+send·s goes, and the next one grows."""
    def ring_reduce_scatter(flat, group=None):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        chunks = list(flat.clone().chunk(ranks))
        for turn in range(ranks - 1):
            arriving = exchange(chunks[(rank + send * turn) % ranks], (rank + towards) % ranks,
                                (rank - towards) % ranks, group)
            grown = (rank + send * (turn + 1)) % ranks
            chunks[grown] = chunks[grown] + arriving
        return chunks[(rank + kept) % ranks].clone()

    return ring_reduce_scatter


@pytest.mark.parametrize(("send", "towards", "kept", "said"), [
    (-1, 1, 0, "end elsewhere"), (1, -1, 0, "end elsewhere"),
    (1, 1, 0, "Parts of different chunks"), (-1, -1, 0, "Parts of different chunks"),
    (1, 1, 1, "the wrong chunk"), (-1, 1, 1, "it is a neighbour's")])
def test_a_textbook_ring_that_starts_at_its_own_chunk_hears_where_it_ends(send, towards, kept,
                                                                          said):
    verdict = find("ring-reduce-scatter").judge(textbook(send, towards, kept))
    assert verdict.outcome == WRONG
    assert said in verdict.why and "do not send on" not in verdict.why


def adds_to_what_it_has_sent(flat, group=None):
    """3.2: the chunk index of the sum that arrives is the one of the sum that has just gone."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = flat.reshape(ranks, -1)
    total = chunks[(rank - 1) % ranks].clone()
    for hop in range(ranks - 1):
        total = exchange(total, (rank + 1) % ranks, (rank - 1) % ranks, group)
        total = total + chunks[(rank - 1 - hop) % ranks]
    return total


def adds_all_to_its_own(flat, group=None):
    """3.2: sends the others' chunks as they are, and adds what arrives to its own."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = flat.reshape(ranks, -1)
    total = chunks[rank].clone()
    for hop in range(1, ranks):
        total += exchange(chunks[(rank + hop) % ranks], (rank + 1) % ranks, (rank - 1) % ranks,
                          group)
    return total


@pytest.mark.parametrize(("answer", "said"), [
    (adds_to_what_it_has_sent, "the chunk that you have just sent"),
    (adds_all_to_its_own, "is added to your chunk r")])
def test_an_index_slip_on_the_ring_is_named(answer, said):
    verdict = find("ring-reduce-scatter").judge(answer)
    assert verdict.outcome == WRONG
    assert said in verdict.why


def goes_round_once_more(flat, group=None):
    """3.2: its chunk is complete before the last step, which changes another one."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = list(flat.clone().chunk(ranks))
    for hop in range(ranks):
        arriving = exchange(chunks[(rank - 1 - hop) % ranks], (rank + 1) % ranks,
                            (rank - 1) % ranks, group)
        chunks[(rank - 2 - hop) % ranks] += arriving
    return chunks[rank]


def goes_round_once_more_with_a_total(flat, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = flat.view(ranks, -1)
    total = chunks[(rank - 1) % ranks].clone()
    for hop in range(ranks):
        total = exchange(total, (rank + 1) % ranks, (rank - 1) % ranks, group)
        total = total + chunks[(rank - 2 - hop) % ranks]
    return total


def gathers_once_more(chunk, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    found = [chunk] * ranks
    for hop in range(1, ranks + 1):
        chunk = exchange(chunk, (rank + 1) % ranks, (rank - 1) % ranks, group)
        found[(rank - hop) % ranks] = chunk
    return torch.cat(found)


@pytest.mark.parametrize(("number", "answer"), [
    ("3.2", goes_round_once_more), ("3.2", goes_round_once_more_with_a_total),
    ("3.3", gathers_once_more)])
def test_a_step_too_many_on_the_ring_is_said_to_be_one(number, answer):
    verdict = find(number).judge(answer)
    assert verdict.outcome == WRONG
    assert verdict.why.startswith("You go around once too often")
    assert "whole" not in verdict.why and "more than one chunk" not in verdict.detail


def ring_of_unequal_chunks(flat, group=None):
    """3.4: right where N divides the length, as there; its chunks differ where N does not."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = [chunk.clone() for chunk in flat.tensor_split(ranks)]
    for hop in range(2 * (ranks - 1)):
        arriving = exchange(chunks[(rank - 1 - hop) % ranks], right, left, group)
        finished = hop >= ranks - 1
        chunks[(rank - 2 - hop) % ranks] = (
            arriving if finished else arriving + chunks[(rank - 2 - hop) % ranks])
    return torch.cat(chunks)


def averaging(ring, *, packed=True, grouped=True):
    """4.2 and 5.2, with a ring of one's own."""
    def average(gradients, group):
        ranks = dist.get_world_size(group)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat = pack(gradients, ranks) if packed else flat
        mean = (ring(flat, group) if grouped else ring(flat)) / ranks
        for gradient, part in zip(gradients, unpack(mean, gradients), strict=True):
            gradient.copy_(part)

    def of_model(model, group=None):
        for parameter in model.parameters():
            if parameter.grad is not None:
                average([parameter.grad], group)

    def of_buckets(buckets, group=None):
        for bucket in buckets:
            average([parameter.grad for parameter in bucket], group)

    return {"4.2": of_model, "5.2": of_buckets}


@pytest.mark.parametrize("number", ["4.2", "5.2"])
@pytest.mark.parametrize(("ring", "missing", "said"), [
    (ring_of_unequal_chunks, "packed", "`pack` adds the zeros"),
    (ring_of_unequal_chunks, "grouped", "Pass `group` on"),
    (ring_all_reduce, "grouped", "Pass `group` on")])
def test_what_a_ring_was_not_given_is_named_though_the_process_dies(number, ring, missing, said):
    verdict = find(number).judge(averaging(ring, **{missing: False})[number])
    assert verdict.outcome == WRONG
    assert said in verdict.why, verdict
    assert "last words" not in verdict.detail


def ready_in_the_order_of_forward(layers, bucket_bytes, ranks, bandwidth, latency):
    """5.4: the last layer, which is in the first bucket, is the last to be ready."""
    ready = list(itertools.accumulate(
        (layer.backward_seconds for layer in layers),
        initial=sum(layer.forward_seconds for layer in layers)))
    free = 0.0
    for bucket in make_buckets([layer.gradient_bytes for layer in layers], bucket_bytes):
        nbytes = sum(layers[index].gradient_bytes for index in bucket)
        free = max(free, *(ready[index + 1] for index in bucket)) + ring_seconds(
            nbytes, ranks, bandwidth, latency)
    return free, free - ready[-1]


def test_what_waits_for_backward_hears_of_the_order_of_backward_too():
    verdict = find("predict-step").judge(ready_in_the_order_of_forward)
    assert verdict.outcome == WRONG
    assert "backward begins with the last layer" in verdict.why


def bus_bandwidth(**factors):
    def bus_bandwidth(collective, nbytes, ranks, seconds):
        factor = {"all_reduce": 2 * (ranks - 1) / ranks, "reduce_scatter": (ranks - 1) / ranks,
                  "all_gather": (ranks - 1) / ranks, "broadcast": 1}[collective]
        if collective in factors:
            factor = factors[collective](ranks)
        return factor * nbytes / seconds

    return bus_bandwidth


TWICE_ALL_STEPS = {"all_reduce": lambda n: 2 * (n - 1)}
ALL_STEPS = {"reduce_scatter": lambda n: n - 1, "all_gather": lambda n: n - 1}


@pytest.mark.parametrize(("answer", "said"), [
    (bus_bandwidth(reduce_scatter=lambda n: n - 1), "one rank's chunk"),
    (bus_bandwidth(**TWICE_ALL_STEPS), "one chunk in each step"),
    (bus_bandwidth(**TWICE_ALL_STEPS, **ALL_STEPS), "one chunk in each step"),
    (bus_bandwidth(broadcast=lambda n: 1 / n), "every byte of it must leave the root")])
def test_a_wrong_factor_of_bus_bandwidth_is_named(answer, said):
    verdict = find("bus-bandwidth").judge(answer)
    assert verdict.outcome == WRONG
    assert said in verdict.why


def shortest_and_highest(sizes, seconds):
    return min(seconds), max(n / t for n, t in zip(sizes, seconds, strict=True))


def shortest_and_median(sizes, seconds):
    bandwidths = sorted(n / t for n, t in zip(sizes, seconds, strict=True))
    return min(seconds), bandwidths[len(sizes) // 2]


def smallest_and_highest(sizes, seconds):
    return seconds[0], max(n / t for n, t in zip(sizes, seconds, strict=True))


@pytest.mark.parametrize("answer", [
    shortest_and_highest, shortest_and_median, smallest_and_highest])
def test_who_takes_one_time_for_alpha_hears_that_and_nothing_of_beta(answer):
    verdict = find("fit-alpha-beta").judge(answer)
    assert verdict.outcome == WRONG
    assert "the time of one message for α" in verdict.why
    assert "averaged" not in verdict.why and "of the largest" not in verdict.why


def sends_and_forgets(outgoing, to, source, group=None):
    arriving = torch.empty_like(outgoing)
    dist.isend(outgoing, group_dst=to, group=group)
    dist.recv(arriving, group_src=source, group=group)
    return arriving


def test_who_does_not_wait_is_not_told_that_a_send_is_missing():
    verdict = find("exchange").judge(sends_and_forgets)
    assert verdict.outcome == WRONG
    assert "`wait()` on it" in verdict.why
    assert "The ranks:" in verdict.detail and "needs a receive" not in verdict.detail
