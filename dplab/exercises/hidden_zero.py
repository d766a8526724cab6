"""The traffic of ZeRO beside computing: gradients in backward, parameters in the next forward."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby, pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.utils import parameters_to_vector

from dplab.checks.compare import AtMost
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.exercises.average_gradients import pack, unpack
from dplab.exercises.ring_all_gather import ring_all_gather
from dplab.exercises.scatter_gradients import scatter_gradients
from dplab.exercises.sharded_optimizer import HELD, OWN, VIEW, chunk_size, held_beside
from dplab.exercises.zero_2 import adam_of
from dplab.measure import CallLog, sent_bytes
from dplab.spawn.rank import recording


class HiddenZeRO:
    """Each layer's gradients leave in backward, and its parameters arrive in the next forward."""

    def __init__(self, layers, make_optimizer, group):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.layers, self.group = list(layers), group
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.buckets = {layer: list(layer.parameters()) for layer in self.layers}
        self.own = {layer: pack(bucket, ranks).chunk(ranks)[rank].clone()
                    for layer, bucket in self.buckets.items()}
        self.optimizer = make_optimizer(list(self.own.values()))
        self.missing = {layer: set(bucket) for layer, bucket in self.buckets.items()}
        self.leaving, self.arriving = {}, {}
        for layer, bucket in self.buckets.items():
            layer.register_forward_pre_hook(self.before_forward)
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self.after_backward, layer))

    def after_backward(self, layer, parameter):
        self.missing[layer].discard(parameter)
        if not self.missing[layer]:
            self.leaving[layer] = self.thread.submit(
                scatter_gradients, self.buckets[layer], self.group)
            self.missing[layer] = set(self.buckets[layer])

    def step(self):
        for layer, scattering in self.leaving.items():
            self.own[layer].grad = scattering.result()
        self.leaving = {}
        self.optimizer.step()
        for layer in self.layers:  # the first layer first: forward begins there
            self.arriving[layer] = self.thread.submit(ring_all_gather, self.own[layer], self.group)

    def before_forward(self, layer, inputs=()):
        if layer in self.arriving:
            whole, bucket = self.arriving.pop(layer).result(), self.buckets[layer]
            for parameter, values in zip(bucket, unpack(whole, bucket), strict=True):
                parameter.data.copy_(values)

    def wait(self):
        for layer in self.layers:
            self.before_forward(layer)


class WithHandles(HiddenZeRO):
    """The same without a thread of its own: torch's collectives return handles to wait for."""

    def after_backward(self, layer, parameter):
        self.missing[layer].discard(parameter)
        if not self.missing[layer]:
            ranks, bucket = dist.get_world_size(self.group), self.buckets[layer]
            flat = pack([each.grad for each in bucket], ranks) / ranks
            mean = torch.empty_like(self.own[layer])
            self.leaving[layer] = mean, dist.reduce_scatter_single(
                mean, flat, group=self.group, async_op=True)
            self.missing[layer] = set(bucket)

    def step(self):
        for layer, (mean, scattering) in self.leaving.items():
            scattering.wait()
            self.own[layer].grad = mean
        self.leaving = {}
        self.optimizer.step()
        for layer, own in self.own.items():
            whole = torch.empty(len(own) * dist.get_world_size(self.group))
            self.arriving[layer] = whole, dist.all_gather_single(
                whole, own, group=self.group, async_op=True)

    def before_forward(self, layer, *inputs):
        if layer in self.arriving:
            whole, gathering = self.arriving.pop(layer)
            gathering.wait()
            bucket = self.buckets[layer]
            for parameter, values in zip(bucket, unpack(whole, bucket), strict=True):
                parameter.data.copy_(values)


WIDTHS = (5, 6, 4, 5)  # of what goes into the layers and comes out: 36, 28 and 25 parameters
SIZES = [into * out + out for into, out in pairwise(WIDTHS)]
STEPS = 4
PAUSE = 0.06  # seconds that the last rank takes for each layer's parameters, in step 3
VALUES = "the parameters after `wait()` in step"
NEW = f"that in step {STEPS} each layer computes with what the updates before it gave"
GOES_ON = "that backward waits for no other rank"
RETURNS = "that `step` returns before the other ranks' `step`"
ORDER = "the bytes of the chunks that `step` sends, in their order"
EARLY = ("that the first layer computes before the last rank, which is slow here, sends the last "
         "layer's parameters")
SENT = "how many times the bytes of DDP this rank sends in a step"
STATE = "the bytes of optimizer state on this rank"


class HideTheTraffic(Exercise):
    number = "8.5"
    title = "Hide the traffic of ZeRO"
    minutes = 25
    world_sizes = (2, 3, 4, 1)
    seconds = 12.0
    solution = HiddenZeRO
    also_right = (WithHandles,)

    def trial(self, attempt):
        rank, ranks, layers = dist.get_rank(), dist.get_world_size(), _layers()
        group, made, facts, at_first, used = dist.new_group(), [], {}, [], []

        def make_optimizer(tensors):
            made.append(adam_of(tensors))
            return made[-1]

        zero, slow = attempt(layers, make_optimizer, group), Slow(rank, ranks)
        facts[OWN] = held_beside(layers.parameters(), zero, made)
        for step in range(STEPS):
            layers.zero_grad()
            layers[0].listener = lambda: at_first.append(time.monotonic())
            used.clear()
            with CallLog() as log:
                loss = _loss(layers, rank, step, used)
                slow.stop()
                if step == 1:
                    facts[GOES_ON] = _without_the_last("backward", loss.backward, group)
                    facts[RETURNS] = _without_the_last("step", zero.step, group)
                else:
                    loss.backward()
                    if step == 2:
                        _until_nothing_is_sent(group)
                        slow.start()
                    zero.step()
                if step in (0, STEPS - 1):
                    zero.wait()
                    facts[f"{VALUES} {step + 1}"] = _flat(layers)
            if step == 0 and ranks > 1:
                whole = 4 * sum(ranks * chunk_size(size, ranks) for size in SIZES)
                sent = sum(map(sent_bytes, log.calls))
                facts[SENT] = round(sent / (2 * (ranks - 1) / ranks * whole), 2)
        begun = [None] * ranks  # the ranks share one machine, and so its clock
        dist.all_gather_object(begun, slow.begins_the_last_layer)
        right = _alone(ranks)[-2]
        return facts | {NEW: torch.allclose(torch.cat(used), right, rtol=1e-4, atol=1e-5),
                        ORDER: [nbytes for nbytes, _ in groupby(slow.sent)],
                        EARLY: at_first[-1] < begun[-1] or rank == ranks - 1,
                        STATE: sum(tensor.nbytes for optimizer in made
                                   for state in optimizer.state.values()
                                   for tensor in state.values())}

    def expected(self, world_size):
        first, *_, last = _alone(world_size)
        facts = {GOES_ON: True, RETURNS: True, EARLY: True, f"{VALUES} 1": first, NEW: True,
                 f"{VALUES} {STEPS}": last}
        chunks = [4 * chunk_size(size, world_size) for size in SIZES]
        if world_size > 1:
            facts |= {ORDER: [nbytes for nbytes, _ in groupby(chunks)], SENT: AtMost(
                1, "a reduce-scatter and an all-gather of each layer are enough")}
        return facts | {OWN: AtMost(2 * sum(chunks), HELD),
                        STATE: AtMost(sum(2 * chunk + 4 for chunk in chunks),
                                      "⌈n/N⌉ elements of each layer have that much")}

    hints = (
        "Draw two steps, one behind the other. Each reduce-scatter can leave when its layer's "
        "gradients are there, and has to be done when the optimizer needs it. Each all-gather can "
        "leave after the update, and has to be done when its layer computes again.",
        "One thread with a queue, as in exercise 5.3: its calls run in the order in which they "
        "are submitted, which is then the same on all ranks. Which layer does the next forward "
        "ask for first?",
        "`layer.register_forward_pre_hook(f)` calls `f(layer, inputs)` before the layer computes: "
        "there wait for this layer's future, and copy what it brings into the parameters. "
        "`wait()` does that for all layers.",
    )
    slips = (
        Slip("Your hook waits for its reduce-scatter, so backward stands still until the other "
             "ranks come. Keep the future, and ask for its result in `step`.",
             {"self.missing[layer] = set(self.buckets[layer])":
              "self.missing[layer] = set(self.buckets[layer])\nself.leaving[layer].result()"}),
        Slip("`step` waits for the new parameters. Nobody needs them before the next forward: wait "
             "in each layer's forward pre-hook, for that layer alone.",
             {"ring_all_gather, self.own[layer], self.group)":
              "ring_all_gather, self.own[layer], self.group)\nself.arriving[layer].result()"}),
        Slip("All parameters are waited for at the first layer. Each layer waits for its own: the "
             "others arrive while it computes.",
             {"def before_forward(self, layer, inputs=()):":
              "def before_forward(self, layer, inputs=()):\n"
              "    for future in self.arriving.values():\n        future.result()"},
             {"gathering.wait()": "gathering.wait()\n"
              "for _, other in self.arriving.values():\n    other.wait()"}),
        Slip("The last layer's parameters are sent first, and the next forward begins with the "
             "first layer. Send in the order of forward.",
             {"for layer in self.layers:  #": "for layer in reversed(self.layers):  #"}),
        Slip("A layer computes with its old parameters: nobody has waited for the new ones. Its "
             "forward pre-hook has to wait for the gather that the last `step` began: not for a "
             "handle of an earlier step, nor for a reduce-scatter.",
             {"layer.register_forward_pre_hook(self.before_forward)": "pass"},
             {"self.arriving.pop(layer)": "self.arriving[layer]",
              "self.arriving[layer] = self.thread.submit(ring_all_gather, self.own[layer], "
              "self.group)": "self.arriving.setdefault(layer, self.thread.submit(\n"
              "    ring_all_gather, self.own[layer], self.group))"}),
        Slip("`wait()` returns before all parameters are there: it does for all layers what the "
             "pre-hook does for one.",
             {"for layer in self.layers:\n            self.before_forward(layer)": "pass"}),
        Slip(VIEW, {".chunk(ranks)[rank].clone()": ".chunk(ranks)[rank]"}),
        # What the ranks see of these two is the same.
        Slip("The parameters are a step behind. Either the optimizer updates with the gradients of "
             "the step before: those of this backward have to be there before `optimizer.step()`. "
             "Or the gathers leave before the update, with the old values.",
             {"self.own[layer].grad = scattering.result()": "pass",
              "self.leaving = {}": "leaving, self.leaving = self.leaving, {}",
              "self.optimizer.step()":
              "self.optimizer.step()\nfor layer, scattering in leaving.items():\n"
              "    self.own[layer].grad = scattering.result()"},
             {"self.optimizer.step()":
              "old = {layer: own.clone() for layer, own in self.own.items()}\n"
              "self.optimizer.step()", "ring_all_gather, self.own[layer],":
              "ring_all_gather, old[layer],"}),
    )


class Linear(nn.Linear):
    """One that tells ``listener`` before it computes, if it has one."""

    listener = None

    def forward(self, x):
        if self.listener:
            self.listener()
        return torch.tanh(super().forward(x))


class Slow:
    """Between ``start()`` and ``stop()`` notes the bytes of what this rank sends, and on the last
    rank holds each back. That rank shows of the others which parameters they wait for. What they
    themselves wait for is no matter of the thread in which the last rank is held.
    """

    def __init__(self, rank, ranks):
        self.sent, self._times, self._ranks = [], [], ranks
        self._pause = PAUSE / max(1, ranks - 1) if rank == ranks - 1 else 0

    def start(self):
        recording.recorder_here().listeners.append(self._hears)

    def stop(self):
        """Once all layers are sent, for which an attempt that waits for nothing gets a moment."""
        listeners, limit = recording.recorder_here().listeners, time.monotonic() + 10 * PAUSE
        if self._hears in listeners:
            chunks = {4 * chunk_size(size, self._ranks) for size in SIZES}
            while (self._ranks > 1 and set(self.sent) < chunks) and time.monotonic() < limit:
                time.sleep(0.002)
            listeners.remove(self._hears)

    def _hears(self, call):
        if call.operation != "recv":
            time.sleep(self._pause)
            self._times.append(time.monotonic())
            self.sent.append(call.bytes)

    @property
    def begins_the_last_layer(self):
        """When this rank's own part of the last layer left: no rank has that layer earlier.

        What it sends later of that layer in a ring, the others need not wait for.
        """
        return self._times[len(self._times) * 2 // 3] if self._times else 0.0


def _layers():
    layers = nn.ModuleList(Linear(*widths) for widths in pairwise(WIDTHS))
    for number, parameter in enumerate(layers.parameters()):
        parameter.data = seeded(f"parameter {number}", *parameter.shape)
    return layers


def _alone(ranks):
    """All parameters after each step of one process, on the samples of so many ranks."""
    layers, after = _layers(), []
    optimizer = adam_of(list(layers.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            (_loss(layers, rank, step) / ranks).backward()
        optimizer.step()
        after.append(_flat(layers))
    return after


def _loss(layers, rank, step, used=None):
    """Puts into ``used`` what each layer has computed with."""
    x = seeded(f"samples of rank {rank} in step {step}", 4, WIDTHS[0])
    for layer in layers:
        x = layer(x)
        if used is not None:
            used.append(_flat(layer))
    return (x - seeded(f"targets of rank {rank} in step {step}", *x.shape)).square().mean()


def _flat(module):
    return parameters_to_vector(module.parameters()).detach().clone()


def _until_nothing_is_sent(group):
    """Returns on all ranks together, when none has sent anything in the group for ten rounds.

    An attempt's threads may still send what backward has begun. A round takes longer where the
    machine has other work, as those threads do.
    """
    heard, quiet = [], 0

    def hear(call):
        if call.group == group.group_name:
            heard.append(call)

    recording.recorder_here().listeners.append(hear)
    while quiet < 10:
        before = len(heard)
        time.sleep(0.01)
        sent = torch.tensor(float(len(heard) > before))
        dist.all_reduce(sent)
        quiet = 0 if sent else quiet + 1
    recording.recorder_here().listeners.remove(hear)


def _without_the_last(what, call, group):
    """Calls it on all ranks, on the last one when the others are done: whether they were in time.

    The group's name is another one in each trial.
    """
    rank, others, store = dist.get_rank(), dist.get_world_size() - 1, _get_default_store()
    keys, in_time = [f"{what} {group.group_name} {other}" for other in range(others)], True
    if rank == others > 0:
        limit = time.monotonic() + 1.5
        while not (in_time := store.check(keys)) and time.monotonic() < limit:
            time.sleep(0.002)
    call()
    if rank < others:
        store.set(keys[rank], "")
    return in_time
