"""The reader's copy of the course: made, kept, brought up to date, and never poorer by a line."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys

import pytest

from dplab.lab import command, jupyterlab
from dplab.lab.answers import NOTE, answers_in, stubs_in, with_answers

FIRST, THIRD = "chapters/00_start_here.ipynb", "chapters/03_all_reduce.ipynb"
STUB = '''\
def total(values):
    """The sum over all ranks."""
    raise NotImplementedError("your turn")'''
ANSWER = """\
def total(values):
    # the reader's way
    return sum(values)"""
OUTPUT = {"output_type": "stream", "name": "stdout", "text": ["the result gives it away\n"]}
FILES = {"chapters/data/sweep.json": "[1, 2]\n", "figures/ring.svg": "<svg/>\n",
         "chapters/03_launch/train.py": "print('train')\n",
         "README.md": "# Course\n\n[first](chapters/00_start_here.ipynb)\n",
         "figures/ring.py": "draws ring.svg\n"}


def cell(id, source, *, slug=None, kind="code", outputs=()):
    """A cell as a notebook file has it; with a slug, an exercise's."""
    metadata = {"tags": ["exercise"], "dplab": {"exercise": slug}} if slug else {}
    extra = {"outputs": list(outputs), "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "id": id, "metadata": metadata, "source": source, **extra}


def book(*cells):
    return {"cells": [dict(each) for each in cells], "metadata": {}, "nbformat": 4,
            "nbformat_minor": 5}


def chapter(title="All-reduce", slug="total-of-ranks"):
    """A chapter with prose, a cell of the course, an exercise, a guess and a picture."""
    return book(
        cell("question", f"# {title}\n\n![ring](../figures/ring.svg) [all](../README.md)",
             kind="markdown"),
        cell("setup", "ranks = 4", outputs=[OUTPUT]),
        cell("stub-total", STUB, slug=slug),
        cell("check-total", 'check("total-of-ranks", total)', outputs=[OUTPUT]),
        cell("guess-bytes", 'dplab.guess("bytes-moved", "How many bytes?", unit="MB")'),
        cell("last", "print(ranks)"))


def sources(notebook):
    """The text of each cell, as it stands in a file or in memory."""
    return ["".join(each["source"]) for each in notebook["cells"]]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))


def read(path):
    return json.loads(path.read_text())


def change(path, id, **parts):
    """Changes these parts of a cell of a notebook file."""
    notebook = read(path)
    next(each for each in notebook["cells"] if each["id"] == id).update(parts)
    write(path, notebook)


def set_source(path, id, source):
    change(path, id, source=source.splitlines(keepends=True))  # as JupyterLab writes it


def answer_in(path):
    set_source(path, "stub-total", ANSWER)


def run_in(path):
    """What JupyterLab leaves in a notebook that was run and saved."""
    change(path, "setup", outputs=[OUTPUT | {"text": ["4\n"]}])


def commit(course):
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c",
                  "user.email=a@example.org", "commit", "-qm", "a version"]):
        subprocess.run(["git", *words], cwd=course, check=True, capture_output=True)


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A small course in a repository."""
    root = tmp_path / "a clone"
    for name, content in {FIRST: chapter("Start here", "another-total"), THIRD: chapter(),
                          **FILES}.items():
        write(root / name, content)
    commit(root)
    monkeypatch.setattr(command, "ROOT", root)
    return root


@pytest.fixture
def lab(course, capsys):
    """A function that runs ``dplab lab --copy-only``; returns what it printed."""
    def run(*arguments, status=0):
        assert command.lab([*arguments, "--copy-only"]) == status
        return "".join(capsys.readouterr())
    return run


@pytest.fixture
def copy(course, lab):
    lab()
    return course / "my_course"


def change_course(course, source="ranks = 8"):
    """A newer version of chapter 03, with another cell."""
    set_source(course / THIRD, "setup", source)
    commit(course)


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and ".course" not in path.parts}


def kept(copy, pattern="03_*.before-*"):
    """What was kept beside the notebooks of the copy."""
    return sorted(path.read_bytes() for path in (copy / "chapters").glob(pattern))


# What lies in it


@pytest.mark.parametrize("with_git", [True, False])
def test_the_copy_has_what_chapters_need_and_nothing_else(course, lab, with_git):
    """No outputs, nothing that git does not know or that is hidden, of the web book linked pages;
    and the rules for assistants where editors look for them.
    """
    for name, page in {"setup.md": "[next](more.md)", "more.md": "# More", "conf.py": "",
                       "assistants.md": "# Rules\n\n[all](../glossary.md)"}.items():
        write(course / "chapters/book" / name, page)
    (course / "README.md").write_text(
        "[a](chapters/book/setup.md) [b](chapters/book/assistants.md) [c](../outside.md)")
    (course.parent / "outside.md").write_text("not of the course")
    commit(course)
    expected = files(course)
    write(course / "chapters/.ipynb_checkpoints/x.ipynb", "no notebook")
    if with_git:
        (course / "chapters/Untitled.ipynb").write_text("no notebook")
        answer_in(course / THIRD)  # in the clone itself: not the course's text
    else:
        shutil.rmtree(course / ".git")
    lab()
    found = files(course / "my_course")
    assert not (course / "outside.md").exists()
    assert found.pop("AGENTS.md") == b"# Rules\n\n[all](chapters/glossary.md)"
    assert found.keys() == {
        "README.md", "figures/ring.svg", "chapters/data/sweep.json", THIRD, FIRST,
        "chapters/03_launch/train.py", *(f"chapters/book/{name}.md" for name in (
            "setup", "more", "assistants"))}
    for name in found.keys() - {FIRST, THIRD}:
        assert found[name] == expected[name]
    third = read(course / "my_course" / THIRD)
    assert sources(third) == sources(chapter()) and b"gives it away" in expected[THIRD]
    assert not any(each.get("outputs") for each in third["cells"])


def test_a_copy_of_the_real_course_is_complete(tmp_path):
    """Every link, picture and data file of the copied chapters leads to a file of the copy."""
    assert command.lab([str(tmp_path / "copy"), "--copy-only"]) == 0
    dead, count = [], 0
    for path in (tmp_path / "copy/chapters").glob("*.ipynb"):
        cells = [each for each in read(path)["cells"] if each["cell_type"] == "markdown"]
        found = re.findall(r"\]\(([^)#\s]+)", "\n".join(sources({"cells": cells})))
        found += re.findall(r'Path\(\\"((?:data/|launch)[^"\\]*)', path.read_text())
        count += len(found)
        dead += [(path.name, target) for target in found
                 if "://" not in target and not (path.parent / target).exists()]
    assert count > 50 and not dead


# What happens to the reader's files


def test_nothing_changes_at_a_second_start_and_what_is_missing_comes_back(course, lab, tmp_path):
    place = tmp_path / "at home" / "course of mine"
    lab(str(place))
    answer_in(place / THIRD)
    run_in(place / FIRST)
    (place / "chapters/mine.ipynb").write_text("whatever")
    (place / "README.md").unlink()
    before = files(place)
    assert "README.md" in lab(str(place)) and "New" not in lab(str(place))
    assert files(place) == before | {"README.md": (course / "README.md").read_bytes()}
    assert not (course / "my_course").exists()
    (course / THIRD).unlink()  # it left the course
    commit(course)
    lab(str(place))
    assert files(place)[THIRD] == before[THIRD]


def test_what_the_reader_has_not_touched_follows_the_course_by_itself(course, copy, lab):
    (course / "chapters/data/sweep.json").write_text("[3]\n")
    change_course(course)
    assert "03_all_reduce" in lab()
    assert sources(read(copy / THIRD)) == sources(read(course / THIRD)) and not kept(copy)
    assert (copy / "chapters/data/sweep.json").read_text() == "[3]\n"


@pytest.mark.parametrize("touch", [run_in, answer_in,
                                   lambda path: set_source(path, "last", "x = 1")])
def test_an_update_waits_for_the_word_brings_answers_and_keeps_the_old_notebook(
        course, copy, lab, touch):
    """Also a second one on the same day; then only the answer comes along."""
    olds = []
    for number, word in ((8, "03"), (16, "all")):
        touch(copy / THIRD)
        olds.append((copy / THIRD).read_bytes())
        change_course(course, f"ranks = {number}")
        said = lab()
        assert "Newer in the course" in said and "--update 03" in said
        assert (copy / THIRD).read_bytes() == olds[-1]
        assert "brought over; as it was: chapters/03_all_reduce.before-" in lab("--update", word)
        expected = sources(read(course / THIRD))
        expected[2] = ANSWER if touch is answer_in else STUB
        assert sources(read(copy / THIRD)) == expected
        assert kept(copy) == sorted(olds) and "Newer" not in lab()


def test_an_edited_file_beside_the_chapters_is_kept_under_another_name(course, copy, lab):
    (copy / "chapters/03_launch/train.py").write_text("print('mine')\n")
    (course / "chapters/03_launch/train.py").write_text("print('newer')\n")
    commit(course)
    assert "--update 03_launch/train.py" in lab()
    lab("--update", "03_launch/train.py")
    assert kept(copy, "03_launch/train.before-*.py") == [b"print('mine')\n"]
    assert (copy / "chapters/03_launch/train.py").read_text() == "print('newer')\n"


def test_a_chapter_is_begun_anew_by_its_number_and_an_appendix_by_its_letter(course, copy, lab):
    path = "chapters/appendix_other_cuts.ipynb"
    write(course / path, chapter("Other cuts"))
    commit(course)
    lab()
    for name, words in ((THIRD, ("3", "03_all_reduce")), (path, ("B", "b"))):
        for word in words:
            answer_in(copy / name)
            assert f"{name}: new from the course; as it was" in lab("--fresh", word)
            assert STUB in sources(read(copy / name))
    assert len(kept(copy)) == 1
    for option in ("--fresh", "--update"):
        assert "no chapter 77" in lab(option, "77", status=1)
    answer_in(copy / path)
    set_source(course / path, "setup", "ranks = 2")
    commit(course)
    assert "--update B" in lab() and "--update" not in lab("--fresh", "B")


def test_a_broken_notebook_is_left_alone_until_a_new_one_is_asked_for(course, copy, lab):
    broken = (copy / THIRD).read_bytes()[:300]  # as a full disk or a stop leaves it
    (copy / THIRD).write_bytes(broken)
    change_course(course)
    for arguments in (["--update", "all"], ["--import", str(course)]):
        said = lab(*arguments)
        assert str(copy / THIRD) in said and "--fresh 03" in said and "--update 03" not in said
    assert "no answers" in lab("--update", "03", status=1)
    assert (copy / THIRD).read_bytes() == broken
    said = lab("--fresh", "03")
    assert "is broken" not in said and "Newer" not in said
    assert sources(read(copy / THIRD)) == sources(read(course / THIRD)) and kept(copy) == [broken]
    before = files(copy)
    (course / THIRD).write_text("<<<<<<< HEAD\n")  # the course's own; until then the last commit
    lab()
    commit(course)
    assert str(course / THIRD) in lab(status=1) and files(copy) == before


def test_answers_in_another_folder_are_imported_where_the_copy_has_none(copy, lab, tmp_path):
    """By slug, whatever the file is called; the newest file wins, stubs and broken ones do not."""
    for number, (place, answer) in enumerate({
            "chapters/03.ipynb": ANSWER.replace("sum", "min"), "03_all_reduce (1).ipynb": ANSWER,
            "bare.ipynb": STUB}.items()):
        write(tmp_path / "other" / place, book(cell("c", answer, slug="total-of-ranks")))
        os.utime(tmp_path / "other" / place, (number, number))
    (tmp_path / "other/broken.ipynb").write_text("{")
    set_source(copy / THIRD, "last", "of_the_reader = 1")
    before = (copy / THIRD).read_bytes()
    lab("--import", str(tmp_path / "other"))
    assert sources(read(copy / THIRD)) == [
        *sources(chapter())[:2], ANSWER, *sources(chapter())[3:5], "of_the_reader = 1"]
    assert kept(copy) == [before]
    set_source(copy / THIRD, "stub-total", ANSWER.replace("sum", "max"))
    before = files(copy)
    assert "No answers" in lab("--import", str(tmp_path / "other")) and files(copy) == before
    assert "is not there" in lab("--import", "nowhere", status=1)


def test_nothing_is_replaced_while_jupyterlab_has_the_copy_open(course, copy, lab, monkeypatch):
    answer_in(copy / FIRST)
    change_course(course)
    before = files(copy)
    monkeypatch.setattr(jupyterlab, "running_at", lambda place: "http://127.0.0.1:1/lab")
    assert "127.0.0.1:1/lab" in lab()
    for words in (["--update", "all"], ["--fresh", "03"], ["--import", "."]):
        assert "Close JupyterLab" in lab(*words, status=1)
    assert files(copy) == before


def test_a_full_disk_changes_nothing(course, copy, lab):
    """Nor does it leave a part of a file, and a first copy is completed later."""
    answer_in(copy / THIRD)
    change_course(course)
    script = ("import sys; from dplab.lab import command; from pathlib import Path\n"
              f"command.ROOT = Path({str(course)!r}); sys.exit(command.lab(sys.argv[1:]))")
    for place, words in ((copy, ["--update", "03"]), (course.parent / "new", [])):
        before = files(copy)
        done = subprocess.run(
            [sys.executable, "-B", "-c", script, str(place), "--copy-only", *words], text=True,
            capture_output=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)))
        assert done.returncode == 1 and "Nothing of yours was changed" in done.stderr
        assert files(copy) == before and not list(course.parent.rglob("*.part"))
    lab(str(place))
    assert sources(read(place / THIRD)) == sources(read(course / THIRD))


def test_where_no_copy_can_be_it_says_what_to_do(course, lab, tmp_path, monkeypatch):
    for place in (".", "chapters/mine", "figures"):
        before = files(course)
        assert "Name a" in lab(str(course / place), status=1) and files(course) == before
    (tmp_path / "file").write_text("")  # as a clone that one may not write in
    assert "dplab lab ~/my_course" in lab(str(tmp_path / "file" / "copy"), status=1)
    monkeypatch.setattr(jupyterlab, "missing_package", lambda: "jupyterlab")
    assert command.lab([]) == 1
    shutil.rmtree(course / "chapters")
    said = lab(status=1)
    assert "no jupyterlab. In the course's folder" in said and "clone" in said


# Answers


@pytest.mark.parametrize(("texts", "answer"), [
    ([STUB], None), ([], None), ([STUB, " "], None), ([ANSWER], ANSWER),
    ([f"{STUB}  # first add, then send"], f"{STUB}  # first add, then send"),
    (["import math", STUB, ANSWER], f"import math\n\n\n{ANSWER}")])
def test_an_answer_is_what_stands_in_place_of_the_stub(texts, answer):
    """In several cells it becomes one. Where the stub is unknown, an unfinished one is none."""
    old = book(*(cell(f"c{number}", source, slug="total-of-ranks")
                 for number, source in enumerate(texts)), cell("own", "x"))
    found = {} if answer is None else {"total-of-ranks": answer}
    assert answers_in(old, {"total-of-ranks": STUB}) == found
    assert answers_in(old, {}) == ({} if answer and "NotImplemented" in answer else found)
    new = chapter()
    new["cells"].append({**new["cells"][2], "id": "more", "source": "more = 1"})
    new["cells"][2]["outputs"] = [{}]
    result = with_answers(new, found | {"another-slug": ANSWER})
    assert stubs_in(new) == {"total-of-ranks": STUB}
    assert sources(result) == [*sources(new)[:2], answer or STUB, *sources(new)[3:]]
    if answer:
        assert result["cells"][1]["outputs"] and not result["cells"][2]["outputs"]


@pytest.mark.parametrize(("old", "new", "replaced"), [
    ("all ranks", "the ranks of the group", True), ("total(values)", "total(values, group)", False),
    ("total", "sum_of_ranks", False)])
def test_below_a_stub_with_another_signature_the_answer_stands_and_still_runs(old, new, replaced):
    stub = STUB.replace(old, new)
    [source] = sources(with_answers(book(cell("c", stub, slug="s")), {"s": ANSWER}))
    assert source == (ANSWER if replaced else f"{stub}\n\n\n{NOTE}\n{ANSWER}")
    names = {}
    exec(source, names)
    assert names["total"]([1, 2]) == 3
