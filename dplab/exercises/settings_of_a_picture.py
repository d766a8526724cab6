"""From what a rank holds over a step to the settings with which its model was wrapped."""

import re

from dplab import dryrun
from dplab.checks.exercise import Calculation
from dplab.checks.mistakes import Slip
from dplab.predict.transformer_config import TransformerConfig
from dplab.workloads.memory_picture import picture_of


def settings_of(picture):
    """Units, kept or not, bytes of a gathered and of a stored number, recomputed or not."""
    root, whole = picture.root, picture.root + picture.blocks * picture.block
    most = max(held["gathered"] for held in picture.forward + picture.backward)
    at_end = picture.forward[-1]
    first = next(held for held in picture.forward if held["activations"])
    as_one = first["gathered"] == most and at_end["gathered"] == most
    kept = at_end["gathered"] == most
    gathered = most / (whole if kept else root + picture.block)
    stored = picture.forward[0]["parameters"] * picture.ranks / whole
    later = max(held["activations"] for held in picture.backward)
    return {"units": "root" if as_one else "blocks", "kept": kept, "gathered": round(gathered),
            "stored": round(stored), "recomputed": later > 1.1 * at_end["activations"]}


CONFIG = TransformerConfig(layers=4, d_model=64, heads=4, d_ff=128, vocabulary=256, context=64,
                           gated=True, biases=False, norm="rmsnorm", learned_positions=False,
                           tied=False)
RANKS, BATCH, SEQUENCE = 2, 4, 64
# By what each is about: units, resharded or not, precision, checkpointed or not.
CASES = (
    ("A", "blocks", None, "mixed", False), ("B", "root", None, "fp32", False),
    ("C", "blocks", False, "mixed", True), ("D", "blocks", None, "bf16", True),
    ("E", "blocks", False, "fp32", False), ("F", "root", None, "mixed", True),
)
BYTES = {"fp32": (4, 4), "mixed": (2, 4), "bf16": (2, 2)}  # gathered, stored


class SettingsOfAPicture(Calculation):
    number = "10.3"
    title = "From a memory picture to its settings"
    minutes = 20
    seconds = 30.0
    again = False
    solution = staticmethod(settings_of)

    def prepare(self):
        return {case[0]: _pictured(*case[1:]) for case in CASES}

    def trial(self, attempt):
        facts = {}
        for name, picture in self.given.items():
            found = attempt(picture)
            facts |= {_fact(each, name): found.get(each) for each in _right(CASES[0])}
        return facts

    def expected(self, world_size):
        return {_fact(each, case[0]): value for case in CASES
                for each, value in _right(case).items()}

    def described(self, difference, got, world_size):
        """And what the picture says of this setting."""
        setting, name = re.fullmatch(r"`(\w+)` of picture (\w)", difference.fact).groups()
        return (f"{super().described(difference, got, world_size)}\n"
                f"In picture {name}, {_reading(setting, self.given[name])}.")

    hints = (
        "Print the area `gathered` of `pictures[\"by block\"]` and of `pictures[\"as one\"]`. What "
        "is there at the first activation, at the most, and when forward ends?",
        "The top of `gathered` is the whole model, or else the root and the largest block. Divide "
        "by the number of parameters in it. What is stored is there before anything is gathered; "
        "a rank has 1/N of it.",
        "With the root alone, everything is gathered when the first activation appears. With "
        "recomputation, activations *rise* in backward, above what they are when forward ends.",
    )
    slips = (
        Slip("You tell the root alone from blocks by the top of `gathered`. Blocks that are kept "
             "reach the whole model too, later: look at the moment of the first activation.",
             {'first["gathered"] == most and at_end["gathered"] == most': "kept",
              "as_one =": "kept = at_end[\"gathered\"] == most\nas_one ="}),
        Slip("You divide by the whole model where only the root and one block are there at once.",
             {"(whole if kept else root + picture.block)": "whole"}),
        Slip("You divide by the root and a block where all blocks are there at once.",
             {"(whole if kept else root + picture.block)": "(root + picture.block)"}),
        Slip("You leave the root out: it is whole all the time, beside the block that computes.",
             {"root + picture.block)": "picture.block)"}),
        Slip("A rank stores 1/N of the parameters.", {" * picture.ranks / whole": " / whole"}),
        Slip("Gathered is not stored: shards in 4 bytes may be gathered in 2. What is stored is "
             "the area `parameters`, and what is gathered the area `gathered`.",
             {'picture.forward[0]["parameters"] * picture.ranks / whole': "gathered"},
             {'"gathered": round(gathered)': '"gathered": round(stored)'}),
        Slip("Backward begins with a few bytes more than forward ended with, whatever the "
             "settings. Recomputing a block adds far more than that.",
             {'later > 1.1 * at_end["activations"]': 'later > at_end["activations"]'}),
        Slip("Without recomputation, activations fall all through backward. With it, they rise "
             "again in each block, above what they are when forward ends.",
             {'later > 1.1 * at_end["activations"]':
              'max(held["activations"] for held in picture.forward) > '
              '1.1 * at_end["activations"]'},
             {'later > 1.1 * at_end["activations"]': 'later < at_end["activations"]'}),
    )


def _pictured(units, reshard, precision, recomputed):
    """What a dry run with these settings holds."""
    run = dryrun.fully_shard(CONFIG, RANKS, batch=BATCH, sequence=SEQUENCE, units=units,
                             reshard_after_forward=reshard, precision=precision,
                             checkpointing=recomputed)
    return picture_of(run.samples, run.phases, CONFIG, RANKS)


def _reading(setting, picture):
    """What tells this setting."""
    steps = picture.forward + picture.backward
    most, at_end = max(held["gathered"] for held in steps), picture.forward[-1]
    if setting == "units":
        first = next(held for held in picture.forward if held["activations"])
        return (f"`gathered` has {first['gathered']:,} bytes at the first activation, {most:,} at "
                f"the most and {at_end['gathered']:,} when forward ends")
    if setting == "kept":
        return (f"`gathered` has {at_end['gathered']:,} bytes when forward ends, and {most:,} at "
                "the most")
    if setting == "gathered":
        return (f"`gathered` has {most:,} bytes at the most; the root and a block have "
                f"{picture.root + picture.block:,} parameters, and the model has "
                f"{picture.root + picture.blocks * picture.block:,}")
    if setting == "stored":
        return (f"`parameters` has {picture.forward[0]['parameters']:,} bytes on one of "
                f"{picture.ranks} ranks; the model has "
                f"{picture.root + picture.blocks * picture.block:,} parameters")
    later = max(held["activations"] for held in picture.backward)
    return (f"`activations` has {at_end['activations']:,} bytes when forward ends, and at most "
            f"{later:,} in backward")


def _right(case):
    _, units, reshard, precision, recomputed = case
    gathered, stored = BYTES[precision]
    return {"units": units, "kept": reshard is False or units == "root", "gathered": gathered,
            "stored": stored, "recomputed": recomputed}


def _fact(setting, name):
    return f"`{setting}` of picture {name}"
