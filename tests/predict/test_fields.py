"""What an address may say: every value, every error by its field, and nothing that raises."""

import json
import random
import string
from urllib.parse import parse_qsl, urlencode

import pytest

from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.choose import CHOICES, PRECISION_CHOICES
from dplab.predict.fields import (
    BY_NAME,
    FIELDS,
    MOST_GPUS,
    cluster_of,
    model_of,
    query_of,
    read,
)


def wrong(query):
    """Why each field is wrong."""
    return {error.name: error.why for error in read(query)[1]}


def test_the_default_of_every_field_is_one_of_its_values_and_stands_in_no_address():
    assert {*BY_NAME["inside"].choices, *BY_NAME["between"].choices} == set(LINKS)
    for each in FIELDS:
        default = each.default_for({})
        assert default is None or each.value_of(each.text_of(default)) == default
    values, errors = read("")
    assert not errors and query_of(values) == ""
    assert model_of(values) == MODELS["Llama-3 8B"] and cluster_of(values).ranks == 64


def test_a_default_follows_the_field_that_it_depends_on():
    for gpu, inside, between in (("A100", "NVLink 3", "200 Gb/s"), ("H200", "NVLink 4", "400 Gb/s"),
                                 ("B200", "NVLink 5", "400 Gb/s"),
                                 ("A100 40 GB", "NVLink 3", "200 Gb/s")):
        values, _ = read(urlencode({"gpu": gpu}))
        assert (values["inside"], values["between"]) == (inside, between)
        assert query_of(values) == urlencode({"gpu": gpu})
    assert query_of(read("gpu=A100&inside=NVLink+4")[0]) == "gpu=A100&inside=NVLink+4"
    for model, sequence in (("GPT-2", 1024), ("Llama-3.1+405B", 8192), ("custom", 8192)):
        assert read(f"model={model}")[0]["sequence"] == sequence


def test_a_model_of_ones_own():
    llama, errors = read("model=custom&kv_heads=8")
    ours, theirs = model_of(llama), MODELS["Llama-3 8B"]
    assert not errors
    assert ours.parameters == theirs.parameters and ours.block == theirs.block


@pytest.mark.parametrize(("name", "text", "value"), [
    ("sequence", " 0012 ", 12), ("tokens", "4e6", 4e6), ("price", "", None), ("price", "0", 0.0)])
def test_numbers_as_people_write_them(name, text, value):
    values, errors = read(urlencode({name: text}))
    assert not errors and values[name] == value


@pytest.mark.parametrize("text", ["x", "nan", "1e400", "1,2", "0x10", "٣", "9" * 5000, "0", "-1"])
def test_no_other_number_is_taken(text):
    for name in ("layers", "global_batch"):
        why = wrong(urlencode({"model": "custom", name: text}))
        assert list(why) == [name] and len(why[name]) < 250


@pytest.mark.parametrize(("query", "name", "words"), [
    ("model=custom&heads=30", "heads", "30 heads do not divide d_model = 4096"),
    ("model=custom&kv_heads=5", "kv_heads", "5 kv_heads do not divide heads = 32"),
    ("gpus=12", "gpus", "12 GPUs do not fill nodes of 8: take 8"),
    (f"gpus={MOST_GPUS + 8}", "gpus", "at most 131,072"), ("gpus=", "gpus", "such as 64"),
    ("batch=1.5", "batch", "not a whole number"),
    ("model=GPT-2&sequence=2048", "sequence", "1,024"),
    ("strategy=x", "strategy", "'FSDP', 'FSDP, kept', 'HSDP'"),
    ("gpu_count=8", "gpu_count", "no field"), ("gpus=8&gpus=16", "gpus", "twice"),
    ("global_batch=8000", "global_batch", "less than a sequence of 8,192"),
    ("compile=perhaps", "compile", "'yes', 'no'"),
    ("model=GPT-2&layers=12", "layers", "only for a model of your own"),
    # no second error about what follows from the first
    ("model=custm&layers=3", "model", "none of the choices"),
    ("model=custom&heads=0", "heads", "at least 1"), ("gpus=x&per_node=3", "gpus", "'x'")])
def test_an_error_names_its_field_and_says_why(query, name, words):
    found = wrong(query)
    assert list(found) == [name] and words in found[name]


def test_independent_errors_come_together_and_what_was_written_stands():
    query = "model=custom&layers=0&heads=30&kv_heads=x&gpus=12&bach=2&gpu=H10"
    assert set(wrong(query)) == {"layers", "heads", "kv_heads", "gpus", "bach", "gpu"}
    assert read("gpus=many&batch=2")[0] == {**read("batch=2")[0], "gpus": "many"}


def test_a_part_of_a_node_and_whole_nodes():
    for gpus, per_node, nodes in ((3, 8, 1), (8, 8, 1), (12, 4, 3)):
        values, errors = read(f"?gpus={gpus}&per_node={per_node}&nics=2#top")
        on = cluster_of(values)
        assert not errors and (on.nodes, on.ranks, on.nics) == (nodes, gpus, 2)


STRANGE = [*MODELS, *GPUS, *LINKS, *CHOICES, *PRECISION_CHOICES, *BY_NAME, "custom", "yes", "", "0",
           "-1", "1e9", "nan", "9" * 30, "\ud800", "é%", "<b>", "{}", "%00", "a" * 300, "١٢"]


def random_query(chance):
    """Some right, most wrong in some way: raw text, or names with values of any other field."""
    if chance.random() < 0.1:
        return "".join(chance.choices(string.printable + "&=%+;?#", k=chance.randrange(60)))
    pairs = []
    for _ in range(chance.randrange(7)):
        name = chance.choice([*BY_NAME] * 3 + STRANGE)
        right = BY_NAME[name].choices if name in BY_NAME else ()
        value = chance.choice([*right] or ["1", "2", "4", "8", "16", "32", "64", "1024"])
        pairs.append((name, value if chance.random() < 0.7 else chance.choice(STRANGE)))
    return urlencode(pairs, errors="replace")


def test_whatever_an_address_says_it_is_read_or_refused_by_name():
    chance, right = random.Random(0), 0
    for _ in range(1000):
        query = random_query(chance)
        values, errors = read(query)
        json.dumps(values, allow_nan=False)
        given = {name for name, _ in parse_qsl(query.removeprefix("?").partition("#")[0],
                                               keep_blank_values=True)}
        for error in errors:
            assert error.name in given | set(values) and error.why.isprintable()
        if not errors:
            right += 1
            again, errors = read(query_of(values))
            assert again == values and not errors
            assert model_of(values).parameters > 0
            assert cluster_of(values).ranks == values["gpus"]
    assert 50 < right < 950
