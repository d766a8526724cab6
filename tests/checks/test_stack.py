"""The stack: its table, its parts beside torch's own, and chapter 09's whole stack on anybody's."""

import ast
import copy
import itertools
import os
import re
import textwrap
import types

import notebooks
import pytest
import torch
import torch.distributed as dist
from ranks import world_sizes
from sandbox import ROOT
from torch import nn
from torch.nn.functional import cross_entropy

import dplab
from dplab import run
from dplab.checks.stack import PARTS, as_text
from dplab.desk import kept, record
from dplab.desk.edits import source_of
from dplab.measure import CallLog

PART = {part.slug: part for part in PARTS}
parts = types.SimpleNamespace(**{part.name: part.solution for part in PARTS})


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


# Beside torch's own: pairs of what is and what should be, in the group of all ranks and in others


@world_sizes
def test_the_parts_do_what_torchs_do(world_size):
    found = run(in_groups, world_size, backend="gloo", timeout=120)
    for got, expected in itertools.chain(*(pairs for pairs, _ in found)):
        torch.testing.assert_close(got, expected)
    assert len({bits for _, bits in found}) == 1, "an all-reduce has the same bits on all ranks"


def in_groups():
    groups = [None]
    for ranks in ([1, 3], [0, 2, 3]) if dist.get_world_size() == 4 else ():
        group = dist.new_group(ranks)
        groups += [group] if dist.get_rank() in ranks else []
    pairs = [pair for group in groups for case in (collectives, broadcasts, training)
             for pair in case(group)]
    flat = torch.sin(torch.arange(11.0 * dist.get_world_size()) * (1.3 + dist.get_rank()))
    return pairs, parts.ring_all_reduce(flat).numpy().tobytes()


def collectives(group):
    rank, ranks = dist.get_rank(), dist.get_world_size(group)
    dtypes = torch.float32, torch.float64, torch.bfloat16, torch.int64
    for dtype, chunk in itertools.product(dtypes, (1, 7)):
        flat = (torch.arange(chunk * ranks) * 3 + 5 * rank + 1).to(dtype)
        if dtype in (torch.float32, torch.float64):  # bfloat16 adds whole numbers alone exactly
            flat = torch.sin(1.7 * flat)
        whole = flat.clone()
        dist.all_reduce(whole, group=group)
        own = whole.chunk(ranks)[dist.get_rank(group)].clone()
        gathered = torch.empty(ranks * ranks * chunk, dtype=dtype)
        dist.all_gather_single(gathered, flat, group=group)
        for function, expected, chunks in ((parts.ring_reduce_scatter, own, 1),
                                           (parts.ring_all_reduce, whole, 2),
                                           (parts.ring_all_gather, gathered, ranks)):
            before = flat.clone()
            with CallLog() as log:
                got = function(flat, group)
            yield got.clone(), expected
            yield log.bytes("send"), chunks * (ranks - 1) * chunk * flat.element_size()
            yield flat, before  # left alone
            memory = got.untyped_storage()
            yield memory.nbytes(), got.nbytes  # of its own: no view that keeps more alive
            yield memory.data_ptr() == flat.untyped_storage().data_ptr(), False


DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16,
          torch.bfloat16, torch.float64, torch.complex64)  # those that gloo broadcasts


class Mixed(nn.Module):
    """A frozen and a transposed parameter, and buffers of all dtypes, some not in state_dict."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm = nn.Linear(6, 7), nn.BatchNorm1d(7)
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.first.bias.requires_grad_(False)
        self.norm.num_batches_tracked += seed
        for number, dtype in enumerate(DTYPES):
            numbers = torch.randint(2 if dtype == torch.bool else 9, (5, 4))
            self.register_buffer(f"buffer{number}", numbers.to(dtype), persistent=number % 2 == 0)

    def tensors(self):
        return dict(self.named_parameters()) | dict(self.named_buffers())


def broadcasts(group):
    first = 0 if group is None else dist.get_global_rank(group, 0)
    model, expected = Mixed(dist.get_rank()), Mixed(first)
    memory = [tensor.data_ptr() for tensor in model.tensors().values()]
    parts.broadcast_weights(model, group)
    yield model.tensors(), expected.tensors()
    yield [tensor.data_ptr() for tensor in model.tensors().values()], memory


def training(group):
    """Four steps of AdamW with overlapped buckets, with buckets after backward, and under DDP."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 13), nn.Tanh(),
                          nn.Linear(13, 5))
    overlapped, later, plain = (copy.deepcopy(model) for _ in range(3))
    wrapped = nn.parallel.DistributedDataParallel(plain, process_group=group)
    in_turn = buckets_of(later)
    finish = parts.OverlappedGradients(buckets_of(overlapped), group or dist.new_group()).finish
    for trained, average in (
            (overlapped, finish), (wrapped, lambda: None),
            (later, lambda: parts.average_in_buckets(in_turn, group))):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, eps=0.01, weight_decay=0.1)
        for number in range(4):
            generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
            optimizer.zero_grad()
            cross_entropy(trained(torch.randn(5, 7, generator=generator)),
                          torch.randint(5, (5,), generator=generator)).backward()
            average()
            optimizer.step()
    yield overlapped.state_dict(), plain.state_dict()
    yield later.state_dict(), plain.state_dict()


def buckets_of(model):
    parameters = list(model.parameters())
    buckets = parts.make_buckets([parameter.nbytes for parameter in parameters], 300)
    assert len(buckets) == 3
    return [[parameters[index] for index in bucket] for bucket in buckets]


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
