"""The frozen table of published runs: its form, its sources, and figures that must agree."""

import hashlib
import json
import re
from importlib import resources

from dplab.predict import catalogue

TABLE = json.loads(resources.files("dplab.predict").joinpath("runs.json").read_text("utf-8"))
RUNS = {row["id"]: row for row in TABLE["runs"]}
IN_SCOPE = [row for row in RUNS.values() if row["in_scope"]]
NEEDED = {"id", "table", "series", "machine", "model", "ranks", "batch", "sequence", "strategy",
          "recompute", "wire", "compiled", "attention", "published", "unit", "in_scope", "held_out"}
OPTIONAL = {"accumulation", "recompute_share", "selects", "also", "assumed", "known", "at", "flops",
            "mended"}
WORDS = {"strategy": {"DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "SHARD_GRAD_OP", "FSDP", "HSDP"},
         "recompute": {"none", "selective", "full"},
         "attention": {"none", "triton", "sdpa", "cudnn", "flash2", "flash3", "flash4"},
         "unit": {"tokens/s/GPU", "tokens/s", "sequences/s", "s/step", "TFLOP/s/GPU", "MFU"}}


def test_each_row_states_what_a_prediction_needs():
    assert len(RUNS) == len(TABLE["runs"]), "an id stands twice"
    for row in IN_SCOPE:
        assert NEEDED <= set(row) <= NEEDED | OPTIONAL, row["id"]
        assert all(row[key] in words for key, words in WORDS.items()), row["id"]
        assert (row["recompute"] == "selective") == (0 < row.get("recompute_share", 0) < 1)
        assert (row["recompute"] == "selective") == (row.get("selects") in ("blocks", "products"))
        assert (row["unit"] == "TFLOP/s/GPU") == ("flops" in row), row["id"]
        assert row["published"] > 0 and row["machine"] in TABLE["machines"], row["id"]
        per_node = TABLE["machines"][row["machine"]]["per_node"]
        assert row["ranks"] < per_node or row["ranks"] % per_node == 0, row["id"]
        assert row["model"] in TABLE["models"] or row["model"] in catalogue.MODELS, row["id"]
        if "stated" not in TABLE["tables"][row["table"]]["network"][:6] and row["ranks"] > per_node:
            assert "assumed" in row or "assumed" in TABLE["tables"][row["table"]]["network"], (
                f"{row['id']}: its network is not stated, and the row does not say so")


def test_rows_out_of_scope_say_why():
    assert all(row["in_scope"] or (row["reason"] and not row["held_out"]) for row in RUNS.values())


def test_each_table_has_a_source_that_can_be_found_again():
    exact = re.compile(r"arXiv:\d{4}\.\d{5}|[\w.-]+/[\w.-]+ [0-9a-f]{7,}, |issue \d+|\w+\.com/\S+")
    for name, table in TABLE["tables"].items():
        at = [row.get("at") for row in TABLE["runs"] if row["table"] == name]
        assert exact.search(table["source"]) or all(at), name
        assert 2015 < table["year"] < 2030 and table["network"]
    assert {row["table"] for row in TABLE["runs"]} == set(TABLE["tables"])
    for sizes in TABLE["models"].values():
        assert exact.search(sizes["source"]) or "llm-foundry 8c8dd48f" in sizes["source"]


def test_the_held_out_rows_are_those_of_the_rule():
    """Fails for a row that changed sides after its error was seen."""
    for row in RUNS.values():
        digest = hashlib.sha256(f"{row['table']}: {row['series']}".encode()).hexdigest()
        odd = int(digest, 16) % 2 == 1
        assert row["held_out"] == (row["in_scope"] and not row.get("known", False) and odd), row
    assert 0.3 < sum(row["held_out"] for row in IN_SCOPE) / len(IN_SCOPE) < 0.7


def test_no_row_leaves_and_no_figure_changes():
    """As they were frozen: a row is added here, never taken away."""
    assert (len(RUNS), len(IN_SCOPE)) == (351, 322)
    figures = sorted(f"{name}: {row['published']} {row['unit']}" for name, row in RUNS.items())
    assert hashlib.sha256("\n".join(figures).encode()).hexdigest()[:16] == "3a6e161bd578eff3"


def test_rankings_compare_rows_of_the_table():
    names = [ranking["id"] for ranking in TABLE["rankings"]]
    assert len(set(names)) == len(names) >= 20
    for ranking in TABLE["rankings"]:
        assert len(set(ranking["runs"])) >= 2 and all(RUNS[run]["in_scope"]
                                                      for run in ranking["runs"])
