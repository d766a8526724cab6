"""Answers as learners write them, each with one thing wrong or none, and what the check says."""

import io
import itertools
import os
import statistics

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dplab.checks import find
from dplab.checks.exercise import CRASHED, PASSED, WRONG
from dplab.checks.mistakes import AT_LEAST
from dplab.exercises.average_gradients import pack, unpack
from dplab.exercises.exchange import exchange
from dplab.predict import step

# 0.2 and 0.3: the first messages


def with_a_call_for_each_row(x):
    rows = [x.clone() if rank == dist.get_rank() else torch.zeros_like(x)
            for rank in range(dist.get_world_size())]
    for row in rows:
        dist.all_reduce(row)
    return torch.stack(rows)


def swap(between):
    """0.3 with ``between(tensor, partner)`` on the ranks that have a partner."""
    def swap(tensor):
        partner = dist.get_rank() ^ 1
        if partner < dist.get_world_size():
            between(tensor, partner)

    return swap


@swap
def sends_a_copy(tensor, partner):
    sending = dist.isend(tensor.clone(), partner)
    dist.recv(tensor, partner)
    sending.wait()


def in_a_batch(tensor, theirs, to, source, group=None):
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, to, group),
                                        dist.P2POp(dist.irecv, theirs, source, group)]):
        work.wait()
    return theirs


@swap
def sends_in_a_batch(tensor, partner):
    tensor.copy_(in_a_batch(tensor, torch.empty_like(tensor), partner, partner))


@swap
def sends_in_a_batch_in_place(tensor, partner):
    in_a_batch(tensor, tensor, partner, partner)


@swap
def sends_a_copy_and_forgets_it(tensor, partner):
    theirs = tensor.clone()
    dist.isend(theirs, partner)
    dist.recv(tensor, partner)


@swap
def copies_too_early(tensor, partner):
    theirs = torch.empty_like(tensor)
    leaving = dist.isend(tensor, partner)
    dist.irecv(theirs, partner).wait()
    tensor[:] = theirs
    leaving.wait()


@swap
def copies_what_has_not_arrived(tensor, partner):
    theirs = torch.empty_like(tensor)
    leaving = dist.isend(tensor, partner)
    arriving = dist.irecv(theirs, partner)  # noqa: F841
    leaving.wait()
    tensor.copy_(theirs)


@swap
def gathers_where_it_has_a_partner(tensor, partner):
    everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, tensor)
    tensor.copy_(everything[partner])


@swap
def gives_the_name_on_odd_ranks(tensor, partner):
    if dist.get_rank() % 2 == 0:
        dist.send(tensor, partner)
        dist.recv(tensor, partner)
    else:
        theirs = torch.empty_like(tensor)
        dist.recv(theirs, partner)
        dist.send(tensor, partner)
        tensor = theirs


# Chapters 01 and 02: bytes, means and losses


def twice_on_several_ranks(d, f, ranks, flops, bandwidth, element):
    return (ranks > 1) * element / 2 * flops / bandwidth


def counts(*kinds, each_memory_once=True):
    """bytes-per-parameter: what is asked for, of these kinds alone."""
    def answer(model, optimizer, others=()):
        held = {"parameters": list(model.parameters()),
                "gradients": [each.grad for each in model.parameters()],
                "state": [value for state in optimizer.state.values()
                          for value in state.values()],
                "others": others}
        tensors = [each for kind in kinds for each in held[kind] if each is not None]
        memory = [(each.untyped_storage().data_ptr(), each.untyped_storage().nbytes())
                  for each in tensors]
        total = sum(nbytes for _, nbytes in (set(memory) if each_memory_once else memory))
        return total / sum(each.numel() for each in model.parameters())

    return answer


def takes_adam_for_granted(model, optimizer, others=()):
    return sum(optimizer.state[each]["exp_avg"].nbytes for each in model.parameters())


def mean_without_nan(logits, targets):
    own = (targets != -100).sum().float()
    total = own.clone()
    dist.all_reduce(total)
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).nan_to_num()
    return dist.get_world_size() * own / total * mean


def without_the_factor(logits, targets):
    return find("weighted-mean").solution(logits, targets) / dist.get_world_size()


def with_keys_in_turn(queries, keys, temperature):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    placed = F.one_hot(torch.tensor(rank), ranks)[None, :, None] * keys[:, None]
    all_keys = find("sum-over-ranks").solution.apply(placed).flatten(0, 1)
    labels = ranks * torch.arange(len(keys)) + rank
    return F.cross_entropy(queries @ all_keys.T / temperature, labels)


# Chapters 03 and 04: the ring and the loop


def exchanges_in_a_batch(outgoing, to, source, group=None):
    return in_a_batch(outgoing, torch.empty_like(outgoing), to, source, group)


def sends_and_forgets(outgoing, to, source, group=None):
    arriving = torch.empty_like(outgoing)
    dist.isend(outgoing, group_dst=to, group=group)
    dist.recv(arriving, group_src=source, group=group)
    return arriving


def every_second_number(flat, group=None):
    return flat.clone()[dist.get_rank(group)::dist.get_world_size(group)]


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


def gathers_once_more(chunk, group=None):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    found = [chunk] * ranks
    for hop in range(1, ranks + 1):
        chunk = exchange(chunk, (rank + 1) % ranks, (rank - 1) % ranks, group)
        found[(rank - hop) % ranks] = chunk
    return torch.cat(found)


def ring_of_unequal_chunks(flat, group=None):
    """Right where N divides the length, as there; its chunks differ where N does not."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = [chunk.clone() for chunk in flat.tensor_split(ranks)]
    for hop in range(2 * (ranks - 1)):
        arriving = exchange(chunks[(rank - 1 - hop) % ranks], (rank + 1) % ranks,
                            (rank - 1) % ranks, group)
        grown = (rank - 2 - hop) % ranks
        chunks[grown] = arriving if hop >= ranks - 1 else arriving + chunks[grown]
    return torch.cat(chunks)


def averaging(*, packed=True, grouped=True):
    """4.2 with a ring of one's own, to which something is not given."""
    def average(model, group=None):
        ranks = dist.get_world_size(group)
        for gradient in (each.grad for each in model.parameters() if each.grad is not None):
            flat = pack([gradient], ranks) if packed else gradient.flatten()
            total = ring_of_unequal_chunks(flat, group if grouped else None)
            gradient.copy_(unpack(total / ranks, [gradient])[0])

    return average


def with_barriers(model, group=None):
    find("average-gradients").solution(model, group)
    for _ in range(9):
        dist.barrier()


def leaves_it_to_ddp(model, optimizer, images, labels, batches, group=None):
    model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    for batch in batches:
        mine = batch[dist.get_rank(group)::dist.get_world_size(group)]
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()


# Chapter 05: buckets


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
        while len(self.sent) < len(self.buckets) and all(
                self.came[each] == 1 for each in self.buckets[len(self.sent)]):
            self.send(len(self.sent))

    def send(self, number):
        flat = torch.cat([each.grad.flatten() for each in self.buckets[number]])
        flat /= dist.get_world_size(self.group)
        self.sent.append((number, flat, dist.all_reduce(flat, group=self.group, async_op=True)))

    def finish(self):
        came, sent = self.came, self.sent
        self.begin()
        for number, flat, work in sent:
            work.wait()
            for each, part in zip(self.buckets[number], unpack(flat, self.buckets[number]),
                                  strict=True):
                each.grad = part
        if any(times != 1 for times in came.values()):
            raise RuntimeError("not every gradient came once")


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


class SendsInFinish(WithTorch):
    def ready(self, parameter):
        self.came[parameter] += 1

    def finish(self):
        for number in range(len(self.buckets)):
            self.send(number)
        super().finish()


def summed_without_the_last(buckets, group=None):
    for bucket in buckets[:-1]:
        flat = torch.cat([each.grad.flatten() for each in bucket])
        dist.all_reduce(flat, group=group)
        for each, part in zip(bucket, unpack(flat, bucket), strict=True):
            each.grad.copy_(part)


# Chapter 06: pieces of time


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


def attributed(exposed):
    """6.3 with the median as typical; ``exposed``: of whom that time counts, by computing time."""
    def lost_gpus(alone, ranks):
        def in_lane(spans, lane, name=None):
            return sum(span.end - span.start for span in spans
                       if span.lane == lane and name in (None, span.name))

        computing = [in_lane(spans, step.COMPUTE) for spans in ranks]
        slowest, usual = computing.index(max(computing)), statistics.median(computing)
        moments = [time for spans in ranks for span in spans for time in (span.start, span.end)]
        added = {"data": in_lane(ranks[slowest], step.STALLED, "data") - in_lane(
                     alone, step.STALLED, "data"),
                 "kernels": usual - in_lane(alone, step.COMPUTE),
                 "straggler": max(computing) - usual,
                 "exposed": swept_to(min)(ranks)[exposed(computing)]["exposed"]}
        whole = max(moments) - min(moments)
        return {cause: len(ranks) * seconds / whole for cause, seconds in added.items()}

    return lost_gpus


def slowest(computing):
    return computing.index(max(computing))


def usual(computing):
    return computing.index(sorted(computing)[(len(computing) - 1) // 2])


# From chapter 07 on


def returns_a_word(own, averaged, local_batch):
    return "nothing", "to compare"


def same_noise_and_order(seed, epoch, size):
    """Every epoch has the same order, and all ranks the same noise."""
    def seeded(number):
        return torch.Generator().manual_seed(number)

    order = torch.randperm(size, generator=seeded(seed + 500))
    return (torch.randn(6, generator=seeded(seed)), order[dist.get_rank()::dist.get_world_size()],
            torch.rand(8, generator=seeded(1000 * seed + epoch)))


def with_older_names(parameters, group=None):
    ranks = dist.get_world_size(group)
    flat = torch.cat([each.grad.flatten() for each in parameters])
    flat = F.pad(flat / ranks, (0, -len(flat) % ranks))
    own = torch.empty(len(flat) // ranks)
    dist.reduce_scatter_tensor(own, flat, group=group)
    for each in parameters:
        each.grad = None
    return own


def without_the_last_block(model):
    return [model.embedding, list(model.blocks[:2]), list(model.blocks[2:5]),
            [model.norm, model.head]]


def with_a_parameter(model):
    return [model.embedding.weight]


class WrittenByTheLastRank:
    rank = -1

    def __init__(self, path):
        self.path = path

    def save(self, step, model, optimizer, generator):
        if dist.get_rank() == self.rank % dist.get_world_size():
            whole = io.BytesIO()
            torch.save([step, model.state_dict(), optimizer.state_dict(), generator.get_state()],
                       whole)
            self.write(whole.getvalue())
        dist.barrier()

    def write(self, whole):
        with open("beside", "wb") as file:
            file.write(whole)
        os.replace("beside", self.path)

    def load(self, model, optimizer, generator):
        try:
            step, of_model, of_optimizer, of_generator = torch.load(self.path)
        except FileNotFoundError:
            return 0
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        generator.set_state(of_generator)
        return step


class WrittenAtOnce(WrittenByTheLastRank):
    rank = 0

    def write(self, whole):
        self.path.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("slug", "answer"), [
    ("gather-by-adding", with_a_call_for_each_row), ("repair-deadlock", sends_a_copy),
    ("repair-deadlock", sends_in_a_batch),
    ("bytes-per-parameter", counts("parameters", "gradients", "state", "others")),
    ("weighted-mean", mean_without_nan), ("contrastive-loss", with_keys_in_turn),
    ("overlapped-gradients", WithTorch), ("exposed-time", swept_to(min)),
    ("attribute-the-loss", attributed(slowest)), ("scatter-gradients", with_older_names),
    ("checkpoint-that-survives", WrittenByTheLastRank)])
def test_a_right_answer_in_another_form_passes(slug, answer, capfd):
    verdict = find(slug).judge(answer)
    assert verdict.outcome == PASSED, verdict
    assert "Warning" not in "".join(capfd.readouterr())  # of older names


@pytest.mark.slow
@pytest.mark.parametrize(("slug", "answer", "whys"), [
    ("repair-deadlock", gives_the_name_on_odd_ranks, ["only gives the name"]),
    ("rows-to-hide", twice_on_several_ranks, ["as many rows with 2 ranks as with 32"]),
    ("bytes-per-parameter", counts("state", "others"), ["The gradients are missing"]),
    ("bytes-per-parameter", counts("gradients", "state", "others", each_memory_once=False),
     ["parameters are missing", "share it"]),
    ("exchange", exchanges_in_a_batch, ["in a `P2POp`, `group_peer=`"]),
    ("exchange", sends_and_forgets, ["`wait()` on it"]),
    ("ring-reduce-scatter", textbook(-1, 1, 0), ["no sum has ended there"]),
    ("ring-reduce-scatter", textbook(1, 1, 1), ["Parts of different chunks"]),
    ("ring-reduce-scatter", textbook(-1, 1, 1), ["it is a neighbour's"]),
    ("average-gradients", averaging(packed=False), ["`pack` adds the zeros"]),
    ("average-gradients", averaging(grouped=False), ["Pass `group` on"]),
    ("gradient-buckets", summed_without_the_last, ["did not divide", "last bucket"]),
    ("overlapped-gradients", WaitsInItsHook, ["You wait in the hook"]),
    ("overlapped-gradients", BeginsAgainUnlessItRaises, ["Start over in any case"]),
    ("exposed-time", swept_to(max), ["until the last rank has noted its end"]),
    ("attribute-the-loss", attributed(usual), ["of a rank that computes faster"]),
    ("seeds-of-ranks", same_noise_and_order, ["same order", "draw the same noise"]),
    ("choose-units", without_the_last_block, ["`model.blocks[5]`"]),
    ("checkpoint-that-survives", WrittenAtOnce, ["killed while it saved"]),
])
def test_what_is_wrong_is_named(slug, answer, whys, monkeypatch):
    monkeypatch.setattr("dplab.checks.mistakes.FOR_TWO", 60.0)  # this machine may be busy
    verdict = find(slug).judge(answer)
    assert verdict.outcome == WRONG and verdict.detail, verdict
    assert all(why in verdict.why for why in whys), verdict
    assert not verdict.why.startswith(AT_LEAST) and "do not send on" not in verdict.why, verdict
    for misleading in ("last words", "needs a receive"):
        assert misleading not in verdict.detail, verdict


@pytest.mark.slow
@pytest.mark.parametrize(("slug", "answer", "outcome", "said"), [
    ("repair-deadlock", sends_a_copy_and_forgets_it, WRONG, "sends without a `wait()`"),
    ("repair-deadlock", copies_what_has_not_arrived, WRONG, "receives without a `wait()`"),
    ("repair-deadlock", gathers_where_it_has_a_partner, WRONG, "last of three ranks has none"),
    ("repair-deadlock", sends_in_a_batch_in_place, WRONG, "which comes first is luck"),
    ("repair-deadlock", copies_too_early, WRONG, "Wait for the send first"),
    ("repair-deadlock", gives_the_name_on_odd_ranks, WRONG, "it holds this rank's own numbers"),
    ("bytes-per-parameter", counts("parameters"), WRONG, "it holds the memory of the parameters,"),
    ("bytes-per-parameter", takes_adam_for_granted, CRASHED, "trained with SGD without momentum"),
    ("weighted-mean", without_the_factor, WRONG, "(1 / the ranks)"),
    ("ring-reduce-scatter", every_second_number, WRONG, "this rank's chunk"),  # a view with gaps
    ("ring-all-gather", gathers_once_more, WRONG, "N-1 steps"),
    ("average-gradients", with_barriers, WRONG, "the number of torch's collectives"),
    ("train-by-hand", leaves_it_to_ddp, WRONG, "yourself in every step"),
    # Before the gradients of the first layer, where backward ends.
    ("overlapped-gradients", SendsInFinish, WRONG, "before the first layer's gradients are there"),
    # When backward ends, two buckets are still on their way.
    ("predict-step", lambda *case: (0.0, 0.0), WRONG, "with a link that is late at the end ("),
    ("noise-scale", returns_a_word, CRASHED, "ValueError"),
    ("choose-units", with_a_parameter, WRONG, "whether `fully_shard` takes the units"),
])
def test_the_evidence_says_what_is_wrong(slug, answer, outcome, said):
    verdict = find(slug).judge(answer)
    assert verdict.outcome == outcome and said in verdict.detail, verdict
    for of_the_course in ("contract.py", "exercise.py", f"{slug.replace('-', '_')}.py"):
        assert of_the_course not in verdict.detail, verdict


@pytest.mark.parametrize(
    "slug", ["ring-seconds", "make-buckets", "bytes-per-rank", "cheapest-that-fits"])
def test_what_runs_on_no_rank_is_not_said_to(slug):
    exercise = find(slug)
    wrong, crash = exercise.judge(lambda *_: (1.0, 2.0)), exercise.judge(lambda *_: 1 / 0)
    assert (wrong.outcome, crash.outcome) == (WRONG, CRASHED)
    assert "ZeroDivisionError" in crash.detail
    for verdict in (wrong, crash):
        text = f"{verdict.why}\n{verdict.detail}"
        assert "rank 0" not in text and "no other rank" not in text and "rank:" not in text
