"""`dplab.mine`: kept at a pass, tried by fresh ranks, whose it is, and when it no longer passes."""

import shutil
import textwrap

import pytest
import torch
import torch.distributed as dist
from kernel import Kernel

import dplab
from dplab.checks import find, own
from dplab.checks.exercise import PASSED
from dplab.desk import kept, record

SLUG = "global-mean"
FACTOR = 1


def global_mean(values):
    """The reader's own: the sum of sums over the sum of counts."""
    count = torch.tensor(float(FACTOR * len(values)))
    total = values.sum()
    for each in (total, count):
        dist.all_reduce(each)
    return total / count


scale = torch.ones(())


def with_a_tensor(values):
    return global_mean(values) * scale


def from_mine(values):
    """Another in its place comes from `mine`."""


def by_what_mine_gave(values):
    return from_mine(values)


def doubled(values):
    return 2 * global_mean(values)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def home_after_a_pass(tmp_path_factory):
    folder = tmp_path_factory.mktemp("passed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPLAB_HOME", str(folder))
        dplab.check(SLUG, global_mean)
    return folder


@pytest.fixture
def passed(home, home_after_a_pass):
    """The place of what a pass has kept."""
    shutil.copytree(home_after_a_pass, home, dirs_exist_ok=True)
    return kept.place(SLUG)


def whose(capsys, id=SLUG):
    """What `mine` returns, and its one line."""
    value = dplab.mine(id)
    [line] = capsys.readouterr().out.splitlines()
    return value, line


def of_unequal_parts(mean):
    return round(mean(torch.arange(1.0 + 2 * dist.get_rank())).item(), 4)


def test_it_is_the_courses_until_yours_passes(capsys):
    value, line = whose(capsys)
    assert value is find(SLUG).solution
    assert line.startswith("global_mean: the course's")
    with pytest.raises(ValueError, match="no-such"):
        dplab.mine("no-such")


def test_a_pass_that_could_not_be_kept_is_said(capsys):
    record.update("exercises", SLUG, lambda entry: entry.update(outcome=PASSED))
    value, line = whose(capsys)
    assert value is find(SLUG).solution and "not kept" in line and "until" not in line


@pytest.mark.slow
def test_a_pass_is_kept_and_works_on_ranks(capsys, passed):
    value, line = whose(capsys)
    assert line == f"global_mean: yours, from {passed}."
    assert value is not global_mean and value.__doc__ == global_mean.__doc__
    assert whose(capsys, find(SLUG).number)[0].__code__ == value.__code__
    assert dplab.run(of_unequal_parts, 2, value) == [3 / 4] * 2
    assert "FACTOR = 1" in passed.read_text() and "with_a_tensor" not in passed.read_text()


@pytest.mark.slow
def test_an_attempt_that_its_check_calls_in_the_notebook_is_kept(monkeypatch):
    units = find("choose-units")
    monkeypatch.setattr(kept, "written_down", lambda *_: (
        "def choose_units(model):\n    first, second = model.blocks[::2], model.blocks[1::2]\n"
        "    pairs = [list(pair) for pair in zip(first, second, strict=True)]\n"
        "    return [model.embedding, *pairs, [model.norm, model.head]]"))
    assert "It is kept" in own.keep(units, global_mean)


@pytest.mark.slow
def test_what_cannot_be_written_down_passes_and_is_named(capsys, passed):
    before = passed.read_text()
    dplab.check(SLUG, with_a_tensor)
    out = capsys.readouterr().out
    assert "passed" in out and "`scale`, a Tensor that `with_a_tensor` uses" in out
    dplab.check(SLUG, doubled)
    assert "wrong" in capsys.readouterr().out and passed.read_text() == before


def test_source_that_does_not_pass_by_itself_is_not_kept(monkeypatch):
    monkeypatch.setattr(kept, "written_down",
                        lambda *_: "def global_mean(values):\n    return nowhere")
    assert "'nowhere' is not defined" in own.keep(find(SLUG), global_mean)
    assert not kept.place(SLUG).exists()


@pytest.mark.parametrize("attempt", [find(SLUG).solution, torch.sum])
def test_code_that_is_not_the_readers_is_not_kept_as_theirs(attempt):
    assert own.keep(find(SLUG), attempt)
    assert not kept.place(SLUG).exists()


def test_what_mine_gave_is_not_kept_again(passed, monkeypatch):
    before = passed.read_text()
    monkeypatch.setitem(globals(), "from_mine", dplab.mine(SLUG))
    assert own.keep(find(SLUG), from_mine) == ""
    assert "this very exercise" in own.keep(find(SLUG), by_what_mine_gave)
    assert passed.read_text() == before


def counted(monkeypatch):
    """How often an exercise has been run again from here on."""
    runs = []
    rerun = type(find(SLUG)).rerun
    monkeypatch.setattr(type(find(SLUG)), "rerun",
                        lambda self, *parts: runs.append(1) or rerun(self, *parts))
    return runs


def test_an_edited_file_that_no_longer_passes_gives_way_and_stays(capsys, passed, monkeypatch):
    runs = counted(monkeypatch)
    wrong = passed.read_text().replace("FACTOR = 1", "FACTOR = 2")
    passed.write_text(wrong)
    for _ in range(2):
        value, line = whose(capsys)
        assert value is find(SLUG).solution
        assert "no longer passes" in line and str(passed) in line
    assert len(runs) == 1 and passed.read_text() == wrong
    passed.write_text(wrong.replace("FACTOR = 2", "FACTOR = 1"))
    assert whose(capsys)[1].startswith("global_mean: yours")


def test_a_check_that_has_changed_tries_again(capsys, passed, monkeypatch):
    runs = counted(monkeypatch)
    monkeypatch.setattr(own, "_check_of", lambda kind: "another")
    assert whose(capsys)[1].startswith("global_mean: yours")
    assert len(runs) == 1
    monkeypatch.setattr(own, "_check_of", lambda kind: "a stricter one")
    monkeypatch.setattr(find(SLUG), "_expectations", {
        size: [{"the mean of call 0": torch.tensor(0.25)}] * size
        for size in (1, 2, 3, 4)})
    assert "no longer passes" in whose(capsys)[1]


@pytest.mark.parametrize("content", [
    b"def global_mean(values:", b"\xff\xfe", b"global_mean = 3", b"raise SystemExit(3)"])
def test_a_broken_file_is_said_in_one_line(capsys, passed, content):
    passed.write_bytes(content)
    value, line = whose(capsys)
    assert value is find(SLUG).solution
    assert "yours cannot be used" in line and str(passed) in line
    assert passed.read_bytes() == content


def test_a_folder_in_its_place_and_one_that_cannot_be_written(capsys, home):
    kept.place(SLUG).mkdir(parents=True)
    assert "yours cannot be used" in whose(capsys)[1]
    assert "could not be kept" in own.keep(find(SLUG), global_mean)
    assert not [path for path in (home / "mine").iterdir() if path.name.startswith("tmp")]


def test_reset_sets_it_aside(capsys, passed):
    text = passed.read_text()
    dplab.reset(SLUG)
    said = capsys.readouterr().out
    assert whose(capsys)[0] is find(SLUG).solution
    [aside] = passed.parent.iterdir()
    assert aside.read_text() == text and str(aside) in said


def test_a_part_may_ask_for_another_and_for_itself(capsys, passed):
    passed.write_text("import dplab\nagain = dplab.mine('global-mean')\n"
                      "def global_mean(values):\n    return again(values)\n")
    value, line = whose(capsys)
    assert line.startswith("global_mean: yours")
    assert value.__globals__["again"] is find(SLUG).solution


def asks_for_it():
    return dplab.mine(SLUG).__doc__


def test_on_a_rank_it_is_the_same_and_nothing_is_printed(capfd, passed):
    assert dplab.run(asks_for_it, 2) == [global_mean.__doc__] * 2
    assert capfd.readouterr().out == ""


def test_solution_and_an_export_with_code_show_yours(capsys, passed, home):
    for code in (False, True):
        dplab.progress(export=home / "out.json", code=code)
        assert ("FACTOR = 1" in (home / "out.json").read_text()) is code
    capsys.readouterr()
    dplab.solution(SLUG)
    out = capsys.readouterr().out
    assert 0 < out.index("FACTOR = 1") < out.index("torch.stack([values.sum()")
    assert "# dplab.mine" not in out


# In a real notebook


def cells(kernel, *texts):
    """Runs the cells; returns the last one's reply."""
    for text in texts:
        reply = kernel.run(textwrap.dedent(text).strip(), timeout=120)
        assert reply.status == "ok", reply.error
    return reply


@pytest.mark.slow
def test_in_a_notebook_and_in_the_next(home):
    start = "%load_ext dplab\nimport dplab, torch, torch.distributed as dist"
    with Kernel(DPLAB_HOME=str(home)) as kernel:
        reply = cells(kernel, start, """
            %%time
            class Bag:
                def add(self, *tensors):
                    self.all = [each.clone() for each in tensors]
                    return self
            """, """
            class SumBag(Bag):
                def over_ranks(self):
                    for each in self.all:
                        dist.all_reduce(each)
                    return self.all

            def global_mean(values):
                total, count = SumBag().add(values.sum(), torch.tensor(float(len(values)))
                                            ).over_ranks()
                return total / count
            """, "dplab.check('global-mean', global_mean)")
        assert "It is kept" in reply.text
        assert "<code>dplab.mine(&quot;global-mean&quot;)</code>" in str(reply.displays)
    with Kernel(DPLAB_HOME=str(home)) as kernel:
        reply = cells(kernel, start, "mean = dplab.mine('global-mean')")
        assert reply.text.startswith("global_mean: yours") and reply.text.count("\n") <= 2
        reply = cells(kernel, """
            %%ranks 3
            import torch, torch.distributed as dist
            round(mean(torch.arange(1.0 + 2 * dist.get_rank())).item(), 4)
            """)
        assert reply.value == str([round((0 + 3 + 10) / (1 + 3 + 5), 4)] * 3)
        reply = cells(kernel, "def global_mean(values):\n    return mean(values)",
                      "def f():\n    return mean(torch.ones(2)).item()\n\ndplab.run(f, 2)")
        assert reply.value == "[1.0, 1.0]"
        reply = cells(kernel, "dplab.solution('global-mean')")
        [data] = reply.displays.values()
        html = data["text/html"]
        assert html.count("<details") == 2 and "<details open" not in html
        assert html.index("Yours") < html.index("The course&#x27;s")
        assert "class SumBag(Bag)" in data["text/plain"]
        assert "# dplab.mine" not in html and "<span style=" in html
