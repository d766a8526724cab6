"""Exercises of chapter 09: FSDP."""

import re

import torch
import torch.distributed as dist
from torch import nn

from dplab import RankError
from dplab.exercises import observe
from dplab.exercises.compare import COMMUNICATED, AtMost, first_difference
from dplab.exercises.exercise import Exercise, Mistake
from dplab.exercises.trials import reduced, seeded
from dplab.measure import CallLog, MemoryTimeline
from dplab.workloads.residual_network import BLOCKS, Network, bytes_beyond_shards, dry_run_of

# 9.1

WIDTHS = (37, 41, 38, 40, 39, 41, 37, 40, 38)
LAYERS = len(WIDTHS) - 1
MOST_LAYERS = 5  # held whole at once; gathering as a list of parts and then joining takes three
HELD = "layers whose whole parameters were held at once"


def forward_of_shards(shards, shapes, x):
    for shard, (rows, columns) in zip(shards, shapes, strict=True):
        whole = shard.new_empty(dist.get_world_size() * shard.numel())
        dist.all_gather_single(whole, shard)
        weight = whole[: rows * columns].view(rows, columns)
        bias = whole[rows * columns :][:rows]
        x = torch.tanh(x @ weight.T + bias)
        del whole, weight, bias
    return x


def _layer_of(whole, x, rows, columns):
    weight, bias = whole[: rows * columns].view(rows, columns), whole[rows * columns :][:rows]
    return torch.tanh(x @ weight.T + bias)


def _gather(shard):
    whole = shard.new_empty(dist.get_world_size() * shard.numel())
    dist.all_gather_single(whole, shard)
    return whole


def _forward(gather=_gather, layer=_layer_of, keep=False):
    """The forward with one thing wrong."""

    def attempt(shards, shapes, x):
        kept = []
        for shard, shape in zip(shards, shapes, strict=True):
            whole = gather(shard)
            if keep:
                kept.append(whole)
            x = layer(whole, x, *shape)
        return x

    return attempt


def _all_at_once(shards, shapes, x):
    whole = _gather(torch.cat(shards)).view(dist.get_world_size(), -1)
    parts = whole.split([shard.numel() for shard in shards], dim=1)
    for part, shape in zip(parts, shapes, strict=True):
        x = _layer_of(part.flatten(), x, *shape)
    return x


def _interleaved(shard):
    return _gather(shard).view(dist.get_world_size(), -1).T.flatten()


def _of_rank_0(shard):
    copy = shard.clone()
    dist.broadcast(copy, src=0)
    return copy.repeat(dist.get_world_size())


def _by_broadcasts(shard):
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    parts[dist.get_rank()] = shard.clone()
    for source, part in enumerate(parts):
        dist.broadcast(part, src=source)
    return torch.cat(parts)


def _by_all_reduce(shard):
    whole = shard.new_zeros(dist.get_world_size(), shard.numel())
    whole[dist.get_rank()] = shard
    dist.all_reduce(whole)
    return whole.flatten()


def _bias_at_end(whole, x, rows, columns):
    return torch.tanh(x @ whole[: rows * columns].view(rows, columns).T + whole[-rows:])


def _bias_with_padding(whole, x, rows, columns):
    return torch.tanh(x @ whole[: rows * columns].view(rows, columns).T + whole[rows * columns :])


def _bias_after(whole, x, rows, columns):
    bias = whole[rows * columns :][:rows]
    return torch.tanh(x @ whole[: rows * columns].view(rows, columns).T) + bias


def _own_first(shard):
    parts = list(_gather(shard).split(len(shard)))
    return torch.cat([parts.pop(dist.get_rank()), *parts])


def _transposed(whole, x, rows, columns):
    weight = whole[: rows * columns].view(columns, rows)
    return torch.tanh(x @ weight + whole[rows * columns :][:rows])


def _last_is_linear(shards, shapes, x):
    *inner, last = zip(shards, shapes, strict=True)
    for shard, shape in inner:
        x = _layer_of(_gather(shard), x, *shape)
    shard, (rows, columns) = last
    whole = _gather(shard)
    return x @ whole[: rows * columns].view(rows, columns).T + whole[rows * columns :][:rows]


def _without_bias(whole, x, rows, columns):
    return torch.tanh(x @ whole[: rows * columns].view(rows, columns).T)


class ForwardOfShards(Exercise):
    slug = "forward-of-shards"
    number = "9.1"
    title = "Gather, use, free"
    name = "forward_of_shards"
    minutes = 20
    hints = (
        "One loop over the layers. Each turn gathers the layer, computes, and lets go of what it "
        "gathered before the next turn needs its place.",
        "`whole = shard.new_empty(world_size * shard.numel())` and "
        "`dist.all_gather_single(whole, shard)` put the ranks' shards side by side, in rank order.",
        "`whole[: rows * columns].view(rows, columns)` is the weight, the next `rows` numbers are "
        "the bias, and the rest is padding. Memory is free when no name holds the tensor: `del`, "
        "or assign something else to the name.",
    )
    solution = staticmethod(forward_of_shards)
    mistakes = (
        Mistake(_all_at_once, "You gather all layers with one collective: for a while every rank "
                "holds the whole model, and nothing was gained. Gather inside the loop, one layer "
                "at a time."),
        Mistake(_forward(keep=True), "In the end the whole model is there: either you gather all "
                "layers before you use the first, or something keeps what was gathered (a list, a "
                "dict). Gather a layer, use it, let go of it; and only then gather the next."),
        Mistake(_forward(_interleaved), "You mixed the ranks' shards element by element. A shard "
                "is a contiguous part: the whole is rank 0's shard, then rank 1's, and so on."),
        Mistake(_forward(lambda shard: shard.repeat(dist.get_world_size())), "You fill the layer "
                "with copies of this rank's own shard: the others have to be gathered."),
        Mistake(_forward(_of_rank_0), "You broadcast rank 0's shard, and use it for all. Each rank "
                "has another part of the layer: gather them."),
        Mistake(_forward(_by_broadcasts), "You broadcast each rank's shard by itself: that is N "
                "collectives for a layer, where one all-gather does it."),
        Mistake(_forward(_by_all_reduce), "You put the shard into a tensor of zeros and sum over "
                "the ranks. That is right, and moves twice the bytes of an all-gather, half of "
                "them zeros."),
        Mistake(_forward(layer=_bias_at_end), "You take the bias from the end of the flat tensor, "
                "where the padding is. It begins right behind the weight."),
        Mistake(_forward(layer=_bias_with_padding), "You take everything behind the weight as the "
                "bias, the padding too. The bias has `rows` elements."),
        Mistake(_forward(layer=_bias_after), "You add the bias after the tanh. It belongs inside."),
        Mistake(_forward(_own_first), "You put this rank's shard in front of the others. The order "
                "is that of the ranks, the same on all of them."),
        Mistake(_forward(layer=_transposed), "You read the weight as (columns, rows). It lies row "
                "by row: `view(rows, columns)`, and then `.T`."),
        Mistake(_forward(lambda shard: reduced(shard.repeat(dist.get_world_size()))), "You add up "
                "the ranks' shards. They are different parts of the layer: side by side, an "
                "all-gather."),
        Mistake(_last_is_linear, "The last layer has its tanh, too: the formula holds for all."),
        Mistake(_forward(layer=_without_bias), "The bias is missing: it lies behind the weight in "
                "the same flat tensor."),
    )

    def trial(self, attempt):
        wholes, shapes = _layers()
        shards = nn.ParameterList(
            nn.Parameter(_shard_of(whole), requires_grad=False) for whole in wholes)
        x = _input(dist.get_rank())
        with CallLog() as log, MemoryTimeline(shards) as memory, torch.no_grad():
            output = attempt([shard.data for shard in shards], shapes, x)
        held = max(sample.total - sample.bytes["parameters"] for sample in memory.samples)
        layers = held / max(4 * whole.numel() for whole in wholes)
        calls = [call for call in log.calls if not call.is_point_to_point]
        return {"the output": output, "the number of collectives": len(calls),
                "the bytes that a rank hands to one collective":
                    max((call.bytes for call in calls), default=0),
                HELD: f"at most {MOST_LAYERS}" if layers < MOST_LAYERS + 0.5 else f"all {LAYERS}"}

    def expected(self, world_size):
        wholes, shapes = _layers()
        largest = max(-(-whole.numel() // world_size) for whole in wholes)
        facts = {"the number of collectives": AtMost(LAYERS, "one all-gather for each layer"),
                 "the bytes that a rank hands to one collective":
                     AtMost(4 * largest, "that is more than its shard of the largest layer"),
                 HELD: f"at most {MOST_LAYERS}"}
        found = []
        for rank in range(world_size):
            x = _input(rank)
            for whole, shape in zip(wholes, shapes, strict=True):
                x = _layer_of(whole, x, *shape)
            found.append({"the output": x, **facts})
        return found


def _layers():
    """Each layer's flat parameters, weight and then bias, and the weight's shape."""
    generator = torch.Generator().manual_seed(9)
    shapes = list(zip(WIDTHS[1:], WIDTHS[:-1], strict=True))
    return [torch.randn(rows * columns + rows, generator=generator) / 5
            for rows, columns in shapes], shapes


def _shard_of(whole):
    """This rank's part of it, padded at the end with what must not be used."""
    size = -(-whole.numel() // dist.get_world_size())
    padded = torch.cat([whole, torch.full((size * dist.get_world_size() - whole.numel(),), 7.0)])
    return padded[dist.get_rank() * size :][:size].clone()


def _input(rank):
    return seeded(f"x of rank {rank}", 3, WIDTHS[0])


# 9.2

def clip_by_global_norm(parameters, max_norm):
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = torch.zeros(())
    for gradient in gradients:
        squares += gradient.square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    scale = min(1.0, max_norm / (norm.item() + 1e-6))  # or divide by zero where all is zero
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def _clip(total, scale=lambda norm, limit: min(1.0, limit / (norm + 1e-6)),
          whose=lambda gradient: gradient):
    """Clipping with one thing wrong; ``total`` makes the norm from the gradients."""

    def attempt(parameters, max_norm):
        gradients = _gradients(parameters)
        norm = total(gradients)
        for gradient in gradients:
            whose(gradient).mul_(scale(norm.item(), max_norm))
        return norm

    return attempt


def _gradients(parameters):
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _squares(gradients):
    return sum((gradient.square().sum() for gradient in gradients), torch.zeros(()))


def _global_norm(gradients):
    return reduced(_squares(gradients)).sqrt()


def _own_norm(gradients):
    return _squares(gradients).sqrt()


def _one_call_each(gradients):
    return sum((reduced(gradient.square().sum()) for gradient in gradients),
               torch.zeros(())).sqrt()


def _each_alone(parameters, max_norm):
    gradients = _gradients(parameters)
    squares = reduced(torch.stack([gradient.square().sum() for gradient in gradients]))
    for gradient, norm in zip(gradients, squares.sqrt(), strict=True):
        gradient.mul_(min(1.0, max_norm / max(norm.item(), 1e-12)))
    return squares.sum().sqrt()


def _returns_own(parameters, max_norm):
    own = _own_norm(_gradients(parameters))
    clip_by_global_norm(parameters, max_norm)
    return own


def _returns_new(parameters, max_norm):
    return min(clip_by_global_norm(parameters, max_norm), torch.tensor(max_norm))


def _own_limit(parameters, max_norm):
    gradients, limit = _gradients(parameters), max_norm / dist.get_world_size() ** 0.5
    own = _own_norm(gradients)
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / max(own.item(), 1e-12)))
    return reduced(own**2).sqrt()


def _skips_where_empty(parameters, max_norm):
    if not any(gradient.numel() for gradient in _gradients(parameters)):
        return torch.zeros(())
    return clip_by_global_norm(parameters, max_norm)


_NO_SUM = ("You used the norm of this rank's own shards, as torch's `clip_grad_norm_` does on "
           "plain tensors. Every rank then scales by another number: sum the squares over the "
           "ranks.")


class ClipByGlobalNorm(Exercise):
    slug = "clip-by-global-norm"
    number = "9.2"
    title = "Clip sharded gradients by their global norm"
    name = "clip_by_global_norm"
    minutes = 15
    tolerance = 1e-4
    hints = (
        "The norm of a vector in pieces: the square root of the sum of all squares, whoever holds "
        "them. Norms themselves do not add up.",
        "Add the squares of all your shards to one number, all-reduce that, and take the root.",
        "The scale is `max_norm / norm`, but never more than 1. A rank whose shards are empty "
        "still takes part in the all-reduce, with a zero.",
    )
    solution = staticmethod(clip_by_global_norm)
    mistakes = (
        Mistake(_clip(_own_norm), _NO_SUM),
        Mistake(nn.utils.clip_grad_norm_, _NO_SUM),
        Mistake(_clip(lambda each: reduced(_own_norm(each))), "You summed the ranks' norms. Norms "
                "do not add up, their squares do: all-reduce the sum of squares, then take the "
                "root."),
        Mistake(_clip(lambda each: reduced(_own_norm(each)) / dist.get_world_size()),
                "You averaged the ranks' norms. Each is that of a part alone; the squares of the "
                "parts add up to the square of the whole."),
        Mistake(_clip(lambda each: reduced(_own_norm(each), dist.ReduceOp.MAX)),
                "You took the largest of the ranks' norms. The whole is longer than each of its "
                "parts: sum the squares."),
        Mistake(_clip(lambda each: reduced(_squares(each))), "The root is missing: you used the "
                "sum of squares as the norm."),
        Mistake(_clip(lambda each: (reduced(_squares(each)) / dist.get_world_size()).sqrt()),
                "You divided the sum of squares by the world size. The shards are parts of one "
                "gradient, not copies of it: nothing is to be averaged."),
        Mistake(_each_alone, "You clip each tensor by its own norm, which changes the gradient's "
                "direction. All are scaled by one number."),
        Mistake(_clip(_one_call_each), "You all-reduce once for each tensor. Add the squares of "
                "all tensors first: one number, one collective."),
        Mistake(_clip(_global_norm, scale=lambda norm, limit: limit / norm), "You scale up, too, "
                "where the norm is below `max_norm`. The scale is at most 1."),
        Mistake(_clip(_global_norm, whose=torch.clone), "The gradients stay as they were. Scale "
                "each `parameter.grad` itself, in place with `mul_`: not a copy of it, and not "
                "the parameter."),
        Mistake(lambda parameters, max_norm: reduced(torch.zeros(())), "You stop at the first "
                "parameter that has no `.grad`: it is frozen. Pass over it, and take the others."),
        Mistake(_returns_own, "You scale by the global norm, and return that of this rank's own "
                "shards. Return the global one."),
        Mistake(_returns_new, "You return the norm after clipping. Asked is the one before: it "
                "goes into the log."),
        Mistake(_clip(lambda each: reduced(sum((one.abs().sum() for one in each),
                torch.zeros(())))), "You add up absolute values. The norm is the root of the sum "
                "of squares."),
        Mistake(_own_limit, "Each rank clips its own shards, to max_norm/√N, by a number of its "
                "own. That turns the gradient: all ranks scale by the same number."),
        Mistake(_skips_where_empty, "A rank whose shards are all empty does not take part, and the "
                "others wait for it. It contributes a zero.", hangs=True),
    )

    def trial(self, attempt):
        facts = {}
        for name, sizes, factor, max_norm in CASES:
            parameters = [nn.Parameter(torch.zeros_like(shard)) for shard in _shards(sizes, factor)]
            for parameter, gradient in zip(parameters, _shards(sizes, factor), strict=True):
                parameter.grad = gradient
            frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            with CallLog() as log:
                norm = attempt([frozen, *parameters], max_norm)
            facts |= _of_case(name, norm if norm is None else float(norm),
                              torch.cat([each.grad for each in parameters]),
                              log.count(), max((call.bytes for call in log.calls), default=0))
        return facts

    def expected(self, world_size):
        found = [{} for _ in range(world_size)]
        for name, sizes, factor, max_norm in CASES:
            norm = torch.cat(_wholes(sizes, factor)).norm().item()
            for rank, facts in enumerate(found):
                shards = torch.cat(_shards(sizes, factor, rank, world_size))
                facts |= _of_case(name, norm, shards * min(1.0, max_norm / norm),
                                  AtMost(1, "one number is all that has to be summed"),
                                  AtMost(8 * len(sizes), "a number has 8 bytes at most"))
        return found


CASES = (("a norm above max_norm", (7, 11, 2, 5), 3.0, 1.0),
         ("a norm below max_norm", (7, 11, 2, 5), 0.1, 5.0),
         ("a gradient of two numbers", (2,), 2.0, 1.0))


def _of_case(name, norm, gradients, calls, nbytes):
    return {f"{name}: what it returns": norm, f"{name}: the rank's gradients": gradients,
            f"{name}: the number of collectives": calls,
            f"{name}: the bytes of the largest": nbytes}


def _wholes(sizes, factor):
    return [factor * seeded(f"gradient {number}, times {factor}", size)
            for number, size in enumerate(sizes)]


def _shards(sizes, factor, rank=None, world_size=None):
    """The rank's part of each gradient, cut along it into equal parts, the last ones shorter."""
    rank = dist.get_rank() if rank is None else rank
    world_size = dist.get_world_size() if world_size is None else world_size
    return [whole[-(-len(whole) // world_size) * rank :][: -(-len(whole) // world_size)].clone()
            for whole in _wholes(sizes, factor)]


# 9.3, judged by a dry run

BYTES_BEYOND_SHARDS, MOST_COLLECTIVES = 5_500_000, 15
TAKEN, CHOICE = "whether `fully_shard` takes the units", "how many units there are"
AT_THE_PEAK = "the bytes beyond the rank's shards, at the peak"


def choose_units(model):
    pairs = [list(pair) for pair in zip(model.blocks[::2], model.blocks[1::2], strict=True)]
    return [model.embedding, *pairs, [model.norm, model.head]]


def _groups(model, size):
    return [list(model.blocks[first : first + size]) for first in range(0, BLOCKS, size)]


def _ends_at_root(size):
    return lambda model: _groups(model, size)


def _with_ends(size):
    return lambda model: [model.embedding, *_groups(model, size), [model.norm, model.head]]


_ENDS = ("The embedding and the head are left to the root. What the root owns is gathered when the "
         "step begins and stays until the end of backward: make units of them.")
_EMBEDDING = "The embedding is left to the root, which keeps it gathered for the whole step."
_HEAD = ("The head is left to the root, which gathers it when the step begins and keeps it to the "
         "end of backward.")
_TOGETHER = ("The embedding and the head are one unit: the first and the last that the step needs, "
             "so they stay gathered in between. Make two units of them.")
_APART = ("The blocks of a unit are not neighbours. It is gathered for the first of them and stays "
          "whole until the last has computed: put neighbours together.")
_LEFT = ("In no unit: {}. What no unit holds is left to the root, which gathers it when the step "
         "begins and keeps it to the end of backward.")
_LARGE = "Your units are too large: for a moment, two neighbours are whole at the same time."


class ChooseUnits(Exercise):
    slug = "choose-units"
    number = "9.3"
    title = "Units that fit"
    name = "choose_units"
    minutes = 25
    communicates = False
    hints = (
        "Start with `list(model.blocks)`, look at the peak and at the collectives, and ask of "
        "each parameter: when is it gathered, and when freed?",
        "What no unit holds belongs to the root, which keeps it for the whole of forward and "
        "backward. Here these are the two largest tensors of the model.",
        "Each unit costs two all-gathers and a reduce-scatter, so 15 collectives are five units. "
        "A list of modules inside your list is one unit: `[model.norm, model.head]`.",
    )
    solution = staticmethod(choose_units)
    mistakes = (
        Mistake(lambda model: [], "You return no unit, so the root is the only one: the whole "
                "model is gathered at once."),
        Mistake(lambda model: [model], "The model itself is the root, which is wrapped anyway: "
                "the whole model is gathered at once. Return submodules."),
        *(Mistake(_ends_at_root(size), _ENDS) for size in (1, 2, 3)),
        Mistake(lambda model: [model.embedding, *_groups(model, 2)], _HEAD),
        Mistake(lambda model: [*_groups(model, 2), [model.norm, model.head]], _EMBEDDING),
        Mistake(lambda model: [[model.embedding, model.norm, model.head], *_groups(model, 2)],
                _TOGETHER),
        Mistake(lambda model: [model.embedding, *(list(model.blocks[first::3]) for first in
                range(3)), [model.norm, model.head]], _APART),
        Mistake(lambda model: [*_groups(model, 2), model.embedding, model.head],
                "The norm is left to the root: 256 numbers, and two collectives more. Put it "
                "together with the head."),
        Mistake(lambda model: [model.embedding, *_groups(model, 2), model.norm, model.head],
                "The norm is a unit of its own: 256 numbers, and three collectives more. Put it "
                "together with the head."),
        *(Mistake(units, "It fits, with more collectives than allowed: each block is a unit, "
                  "although two of them together still fit.")
          for units in (_with_ends(1), lambda model: [model.embedding, *model.blocks, model.head],
                        lambda model: [model.embedding, *model.blocks, model.norm, model.head])),
        Mistake(_with_ends(3), _LARGE),
        Mistake(_with_ends(6), "All blocks are one unit: most of the model is gathered at once."),
        *(Mistake(units, "`model.blocks` is an `nn.ModuleList`, whose forward nobody calls, so no "
                  "moment comes at which to gather it. Return its elements, or lists of them.")
          for units in (lambda model: [model.embedding, model.blocks, [model.norm, model.head]],
                        lambda model: [model.embedding, model.blocks, model.head],
                        lambda model: list(model.children()))),
        Mistake(lambda model: [m for m in model.modules() if isinstance(m, nn.Linear)],
                "Every Linear is a unit: it may fit, and costs far more collectives than allowed, "
                "while the embedding stays with the root."),
    )

    world_sizes = (2, 3, 4)  # of the dry runs
    on_ranks = False

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self._model = Network()

    def _observe(self, attempt, world_size, *, quiet=False):
        """The facts of a dry run; the reader's own error, if there is one."""
        chosen = observe.alone(self._choice, attempt, 1, seconds=self._limit, quiet=quiet)
        if isinstance(chosen, RankError):
            return chosen
        units = "root" if chosen[0][CHOICE] == 0 else attempt
        try:
            found = dry_run_of(units, world_size)
        except (RankError, TypeError, ValueError) as error:
            facts = {TAKEN: re.sub(r"^rank \d+ of \d+ raised ", "", str(error)).splitlines()[0]}
        else:
            facts = {TAKEN: "yes", AT_THE_PEAK: bytes_beyond_shards(found),
                     "the number of collectives": found.count()}
        return [{**facts, COMMUNICATED: False}] * world_size

    def _observe_all(self, attempts, world_size):
        return [self._observe(attempt, world_size, quiet=True) for attempt in attempts]

    def _choice(self, attempt):
        units = attempt(self._model)
        return {CHOICE: len(units) if isinstance(units, list | tuple) else None}

    def expected(self, world_size):
        return {TAKEN: "yes",
                AT_THE_PEAK: AtMost(BYTES_BEYOND_SHARDS, "too much is whole at the same time"),
                "the number of collectives": AtMost(MOST_COLLECTIVES, "the units are too many")}

    def described(self, difference, world_size):
        return f"in a dry run on {world_size} ranks, {difference}"

    def explanation(self, attempt, got, world_size):
        """That of the mistake with the same units; or else what makes the units large."""
        parts = self._parts(attempt)
        if isinstance(got, RankError) or parts is None:
            return ""
        for mistake in self.mistakes:
            if self._parts(mistake.attempt) == parts:
                return mistake.why
        difference = first_difference(self.expected_of_all(world_size), got, self.tolerance)
        return self._why_so_large(parts) if difference.fact == AT_THE_PEAK else ""

    def _why_so_large(self, parts):
        """A sentence for units that no mistake has."""
        units = [{name.removesuffix(".weight") for name in names} for _, names in parts]
        blocks = [sorted({int(name.split(".")[1]) for name in unit if name.startswith("blocks.")})
                  for unit in units]
        held = {name for name in ("embedding", "head") if any(name in unit for unit in units)}
        if len(held) < 2:
            return {"embedding": _HEAD, "head": _EMBEDDING}.get("".join(held), _ENDS)
        if left := sorted(set(range(BLOCKS)).difference(*blocks)):
            return _LEFT.format(" and ".join(f"`model.blocks[{number}]`" for number in left))
        if any(held <= unit for unit in units):
            return _TOGETHER
        if any(unit != list(range(unit[0], unit[-1] + 1)) for unit in blocks if unit):
            return _APART
        return _LARGE

    def _parts(self, attempt):
        """Each unit's parameters, sorted: what makes two policies the same. None if there is no
        telling, and [] for no units.
        """
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        try:
            units = [unit if isinstance(unit, list) else [unit] for unit in attempt(self._model)]
            return sorted(
                (any(isinstance(module, nn.ModuleList | Network) for module in unit),
                 sorted(names[each] for module in unit for each in module.parameters()))
                for unit in units)
        except Exception:
            return None


EXERCISES = (ForwardOfShards, ClipByGlobalNorm, ChooseUnits)
