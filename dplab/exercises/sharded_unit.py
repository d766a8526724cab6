"""Hooks that make a module whole while it computes, and that keep autograd from holding it."""

import contextlib
import gc
import itertools
import time
import weakref

import torch
import torch.distributed as dist
from torch import nn

from dplab import RankError
from dplab.checks.compare import AtMost, first_difference
from dplab.checks.mistakes import Slip
from dplab.checks.trials import seeded
from dplab.exercises.average_gradients import pack, unpack
from dplab.exercises.broadcast_weights import InPairsToo
from dplab.exercises.gather_chunks import Gather
from dplab.exercises.ring_all_gather import ring_all_gather
from dplab.measure import CallLog, MemoryTimeline, WholeUnits, sent_bytes


def parameter_places(module):
    """The submodule and the name of each of its parameters: where it can be replaced."""
    return [(part, name) for part in module.modules()
            for name, _ in part.named_parameters(recurse=False)]


class ShardedUnit:
    """A module of which this rank keeps a chunk, and that is whole while it computes."""

    def __init__(self, module, group=None):
        self.group = group
        self.places = parameter_places(module)
        self.shapes = [getattr(part, name).detach().to("meta") for part, name in self.places]
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        flat = pack([getattr(part, name) for part, name in self.places], ranks)
        self.chunk = nn.Parameter(flat.chunk(ranks)[rank].clone())
        self.put(len(self.places) * [None])
        self.again = None  # the whole in backward
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)
        self.chunk.register_post_accumulate_grad_hook(self.after_backward)

    def put(self, tensors):
        for (part, name), tensor in zip(self.places, tensors, strict=True):
            part._parameters[name] = tensor

    def before_forward(self, module, inputs):
        whole = Gather.apply(self.chunk, self.group)
        self.put(unpack(whole, self.shapes))
        self.address = whole.untyped_storage().data_ptr()
        self.saving = torch.autograd.graph.saved_tensors_hooks(self.save, self.load)
        self.saving.__enter__()

    def after_forward(self, module, inputs, output):
        self.saving.__exit__()
        self.put(len(self.places) * [None])

    def save(self, tensor):
        """What autograd keeps in place of a tensor: of a piece of the whole, only where it lies."""
        if tensor.untyped_storage().data_ptr() != self.address:
            return tensor
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def load(self, saved):
        if isinstance(saved, torch.Tensor):
            return saved
        if self.again is None:
            self.again = ring_all_gather(self.chunk.detach(), self.group)
        return self.again.as_strided(*saved)

    def after_backward(self, chunk):
        self.again = None


# Of pairs of layers, each a unit, so that a weight lies behind another one.
WIDTHS = (41, 43, 38, 40, 39, 41, 38, 40, 37, 41, 38)
LARGEST = 4 * max((a + 1) * b + (b + 1) * c for a, b, c in
                  zip(WIDTHS[::2], WIDTHS[1::2], WIDTHS[2::2], strict=False))  # bytes, whole
FIRST, SECOND, AGAIN = " in step 1", " in step 2, after an update", " in a step after evaluation"
AFTER = "whole units that are held when forward has ended"
MOST = "whole units that are held at once during the step"
OTHERS = "the most other units that are whole while one computes "
LEFT = "the units that are whole when forward has ended"
OVER = "the units that are whole when backward has ended"
ENDS = {"forward": LEFT, "backward": OVER}
BETWEEN = "the numbers of parameters that the modules hold between the steps"
FIRST_ONES = "the numbers of the module's first parameters that are still in memory"
OWN = "that a chunk has memory of its own, and no more than it needs"
THERE, BACK = "the number of bytes that forward sends", "the number of bytes that backward sends"


PILED = ("Whole units pile up in forward: something holds each of them after it has computed. "
         "Is it a name of yours, or one of the module's places? If neither, autograd saves "
         "weights for backward. Give it something small in place of each.")

# Lines of the right answer.
FREE = "def after_backward(self, chunk):\n        "
LATE = "late, type(self).late = getattr(type(self), 'late', self), self"  # the unit before
CUT = "self.chunk = nn.Parameter(flat.chunk(ranks)[rank].clone())"


class MakeUnits(InPairsToo):
    number = "9.2"
    title = "Whole while it computes"
    minutes = 40
    seconds = 12.0
    world_sizes = (2, 3, 4, 1)
    solution = ShardedUnit

    def facts_of(self, attempt, group):
        model = units_of_two_layers()
        first_ones = [weakref.ref(parameter) for parameter in model.parameters()]
        units = [attempt(module, group) for module in model]
        gc.collect()
        facts = {f"the chunk of unit {number}": unit.chunk.detach().clone()
                 for number, unit in enumerate(units)}
        facts[BETWEEN] = sum(each.numel() for each in model.parameters())
        facts[FIRST_ONES] = sum(
            parameter.numel() for each in first_ones if (parameter := each()) is not None)
        facts[OWN] = all(unit.chunk.untyped_storage().nbytes() == unit.chunk.nbytes
                         for unit in units)
        facts |= self._step(model, units, FIRST)
        with torch.no_grad():
            for unit in units:
                unit.chunk -= unit.chunk.grad
                unit.chunk.grad = None
        facts |= self._step(model, units, SECOND)
        with torch.no_grad():
            facts["the output of an evaluation"] = model(input_of(dist.get_rank(), "evaluation"))
        # Nothing has been updated and no gradient cleared: this one adds to that of step 2.
        return facts | self._step(model, units, AGAIN)

    def _step(self, model, units, when):
        rank, memory = dist.get_rank(), MemoryTimeline(nn.ParameterList(
            unit.chunk for unit in units))
        whole = WholeUnits([pack(module.parameters(), 1) for module in units_of_two_layers()])
        seen = when == FIRST  # following all operations takes long
        # `whole` outside, so that `memory` does not count what `whole` itself looks into.
        both = (whole, memory) if seen else (contextlib.nullcontext(), contextlib.nullcontext())
        with CallLog() as log, both[0], both[1], amid_units(model, whole):
            with memory.phase("forward"):
                output = model(input_of(rank, when))
                there = sum(map(sent_bytes, log.calls))
            mark_later(whole, "forward")
            (output * target_of(rank, when)).sum().backward()
            mark_later(whole, "backward")
            torch.zeros(1)  # after the mark: what the block's end frees was there at it
        held = {AFTER: in_units(memory.phases[0].end, memory),
                MOST: in_units(None, memory), **held_at_once(whole)} if seen else {}
        sent = sum(map(sent_bytes, log.calls))
        return {f"the output{when}": output.detach(), **held,
                **{f"the gradient of unit {number}'s chunk{when}": None if unit.chunk.grad is None
                   else unit.chunk.grad.clone() for number, unit in enumerate(units)},
                THERE + when: there, BACK + when: sent - there}

    def right(self, ranks):
        count, model, every = len(ranks), units_of_two_layers(), [{} for _ in ranks]

        def add_chunks(name, when, tensors_of):
            for number, module in enumerate(model):
                chunks = pack(tensors_of(module), count).chunk(count)
                for facts, chunk in zip(every, chunks, strict=True):
                    facts[f"{name.format(number)}{when}"] = chunk.clone()

        def add(said_of):
            for facts, rank in zip(every, ranks, strict=True):
                facts |= said_of(rank)

        add_chunks("the chunk of unit {}", "", nn.Module.parameters)
        gather = (count - 1) * sum(4 * len(chunk) for chunk in every[0].values())
        add(lambda _: {BETWEEN: 0, FIRST_ONES: 0, OWN: True})
        for when in FIRST, SECOND, AGAIN:
            if when == SECOND:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= parameter.grad
                        parameter.grad = None
            if when == AGAIN:
                add(lambda rank: {"the output of an evaluation": model(
                    input_of(rank, "evaluation")).detach()})
            add(lambda rank, when=when: {
                f"the output{when}": model(input_of(rank, when)).detach()})
            for rank in ranks:
                (model(input_of(rank, when)) * target_of(rank, when) / count).sum().backward()
            add_chunks("the gradient of unit {}'s chunk", when,
                       lambda module: [parameter.grad for parameter in module.parameters()])
            if when == FIRST:
                add(lambda _: {
                    AFTER: AtMost(1, "free each unit when it has computed; autograd may keep none "
                                     "of it either", exact=False),
                    MOST: AtMost(5, "in backward a unit and its gradient are there, and copies of "
                                    "both on their way", exact=False)})
            if when == FIRST and count > 1:  # alone, a chunk is whole
                add(lambda _: {fact: AtMost(0, "a unit is whole only while it computes itself",
                                            exact=False)
                               for fact in (f"{OTHERS}forward", LEFT, f"{OTHERS}backward", OVER)})
            add(lambda _, when=when: {
                THERE + when: AtMost(gather, "one all-gather for each unit"),
                BACK + when: AtMost(2 * gather, "for each unit one all-gather, and one "
                                                "reduce-scatter of its gradient")})
        return every

    def explanation(self, attempt, got, world_size):
        why = super().explanation(attempt, got, world_size)
        if why or isinstance(got, RankError):
            return why
        first = first_difference(self.expected_of_all(world_size), got, self.tolerance)
        return PILED if first.fact.startswith((AFTER, LEFT)) else ""

    def quantities(self, world_size, rank):
        return {"the ranks": world_size}

    hints = (
        "Begin without freeing: in the pre-hook, `Gather.apply` and `unpack`, and the views go to "
        "the parameters' places. In the forward hook the places get None. Then ask who still "
        "holds the whole: autograd does, for backward.",
        "`saved_tensors_hooks(save, load)` can be entered in one hook, with `__enter__()`, and "
        "left in the other one, with `__exit__()`. `save` returns a piece of the whole as (shape, "
        "stride, storage_offset), and any other tensor as it is. How does it tell a piece of the "
        "whole? By the address of its storage.",
        "`load` gets what `save` returned. Of a piece it gathers the whole again, once for all "
        "pieces (`ring_all_gather`), and returns `whole.as_strided(shape, stride, offset)`. When "
        "the chunk's gradient is there, the module's backward is over: "
        "`chunk.register_post_accumulate_grad_hook` can free the whole.",
    )
    slips = (
        Slip(PILED,
             {"if tensor.untyped_storage().data_ptr() != self.address:": "if True:"},
             {"tensor.untyped_storage().data_ptr() !=": "tensor.data_ptr() !="},
             {"self.put(unpack(whole": "self.kept = whole\nself.put(unpack(whole"},
             {"__exit__()\n        self.put(len(self.places) * [None])": "__exit__()"}),
        Slip("The module computes with copies of the weights, each in a storage of its own, and "
             "autograd keeps these for backward. Put views of the whole in the places, as `unpack` "
             "returns them: `save` can tell those by their storage.",
             {"self.put(unpack(whole, self.shapes))":
              "self.put([view.clone() for view in unpack(whole, self.shapes)])"}),
        Slip("In backward, whole units pile up: what you gather again is still held when the "
             "unit's gradient has gone. Let go of it then.",
             {f"{FREE}self.again = None": f"{FREE}self.last, self.again = self.again, None"}),
        Slip("You free a unit too late: another one already computes. The unit's own hooks can "
             "free it: the forward hook, and the one of its chunk's gradient.",
             {f"{FREE}self.again = None": f"{FREE}{LATE}\n        late.again = None"},
             {"__exit__()\n        self.put(len(self.places)":
              f"__exit__()\n{LATE}\nlate.put(len(late.places)"}),
        Slip("The first unit is still whole when backward has ended. Its input needs no gradient, "
             "so a module's backward hook runs before the unit's backward has begun, and what is "
             "gathered after that stays. The hook of the chunk's gradient comes after.",
             {"self.chunk.register_post_accumulate_grad_hook(self.after_backward)":
              "module.register_full_backward_hook(lambda *_: self.after_backward(None))"}),
        Slip("In step 2, backward computes with the parameters of step 1: what you gathered again "
             "was kept, and the chunk has changed since. Free it after each backward.",
             {f"{FREE}self.again = None": f"{FREE}pass"}),
        Slip("Backward gathers a unit once for each tensor that autograd asks for. Keep the whole "
             "until the unit's backward is over: one all-gather.",
             {"if self.again is None:": "if True:"}),
        Slip("Backward computes with other numbers than forward did: the weights do not lie where "
             "`load` looks for them. A piece of the whole has an offset in its storage, too.",
             {"tensor.stride(), tensor.storage_offset()": "tensor.stride(), 0"}),
        Slip("The module's first parameters are still in memory: a name of yours holds them, so "
             "this rank has all of the weights. `unpack` needs their shapes alone, which "
             "`.detach().to(\"meta\")` keeps; without `detach()`, autograd holds the parameter.",
             {'.detach().to("meta")': ""}, {'.detach().to("meta")': '.to("meta")'}),
        Slip("The module still has its own parameters between the steps, so this rank holds all of "
             "them. Put None in their places.",
             {f"{CUT}\n        self.put(len(self.places) * [None])": CUT}),
        Slip("Your chunk is a view into the flat tensor of all parameters, and keeps all of it in "
             "memory: `clone()` it.", {"[rank].clone()": "[rank]"}),
        Slip("Each rank has chunk 0. Rank r keeps chunk r.",
             {"flat.chunk(ranks)[rank]": "flat.chunk(ranks)[0]"}),
        Slip("You gather by `ring_all_gather` in forward, which autograd knows nothing of, so no "
             "gradient comes back to the chunk. `Gather` has a backward.",
             {"Gather.apply(self.chunk, self.group)":
              "ring_all_gather(self.chunk.detach(), self.group).requires_grad_()"}),
    )


class Amid(nn.Module):
    """Stands between the layers of a unit, and calls ``look`` in forward and in backward."""

    look = None

    def forward(self, x):
        return x if self.look is None else Looking.apply(x, self.look)


class Looking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, look):
        ctx.look = look
        look("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.look("backward")
        return gradient, None


@contextlib.contextmanager
def amid_units(model, whole):
    """In the block, each unit marks in ``whole`` when it is half-way through."""
    for number, unit in enumerate(model):
        unit[1].look = lambda way, number=number: mark_later(whole, (way, number))
    yield
    for unit in model:
        unit[1].look = None


def mark_later(whole, name):
    """After a moment, in which a thread of gloo's lets go of what it has sent."""
    time.sleep(2e-3)
    whole.mark(name)


def held_at_once(whole):
    """How many units are whole while another one computes, and at the ends of both ways."""
    most = {f"{OTHERS}forward": 0, LEFT: 0, f"{OTHERS}backward": 0, OVER: 0}
    for mark, now in whole.marks.items():
        units = {span.unit for span in whole.spans if span.start <= now < span.end}
        fact, own = (ENDS[mark], None) if mark in ENDS else (OTHERS + mark[0], mark[1])
        most[fact] = max(most[fact], len(units - {own}))
    return most


def units_of_two_layers():
    """The same on all ranks: pairs of layers with a tanh, each of which is to be a unit."""
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(WIDTHS)]
    pairs = zip(layers[::2], layers[1::2], strict=True)
    model = nn.Sequential(*(nn.Sequential(one, Amid(), other) for one, other in pairs))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(seeded(name, *parameter.shape) / 5)
    return model


def input_of(rank, where):
    return seeded(f"x of rank {rank}{where}", 3, WIDTHS[0])


def target_of(rank, where):
    return seeded(f"target of rank {rank}{where}", 3, WIDTHS[-1]) / 10


def in_units(op, memory):
    """How many whole units are held: after that many operations, or at most.

    What counts is neither a chunk nor its gradient. Activations are too small to count.
    """
    held = [sum(size for name, size in each.bytes.items()
                if name not in ("parameters", "gradients"))
            for each in memory.samples if op is None or each.op <= op]
    return int((max(held) if op is None else held[-1]) / LARGEST)
