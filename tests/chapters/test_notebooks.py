"""The chapters: how the .ipynb files are written, and that stub and check stand in them in pairs.

That each notebook runs, and that each solution passes its check, shows the run of the notebook
itself: see `Chapter` in tests/tools/sandbox.py, which is tested here too.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import notebooks
import pytest
from nbformat.v4 import new_notebook, new_output
from nbformat.warnings import DuplicateCellId
from sandbox import CHECK, ROOT, VERDICT

from dplab.desk import course
from dplab.desk.buttons import InPlace

PATHS = sorted((ROOT / "chapters").glob("*.ipynb"))

MOST_LINES, MOST_LINES_OF_EXERCISE = 15, 30

READABLE_ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
RANDOM_ID = re.compile(r"(?=.*\d)[0-9a-f-]{8,}")
HEADING = re.compile(
    r"^### Exercise ((?:\d+|[A-Z])\.\d+) · (.+)\n\n"
    r"Difficulty [●○]{5} · importance [●○]{5} · (\d+) minutes$", re.MULTILINE)
HERE = [re.escape(str(path)[1:]) for path in (Path.home(), Path.cwd(), Path(tempfile.gettempdir()))
        if path.parent != path]
MACHINE_PATH = re.compile(
    rf"(?<![\w/+.~])/(?:home|root|Users|work|tmp|mnt|opt|var/folders|{'|'.join(HERE)})/\S+"
    r"|/\S+/site-packages/\S*")
ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")
MARKDOWN_PICTURE = re.compile(r"!\[([^\]]*)\]")
HTML_PICTURE = re.compile(r"<img\b[^>]*>", re.IGNORECASE)
ALT_TEXT = re.compile(r"""\balt\s*=\s*(["'])\s*[^"'\s]""", re.IGNORECASE)
CODE_IN_MARKDOWN = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
# Whole seconds and minutes are limits and reading times; what is measured has a fraction,
# a smaller unit, a rate or a comparison.
TIMING = re.compile(
    r"""(?<![\w.])\d[\d.,]*[ \u00a0\u202f]?
    (?: (?:ms|ns|[µμ]s|(?:milli|micro|nano)seconds?)\b
      | [kKMGT]?i?(?:B|bit|b)(?:/s|ps)\b
      | [×x][ \u00a0](?:faster|slower)\b )
    | (?<![\w.])\d+[.,]\d+[ \u00a0\u202f]?(?:s|sec|seconds?|min|minutes?)\b""", re.VERBOSE)
# (the notebook's name, the text as it stands there): why it is no timing
NO_TIMING = {("03_all_reduce", text) for text in (  # chosen, or published
    "0.1 s", "40 ms", "12.5 MB/s", "450 GB/s", "370 GB/s", "200 Gb/s",
    "200 GB/s", "400 Gb/s")} | {
    ("05_buckets_and_overlap", text) for text in (  # chosen, and computed from these
        "50 ms", "10 ms", "0.2 GB/s", "6 ms", "17 ms", "28 ms")} | {
    ("06_where_the_time_goes", text) for text in (  # chosen
        "20 ms", "60 ms", "10 ms", "8 ms", "16 ms", "12 ms", "21 ms")}

each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def code_cells(notebook, tag=None):
    return [cell for cell in notebook.cells if cell.cell_type == "code"
            and (tag is None or tag in cell.metadata.get("tags", []))]


def markdown(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"]


def texts(cell, *kinds):
    """What the cell put out, as text: its streams, errors, and data whose type is among `kinds`."""
    for output in cell.outputs:
        if output.output_type == "error":
            yield "\n".join(output.traceback)
        elif output.output_type == "stream":
            yield output.text
        else:
            yield from (text for kind, text in output.data.items() if kind.startswith(kinds))


def exercise_ids(notebook):
    return [cell.metadata.get("dplab", {}).get("exercise")
            for cell in code_cells(notebook, "exercise")]


def has_exercises(path):
    return bool(code_cells(notebooks.read(path), "exercise"))


@each_notebook
def test_file_is_normalised(path):
    normal = notebooks.normalise(notebooks.read(path))
    assert path.read_text(encoding="utf-8") == normal, (
        f"python tests/tools/notebooks.py refresh {path}")


@each_notebook
def test_no_execution_counts(path):
    for cell in code_cells(notebooks.read(path)):
        assert cell.execution_count is None, cell.id
        assert all(output.get("execution_count") is None for output in cell.outputs), cell.id


@each_notebook
def test_outputs_are_there_and_without_errors(path):
    cells = code_cells(notebooks.read(path))
    assert not cells or any(cell.outputs for cell in cells)
    errors = [cell.id for cell in cells
              for output in cell.outputs if output.output_type == "error"]
    assert not errors


@each_notebook
def test_outputs_show_nothing_of_the_machine(path):
    for cell in code_cells(notebooks.read(path)):
        for text in texts(cell, "text/", "image/svg", "application/json"):
            found = MACHINE_PATH.findall(str(text)) + ADDRESS.findall(str(text))
            assert not found, f"{cell.id} shows {found}"


@each_notebook
def test_cell_ids_are_unique_and_readable(path):
    ids = [cell["id"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    assert not {name for name in ids if ids.count(name) > 1}
    assert not [name for name in ids
                if not READABLE_ID.fullmatch(name) or RANDOM_ID.fullmatch(name)]


@each_notebook
def test_code_cells_are_short(path):
    for cell in code_cells(notebooks.read(path)):
        lines = [line for line in map(str.strip, cell.source.splitlines())
                 if line and not line.startswith("#")]
        exercise = "exercise" in cell.metadata.get("tags", [])
        assert len(lines) <= (MOST_LINES_OF_EXERCISE if exercise else MOST_LINES), cell.id


@each_notebook
def test_pictures_have_alt_text(path):
    notebook = notebooks.read(path)
    pages = [(cell.id, CODE_IN_MARKDOWN.sub("", cell.source)) for cell in markdown(notebook)]
    for name, text in pages:
        assert all(alt.strip() for alt in MARKDOWN_PICTURE.findall(text)), name
    pages += [(cell.id, text) for cell in code_cells(notebook) for text in texts(cell, "text/html")]
    for name, text in pages:
        assert all(ALT_TEXT.search(tag) for tag in HTML_PICTURE.findall(text)), name


@each_notebook
def test_prose_quotes_no_timing(path):
    quoted = {match[0]: cell.id for cell in markdown(notebooks.read(path))
              for match in TIMING.finditer(CODE_IN_MARKDOWN.sub("", cell.source))}
    excused = {text for name, text in NO_TIMING if name == path.stem}
    assert not {text: cell for text, cell in quoted.items() if text not in excused}
    assert not excused - quoted.keys(), "no longer there"


@each_notebook
def test_no_list_was_joined_to_a_paragraph(path):
    """Lines that an editor has filled as one: the indents of a list's lines stand amid them."""
    for cell in markdown(notebooks.read(path)):
        prose = CODE_IN_MARKDOWN.sub("code", cell.source)
        assert not re.findall(r"^(?!\||\s*(?:\d+\.|-) ).*\S  +\S.*$", prose, re.MULTILINE), cell.id


@pytest.mark.parametrize(("text", "is_timing"), [
    ("it takes 12 ms", True), ("in 3.4 s", True), ("at 25 GB/s", True), ("25GB/s", True),
    ("about 800 µs", True), ("2.5× faster", True), ("10 Gbps", True), ("1,234.5 seconds", True),
    ("after 60 s it gives up", False), ("about 40 minutes", False), ("8 ranks", False),
    ("3.5 GB per rank", False), ("torch 2.13", False), ("a 4× larger batch", False),
])
def test_what_counts_as_a_timing(text, is_timing):
    assert bool(TIMING.search(text)) == is_timing


@each_notebook
def test_each_exercise_has_one_stub_and_then_one_check(path):
    from dplab.checks import find

    notebook = notebooks.read(path)
    order = []
    for cell in code_cells(notebook):
        tags = cell.metadata.get("tags", [])
        checked = CHECK.findall(cell.source)
        assert ("check" in tags) == bool(checked), f"{cell.id}: the tag `check` is for checks"
        assert len(checked) <= 1, f"{cell.id}: one check in a cell"
        order += [("check", name) for name in checked]
        if "exercise" in tags:
            order.append(("stub", cell.metadata.get("dplab", {}).get("exercise")))
    stubs = exercise_ids(notebook)
    assert sorted(order) == sorted((kind, name) for name in stubs for kind in ("check", "stub"))
    assert len(set(stubs)) == len(stubs)
    for name in stubs:
        assert find(name).chapter == course.key_of(path.stem), "not of this chapter"
        assert order.index(("stub", name)) < order.index(("check", name))


@each_notebook
def test_checks_of_an_untouched_chapter_say_not_attempted(path):
    for cell in code_cells(notebooks.read(path), "check"):
        shown = list(texts(cell, "text/plain"))
        outcomes = [found[1] for text in shown if (found := VERDICT.match(text))]
        assert outcomes == ["not attempted"], f"{cell.id} shows {shown}"


@pytest.mark.parametrize("path", list(filter(has_exercises, PATHS)), ids=lambda path: path.stem)
def test_no_other_cell_uses_what_an_exercise_defines(path):
    """A chapter's run has the solutions in place after each check, a reader's may have the stubs.

    As no cell notices the difference, either of them shows what the other does. A name that
    `dplab.mine` has bound is no longer what the exercise's cell defined.
    """
    from dplab.checks import solution_source

    cells = code_cells(notebooks.swap(notebooks.read(path), solution_source))
    theirs = [cell for cell in cells if {"exercise", "check"} & set(cell.metadata.get("tags", []))]
    solutions = set().union(*(notebooks.names(cell.source)[0] for cell in theirs))
    shared, rebound = {}, set()
    for cell in cells:
        if cell not in theirs:
            rebound |= set(re.findall(r"^(\w+) = dplab\.mine\(", cell.source, re.MULTILINE))
            if both := solutions & set().union(*notebooks.names(cell.source)) - rebound:
                shared[cell.id] = both
    assert not shared


SAMPLE = """\
# %% id=setup
import os
from IPython.display import display

outcomes = {"global-mean": ["not attempted", "passed"], "rows-to-hide": ["wrong", "passed"],
            "weighted-mean": ["not attempted", "wrong"]}
homes = [os.environ["DPLAB_HOME"]]

def check(id, attempt):
    homes.append(os.environ["DPLAB_HOME"])
    display({"text/plain": f"Exercise 0.1: {outcomes[id].pop(0)}"}, raw=True)

# %% id=stub tags=exercise exercise=global-mean
def global_mean(values):
    raise NotImplementedError

# %% id=check-global-mean tags=check
check("global-mean", global_mean)

# %% id=with-the-solution
assert "NotImplementedError" not in global_mean.__code__.co_names
assert homes[0] == homes[1] != homes[2] and os.environ["DPLAB_HOME"] == homes[0]

# %% id=check-rows-to-hide tags=check
check("rows-to-hide", None)

# %% id=check-weighted-mean tags=check
check("weighted-mean", None)
"""


@pytest.mark.slow
def test_the_run_of_a_notebook_puts_each_solution_behind_its_check(tmp_path):
    path = tmp_path / "00_sample.ipynb"
    path.write_text(notebooks.normalise(notebooks.from_percent(SAMPLE)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-n", "0", "-rA", path],
        cwd=ROOT, capture_output=True, text=True, timeout=120)
    ran = {name: outcome for outcome, name in re.findall(
        r"^(PASSED|FAILED) .*?::(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)}
    assert ran == {
        "Cell 0": "PASSED", "Cell 1": "PASSED", "global-mean not attempted": "PASSED",
        "global-mean solution": "PASSED", "global-mean solved": "PASSED", "Cell 3": "PASSED",
        "rows-to-hide not attempted": "FAILED", "rows-to-hide solution": "PASSED",
        "rows-to-hide solved": "PASSED", "weighted-mean not attempted": "PASSED",
        "weighted-mean solution": "PASSED", "weighted-mean solved": "FAILED"}
    assert "should say 'not attempted', and shows Exercise 0.1: wrong" in done.stdout
    assert "should say 'passed', and shows Exercise 0.1: wrong" in done.stdout


@pytest.mark.parametrize("path", list(filter(has_exercises, PATHS)), ids=lambda path: path.stem)
def test_the_heading_of_an_exercise_is_what_the_check_knows(path):
    from dplab.checks import every_exercise

    notebook = notebooks.read(path)
    headings = [found for cell in markdown(notebook) for found in HEADING.findall(cell.source)]
    known = [(exercise.number, exercise.title, str(exercise.minutes))
             for exercise in every_exercise() if exercise.slug in exercise_ids(notebook)]
    assert headings == known


@pytest.mark.parametrize("path", list(filter(has_exercises, PATHS)), ids=lambda path: path.stem)
def test_the_cells_of_an_exercise_are_found_by_its_slug(path):
    """`Next` on a card leads to the heading, and `reset` takes the stub."""
    notebook = notebooks.read(path)
    for slug in exercise_ids(notebook):
        found = {cell.id: cell.source for cell in notebook.cells if cell.id.endswith(f"-{slug}")}
        assert "### Exercise " in found[f"exercise-{slug}"]
        assert course.stub_of(course.key_of(path.stem), slug) == found[f"stub-{slug}"]
        assert CHECK.search(found[f"check-{slug}"])[1] == slug


DRAFT = '''\
# %% [markdown] id=the-question
# # Title
#
# #hashes, ![a picture](x.svg)
#! # %% is no header here

# %% id=magics
#! %load_ext autoreload
#! !true
#! # %% is no header here
#! #! neither is this lost
print("one")

# %% id=stub tags=exercise,slow exercise=rows-to-hide
def answer():
    """Up to you."""

# %% id=check-4-1 tags=check
print(f"Exercise 4.1: {answer()}")
'''


def test_percent_format_and_notebook_turn_into_each_other():
    notebook = notebooks.from_percent(DRAFT)
    question, magics, stub, _ = notebook.cells
    assert question.source == "# Title\n\n#hashes, ![a picture](x.svg)\n%% is no header here"
    assert magics.source.splitlines()[:2] == ["%load_ext autoreload", "!true"]
    assert magics.source.splitlines()[2:4] == ["# %% is no header here", "#! neither is this lost"]
    assert stub.metadata == {"tags": ["exercise", "slow"], "dplab": {"exercise": "rows-to-hide"}}
    assert notebooks.to_percent(notebook) == DRAFT


@pytest.mark.parametrize("draft", [
    "x = 1\n", "# %%\nx = 1\n", "# %% [md] id=a\n", "# %% id=a tag=b\n",
    "# %% [markdown] id=a\nno hash\n",
])
def test_a_draft_with_a_mistake_is_refused(draft):
    with pytest.raises(ValueError, match=r"line \d"):
        notebooks.from_percent(draft)


def test_an_id_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(DuplicateCellId):
        notebooks.from_percent(DRAFT.replace("id=stub", "id=magics"))
    path = tmp_path / "04_sample.ipynb"
    text = notebooks.normalise(notebooks.from_percent(DRAFT))
    path.write_text(text.replace('"id": "stub"', '"id": "magics"'), encoding="utf-8")
    with pytest.raises(DuplicateCellId):
        notebooks.read(path)


def test_what_needs_a_kernel_is_not_kept():
    view = {notebooks.WIDGET: {"model_id": "1"}}
    light = '<img src="light">'
    [cell] = notebooks.from_percent("# %% id=a\nshow\n").cells
    cell.outputs = [new_output("display_data", {**view, "text/plain": ""}),
                    new_output("display_data", {**view, "text/plain": "a guess"}),
                    new_output("display_data", {"text/plain": ""}),
                    new_output("display_data", InPlace().bundle("in place of a widget")),
                    new_output("display_data", {
                        "text/html": f'{light}<style class="dplab-dark">.a\n{{}}</style> and'})]
    text = notebooks.normalise(new_notebook(cells=[cell]))
    [cell] = nbformat.reads(text, as_version=4).cells
    assert [output.data for output in cell.outputs] == [
        {"text/plain": "a guess"}, {"text/plain": ""}, {"text/html": f"{light} and"}]


@pytest.mark.slow
def test_refresh_gives_the_same_bytes_twice_and_swap_puts_solutions_in(tmp_path):
    path = tmp_path / "04_sample.ipynb"
    path.write_text(notebooks.normalise(notebooks.from_percent(DRAFT)), encoding="utf-8")
    notebooks.refresh(path)
    first = path.read_bytes()
    notebooks.refresh(path)
    assert path.read_bytes() == first
    sample = notebooks.read(path)
    assert list(texts(sample.cells[-1])) == ["Exercise 4.1: None\n"]

    solutions = {"rows-to-hide": "def answer():\n    return 'passed'\n"}
    solved = notebooks.execute(notebooks.swap(sample, solutions.get), tmp_path)
    assert list(texts(solved.cells[-1])) == ["Exercise 4.1: passed\n"]


@pytest.mark.slow
def test_refresh_knows_nothing_of_the_progress_of_whoever_runs_it(tmp_path, monkeypatch):
    from dplab.desk import record

    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "home"))
    assert record.update("exercises", "global-mean", lambda entry: entry.update(outcome="passed"))
    draft = ("# %% id=progress\nfrom dplab.desk import record\n"
             "print(record.entries('exercises'), record.entries('guesses'))\n")
    path = tmp_path / "00_sample.ipynb"
    path.write_text(notebooks.normalise(notebooks.from_percent(draft)), encoding="utf-8")
    notebooks.refresh(path)
    assert list(texts(notebooks.read(path).cells[0])) == ["{} {}\n"]
    assert record.entries("exercises")
