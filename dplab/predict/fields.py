"""What the planner asks for, and the values that an address gives for it, with every error named.

    values, errors = read("model=Llama-3+8B&gpus=64")

`FIELDS` says once what there is: the web page builds its form from it, the command line its help.
An address's query holds only what differs from the defaults (`query_of`), so that it can be shared.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from dplab.predict.catalogue import GPUS, LINKS, MODELS, VARIANTS
from dplab.predict.choose import BLOCK_RECOMPUTE, CHOICES, PRECISION_CHOICES
from dplab.predict.job import RECOMPUTE, Cluster
from dplab.predict.transformer_config import TransformerConfig

Value = str | int | float | bool | None
CUSTOM = "custom"
RECOMMENDED = "recommended"
AS_NEEDED = "as needed"
MOST_GPUS = 131_072  # eight times the largest published run that predictions were compared with
_FLAGS: Mapping[str, Value] = {"yes": True, "no": False}
_NUMBERS = {"whole": r"[0-9]+", "number": r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?"}


@dataclass(frozen=True)
class Field:
    """One thing that the planner asks for.

    ``kind``: "choice" (one of ``choices``: value and label), "whole" (number), "number" or "flag".
    ``least`` and ``most`` bound a number. ``default`` None: it may be left out; a function: of the
    values of the fields before it, which may be missing. ``needs``: the values of other fields with
    which there is this one at all.
    """

    name: str
    label: str
    group: str
    kind: str
    default: Value | Callable[[Mapping[str, Any]], Value]
    help: str
    choices: Mapping[str, str] = field(default_factory=dict)
    least: float = 1
    most: float = math.inf
    unit: str = ""
    needs: Mapping[str, str] = field(default_factory=dict)

    def default_for(self, values: Mapping[str, Value]) -> Value:
        """The default beside these values of the fields before it."""
        return self.default(values) if callable(self.default) else self.default

    def value_of(self, text: str) -> Value:
        """The value that ``text`` stands for; ValueError says why there is none."""
        text = text.strip()
        if self.kind in _NUMBERS:
            return self._number(text)
        known = _FLAGS if self.kind == "flag" else {each: each for each in self.choices}
        if text not in known:
            raise ValueError(f"{_shown(text)} is none of the choices. There are: "
                             f"{', '.join(map(repr, known))}")
        return known[text]

    def _number(self, text):
        if not re.fullmatch(_NUMBERS[self.kind], text, re.IGNORECASE):
            kind = "a whole number" if self.kind == "whole" else "a number"
            raise ValueError(f"{_shown(text)} is not {kind}: write one in digits, such as "
                             f"{self.text_of(self.default_for({}) or self.least)}")
        value = float(text)
        if value < self.least:
            raise ValueError(f"{_shown(text)} is too small: take at least {self.least:,g}")
        if value > self.most:
            raise ValueError(f"{_shown(text)} is too large: take at most {self.most:,.0f}")
        return int(value) if self.kind == "whole" else value

    def text_of(self, value: Value) -> str:
        """The value as it stands in an address."""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{int(value)}" if value == int(value) and value < 1e15 else repr(value)
        return "" if value is None else str(value)


class Wrong(NamedTuple):
    """What is wrong with one field."""

    name: str
    why: str


def _shown(text):
    """What was given, short enough for a message and without control characters."""
    text = "".join(each if each.isprintable() else "?" for each in text)
    return f"'{text}'" if len(text) <= 40 else f"'{text[:37]}...'"


_OWN = {"model": CUSTOM}
_NVLINKS = {"A100": "NVLink 3", "A100 40 GB": "NVLink 3", "B200": "NVLink 5"}


def _link(link):
    return f"{link.name}, {link.bandwidth / 1e9:g} GB/s each way"


def _usual_length(values):
    model = MODELS.get(str(values.get("model")))
    return min(model.context, 8192) if model else 8192


FIELDS: tuple[Field, ...] = (
    Field("model", "Model", "model", "choice", "Llama-3 8B",
          "A published model, with its number of parameters, or one of your own.",
          {**{name: f"{name}, {model.parameters / 1e9:.3g} billion"
              for name, model in MODELS.items()}, CUSTOM: "sizes of your own, in Llama's blocks"}),
    Field("layers", "Layers", "model", "whole", 32, "Transformer blocks.", most=1000,
          unit="blocks", needs=_OWN),
    Field("d_model", "Width", "model", "whole", 4096,
          "The width of the model, which the heads divide.", most=131_072, needs=_OWN),
    Field("heads", "Heads", "model", "whole", 32, "Attention heads.", most=1024, needs=_OWN),
    Field("kv_heads", "Heads of keys and values", "model", "whole", None,
          "Heads that have keys and values of their own, which divide the heads; left out, all.",
          most=1024, needs=_OWN),
    Field("d_ff", "Width inside feed-forward", "model", "whole", 14_336,
          "The width inside the feed-forward part.", most=1_048_576, needs=_OWN),
    Field("vocabulary", "Vocabulary", "model", "whole", 128_256, "Different tokens.",
          most=10_000_000, unit="tokens", needs=_OWN),
    Field("gpu", "GPU", "hardware", "choice", "H100",
          "What each rank runs on: its memory, and its peak in bf16.",
          {name: f"{name}, {gpu.memory_bytes / 1e9:.3g} GB, {gpu.bf16_flops / 1e12:g} TFLOP/s"
           for name, gpu in (GPUS | VARIANTS).items()}),
    Field("inside", "Links inside a node", "hardware", "choice",
          lambda values: _NVLINKS.get(str(values.get("gpu")), "NVLink 4"),
          "Over which the GPUs of a node send to each other; by default the GPU's own NVLink.",
          {name: _link(link) for name, link in LINKS.items() if not name.endswith("Gb/s")}),
    Field("between", "Links between nodes", "hardware", "choice",
          lambda values: "200 Gb/s" if "A100" in str(values.get("gpu")) else "400 Gb/s",
          "One of a node's links to the network; by default as usual with the GPU.",
          {name: _link(link) for name, link in LINKS.items() if name.endswith("Gb/s")}),
    Field("gpus", "GPUs", "hardware", "whole", 64,
          "GPUs in all: part of one node, or whole nodes.", most=MOST_GPUS, unit="GPUs"),
    Field("per_node", "GPUs in a node", "hardware", "whole", 8, "GPUs that a node has.", most=72,
          unit="GPUs"),
    Field("nics", "Links of a node to the network", "hardware", "whole", None,
          "How many links to the network a node has; left out, one for each of its GPUs.", most=72,
          unit="links"),
    Field("sequence", "Length of a sequence", "training", "whole", _usual_length,
          "Tokens in a sequence; by default what the model has positions for, up to 8,192.",
          most=1_048_576, unit="tokens"),
    Field("global_batch", "Global batch", "training", "number", 4_194_304.0,
          "What all GPUs take into one step together. Micro-batch and accumulation follow.",
          most=1e12, unit="tokens"),
    Field("tokens", "Tokens to train on", "training", "number", 1e12,
          "In the whole run: days, GPU-hours and money follow.", most=1e18, unit="tokens"),
    Field("strategy", "Strategy", "settings", "choice", RECOMMENDED,
          "What is copied and what is sharded; by default the fastest of them that fits.",
          {RECOMMENDED: "recommended: the fastest that fits",
           **{name: f"{name}: {strategy.what}" for name, strategy in CHOICES.items()}}),
    Field("precision", "Precision", "settings", "choice", "mixed",
          "What is kept in fp32 and what in bf16. Matrix products are in bf16 in each.",
          {name: f"{name}: {what}" for name, what in PRECISION_CHOICES.items()}),
    Field("recompute", "Recomputation", "settings", "choice", AS_NEEDED,
          "Whether backward computes activations of a block again instead of keeping them.",
          {AS_NEEDED: "as needed: what is fastest and fits",
           **{name: f"{name}: {RECOMPUTE[name]}" for name in BLOCK_RECOMPUTE}}),
    Field("compile", "torch.compile", "settings", "flag", False,
          "Whether blocks and loss are compiled. Memory is predicted as without."),
    Field("batch", "Micro-batch", "settings", "whole", None,
          "Sequences that a GPU computes at a time; left out, the largest that fits.",
          most=65_536, unit="sequences"),
    Field("price", "Price of a GPU-hour", "money", "number", None,
          "What you pay for one GPU for one hour, in any currency; left out, no cost is given.",
          least=0, most=1e6),
)
BY_NAME: dict[str, Field] = {each.name: each for each in FIELDS}


def schema() -> str:
    """`FIELDS` in JSON, for the page's form: in the order in which they are asked."""
    shown = ("name", "label", "group", "kind", "help", "choices", "unit", "needs")
    return json.dumps([{name: asdict(each)[name] for name in shown}
                       | {"default": each.default_for({})} for each in FIELDS])


def read(query: str) -> tuple[dict[str, Value], list[Wrong]]:
    """The value of every field that there is, after defaults, and all that is wrong.

    Where a value is wrong, its text stands in its place. Nothing is raised.
    """
    given, errors = _given(query)
    values: dict[str, Value] = {}
    for each in FIELDS:
        text = given.get(each.name)
        if any(values.get(name) != value for name, value in each.needs.items()):
            if text is not None and "model" not in {error.name for error in errors}:
                errors.append(Wrong(each.name, "only for a model of your own"))
            continue
        values[each.name] = each.default_for(values)
        if text is None or (not text.strip() and each.kind in _NUMBERS and each.default is None):
            continue
        try:
            values[each.name] = each.value_of(text)
        except ValueError as error:
            values[each.name] = text
            errors.append(Wrong(each.name, str(error)))
    return values, [*errors, *_between(values, {error.name for error in errors})]


def _given(query):
    errors: list[Wrong] = []
    given: dict[str, str] = {}
    for name, text in parse_qsl(query.removeprefix("?").partition("#")[0], keep_blank_values=True):
        if name not in BY_NAME:
            errors.append(Wrong(name, f"there is no field {_shown(name)}. Leave it out, or take "
                                      f"one of: {', '.join(BY_NAME)}"))
        elif name in given:
            errors.append(Wrong(name, f"given twice, as {_shown(given[name])} and as "
                                      f"{_shown(text)}: leave one out"))
        else:
            given[name] = text
    return given, errors


def _between(values, wrong):
    """What is wrong with several fields together, each right in itself."""
    def right(*names):
        return not wrong & set(names) and all(values.get(name) is not None for name in names)

    for part, whole in (("heads", "d_model"), ("kv_heads", "heads")):
        if right(part, whole) and values[whole] % values[part]:
            yield Wrong(part, f"{values[part]} {part} do not divide {whole} = {values[whole]}: "
                              "take a number that does")
    if right("gpus", "per_node"):
        gpus, per_node = values["gpus"], values["per_node"]
        if gpus > per_node and gpus % per_node:
            yield Wrong("gpus", f"{gpus:,} GPUs do not fill nodes of {per_node}: take "
                                f"{gpus // per_node * per_node:,}")
    if right("model", "sequence"):
        model = MODELS.get(values["model"])
        if model and model.learned_positions and values["sequence"] > model.context:
            yield Wrong("sequence", f"the model has positions for {model.context:,} tokens, not "
                                    f"for {values['sequence']:,}: take at most {model.context:,}")
    if right("global_batch", "sequence") and sequences_of(values) < 1:
        yield Wrong("global_batch", f"{values['global_batch']:,g} tokens are less than a sequence "
                                    f"of {values['sequence']:,}: take more, or shorter sequences")


def query_of(values: Mapping[str, Value]) -> str:
    """The address's query for these values: what differs from the defaults, in order."""
    return urlencode([(each.name, each.text_of(values[each.name])) for each in FIELDS
                      if each.name in values and values[each.name] != each.default_for(values)])


def sequences_of(values: Mapping[str, Any]) -> int:
    """Of a global batch; what is left of the last one is dropped."""
    return int(values["global_batch"] // values["sequence"])


def model_of(values: Mapping[str, Any]) -> TransformerConfig:
    """The model that the values name, or one of Llama's blocks in the sizes that they give."""
    if values["model"] != CUSTOM:
        return MODELS[values["model"]]
    return TransformerConfig(
        layers=values["layers"], d_model=values["d_model"], heads=values["heads"],
        kv_heads=values["kv_heads"], d_ff=values["d_ff"], vocabulary=values["vocabulary"],
        context=values["sequence"], gated=True, tied=False, biases=False, norm="rmsnorm",
        learned_positions=False, name="a model of your own")


def cluster_of(values: Mapping[str, Any]) -> Cluster:
    """The cluster that the values describe."""
    gpu = (GPUS | VARIANTS)[values["gpu"]]
    node = Cluster(gpu, 1, LINKS[values["inside"]], LINKS[values["between"]],
                   per_node=values["per_node"], nics=values["nics"])
    return node.of(values["gpus"])
