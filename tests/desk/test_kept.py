"""`dplab.mine`: kept at a pass, tried by fresh ranks, whose it is, and when it no longer passes."""

import shutil

import pytest
import torch
import torch.distributed as dist
from kernel import Kernel

import dplab
from dplab.checks import find, own
from dplab.checks.exercise import PASSED
from dplab.desk import kept, record

SLUG = "global-mean"
COURSES = find(SLUG).solution
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


@pytest.fixture
def whose(capsys):
    """What `mine` returns, and its one line."""
    def whose(id=SLUG):
        capsys.readouterr()
        value = dplab.mine(id)
        [line] = capsys.readouterr().out.splitlines()
        return value, line
    return whose


@pytest.fixture
def runs(monkeypatch):
    """Grows with each run of an exercise on fresh ranks from here on."""
    runs, rerun = [], type(find(SLUG)).rerun
    monkeypatch.setattr(type(find(SLUG)), "rerun",
                        lambda self, *parts: runs.append(1) or rerun(self, *parts))
    return runs


def test_it_is_the_courses_until_yours_passes_and_is_kept(whose):
    value, line = whose()
    assert value is COURSES and line.startswith("global_mean: the course's, until")
    record.update("exercises", SLUG, lambda entry: entry.update(outcome=PASSED))
    value, line = whose()
    assert value is COURSES and "not kept" in line and "until" not in line
    with pytest.raises(ValueError, match="no-such"):
        dplab.mine("no-such")


@pytest.mark.slow
def test_a_pass_is_kept_and_gives_the_same_on_ranks(whose, passed, runs, capsys):
    value, line = whose(find(SLUG).number)
    assert line == f"global_mean: yours, from {passed}."
    assert value is not global_mean and value.__doc__ == global_mean.__doc__
    assert "FACTOR = 1" in passed.read_text() and "with_a_tensor" not in passed.read_text()

    def on_a_rank():
        part = torch.arange(1.0 + 2 * dist.get_rank())
        return [round(mean(part).item(), 4) for mean in (value, dplab.mine(SLUG))]

    assert dplab.run(on_a_rank, 2, backend="gloo") == [[3 / 4] * 2] * 2
    assert capsys.readouterr().out == "" and not runs


@pytest.mark.slow
def test_what_cannot_be_kept_says_why_and_leaves_what_was_kept(capsys, passed, monkeypatch):
    """Nor is the course's own code kept as the reader's, or what `mine` gave."""
    before = passed.read_text()
    dplab.check(SLUG, with_a_tensor)
    out = capsys.readouterr().out
    assert "passed" in out and "`scale`, a Tensor that `with_a_tensor` uses" in out
    monkeypatch.setitem(globals(), "from_mine", dplab.mine(SLUG))
    assert own.keep(find(SLUG), from_mine) == ""
    assert "this very exercise" in own.keep(find(SLUG), by_what_mine_gave)
    for attempt in (COURSES, torch.sum):
        assert own.keep(find(SLUG), attempt)
    monkeypatch.setattr(kept, "written_down",
                        lambda *_: "def global_mean(values):\n    return nowhere")
    assert "'nowhere' is not defined" in own.keep(find(SLUG), global_mean)
    assert passed.read_text() == before


@pytest.mark.slow
def test_an_attempt_that_its_check_calls_in_the_notebook_is_kept(monkeypatch):
    monkeypatch.setattr(kept, "written_down", lambda *_: (
        "def choose_units(model):\n    first, second = model.blocks[::2], model.blocks[1::2]\n"
        "    pairs = [list(pair) for pair in zip(first, second, strict=True)]\n"
        "    return [model.embedding, *pairs, [model.norm, model.head]]"))
    assert "It is kept" in own.keep(find("choose-units"), global_mean)


@pytest.mark.slow
def test_an_edited_file_or_a_changed_check_is_tried_once_more(whose, passed, runs, monkeypatch):
    right = passed.read_text()
    wrong = right.replace("FACTOR = 1", "FACTOR = 2")
    passed.write_text(wrong)
    for _ in range(2):
        value, line = whose()
        assert value is COURSES and "no longer passes" in line and str(passed) in line
    assert len(runs) == 1 and passed.read_text() == wrong
    passed.write_text(right)
    assert whose()[1].startswith("global_mean: yours") and len(runs) == 2
    monkeypatch.setattr(own, "_check_of", lambda kind: "a stricter one")
    monkeypatch.setattr(find(SLUG), "_expectations", {
        size: [{"the mean of call 0": torch.tensor(0.25)}] * size for size in (1, 2, 3, 4)})
    assert "no longer passes" in whose()[1] and len(runs) == 3


@pytest.mark.parametrize("content", [
    b"def global_mean(values:", b"\xff\xfe", b"global_mean = 3", b"raise SystemExit(3)", None])
def test_a_broken_file_is_said_in_one_line_and_left(whose, home, content):
    """Also a folder in its place, in which nothing can be kept."""
    place = kept.place(SLUG)
    place.parent.mkdir()
    place.mkdir() if content is None else place.write_bytes(content)
    value, line = whose()
    assert value is COURSES and "yours cannot be used" in line and str(place) in line
    if content is None:
        assert "could not be kept" in own.keep(find(SLUG), global_mean)
        assert [*place.parent.iterdir()] == [place]
    else:
        assert place.read_bytes() == content


def test_yours_is_shown_and_exported_on_request_and_a_reset_sets_it_aside(
        capsys, passed, home, whose):
    for code in (False, True):
        dplab.progress(export=home / "out.json", code=code)
        assert ("FACTOR = 1" in (home / "out.json").read_text()) is code
    capsys.readouterr()
    dplab.solution(SLUG)
    out = capsys.readouterr().out
    assert 0 < out.index("FACTOR = 1") < out.index("torch.stack([values.sum()")
    assert "# dplab.mine" not in out
    text = passed.read_text()
    dplab.reset(SLUG)
    [aside] = passed.parent.iterdir()
    assert aside.read_text() == text and str(aside) in capsys.readouterr().out
    assert whose()[0] is COURSES


@pytest.mark.slow
def test_a_notebook_shows_the_next_days_reader_both_solutions_folded(home, passed):
    with Kernel(DPLAB_HOME=str(home)) as kernel:
        kernel.run("import dplab")
        [data] = kernel.run("dplab.solution('global-mean')").displays.values()
    html = data["text/html"]
    assert html.count("<details") == 2 and "<details open" not in html
    assert html.index("Yours") < html.index("The course&#x27;s") and "<span style=" in html
    assert "FACTOR = 1" in data["text/plain"] and "# dplab.mine" not in html
