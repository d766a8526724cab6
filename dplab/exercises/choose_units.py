"""Exercise 9.3: units that fit."""

import re

import torch
from torch import nn

from dplab import RankError
from dplab.checks import observe
from dplab.checks.compare import COMMUNICATED, AtMost, first_difference
from dplab.checks.exercise import Exercise, Mistake
from dplab.workloads.residual_network import BLOCKS, Network, bytes_beyond_shards, dry_run_of

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
    number = "9.3"
    title = "Units that fit"
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

    def described(self, difference, got, world_size):
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
