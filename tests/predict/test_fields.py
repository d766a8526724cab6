"""What an address may say: every value, every error by its field, and nothing that raises."""

import json
import random
import string
from urllib.parse import parse_qsl, urlencode

import pytest

from dplab.predict import fields
from dplab.predict.catalogue import GPUS, LINKS, MODELS
from dplab.predict.choose import CHOICES, IN_BF16
from dplab.predict.cluster import BLOCK_RECOMPUTE
from dplab.predict.fields import BY_NAME, FIELDS, MOST_GPUS, cluster_of, model_of, query_of, read


def wrong(query):
    """Why each field is wrong."""
    return {error.name: error.why for error in read(query)[1]}


def test_the_defaults_are_right_and_make_an_empty_query():
    values, errors = read("")
    assert not errors and query_of(values) == ""
    assert model_of(values) == MODELS["Llama-3 8B"] and cluster_of(values).ranks == 64


def test_the_fields_offer_what_the_predictions_know():
    assert set(BY_NAME["model"].choices) == {*MODELS, "custom"}
    assert set(BY_NAME["gpu"].choices) == set(GPUS)
    assert {*BY_NAME["inside"].choices, *BY_NAME["between"].choices} == set(LINKS)
    assert set(BY_NAME["strategy"].choices) == {"recommended", *CHOICES}
    assert set(BY_NAME["precision"].choices) == set(IN_BF16)
    assert set(BY_NAME["recompute"].choices) == {"as needed", *BLOCK_RECOMPUTE}


def test_every_field_says_what_it_is():
    for each in FIELDS:
        assert each.group in ("model", "hardware", "training") and each.label and each.help
        assert each.kind in ("choice", "whole", "number", "flag")
        assert bool(each.choices) is (each.kind == "choice")
        assert (each.least is not None) is (each.kind in ("whole", "number"))
        assert not {*each.needs, each.at_most or "gpus"} - set(BY_NAME)
        if each.default is not None:
            assert each.value_of(each.text_of(each.default)) == each.default


def test_the_schema_is_the_fields_in_json():
    entries = json.loads(fields.schema())
    assert [entry["name"] for entry in entries] == list(BY_NAME)
    for entry, each in zip(entries, FIELDS, strict=True):
        assert [choice["value"] for choice in entry["choices"]] == list(each.choices)
        assert (entry["least"], entry["most"]) == (each.least, each.most)
        assert entry["default"] == each.default and entry["needs"] == each.needs


def test_a_default_follows_the_field_that_it_depends_on():
    for gpu, inside, between in (("A100", "NVLink 3", "200 Gb/s"), ("H200", "NVLink 4", "400 Gb/s"),
                                 ("B200", "NVLink 5", "400 Gb/s")):
        values, _ = read(f"gpu={gpu}")
        assert (values["inside"], values["between"]) == (inside, between)
        assert query_of(values) == f"gpu={gpu}"
    assert read("model=GPT-2")[0]["sequence"] == 1024
    assert read("model=Llama-3.1+405B")[0]["sequence"] == 8192
    assert query_of(read("gpu=A100&inside=NVLink+4")[0]) == "gpu=A100&inside=NVLink+4"


def test_no_default_of_a_sequence_is_longer_than_the_positions():
    own = "model=custom&family=gpt"
    for query, sequence in ((own, 1024), (f"{own}&context=512", 512), ("model=custom", 8192),
                            (f"{own}&context=65536", 8192)):
        values, errors = read(query)
        assert not errors and values["sequence"] == sequence and query_of(values) == query
    assert wrong(f"{own}&context=many").keys() == {"context"}


def test_a_model_of_ones_own():
    llama, errors = read("model=custom&kv_heads=8")
    assert not errors
    ours, theirs = model_of(llama), MODELS["Llama-3 8B"]
    assert ours.parameters == theirs.parameters and ours.block == theirs.block
    gpt, errors = read("model=custom&family=gpt&layers=12&d_model=768&heads=12&d_ff=3072"
                       "&vocabulary=50257&sequence=1024")
    assert not errors and model_of(gpt).parameters == MODELS["GPT-2"].parameters == 124_439_808
    tied = model_of(read("model=custom&kv_heads=8&tied=yes")[0])
    assert theirs.parameters - tied.parameters == 128_256 * 4096


@pytest.mark.parametrize(("text", "value"), [
    ("8192", 8192), ("8,192", 8192), (" 12 ", 12), ("+5", 5), ("0012", 12)])
def test_whole_numbers_as_people_write_them(text, value):
    values, errors = read(urlencode({"sequence": text}))
    assert not errors and values["sequence"] == value


@pytest.mark.parametrize("text", ["", "x", "1.5", "1e3", "nan", "inf", "-inf", "1 2", "1,2", "0x10",
                                  "٣", "1_0", "--1", "1" * 3000, "-" + "9" * 3000, "0", "-1", "\0"])
@pytest.mark.parametrize("name", ["layers", "d_model", "gpus", "per_node", "batch", "sequence"])
def test_no_other_whole_number_is_taken(name, text):
    why = wrong(urlencode({"model": "custom", name: text}))
    assert list(why) == [name] and len(why[name]) < 250


@pytest.mark.parametrize("text", ["nan", "-nan", "inf", "-inf", "1e400", "0", "-3", "x", "1_0",
                                  "٣"])
def test_no_number_that_is_none_is_taken(text):
    assert list(wrong(urlencode({"most_tokens": text}))) == ["most_tokens"]


def test_a_number_may_be_left_empty_where_it_may_be_left_out():
    values, errors = read("model=custom&kv_heads=&most_tokens=&nics=")
    assert not errors
    assert values["kv_heads"] is values["most_tokens"] is values["nics"] is None
    assert query_of(values) == "model=custom"
    assert read("most_tokens=4e6")[0]["most_tokens"] == 4_000_000


@pytest.mark.parametrize(("query", "name", "words"), [
    ("model=custom&layers=0", "layers", "at least 1"),
    ("model=custom&heads=30", "heads", "30 heads do not divide d_model = 4096"),
    ("model=custom&kv_heads=5", "kv_heads", "5 kv_heads do not divide 32 heads"),
    ("gpus=1000000000", "gpus", "131,072"),
    ("gpus=12", "gpus", "12 GPUs do not fill nodes of 8: take 8 or 16"),
    ("model=GPT-2&sequence=2048", "sequence", "1,024"),
    ("model=custom&family=gpt&context=512&sequence=513", "sequence", "512"),
    ("model=Lama-3+8B", "model", "did you mean 'Llama-3 8B'"),
    ("gpu=H1000", "gpu", "did you mean 'H100'"),
    ("strategy=FDSP", "strategy", "did you mean 'FSDP'"),
    ("precision=fp8", "precision", "'mixed', 'bf16'"),
    ("inside=400+Gb/s", "inside", "NVLink"),
    ("gpu_count=8", "gpu_count", "did you mean"),
    ("gpus=8&gpus=16", "gpus", "twice"),
    ("model=custom&tied=perhaps", "tied", "yes nor no"),
    ("gpus=131072&per_node=72", "gpus", "take 131,040"),
    ("model=GPT-2&layers=12", "layers", "only for a model of your own"),
    ("model=custom&context=12", "context", "GPT-2's family"),
    ("gpus=", "gpus", "is empty"), ("most_tokens=1e16", "most_tokens", "1,000,000,000,000,000"),
    ("strategy=x", "strategy", "'FSDP', 'FSDP, kept', 'HSDP'"),
    ("batch=2&gpus=" + 5000 * "9", "gpus", "5,000 characters"),
    ("x" * 5000, "", "4,000")])
def test_an_error_names_its_field_and_says_why(query, name, words):
    found = wrong(query)
    assert list(found) == [name] and words in found[name] and ".0" not in found[name]


def test_the_largest_number_of_gpus_has_a_reason():
    assert not wrong(f"gpus={MOST_GPUS}")
    assert "16,384" in wrong(f"gpus={MOST_GPUS + 8}")["gpus"]
    for per_node in range(2, 73):  # what is advised is not refused
        for why in wrong(f"gpus={MOST_GPUS}&per_node={per_node}").values():
            for count in why.rpartition("take ")[2].replace(",", "").split(" or "):
                assert not wrong(f"gpus={count}&per_node={per_node}")


def test_independent_errors_come_together():
    found = wrong("model=custom&layers=0&heads=30&kv_heads=x&gpus=12&batch=-1&bach=2&gpu=H10&gpu=A")
    assert set(found) == {"layers", "heads", "kv_heads", "gpus", "batch", "bach", "gpu"}


def test_an_error_brings_no_second_one_about_what_follows_from_it():
    assert set(wrong("model=custm&layers=3")) == {"model"}
    assert set(wrong("model=custom&heads=0")) == {"heads"}
    assert set(wrong("gpus=x&per_node=3")) == {"gpus"}


def test_what_was_written_stands_where_it_is_wrong():
    assert read("gpus=many&batch=2")[0] == {**read("batch=2")[0], "gpus": "many"}


def test_a_part_of_a_node_and_whole_nodes():
    for gpus, per_node, nodes in ((1, 8, 1), (3, 8, 1), (8, 8, 1), (16, 8, 2), (12, 4, 3)):
        values, errors = read(f"gpus={gpus}&per_node={per_node}&nics=2")
        on = cluster_of(values)
        assert not errors and (on.nodes, on.ranks, on.nics) == (nodes, gpus, 2)


def test_an_address_is_taken_with_its_mark_and_without_its_end():
    assert read("?gpus=8#top") == read("gpus=8")
    assert not wrong("?") and not wrong("#top") and not wrong("&&")


def scrap(chance):
    """A name or a value such as nobody should write, or should."""
    some = [*BY_NAME, *MODELS, *GPUS, *LINKS, *CHOICES, *IN_BF16, "custom", "gpt", "yes", "no", "",
            "0", "-1", "1", "2", "3", "7", "8", "64", "1e9", "nan", "inf", "9" * 30, "\ud800", "é%",
            "<b>", "{}", "%00", "a" * 300, "١٢"]
    if chance.random() < 0.8:
        return chance.choice(some)
    return "".join(chance.choices(string.printable, k=chance.randrange(12)))


def random_query(chance):
    """Some right, most wrong in some way: raw text, or names with values of any other field."""
    if chance.random() < 0.1:
        return "".join(chance.choices(string.printable + "&=%+;?#", k=chance.randrange(60)))
    pairs = []
    for _ in range(chance.randrange(7)):
        name = chance.choice(list(BY_NAME)) if chance.random() < 0.9 else scrap(chance)
        field = BY_NAME.get(name)
        if field and chance.random() < 0.7:
            value = chance.choice([*field.choices] or ["yes", "no"] if field.kind in (
                "choice", "flag") else ["1", "2", "4", "8", "16", "32", "64", "1024"])
        else:
            value = scrap(chance)
        pairs.append((name, value))
    return urlencode(pairs, errors="replace")


@pytest.mark.parametrize("seed", range(8))
def test_whatever_an_address_says_it_is_read_or_refused_by_name(seed):
    chance = random.Random(seed)
    right = 0
    for _ in range(500):
        query = random_query(chance)
        values, errors = read(query)
        json.dumps(values, allow_nan=False)
        given = {name for name, _ in parse_qsl(query.removeprefix("?").partition("#")[0],
                                               keep_blank_values=True)}
        for error in errors:
            assert error.name in given | set(values) | {""} and error.why
            assert error.why.isprintable()
        if not errors:
            right += 1
            again, errors = read(query_of(values))
            assert again == values and not errors
            assert query_of(again) == query_of(values)
            assert model_of(values).parameters > 0
            assert cluster_of(values).ranks == values["gpus"]
    assert 25 < right < 475
