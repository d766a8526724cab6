"""The stack: its table, and chapter 09's whole stack on parts of the reader's and the course's.

That each part does what its stub says is what the check of its exercise tests.
"""

import ast
import os
import re
import textwrap

import notebooks
import pytest
import torch
from sandbox import ROOT

import dplab
from dplab.checks.stack import PARTS, as_text
from dplab.desk import kept, record
from dplab.desk.edits import source_of

PART = {part.slug: part for part in PARTS}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    return tmp_path


def test_the_table_has_each_part_with_what_it_calls_which_stands_before_it():
    for number, part in enumerate(PARTS):
        assert set(part.uses) <= {each.slug for each in PARTS[:number]}
        used = ", ".join(part.uses) or "torch alone"
        assert re.search(rf"^  \d\d  (yours|given)  {part.slug} +{used}$", as_text(), re.M)
        assert re.search(rf"^(def|class) {part.name}\b", as_text(), re.M)
    assert PART["ring-all-reduce"].uses == ("ring-reduce-scatter", "ring-all-gather")
    assert (PART["ring-all-reduce"].by, PART["ring-all-gather"].by) == ("course", "reader")


# Chapter 09's whole stack, with no exercise done, with all, and with some


CELLS = {cell.id: cell.source
         for cell in notebooks.read(ROOT / "chapters/09_zero_3_by_hand.ipynb").cells}
USED = ("exchange", "ring-reduce-scatter", "ring-all-gather", "broadcast-weights", "gather-chunks",
        "sharded-unit", "shard-a-model")
SOME = ("ring-reduce-scatter", "broadcast-weights", "gather-chunks")  # each beside the course's


def keep(slug):
    """Keeps the right answer as the reader's own, which leaves a mark where it is called."""
    lines = source_of(PART[slug].solution).text.splitlines()
    functions = [each for each in ast.walk(ast.parse("\n".join(lines)))
                 if isinstance(each, ast.FunctionDef)]
    statement = next(each for each in functions[0].body if not (
        isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)))
    mark = f'open(os.path.join({os.environ["DPLAB_HOME"]!r}, "called-{slug}"), "w").close()'
    lines.insert(statement.lineno - 1, " " * statement.col_offset + mark)
    used = [PART[each] for each in PART[slug].uses]
    earlier = [f"{part.name} = dplab.mine({part.slug!r})" for part in used if part.by == "reader"]
    given = [textwrap.dedent(source_of(part.solution).text) for part in used
             if part.by == "course"]
    imports = ("import os\nimport torch\nimport torch.distributed as dist\nimport dplab\n"
               "import torch.nn.functional as F\nfrom torch import nn\n")
    kept.write(slug, "\n".join([imports, *earlier, *given, CELLS["places-of-parameters"], *lines]))
    record.update("exercises", slug, lambda entry: entry.update(outcome="passed"))


def run_the_stack(wrap):
    """The weights by the cells of the chapter's last section, as they stand."""
    names = {"__name__": "__main__"}
    for cell in ("setup", "imports", "own-rings", "the-stack", "a-transformer", "ways-to-wrap",
                 "one-step", "train"):
        source = "\n".join(line for line in CELLS[cell].splitlines() if not line.startswith("%"))
        exec(compile(source, f"09-{cell}", "exec"), names)
    return dplab.run(names["train"], 4, names[wrap], 2, backend="gloo")[0][1]


@pytest.fixture(scope="module")
def by_fully_shard():
    return run_the_stack("by_torch")


@pytest.mark.slow
@pytest.mark.parametrize("own", [(), USED, SOME], ids=["none", "all", "some"])
def test_the_stack_trains_as_fully_shard_and_calls_the_readers_own_parts(
        own, home, by_fully_shard):
    for slug in own:
        keep(slug)
    assert {slug for slug in USED if dplab.whose(slug) == "yours"} == set(own)
    for path in home.glob("called-*"):
        path.unlink()  # by the checks that have tried them
    assert (run_the_stack("by_hand") - by_fully_shard).abs().max().item() < 1e-9
    assert {path.name for path in home.glob("called-*")} == {f"called-{slug}" for slug in own}


def test_the_ring_that_the_course_makes_of_two_halves_calls_the_readers(home, capsys):
    keep("ring-all-gather")
    ring = dplab.mine("ring-all-reduce")
    assert capsys.readouterr().out.endswith(
        "ring_all_reduce: made of ring_reduce_scatter, the course's; ring_all_gather, yours.\n")
    assert dplab.whose("ring-all-reduce") == "the course's"
    used = dplab.mine("average-gradients").__globals__["ring_all_reduce"]
    for each in ring, used:
        (home / "called-ring-all-gather").unlink(missing_ok=True)
        assert dplab.run(each, 2, torch.ones(2), backend="gloo")[1].tolist() == [2.0, 2.0]
        assert (home / "called-ring-all-gather").exists()
