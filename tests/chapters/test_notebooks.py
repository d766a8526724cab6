"""The chapters: how the .ipynb files are written, what they ask of a reader, stubs and checks.

That each notebook runs, and that each solution passes its check, shows the run of the notebook
itself: see `Chapter` in tests/tools/sandbox.py.
"""

import re
import tempfile
from pathlib import Path

import aims
import colab
import notebooks
import pytest
from sandbox import CHECK, ROOT, VERDICT

from dplab.checks import every_exercise, solution_source
from dplab.desk import course

PATHS = sorted((ROOT / "chapters").glob("*.ipynb"))
MINUTES = {exercise.slug: exercise.minutes for exercise in every_exercise()}

READABLE_ID = re.compile(r"(?!(?=.*\d)[0-9a-f-]{8,}$)[a-z][a-z0-9]*(-[a-z0-9]+)*")  # none drawn
HEADING = re.compile(
    r"^### Exercise ((?:\d+|[A-Z])\.\d+) · (.+)\n\n"
    r"Difficulty [●○]{5} · importance [●○]{5} · (\d+) minutes$", re.MULTILINE)
HERE = [re.escape(str(path)[1:]) for path in (Path.home(), Path.cwd(), Path(tempfile.gettempdir()))
        if path.parent != path]
OF_A_MACHINE = re.compile(  # a path, or the address of an object
    rf"(?<![\w/+.~])/(?:home|root|Users|work|tmp|mnt|opt|var/folders|{'|'.join(HERE)})/\S+"
    r"|/\S+/site-packages/\S*|\bat 0x[0-9a-f]{6,}")
PICTURE = re.compile(r"!\[[^\]]*\]|<img\b[^>]*>", re.IGNORECASE)
WITH_TEXT = re.compile(r"""!\[[^\]]*\w|.*\balt\s*=\s*["']\s*[^"'\s]""", re.IGNORECASE | re.DOTALL)
CODE_IN_MARKDOWN = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
# Lines that an editor has filled as one: the indents of a list's lines stand amid them.
JOINED_LIST = re.compile(r"^(?!\||\s*(?:\d+\.|-) ).*\S  +\S.*$", re.MULTILINE)
# Whole seconds and minutes are limits and reading times; what is measured has a fraction,
# a smaller unit, a rate or a comparison.
TIMING = re.compile(
    r"""(?<![\w.])\d[\d.,]*[ \u00a0\u202f]?
    (?: (?:ms|ns|[µμ]s|(?:milli|micro|nano)seconds?)\b
      | [kKMGT]?i?(?:B|bit|b)(?:/s|ps)\b
      | [×x][ \u00a0](?:faster|slower)\b )
    | (?<![\w.])\d+[.,]\d+[ \u00a0\u202f]?(?:s|sec|seconds?|min|minutes?)\b""", re.VERBOSE)
NO_TIMING = {  # these are chosen, published, or computed from such
    "01_split_the_batch": "50 GB/s, 400 GB/s",
    "03_all_reduce": (
        "0.1 s, 40 ms, 12.5 MB/s, 450 GB/s, 370 GB/s, 200 Gb/s, 200 GB/s, 400 Gb/s, 50 GB/s, "
        "100 Gb/s, 12.5 GB/s, 487 GB/s, 400 GB/s, 2.2 ms, 24.4 ms, 62 ms, 66 ms, 260 GB/s, "
        "25 GB/s"),
    "05_buckets_and_overlap": (
        "50 ms, 10 ms, 0.2 GB/s, 6 ms, 17 ms, 28 ms, 3.5 GB/s, 28 Gbit/s, 1 ms, 11 ms, 103 ms, "
        "144 ms, 35 ms, 100 ms, 185 ms"),
    "06_where_the_time_goes": (
        "20 ms, 10 ms, 8 ms, 16 ms, 12 ms, 21 ms, 37 ms, 12 µs, 35 ms, 27 ms, 119 ms, 220 ms, "
        "580 ms, 4 ms"),
    "07_how_many_gpus": "10 ms, 2 ms, 6 ms, 4 ms",
    "08_zero_by_hand": "5 ms, 10 ms, 2 ms, 1.3 ms",
    "09_zero_3_by_hand": "8 ms, 16 ms, 5.6 ms, 192 ms, 135 ms, 50 GB/s",
    "10_fsdp": "400 Gb/s, 400 GB/s",
    "11_what_would_you_rent": "4.5 ms, 1.7 ms, 1.5 ms, 1.1 ms, 400 GB/s, 400 Gb/s, 3.35 TB/s",
    "13_communicate_less": "4 MB/s, 5 ms, 40 ms, 136 ms, 56 ms",
    "appendix_other_cuts": "53 µs",
}

each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def code_cells(notebook, tag=None):
    return [cell for cell in notebook.cells if cell.cell_type == "code"
            and (tag is None or tag in cell.metadata.get("tags", []))]


def prose(notebook):
    """(cell's id, text without code) of each cell of Markdown."""
    return [(cell.id, CODE_IN_MARKDOWN.sub("code", cell.source)) for cell in notebook.cells
            if cell.cell_type == "markdown"]


def texts(cell, *kinds):
    """What the cell put out, as text: its streams, errors, and data whose type is among `kinds`."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.text
        else:
            yield from (str(text) for kind, text in output.get("data", {}).items()
                        if kind.startswith(kinds))


@each_notebook
def test_the_file_is_as_the_tools_write_it(path):
    """It holds no counts and no live state, no id twice, and Colab's cell if that can work."""
    text = notebooks.normalise(colab.for_colab(notebooks.read(path)))
    assert path.read_text(encoding="utf-8") == text, (
        f"python tests/tools/notebooks.py refresh {path}, python tests/tools/colab.py")


@each_notebook
def test_ids_are_readable_and_outputs_there_and_neither_shows_an_error_or_the_machine(path):
    notebook = notebooks.read(path)
    assert not [cell.id for cell in notebook.cells if not READABLE_ID.fullmatch(cell.id)]
    cells = code_cells(notebook)
    first = next(cell for cell in cells if cell.id != colab.ID)
    before, line, _ = first.source.partition("import dplab  # not found? In the menu: Kernel")
    assert line and not re.search(r"^(import|from) (dplab|torch)\b", before, re.MULTILINE)
    assert any(cell.outputs for cell in cells)
    assert not [cell.id for cell in cells for output in cell.outputs
                if output.output_type == "error"]
    assert not [(cell.id, found) for cell in cells
                for text in texts(cell, "text/", "image/svg", "application/json")
                if (found := OF_A_MACHINE.findall(text))]


@each_notebook
def test_pictures_have_a_text_lists_are_lists_and_prose_quotes_no_timing(path):
    notebook = notebooks.read(path)
    shown = prose(notebook) + [(cell.id, text) for cell in code_cells(notebook)
                               for text in texts(cell, "text/html")]
    assert not [(cell, picture) for cell, text in shown for picture in PICTURE.findall(text)
                if not WITH_TEXT.match(picture)]
    assert not [cell for cell, text in prose(notebook) if JOINED_LIST.search(text)]
    quoted = {match[0] for _, text in prose(notebook) for match in TIMING.finditer(text)}
    assert quoted == {*filter(None, NO_TIMING.get(path.stem, "").split(", "))}


@each_notebook
def test_each_exercise_has_a_heading_a_stub_and_then_a_check_that_was_not_attempted(path):
    """`Next` on a card leads to the heading, and `reset` takes the stub, by the cells' ids."""
    notebook, key = notebooks.read(path), course.key_of(path.stem)
    by_id = {cell.id: cell for cell in notebook.cells}
    order, stubs = list(by_id), [cell.metadata.dplab.exercise
                                 for cell in code_cells(notebook, "exercise")]
    for slug in stubs:
        heading, stub, check = (f"{kind}-{slug}" for kind in ("exercise", "stub", "check"))
        assert order.index(heading) < order.index(stub) < order.index(check)
        assert course.stub_of(key, slug) == by_id[stub].source
        assert CHECK.findall(by_id[check].source) == [slug]
        said = [found[1] for text in texts(by_id[check], "text/plain")
                if (found := VERDICT.match(text))]
        assert said == ["not attempted"], check
    checks = [cell.id for cell in code_cells(notebook) if CHECK.search(cell.source)]
    tagged = [cell.id for cell in code_cells(notebook, "check")]
    assert checks == tagged and sorted(checks) == sorted(f"check-{slug}" for slug in stubs)
    stated = [found for _, text in prose(notebook) for found in HEADING.findall(text)]
    assert stated == [(exercise.number, exercise.title, str(exercise.minutes))
                      for exercise in every_exercise() if exercise.chapter == key]


@each_notebook
def test_no_other_cell_uses_what_an_exercise_defines(path):
    """A chapter's run has the solutions in place after each check, a reader's may have the stubs.

    As no cell notices the difference, either of them shows what the other does. A name that
    `dplab.mine` has bound is no longer what the exercise's cell defined.
    """
    notebook = notebooks.read(path)
    theirs = code_cells(notebook, "exercise") + code_cells(notebook, "check")
    slugs = [cell.metadata.dplab.exercise for cell in code_cells(notebook, "exercise")]
    solutions = set().union(*(notebooks.names(source)[0] for source in (
        *map(solution_source, slugs), *(cell.source for cell in theirs))))
    for cell in code_cells(notebook):
        if cell not in theirs:
            solutions -= set(re.findall(r"^(\w+) = dplab\.mine\(", cell.source, re.MULTILINE))
            assert not solutions & set().union(*notebooks.names(cell.source)), cell.id


@each_notebook
def test_it_asks_no_more_of_its_reader_than_it_says(path):
    """What is shown, what is folded, what time it takes."""
    chapter = aims.Chapter(path)
    assert chapter.over() == {}
    assert list(aims.faults_of_cells(chapter)) == []
    stated = int(re.search(r"\babout (\d+) minutes\b", chapter.cells[0].source)[1])
    computed = chapter.minutes(MINUTES)
    assert abs(stated - computed) <= 0.1 * computed, f"computed: {computed} minutes"
