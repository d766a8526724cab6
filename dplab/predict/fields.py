"""What the planner asks for, and the values that an address gives for it, with every error named.

    values, errors = read("model=Llama-3+8B&gpus=64")

`FIELDS` says once what there is: the web page builds its form from it, the command line its options
and its help. An address's query holds only what differs from the defaults (`query_of`), so that it
can be shared.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlencode

from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.choose import CHOICES, IN_BF16
from dplab.predict.network import Cluster
from dplab.predict.transformer_config import TransformerConfig

Value = str | int | float | bool | None
CUSTOM = "custom"
RECOMMENDED = "recommended"
AS_NEEDED = "as needed"
MOST_GPUS = 131_072
LONGEST_QUERY = 4000
_TRUE, _FALSE = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


@dataclass(frozen=True)
class Field:
    """One thing that the planner asks for.

    ``kind``: "choice" (one of ``choices``: value and label), "whole" (number), "number" or "flag".
    ``least`` and ``most`` bound a number, and ``why_most`` says why there is a bound. ``default``
    None: it may be left out. ``default_by``: another field's name, and this one's default for some
    of its values. ``at_most``: a field whose number, where there is that field, the default does
    not exceed. ``needs``: the values of other fields with which there is this one at all.
    """

    name: str
    label: str
    group: str
    kind: str
    default: Value
    help: str
    choices: Mapping[str, str] = field(default_factory=dict)
    least: float | None = None
    most: float | None = None
    why_most: str = ""
    unit: str = ""
    needs: Mapping[str, str] = field(default_factory=dict)
    default_by: tuple[str, Mapping[str, Value]] | None = None
    at_most: str = ""

    def default_for(self, values: Mapping[str, Value]) -> Value:
        """The default beside these values of the fields before it."""
        if self.default_by is not None:
            other, defaults = self.default_by
            default = defaults.get(str(values.get(other)), self.default)
            most = values.get(self.at_most)
            if isinstance(most, int) and isinstance(default, int):
                return min(default, most)
            return default
        return self.default

    def is_asked(self, values: Mapping[str, Value]) -> bool:
        """Whether there is this field, with these values of the fields before it."""
        return all(values.get(name) == value for name, value in self.needs.items())

    def value_of(self, text: str) -> Value:
        """The value that ``text`` stands for; ValueError says why there is none."""
        return _READ[self.kind](self, text.strip())

    def text_of(self, value: Value) -> str:
        """The value as it stands in an address."""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{int(value)}" if value == int(value) and value < 1e15 else repr(value)
        return "" if value is None else str(value)


class Wrong(ValueError):
    """What is wrong with one field; ``needs``: the fields without which there is none."""

    def __init__(self, name: str, why: str, needs: Mapping[str, str] | None = None):
        super().__init__(why)
        self.name, self.why, self.needs = name, why, dict(needs or {})


def _choice(field, text):
    by_lower = {value.lower(): value for value in field.choices}
    if text.lower() in by_lower:
        return by_lower[text.lower()]
    raise ValueError(f"{_shown(text)} is none of the choices{_meant(text, field.choices)} There "
                     f"are: {', '.join(map(repr, field.choices))}")


def _flag(field, text):
    if text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    raise ValueError(f"{_shown(text)} is neither yes nor no: write one of them")


def _whole(field, text):
    _refuse_nothing(field, text)
    if re.fullmatch(r"-?[0-9]{1,3}(,[0-9]{3})+", text):
        text = text.replace(",", "")
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(f"{_shown(text)} is not a whole number: write it in digits, such as "
                         f"{field.text_of(_example(field))}")
    digits = text.lstrip("+-").lstrip("0")
    size = int(digits or 0) if len(digits) < 20 else math.inf
    return _bounded(field, -size if text.startswith("-") else size, text)


def _number(field, text):
    _refuse_nothing(field, text)
    if re.fullmatch(r"-?[0-9]{1,3}(,[0-9]{3})+", text):
        text = text.replace(",", "")
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{_shown(text)} is not a number: write one such as "
                         f"{field.text_of(_example(field))} or 4e6")
    return _bounded(field, value, text)


def _refuse_nothing(field, text):
    if not text:
        raise ValueError(f"is empty: write a number, such as {field.text_of(_example(field))}")


def _bounded(field, value, text):
    if field.least is not None and value < field.least:
        raise ValueError(f"{_shown(text)} is too small: take at least {field.least:,.0f}")
    if field.most is not None and value > field.most:
        why = f" ({field.why_most})" if field.why_most else ""
        raise ValueError(f"{_shown(text)} is too large: take at most {field.most:,.0f}{why}")
    return value


_READ: dict[str, Callable[[Field, str], Value]] = {
    "choice": _choice, "flag": _flag, "whole": _whole, "number": _number}


def _example(field):
    return field.default if field.default is not None else field.least


def _shown(text):
    """What was given, short enough for a message and without control characters."""
    text = "".join(each if each.isprintable() else "?" for each in text)
    return f"'{text}'" if len(text) <= 40 else f"'{text[:37]}...'"


def _meant(text, names):
    """The end of the sentence, which asks about one of the names where it is near."""
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(text.lower()[:80], lower, n=1, cutoff=0.5)
    return f"; did you mean {lower[near[0]]!r}?" if near else "."


_TYPED = {"model": CUSTOM}
_SIZE = "that is beyond every model that these predictions were compared with"
_RUN = "that is beyond every run that these predictions were compared with"
_USUAL = {"A100": "NVLink 3", "H100": "NVLink 4", "H200": "NVLink 4", "B200": "NVLink 5"}
_LENGTHS = {name: min(model.context, 8192) for name, model in MODELS.items()}


def _link(link):
    return f"{link.name}, {link.bandwidth / 1e9:g} GB/s each way"


FIELDS: tuple[Field, ...] = (
    Field("model", "Model", "model", "choice", "Llama-3 8B",
          "A published model, with its number of parameters, or one of your own.",
          choices={**{name: f"{name}, {model.parameters / 1e9:.3g} billion"
                      for name, model in MODELS.items()}, CUSTOM: "layers and sizes of your own"}),
    Field("family", "Family", "model", "choice", "llama",
          "Llama's blocks with rotary positions, or GPT-2's with learned ones.", needs=_TYPED,
          choices={"llama": "Llama: RMSNorm, no biases",
                   "gpt": "GPT-2: LayerNorm, biases"}),
    Field("layers", "Layers", "model", "whole", 32, "Transformer blocks.", least=1, most=1000,
          why_most="each block is simulated", unit="blocks", needs=_TYPED),
    Field("d_model", "Width", "model", "whole", 4096,
          "The width of the model, which the heads divide.", least=1, most=131_072, why_most=_SIZE,
          needs=_TYPED),
    Field("heads", "Heads", "model", "whole", 32, "Attention heads.", least=1, most=1024,
          why_most=_SIZE, needs=_TYPED),
    Field("kv_heads", "Heads of keys and values", "model", "whole", None,
          "Heads that have keys and values of their own, which divide the heads; left out, all.",
          least=1, most=1024, why_most=_SIZE, needs=_TYPED),
    Field("d_ff", "Width inside feed-forward", "model", "whole", 14_336,
          "The width inside the feed-forward part.", least=1, most=1_048_576, why_most=_SIZE,
          needs=_TYPED),
    Field("vocabulary", "Vocabulary", "model", "whole", 128_256, "Different tokens.", least=1,
          most=10_000_000, why_most=_SIZE, unit="tokens", needs=_TYPED),
    Field("context", "Learned positions", "model", "whole", 1024,
          "Positions that the model has a vector for: no sequence is longer.", least=1,
          most=1_048_576, why_most=_SIZE, unit="tokens", needs={**_TYPED, "family": "gpt"}),
    Field("gated", "Gated", "model", "flag", True,
          "Whether the feed-forward part has a third matrix, the gate; by default the family's.",
          needs=_TYPED, default_by=("family", {"llama": True, "gpt": False})),
    Field("tied", "Tied", "model", "flag", False,
          "Whether the head is the embedding, so that both count once; by default the family's.",
          needs=_TYPED, default_by=("family", {"llama": False, "gpt": True})),
    Field("gpu", "GPU", "hardware", "choice", "H100",
          "What each rank runs on: its memory, and its peak in bf16.",
          choices={name: f"{name}, {gpu.memory_bytes / 1e9:.3g} GB, {gpu.bf16_flops / 1e12:g} "
                         "TFLOP/s" for name, gpu in GPUS.items()}),
    Field("inside", "Links inside a node", "hardware", "choice", "NVLink 4",
          "Over which the GPUs of a node send to each other; by default the GPU's own NVLink.",
          choices={name: _link(link) for name, link in LINKS.items()
                   if not name.endswith("Gb/s")},
          default_by=("gpu", _USUAL)),
    Field("between", "Links between nodes", "hardware", "choice", "400 Gb/s",
          "One of a node's links to the network; by default as usual with the GPU.",
          choices={name: _link(link) for name, link in LINKS.items() if name.endswith("Gb/s")},
          default_by=("gpu", {"A100": "200 Gb/s"})),
    Field("gpus", "GPUs", "hardware", "whole", 64,
          "GPUs in all: part of one node, or whole nodes.", least=1, most=MOST_GPUS,
          why_most="eight times the 16,384 of the largest published run that these predictions "
                   "were compared with", unit="GPUs"),
    Field("per_node", "GPUs in a node", "hardware", "whole", 8, "GPUs that a node has.", least=1,
          most=72, why_most="the largest node whose collectives were measured", unit="GPUs"),
    Field("nics", "Links of a node to the network", "hardware", "whole", None,
          "How many links to the network a node has; left out, one for each of its GPUs.", least=1,
          most=72, why_most="as many as GPUs in the largest node", unit="links"),
    Field("batch", "Batch on a GPU", "training", "whole", 1, "Sequences on each GPU in a step.",
          least=1, most=65_536, why_most=_RUN, unit="sequences"),
    Field("sequence", "Length of a sequence", "training", "whole", 8192,
          "Tokens in a sequence; by default what the model has positions for, up to 8,192.",
          least=1, most=1_048_576, why_most=_RUN, unit="tokens",
          default_by=("model", _LENGTHS), at_most="context"),
    Field("strategy", "Strategy", "training", "choice", RECOMMENDED,
          "What is copied and what is sharded; by default the fastest of them that fits.",
          choices={RECOMMENDED: "recommended: the fastest that fits", **{
              name: f"{name}: {what}" for name, what in CHOICES.items()}}),
    Field("precision", "Precision", "training", "choice", "mixed",
          "What is kept in fp32 and what in bf16. Matrix products are in bf16 in each.",
          choices={name: f"{name}: {what}" for name, what in IN_BF16.items()}),
    Field("recompute", "Recomputation", "training", "choice", AS_NEEDED,
          "Whether backward computes the activations of a block again instead of keeping them.",
          choices={AS_NEEDED: "as needed: where nothing else fits",
                   "none": "none: all activations are kept",
                   "full": "full: only blocks' inputs kept"}),
    Field("most_tokens", "Largest useful global batch", "training", "number", None,
          "Tokens in a step beyond which training gains nothing; left out, there is no such limit.",
          least=1, most=1e15, unit="tokens"),
)
BY_NAME: dict[str, Field] = {each.name: each for each in FIELDS}


def schema() -> str:
    """`FIELDS` in JSON, for the page: a list of objects in the order in which they are asked."""
    return json.dumps([{
        "name": each.name, "label": each.label, "group": each.group, "kind": each.kind,
        "default": each.default, "help": each.help, "unit": each.unit,
        "choices": [{"value": value, "label": label} for value, label in each.choices.items()],
        "least": each.least, "most": each.most, "why_most": each.why_most,
        "needs": dict(each.needs),
        "default_by": each.default_by and {"field": each.default_by[0],
                                           "values": dict(each.default_by[1])},
        "at_most": each.at_most,
    } for each in FIELDS])


def read(query: str) -> tuple[dict[str, Value], list[Wrong]]:
    """The value of every field that there is, after defaults, and all that is wrong.

    Where a value is wrong, its text stands in its place. Nothing is raised.
    """
    given, errors = _given(query)
    values: dict[str, Value] = {}
    for each in FIELDS:
        asked = each.is_asked(values)
        if each.name in given and not asked and not (
                {error.name for error in errors} & set(each.needs)):
            family = " of GPT-2's family" if "family" in each.needs else ""
            errors.append(Wrong(each.name, f"only for a model of your own{family}", each.needs))
        if not asked:
            continue
        values[each.name] = each.default_for(values)
        if each.name not in given:
            continue
        text = given[each.name]
        if not text.strip() and each.kind in ("whole", "number") and each.default is None:
            continue
        try:
            values[each.name] = each.value_of(text)
        except ValueError as error:
            values[each.name] = text
            errors.append(Wrong(each.name, str(error)))
    return values, errors + _between(values, {error.name for error in errors})


def _given(query):
    errors: list[Wrong] = []
    query = query.removeprefix("?").partition("#")[0]
    if len(query) > LONGEST_QUERY:
        return {}, _too_long(query)
    given: dict[str, str] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in BY_NAME:
            errors.append(Wrong(name, f"there is no field {_shown(name)}"
                                      f"{_meant(name, BY_NAME)} Leave it out, or take one of: "
                                      f"{', '.join(BY_NAME)}"))
        elif name in given:
            errors.append(Wrong(name, f"given twice, as {_shown(given[name])} and as "
                                      f"{_shown(text)}: leave one out"))
        else:
            given[name] = text
    return given, errors


def _too_long(query):
    """The field of each value that is too long by itself, or else that the address is."""
    lengths = {name: len(text) for name, text in parse_qsl(query, keep_blank_values=True)}
    return [Wrong(name, f"what is given has {length:,} characters: write it shorter")
            for name, length in lengths.items()
            if name in BY_NAME and length > LONGEST_QUERY / len(FIELDS)] or [
        Wrong("", f"the address has {len(query):,} characters: at most {LONGEST_QUERY:,} are read")]


def _between(values, wrong):
    """What is wrong with several fields together, each right in itself."""
    errors = []

    def right(*names):
        return not wrong & set(names) and all(name in values for name in names)

    if right("heads", "d_model") and values["d_model"] % values["heads"]:
        errors.append(Wrong("heads", f"{values['heads']} heads do not divide d_model = "
                                     f"{values['d_model']}: take a number that does"))
    if (right("heads", "kv_heads") and values["kv_heads"] is not None
            and values["heads"] % values["kv_heads"]):
        errors.append(Wrong("kv_heads", f"{values['kv_heads']} kv_heads do not divide "
                                        f"{values['heads']} heads: take a number that does"))
    if right("gpus", "per_node"):
        gpus, per_node = values["gpus"], values["per_node"]
        if gpus > per_node and gpus % per_node:
            below = gpus // per_node * per_node
            take = " or ".join(f"{count:,}" for count in (below, below + per_node)
                               if count <= MOST_GPUS)
            errors.append(Wrong("gpus", f"{gpus:,} GPUs do not fill nodes of {per_node}: take "
                                        f"{take}"))
    if right("model", "sequence"):
        most = None
        if values["model"] in MODELS and MODELS[values["model"]].learned_positions:
            most = MODELS[values["model"]].context
        elif right("context"):
            most = values["context"]
        if most is not None and values["sequence"] > most:
            errors.append(Wrong("sequence", f"the model has positions for {most:,} tokens, not for "
                                            f"{values['sequence']:,}: take at most {most:,}"))
    return errors


def query_of(values: Mapping[str, Value]) -> str:
    """The address's query for these values: what differs from the defaults, in order."""
    return urlencode([(each.name, each.text_of(values[each.name])) for each in FIELDS
                      if each.name in values and values[each.name] != each.default_for(values)])


def model_of(values: Mapping[str, Any]) -> TransformerConfig:
    """The model that the values name, or that is typed in."""
    if values["model"] != CUSTOM:
        return MODELS[values["model"]]
    gpt = values["family"] == "gpt"
    return TransformerConfig(
        layers=values["layers"], d_model=values["d_model"], heads=values["heads"],
        kv_heads=values["kv_heads"], d_ff=values["d_ff"], vocabulary=values["vocabulary"],
        context=values["context"] if gpt else values["sequence"], gated=values["gated"],
        tied=values["tied"], biases=gpt, norm="layernorm" if gpt else "rmsnorm",
        learned_positions=gpt, name="a model of your own")


def cluster_of(values: Mapping[str, Any]) -> Cluster:
    """The cluster that the values describe."""
    node = Cluster(GPUS[values["gpu"]], 1, LINKS[values["inside"]], LINKS[values["between"]],
                   per_node=values["per_node"], nics=values["nics"])
    return node.of(values["gpus"])
