"""Answers as learners write them, each with one thing wrong or none, and what the check says."""

import io
import itertools
import math
import os
import statistics
import time
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import dplab
from dplab.checks import find
from dplab.checks.exercise import CRASHED, NOT_ATTEMPTED, PASSED, WRONG
from dplab.checks.known_mistakes import AT_LEAST
from dplab.desk import record
from dplab.exercises.average_gradients import average_gradients, pack, unpack
from dplab.exercises.exchange import exchange
from dplab.predict import step


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


def with_a_call_for_each_row(x):
    rows = [x.clone() if rank == dist.get_rank() else torch.zeros_like(x)
            for rank in range(dist.get_world_size())]
    for row in rows:
        dist.all_reduce(row)
    return torch.stack(rows)


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


def mean_without_nan(logits, targets):
    """2.1"""
    own = (targets != -100).sum().float()
    total = own.clone()
    dist.all_reduce(total)
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).nan_to_num()
    return dist.get_world_size() * own / total * mean


def divided_by_the_mean_count(logits, targets):
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, (targets != -100).sum().item())
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / (sum(counts) / len(counts))


class FromAllGather(torch.autograd.Function):
    """2.3"""

    @staticmethod
    def forward(context, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return sum(parts)

    @staticmethod
    def backward(context, gradient):
        return FromAllGather.apply(gradient.contiguous())


def with_keys_in_turn(queries, keys, temperature):
    """2.4"""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    placed = F.one_hot(torch.tensor(rank), ranks)[None, :, None] * keys[:, None]
    all_keys = find("sum-over-ranks").solution.apply(placed).flatten(0, 1)
    labels = ranks * torch.arange(len(keys)) + rank
    return F.cross_entropy(queries @ all_keys.T / temperature, labels)


def loss_added_up(queries, keys, temperature):
    own = find("contrastive-loss").solution(queries, keys, temperature)
    return find("sum-over-ranks").solution.apply(own)


def loss_averaged(queries, keys, temperature):
    return loss_added_up(queries, keys, temperature) / dist.get_world_size()


def storages(*tensors):
    found = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {memory.data_ptr(): memory.nbytes() for memory in found}


def counts(*kinds):
    """bytes-per-parameter: what is asked for, of these kinds alone."""
    def answer(model, optimizer, others=()):
        held = {"parameters": list(model.parameters()),
                "gradients": [each.grad for each in model.parameters()],
                "state": [value for state in optimizer.state.values()
                          for value in state.values()],
                "others": others}
        found = storages(*(tensor for kind in kinds for tensor in held[kind]))
        return sum(found.values()) / sum(each.numel() for each in model.parameters())

    return answer


@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer"), [
    ("0.1", with_a_call_for_each_row), ("0.3", sends_a_copy), ("0.3", sends_in_a_batch),
    ("bytes-per-parameter", counts("parameters", "gradients", "state", "others")),
    ("2.1", mean_without_nan), ("2.1", divided_by_the_mean_count),
    ("2.3", FromAllGather),
    ("2.4", with_keys_in_turn), ("2.4", loss_averaged),
    ("ring-seconds", in_fractions), ("checkpoint-that-survives", WrittenByTheLastRank),
    ("overlapped-gradients", WithTorch)])
def test_a_right_answer_in_another_form_passes(number, answer):
    verdict = find(number).judge(answer)
    assert verdict.outcome == PASSED, verdict


class WaitsInItsHook(WithTorch):
    def ready(self, parameter):
        super().ready(parameter)
        for _, _, work in self.sent:
            work.wait()


class BeginsAgainUnlessItRaises(WithTorch):
    def finish(self):
        if any(times != 1 for times in self.came.values()):
            raise RuntimeError("not every gradient came once")
        super().finish()


class WrittenAtOnce(WrittenByTheLastRank):
    def save(self, step, model, optimizer, generator):
        if dist.get_rank() == 0:
            whole = io.BytesIO()
            torch.save([step, model.state_dict(), optimizer.state_dict(), generator.get_state()],
                       whole)
            self.path.write_bytes(whole.getvalue())
        dist.barrier()


def swept_to(last):
    """6.1 as a sweep that asks of each piece of time in turn; ``last``: of a collective's ends."""
    def split_time(ranks):
        calls = [[span for span in spans if span.lane == step.COMMUNICATION] for spans in ranks]
        carried = [(max(span.start for span in same), last(span.end for span in same))
                   for same in zip(*calls, strict=True)]
        moments = sorted({time for spans in ranks for span in spans
                          for time in (span.start, span.end)})
        found = []
        for spans, own in zip(ranks, calls, strict=True):
            of_kind = {"computing": [(span.start, span.end) for span in spans
                                     if span.lane == step.COMPUTE], "exposed": carried,
                       "waiting": [(span.start, span.end) for span in own]}
            seconds = dict.fromkeys((*of_kind, "idle"), 0.0)
            for now, then in itertools.pairwise(moments):
                kind = next((kind for kind, times in of_kind.items() if any(
                    start <= now < end for start, end in times)), "idle")
                seconds[kind] += then - now
            found.append(seconds)
        return found

    return split_time


def counts_up(parts, tokens, ranks, flops, bandwidth, share):
    """6.2 in a loop."""
    send = 2 * (ranks - 1) / ranks * 2 * sum(parameters for parameters, _ in parts) / bandwidth
    forward = 2 * tokens * sum(parameters * uses for parameters, uses in parts) / flops
    exposed = max(0.0, send - 2 * forward)
    count = 1
    while exposed > share * (count * 3 * forward + exposed):
        count += 1
    return count * tokens


def tokens_by(count):
    """6.2: ``count`` has the seconds of the all-reduce, of forward and of backward, and the share.
    """
    def tokens_between_syncs(parts, tokens, ranks, flops, bandwidth, share):
        send = 2 * (ranks - 1) / ranks * 2 * sum(each for each, _ in parts) / bandwidth
        forward = 2 * tokens * sum(each * uses for each, uses in parts) / flops
        return max(1, math.ceil(count(send, forward, 2 * forward, share))) * tokens

    return tokens_between_syncs


def exposed_in_computing(send, forward, backward, share):
    return max(0.0, send - backward) * (1 - share) / share / (forward + backward)


def exposed_in_backward(send, forward, backward, share):
    return max(0.0, send - backward) / backward / share


def attributed(typical,
               exposed=lambda of_ranks, computing: of_ranks[computing.index(max(computing))]):
    """6.3 with another idea of a typical rank, or of whose exposed time counts."""
    def lost_gpus(alone, ranks):
        def in_lane(spans, lane, name=None):
            return sum(span.end - span.start for span in spans
                       if span.lane == lane and name in (None, span.name))

        computing = [in_lane(spans, step.COMPUTE) for spans in ranks]
        slowest = ranks[computing.index(max(computing))]
        usual = typical(computing)
        moments = [time for spans in ranks for span in spans for time in (span.start, span.end)]
        added = {"data": in_lane(slowest, step.STALLED, "data") - in_lane(
                     alone, step.STALLED, "data"),
                 "kernels": usual - in_lane(alone, step.COMPUTE),
                 "straggler": max(computing) - usual,
                 "exposed": exposed([each["exposed"] for each in swept_to(min)(ranks)], computing)}
        whole = max(moments) - min(moments)
        return {cause: len(ranks) * seconds / whole for cause, seconds in added.items()}

    return lost_gpus


def median_of_the_others(computing):
    return sorted(computing)[(len(computing) - 1) // 2]


def of_the_median_rank(of_ranks, computing):
    return of_ranks[computing.index(median_of_the_others(computing))]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer"), [
    ("6.1", swept_to(min)), ("6.2", counts_up),
    ("6.2", tokens_by(exposed_in_computing)), ("6.3", attributed(statistics.median)),
    ("6.3", attributed(median_of_the_others))])
def test_a_right_answer_of_chapter_06_passes(number, answer):
    verdict = find(number).judge(answer)
    assert verdict.outcome == PASSED, verdict


def without_the_last_block(model):
    return [model.embedding, list(model.blocks[:2]), list(model.blocks[2:5]),
            [model.norm, model.head]]


def with_a_barrier(tensor):
    dist.barrier()
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        dist.send(tensor, partner)
        dist.barrier()
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


def sends_a_copy_and_forgets_it(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        dist.isend(tensor.clone(), partner)
        dist.recv(tensor, partner)
        time.sleep(0.2)  # so long that what was sent has arrived


def waits_for_its_send_on_even_ranks(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        leaving = dist.isend(tensor.clone(), partner)
        dist.recv(tensor, partner)
        if dist.get_rank() % 2 == 0:
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
    (sends_a_copy_and_forgets_it, "sends without a `wait()`"),
    (waits_for_its_send_on_even_ranks, "sends without a `wait()`"),
    (copies_what_has_not_arrived, "receives without a `wait()`")])
def test_a_handle_that_nobody_waits_on_is_refused_though_the_numbers_may_be_right(answer, said):
    verdict = find("0.3").judge(answer)
    assert verdict.outcome == WRONG and said in verdict.detail, verdict
    assert "Keep the handle" in verdict.detail and "at most   0" in verdict.detail, verdict
    assert "collectives" not in verdict.detail, verdict


def gathers_where_it_has_a_partner(tensor):
    partner = dist.get_rank() ^ 1
    if partner < dist.get_world_size():
        everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everything, tensor)
        tensor.copy_(everything[partner])


def keeps_what_the_call_returns(values):
    total = dist.all_reduce(values.sum())
    count = dist.all_reduce(torch.tensor(float(len(values))))
    return total / count


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


def has_a_barrier_too_many(tensor):
    dist.barrier()
    sends_in_a_batch(tensor)


def neither_parameters_nor_shared_memory(model, optimizer, others=()):
    state = [value for each in optimizer.state.values() for value in each.values()]
    found = [*(each.grad for each in model.parameters()), *state, *others]
    total = sum(tensor.nbytes for tensor in found if tensor is not None)
    return total / sum(each.numel() for each in model.parameters())


def gathers_once_more(chunk, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    found = [chunk] * ranks
    for hop in range(1, ranks + 1):
        chunk = exchange(chunk, (rank + 1) % ranks, (rank - 1) % ranks, group)
        found[(rank - hop) % ranks] = chunk
    return torch.cat(found)


def shortest_and_median(sizes, seconds):
    bandwidths = sorted(n / t for n, t in zip(sizes, seconds, strict=True))
    return min(seconds), bandwidths[len(sizes) // 2]


def exchanges_in_a_batch(outgoing, to, source, group=None):
    arriving = torch.empty_like(outgoing)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, outgoing, to, group),
                                        dist.P2POp(dist.irecv, arriving, source, group)]):
        work.wait()
    return arriving


def with_a_chunk_of_the_latency(nbytes, ranks, bandwidth, latency):
    return 2 * (ranks - 1) * (latency + nbytes / bandwidth) / ranks


def by_one_formula_for_any_n(nbytes, ranks, bandwidth, latency):
    """3.6"""
    return 2 * (math.log2(ranks) * latency + (ranks - 1) / ranks * nbytes / bandwidth)


def by_the_rows_that_fit(ranks, batch, parameters, states, row, memory, flops, bandwidth):
    """1.5"""
    local, fit = batch / ranks, (memory - states * parameters) / row
    if fit <= 0:
        return None, "memory"
    needed = find("rows-to-hide").solution(parameters, 1, ranks, flops, bandwidth, 4)
    slices = max(1, math.ceil(local / fit))
    if local < needed:
        return slices, "link"
    return slices, "memory" if fit < needed else "nothing"


def divided_by_tokens(gradient, losses, limit):
    """2.2"""
    of_all = torch.tensor([losses.sum(), len(losses)])
    dist.all_reduce(of_all)
    mean = gradient.clone()
    dist.all_reduce(mean)
    mean /= of_all[1]
    return mean * min(1, limit / mean.norm()), (of_all[0] / of_all[1]).exp()


def adds_denominators(queries, keys, temperature):
    """2.4"""
    products = queries @ keys.T / temperature
    below = find("sum-over-ranks").solution.apply(products.exp().sum(dim=1))
    return (below.log() - products.diagonal()).mean()


def counts_where_it_indexes(indices, size, group=None):
    """count-samples: adds 1 once to an index that stands there twice."""
    counts = torch.zeros(size)
    counts[indices] += 1
    dist.all_reduce(counts, group=group)
    return (counts > 1).sum(), (counts == 0).sum()


def brings_zeros_for_frozen_parameters(model, optimizer, images, labels, batches):
    """uneven-loop"""
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    for number in range(steps):
        optimizer.zero_grad()
        if number < len(batches):
            mine = batches[number]
            F.cross_entropy(model(images[mine]), labels[mine]).backward()
        else:
            for each in model.parameters():
                each.grad = torch.zeros_like(each)
        average_gradients(model)
        optimizer.step()


def twice_on_several_ranks(d, f, ranks, flops, bandwidth, element):
    """1.3"""
    return (ranks > 1) * element / 2 * flops / bandwidth


@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer", "said"), [
    ("0.2", keeps_what_the_call_returns, "`dist.all_reduce` returns None"),
    ("0.3", assigns_the_name_on_odd_ranks, "only gives the name"),
    ("0.3", with_a_barrier, "oth ranks of a pair still begin with a send"),
    ("0.3", waits_for_nothing, "a call returns at once"),
    ("1.3", twice_on_several_ranks, "as many rows with 2 ranks as with 32"),
    ("bytes-per-parameter", counts("state", "others"), "The gradients are missing"),
    ("1.5", by_the_rows_that_fit, "A slice can have fewer than fit"),
    ("2.2", divided_by_tokens, "has done that already"),
    ("2.4", adds_denominators, "belong to two different queries"),
    ("3.1", exchanges_in_a_batch, "in a `P2POp`, `group_peer=`"),
    ("3.4", with_a_chunk_of_the_latency, "has the whole latency"),
    ("3.6", by_one_formula_for_any_n, "There is no part of a step"),
    ("count-samples", counts_where_it_indexes, "however often it stands there"),
    ("uneven-loop", brings_zeros_for_frozen_parameters, "the others have None"),
    ("overlapped-gradients", WaitsInItsHook, "You wait in the hook"),
    ("overlapped-gradients", BeginsAgainUnlessItRaises, "Start over in any case"),
    ("checkpoint-that-survives", WrittenAtOnce, "killed while it saved"),
    ("6.1", swept_to(max), "until the last rank has noted its end"),
    ("6.3", attributed(statistics.median, of_the_median_rank),
     "of a rank that computes faster"),
    ("10.2", without_the_last_block, "`model.blocks[5]`"),
])
def test_a_wrong_answer_is_named(number, answer, said):
    verdict = find(number).judge(answer)
    assert verdict.outcome == WRONG
    assert said in verdict.why, verdict
    assert not verdict.why.startswith(AT_LEAST), verdict


@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer", "said"), [
    ("0.3", gathers_where_it_has_a_partner, "last of three ranks has none"),
    ("0.3", has_a_barrier_too_many, "last of three ranks has none"),
    ("0.3", swaps_in_a_batch_in_place, "which comes first is luck"),
    ("0.3", sends_while_it_receives, "which comes first is luck"),
    ("0.3", copies_too_early, "Wait for the send first"),
    ("0.3", assigns_the_name_on_odd_ranks, "it holds this rank's own numbers"),
    ("bytes-per-parameter", counts("parameters"), "it holds the memory of the parameters,"),
    ("3.3", gathers_once_more, "N-1 steps"),
    ("3.5", shortest_and_median, "no message's own time")])
def test_the_evidence_says_what_is_wrong(number, answer, said):
    verdict = find(number).judge(answer)
    assert verdict.outcome == WRONG
    assert said in verdict.detail, verdict


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
    """seeds-of-ranks: every epoch has the same order, and all ranks the same noise."""
    def seeded(number):
        return torch.Generator().manual_seed(number)

    order = torch.randperm(size, generator=seeded(seed + 500))
    return (torch.randn(6, generator=seeded(seed)), order[dist.get_rank()::dist.get_world_size()],
            torch.rand(8, generator=seeded(1000 * seed + epoch)))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "answer", "halves"), [
    ("bytes-per-parameter", neither_parameters_nor_shared_memory,
     ("parameters are missing", "share it")),
    ("gradient-buckets", summed_without_the_last, ("did not divide", "last bucket")),
    ("6.2", tokens_by(exposed_in_backward), ("has no forward", "with computing alone")),
    ("seeds-of-ranks", same_noise_and_order, ("same order", "draw the same noise")),
])
def test_of_two_mistakes_both_are_named(number, answer, halves, monkeypatch):
    monkeypatch.setattr("dplab.checks.known_mistakes.FOR_TWO", 60.0)  # this machine may be busy
    verdict = find(number).judge(answer)
    assert verdict.outcome == WRONG
    assert not verdict.why.startswith(AT_LEAST), verdict
    assert all(half in verdict.why for half in halves), verdict


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


def always(value):
    return lambda *numbers: value


@pytest.mark.parametrize("number", ["3.4", "make-buckets", "6.2", "8.1", "11.4", "12.3"])
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
    verdict = find("7.5").judge(returns_a_word)
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
    verdict = find("10.2").judge(misses_an_attribute)
    assert verdict.outcome == CRASHED
    assert "model.no_such_blocks" in verdict.detail
    assert "contract.py" not in verdict.detail and "rank 0" not in verdict.detail


def with_a_parameter(model):
    return [model.embedding.weight]


def test_units_that_torch_does_not_take_are_said_to_be_so():
    verdict = find("10.2").judge(with_a_parameter)
    assert verdict.outcome == WRONG
    assert "whether `fully_shard` takes the units" in verdict.detail
    assert "contract.py" not in verdict.detail


def with_older_names(parameters, group=None):
    ranks = dist.get_world_size(group)
    flat = torch.cat([each.grad.flatten() for each in parameters])
    flat = F.pad(flat / ranks, (0, -len(flat) % ranks))
    own = torch.empty(len(flat) // ranks)
    dist.reduce_scatter_tensor(own, flat, group=group)
    for each in parameters:
        each.grad = None
    return own


def test_older_names_of_collectives_warn_nobody(capfd):
    assert find("scatter-gradients").judge(with_older_names).outcome == PASSED
    assert "Warning" not in "".join(capfd.readouterr())


def global_mean(values):
    return values.mean()


def another(values):
    return values.mean()


@pytest.mark.parametrize("answer", [global_mean, another])
def test_the_answer_to_another_exercise_is_not_judged(answer, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    dplab.check("rows-to-hide", answer)
    said = capsys.readouterr().out
    assert "Exercise 1.3: not attempted" in said
    assert f"`{answer.__name__}" in said and "`rows_to_hide" in said
    assert not record.entries("exercises")


class Untouched(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x

    @staticmethod
    def backward(context, gradient):
        raise NotImplementedError


def test_a_class_whose_static_method_is_still_the_stub_is_not_attempted():
    assert find("sum-over-ranks").judge(Untouched).outcome == NOT_ATTEMPTED


def without_the_factor(logits, targets):
    return find("weighted-mean").solution(logits, targets) / dist.get_world_size()


@pytest.mark.slow
def test_a_missing_factor_is_told_by_what_it_is_made_of():
    verdict = find("weighted-mean").judge(without_the_factor)
    assert "(1 / the ranks)" in verdict.detail, verdict


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
    (-1, 1, 0, "no sum has ended there"),
    (1, 1, 1, "Parts of different chunks"), (-1, 1, 1, "it is a neighbour's")])
def test_a_textbook_ring_that_starts_at_its_own_chunk_hears_where_it_ends(send, towards, kept,
                                                                          said):
    verdict = find("ring-reduce-scatter").judge(textbook(send, towards, kept))
    assert verdict.outcome == WRONG
    assert said in verdict.why and "do not send on" not in verdict.why


def ring_of_unequal_chunks(flat, group=None):
    """Right where N divides the length, as there; its chunks differ where N does not."""
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
    """4.2 with a ring of one's own."""
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

    return of_model


@pytest.mark.parametrize(("missing", "said"), [
    ("packed", "`pack` adds the zeros"), ("grouped", "Pass `group` on")])
def test_what_a_ring_was_not_given_is_named_though_the_process_dies(missing, said):
    verdict = find("4.2").judge(averaging(ring_of_unequal_chunks, **{missing: False}))
    assert verdict.outcome == WRONG
    assert said in verdict.why, verdict
    assert "last words" not in verdict.detail


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
