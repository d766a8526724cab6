"""The chapters: how the .ipynb files are written, and that stub and check stand in them in pairs.

That each notebook runs, and that each solution passes its check, shows the run of the notebook
itself: see `Chapter` in tests/tools/sandbox.py.
"""

import re
import tempfile
from pathlib import Path

import nbformat
import notebooks
import pytest
from nbformat.v4 import new_notebook, new_output
from sandbox import CHECK, ROOT, VERDICT

from dplab.checks import every_exercise, solution_source
from dplab.desk import course
from dplab.desk.buttons import InPlace

PATHS = sorted((ROOT / "chapters").glob("*.ipynb"))

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
NO_TIMING = {  # these are chosen, published, or computed from such
    "01_split_the_batch": {"50 GB/s", "400 GB/s"},
    "03_all_reduce": {"0.1 s", "40 ms", "12.5 MB/s", "450 GB/s", "370 GB/s", "200 Gb/s",
                      "200 GB/s", "400 Gb/s", "50 GB/s", "100 Gb/s", "12.5 GB/s", "487 GB/s",
                      "400 GB/s", "2.2 ms", "24.4 ms", "62 ms", "66 ms", "260 GB/s",
                      "25 GB/s"},
    "05_buckets_and_overlap": {"50 ms", "10 ms", "0.2 GB/s", "6 ms", "17 ms", "28 ms",
                               "3.5 GB/s", "28 Gbit/s", "1 ms", "11 ms", "103 ms", "144 ms",
                               "35 ms", "100 ms", "185 ms"},
    "06_where_the_time_goes": {"20 ms", "10 ms", "8 ms", "16 ms", "12 ms", "21 ms", "37 ms",
                               "12 µs", "35 ms", "27 ms", "119 ms", "220 ms", "580 ms", "4 ms"},
    "07_how_many_gpus": {"10 ms", "2 ms", "6 ms", "4 ms"},
    "08_zero_by_hand": {"5 ms", "10 ms", "2 ms", "1.3 ms"},
    "09_zero_3_by_hand": {"8 ms", "16 ms", "5.6 ms", "192 ms", "135 ms", "400 Gb/s"},
    "10_fsdp": {"400 Gb/s", "400 GB/s"},
    "11_what_would_you_rent": {"4.5 ms", "1.7 ms", "1.5 ms", "1.1 ms", "400 GB/s", "400 Gb/s",
                               "3.35 TB/s"},
    "13_communicate_less": {"4 MB/s", "5 ms", "40 ms", "136 ms", "56 ms"},
    "appendix_other_cuts": {"53 µs"},
}

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


@each_notebook
def test_file_is_normalised(path):
    """It holds no counts and no live state, and no id twice."""
    normal = notebooks.normalise(notebooks.read(path))
    assert path.read_text(encoding="utf-8") == normal, (
        f"python tests/tools/notebooks.py refresh {path}")


@each_notebook
def test_cell_ids_are_readable(path):
    ids = [cell.id for cell in notebooks.read(path).cells]
    assert not [name for name in ids
                if not READABLE_ID.fullmatch(name) or RANDOM_ID.fullmatch(name)]


@each_notebook
def test_outputs_are_there_without_errors_and_show_nothing_of_the_machine(path):
    cells = code_cells(notebooks.read(path))
    assert not cells or any(cell.outputs for cell in cells)
    for cell in cells:
        assert "error" not in [output.output_type for output in cell.outputs], cell.id
        for text in texts(cell, "text/", "image/svg", "application/json"):
            found = MACHINE_PATH.findall(str(text)) + ADDRESS.findall(str(text))
            assert not found, f"{cell.id} shows {found}"


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
    excused = NO_TIMING.get(path.stem, set())
    assert not {text: cell for text, cell in quoted.items() if text not in excused}
    assert not excused - quoted.keys(), "no longer there"


@each_notebook
def test_no_list_was_joined_to_a_paragraph(path):
    """Lines that an editor has filled as one: the indents of a list's lines stand amid them."""
    for cell in markdown(notebooks.read(path)):
        prose = CODE_IN_MARKDOWN.sub("code", cell.source)
        assert not re.findall(r"^(?!\||\s*(?:\d+\.|-) ).*\S  +\S.*$", prose, re.MULTILINE), cell.id


@each_notebook
def test_each_exercise_has_a_heading_a_stub_and_then_a_check(path):
    """`Next` on a card leads to the heading, and `reset` takes the stub, by the cells' ids."""
    notebook = notebooks.read(path)
    stubs, by_id = exercise_ids(notebook), {cell.id: cell for cell in notebook.cells}
    order = list(by_id)
    for slug in stubs:
        heading, stub, check = (f"{kind}-{slug}" for kind in ("exercise", "stub", "check"))
        assert order.index(heading) < order.index(stub) < order.index(check)
        assert course.stub_of(course.key_of(path.stem), slug) == by_id[stub].source
        assert CHECK.findall(by_id[check].source) == [slug]
    checks = [cell.id for cell in code_cells(notebook) if CHECK.search(cell.source)]
    tagged = [cell.id for cell in code_cells(notebook, "check")]
    assert checks == tagged and sorted(checks) == sorted(f"check-{slug}" for slug in stubs)
    stated = [found for cell in markdown(notebook) for found in HEADING.findall(cell.source)]
    assert stated == [(exercise.number, exercise.title, str(exercise.minutes))
                      for exercise in every_exercise()
                      if exercise.chapter == course.key_of(path.stem)]


@each_notebook
def test_checks_of_an_untouched_chapter_say_not_attempted(path):
    for cell in code_cells(notebooks.read(path), "check"):
        shown = list(texts(cell, "text/plain"))
        outcomes = [found[1] for text in shown if (found := VERDICT.match(text))]
        assert outcomes == ["not attempted"], f"{cell.id} shows {shown}"


@each_notebook
def test_no_other_cell_uses_what_an_exercise_defines(path):
    """A chapter's run has the solutions in place after each check, a reader's may have the stubs.

    As no cell notices the difference, either of them shows what the other does. A name that
    `dplab.mine` has bound is no longer what the exercise's cell defined.
    """
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


# The tool that keeps the notebooks

DRAFT = '''\
# %% [markdown] id=the-question
# # Title
#
# #hashes, ![a picture](x.svg)
#! # %% is no header here

# %% id=magics
#! %load_ext dplab
#! !true
#! # %% is no header here
from dplab.desk import record
print(record.entries('exercises'))

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
    assert magics.source.splitlines()[:3] == [
        "%load_ext dplab", "!true", "# %% is no header here"]
    assert stub.metadata == {"tags": ["exercise", "slow"], "dplab": {"exercise": "rows-to-hide"}}
    assert notebooks.to_percent(notebook) == DRAFT


def test_what_needs_a_kernel_is_not_kept():
    light = '<img src="light">'
    [cell] = notebooks.from_percent("# %% id=a\nshow\n").cells
    cell.outputs = [new_output("display_data", data) for data in (
        {notebooks.WIDGET: {"model_id": "1"}, "text/plain": ""},
        {notebooks.WIDGET: {"model_id": "1"}, "text/plain": "a guess"},
        InPlace().bundle("in place of a widget"),
        {"text/html": f'{light}<style class="dplab-dark">.a\n{{}}</style> and'})]
    text = notebooks.normalise(new_notebook(cells=[cell]))
    [cell] = nbformat.reads(text, as_version=4).cells
    assert [output.data for output in cell.outputs] == [
        {"text/plain": "a guess"}, {"text/html": f"{light} and"}]


@pytest.mark.slow
def test_refresh_writes_what_a_reader_without_progress_sees(tmp_path, monkeypatch):
    from dplab.desk import record

    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "home"))
    assert record.update("exercises", "global-mean", lambda entry: entry.update(outcome="passed"))
    path = tmp_path / "04_sample.ipynb"
    path.write_text(notebooks.normalise(notebooks.from_percent(DRAFT)), encoding="utf-8")
    notebooks.refresh(path)
    cells = code_cells(notebooks.read(path))
    assert [list(texts(cell)) for cell in cells] == [["{}\n"], [], ["Exercise 4.1: None\n"]]
