"""Which modules FSDP gathers together: few bytes at the peak, and few collectives."""

import re

import torch
from torch import nn

from dplab import RankError
from dplab.checks import observe
from dplab.checks.compare import COMMUNICATED, AtMost, first_difference
from dplab.checks.exercise import Exercise
from dplab.checks.mistakes import Slip
from dplab.workloads.residual_network import BLOCKS, Network, bytes_beyond_shards, dry_run_of


def choose_units(model):
    pairs = [list(pair) for pair in zip(model.blocks[::2], model.blocks[1::2], strict=True)]
    return [model.embedding, *pairs, [model.norm, model.head]]


BYTES_BEYOND_SHARDS, MOST_COLLECTIVES = 5_500_000, 15
TAKEN, CHOICE = "whether `fully_shard` takes the units", "how many units there are"
AT_THE_PEAK = "the bytes beyond the rank's shards, at the peak"
UNITS = "[model.embedding, *pairs, [model.norm, model.head]]"


class ChooseUnits(Exercise):
    number = "10.2"
    title = "Units that fit"
    minutes = 25
    communicates = False
    world_sizes = (2, 3, 4)  # of the dry runs
    on_ranks = False
    solution = staticmethod(choose_units)

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self._model = Network()

    def observe(self, attempt, world_size, *, quiet=False):
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

    def observe_all(self, attempts, world_size):
        return [self.observe(attempt, world_size, quiet=True) for attempt in attempts]

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
        for mistake in self.known_mistakes.all:
            if self._parts(mistake.attempt) == parts:
                return mistake.why
        difference = first_difference(self.expected_of_all(world_size), got, self.tolerance)
        return _why_so_large(parts) if difference.fact == AT_THE_PEAK else ""

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

    hints = (
        "Start with `list(model.blocks)`, look at the peak and at the collectives, and ask of "
        "each parameter: when is it gathered, and when freed?",
        "What no unit holds belongs to the root, which keeps it for the whole of forward and "
        "backward. Here these are the two largest tensors of the model.",
        "Each unit costs two all-gathers and a reduce-scatter, so 15 collectives are five units. "
        "A list of modules inside your list is one unit: `[model.norm, model.head]`.",
    )
    slips = (  # beside what `_why_so_large` says
        Slip("You return no unit, so the root is the only one: the whole model is gathered at "
             "once.", {UNITS: "[]"}),
        Slip("The model itself is the root, which is wrapped anyway: the whole model is gathered "
             "at once. Return submodules.", {UNITS: "[model]"}),
        Slip("All blocks are one unit: most of the model is gathered at once.",
             {"*pairs": "list(model.blocks)"}),
        Slip("`model.blocks` is an `nn.ModuleList`, whose forward nobody calls, so no moment comes "
             "at which to gather it. Return its elements, or lists of them.",
             {"*pairs": "model.blocks"},
             {"*pairs": "model.blocks", "[model.norm, model.head]": "model.head"},
             {UNITS: "list(model.children())"}),
        Slip("The norm is left to the root: 256 numbers, and two collectives more. Put it together "
             "with the head.", {"[model.norm, model.head]": "model.head"}),
        Slip("The norm is a unit of its own: 256 numbers, and three collectives more. Put it "
             "together with the head.", {"[model.norm, model.head]": "model.norm, model.head"}),
        Slip("It fits, with more collectives than allowed: each block is a unit, although two of "
             "them together still fit.",
             *({"*pairs": "*model.blocks", "[model.norm, model.head]": end} for end in (
                 "[model.norm, model.head]", "model.head", "model.norm, model.head"))),
        Slip("Every Linear is a unit: it may fit, and costs far more collectives than allowed, "
             "while the embedding stays with the root.",
             {UNITS: "[each for each in model.modules() if isinstance(each, nn.Linear)]"}),
    )


def _why_so_large(parts):
    """A sentence for units of which too much is whole at the same time."""
    units = [{name.removesuffix(".weight") for name in names} for _, names in parts]
    blocks = [sorted({int(name.split(".")[1]) for name in unit if name.startswith("blocks.")})
              for unit in units]
    held = {name for name in ("embedding", "head") if any(name in unit for unit in units)}
    if not held:
        return ("The embedding and the head are left to the root. What the root owns is gathered "
                "when the step begins and stays until the end of backward.")
    if held == {"head"}:
        return "The embedding is left to the root, which keeps it gathered for the whole step."
    if held == {"embedding"}:
        return ("The head is left to the root, which gathers it when the step begins and keeps it "
                "to the end of backward.")
    if left := sorted(set(range(BLOCKS)).difference(*blocks)):
        return (f"In no unit: {' and '.join(f'`model.blocks[{number}]`' for number in left)}. What "
                "no unit holds is left to the root, which gathers it when the step begins and "
                "keeps it to the end of backward.")
    if any(held <= unit for unit in units):
        return ("The embedding and the head are one unit: the first and the last that the step "
                "needs, so they stay gathered in between. Make two units of them.")
    if any(unit != list(range(unit[0], unit[-1] + 1)) for unit in blocks if unit):
        return ("The blocks of a unit are not neighbours. It is gathered for the first of them and "
                "stays whole until the last has computed: put neighbours together.")
    return ("Your units are too large: beside one that is whole, there are a buffer for the next "
            "gather and one for the last reduction, each as large as a unit.")
