"""The reader's copy of the course: made, kept, brought up to date, and never poorer by a line."""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_course import (
    ANSWER,
    STUB,
    by_id,
    cell,
    chapter,
    commit,
    edit,
    make_course,
    read,
    sources,
    write,
)

from dplab.lab import command, jupyterlab

THIRD = "chapters/03_all_reduce.ipynb"


@pytest.fixture
def course(tmp_path, monkeypatch):
    root = make_course(tmp_path / "a clone")
    monkeypatch.setattr(command, "ROOT", root)
    return root


@pytest.fixture
def lab(course, capsys):
    """A function that runs ``dplab lab --copy-only``; returns the copy's folder and the output."""
    def run(*arguments, status=0):
        assert command.lab([*arguments, "--copy-only"]) == status
        return capsys.readouterr()
    return run


@pytest.fixture
def copy(course, lab):
    lab()
    return course / "my_course"


def set_source(path, id, source):
    edit(path, lambda cells: by_id(cells, id).update(source=source))


def run_in(path):
    """What JupyterLab leaves in a notebook that was run and saved."""
    def change(cells):
        by_id(cells, "setup")["outputs"] = [
            {"output_type": "stream", "name": "stdout", "text": ["4\n"]}]
    edit(path, change)


def change_course(course, **texts):
    """A newer version of chapter 03, with other texts in these cells."""
    for id, source in texts.items():
        set_source(course / THIRD, id.replace("_", "-"), source)
    commit(course)


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
            and ".course" not in path.parts}


def test_the_copy_has_what_chapters_need_and_no_outputs(course, copy):
    assert files(copy) == {"README.md", "figures/ring.svg", "chapters/data/sweep.json", THIRD,
                           "chapters/00_start_here.ipynb", "chapters/03_launch/train.py"}
    assert sources(read(copy / THIRD)) == sources(read(course / THIRD))
    assert "gives it away" in (course / THIRD).read_text()
    assert "gives it away" not in (copy / THIRD).read_text()
    for name in files(copy) - {THIRD, "chapters/00_start_here.ipynb"}:
        assert (copy / name).read_bytes() == (course / name).read_bytes()


@pytest.mark.parametrize("with_git", [True, False])
def test_of_the_web_book_only_the_pages_that_others_link_to_are_copied(course, lab, with_git):
    """Nor is copied what git does not know, or what lies in hidden folders."""
    for name, page in {"setup.md": "[next](more.md)", "more.md": "# More", "conf.py": ""}.items():
        (course / "chapters/book").mkdir(exist_ok=True)
        (course / "chapters/book" / name).write_text(page)
    (course / "README.md").write_text("[set-up](chapters/book/setup.md)")
    commit(course)
    hidden = course / "chapters/.ipynb_checkpoints"
    hidden.mkdir()
    for path in (hidden / "x.ipynb", *[course / "chapters/Untitled.ipynb"] * with_git):
        path.write_text("no notebook")
    if not with_git:
        shutil.rmtree(course / ".git")
    lab()
    copied = files(course / "my_course/chapters")
    assert {name for name in copied if name.startswith("book/") or name.endswith(".ipynb")} == {
        "book/setup.md", "book/more.md", "00_start_here.ipynb", "03_all_reduce.ipynb"}


def test_an_assistant_in_an_editor_finds_its_rules(course, lab):
    """By the name that such programs look for, with links that lead on from there."""
    (course / "chapters/book").mkdir()
    (course / "chapters/book/assistants.md").write_text("# Rules\n\n[all](../glossary.md)")
    (course / "README.md").write_text("[rules](chapters/book/assistants.md)")
    commit(course)
    lab()
    rules = course / "my_course/AGENTS.md"
    assert rules.read_text() == "# Rules\n\n[all](chapters/glossary.md)"
    rules.write_text("Say it all.")
    (course / "chapters/book/assistants.md").write_text("# New rules")
    commit(course)
    lab()
    assert rules.read_text() == "Say it all."


def test_another_place_and_a_second_start_keeps_what_is_there(course, lab, tmp_path):
    place = tmp_path / "at home" / "course of mine"
    lab(str(place))
    set_source(place / THIRD, "stub-total", ANSWER)
    run_in(place / "chapters/00_start_here.ipynb")
    (place / "chapters/mine.ipynb").write_text("whatever")
    before = {name: (place / name).read_bytes() for name in files(place)}
    assert "new" not in lab(str(place)).out.lower()
    assert {name: (place / name).read_bytes() for name in files(place)} == before
    assert not (course / "my_course").exists()


def test_a_deleted_chapter_comes_back_as_the_course_has_it(copy, lab):
    set_source(copy / THIRD, "stub-total", ANSWER)
    (copy / THIRD).unlink()
    lab()
    assert STUB in sources(read(copy / THIRD))


def test_what_the_reader_has_not_touched_follows_the_course_by_itself(course, copy, lab):
    change_course(course, setup="ranks = 8")
    (course / "chapters/data/sweep.json").write_text("[3]\n")
    commit(course)
    assert "03_all_reduce" in lab().out
    assert "ranks = 8" in sources(read(copy / THIRD))
    assert (copy / "chapters/data/sweep.json").read_text() == "[3]\n"


@pytest.mark.parametrize("touch", [run_in, lambda path: set_source(path, "stub-total", ANSWER)])
def test_a_newer_chapter_waits_until_the_reader_asks_for_it(course, copy, lab, touch):
    touch(copy / THIRD)
    before = (copy / THIRD).read_bytes()
    change_course(course, setup="ranks = 8")
    said = lab().out
    assert "Newer in the course" in said and "--update 03" in said
    assert (copy / THIRD).read_bytes() == before


def test_a_chapter_is_named_by_its_number_and_an_appendix_by_its_letter(course, lab):
    path = "chapters/appendix_other_cuts.ipynb"
    write(course / path, chapter("Other cuts"))
    commit(course)
    lab()
    set_source(course / "my_course" / path, "stub-total", ANSWER)
    set_source(course / path, "setup", "ranks = 8")
    commit(course)
    assert "--update B" in lab().out
    for word in ("B", "b", "appendix_other_cuts", "3", "03", "03_all_reduce"):
        name = THIRD if "3" in word else path
        said = lab("--fresh", word).out
        assert f"{name}: new from the course" in said and "--update" not in said


@pytest.mark.parametrize("id", ["stub-total", "last"])
def test_an_update_brings_answers_along_and_keeps_the_whole_old_notebook_beside(
        course, copy, lab, id):
    """Also where the reader answered nothing, and wrote elsewhere."""
    set_source(copy / THIRD, id, ANSWER)
    edit(copy / THIRD, lambda cells: cells.insert(3, cell("note", "of_the_reader = 1")))
    before = (copy / THIRD).read_bytes()
    change_course(course, setup="ranks = 8")
    lab("--update", "03")
    expected = sources(read(course / THIRD))
    expected[2] = ANSWER if id == "stub-total" else STUB
    assert sources(read(copy / THIRD)) == expected
    [old] = [path for path in (copy / "chapters").glob("03_*.ipynb") if path != copy / THIRD]
    assert re.fullmatch(r"03_all_reduce\.before-\d{4}-\d\d-\d\d\.ipynb", old.name)
    assert old.read_bytes() == before
    assert "Newer" not in lab().out


def test_who_changed_nothing_sees_just_the_new_notebook(course, copy, lab):
    change_course(course, setup="ranks = 8")
    lab()
    assert sources(read(copy / THIRD)) == sources(read(course / THIRD))
    assert files(copy / "chapters") == files(course / "chapters")


def test_two_updates_on_one_day_keep_both_old_notebooks(course, copy, lab):
    """One was only run."""
    olds = []
    for number in (8, 16):
        run_in(copy / THIRD) if number == 8 else set_source(copy / THIRD, "stub-total", ANSWER)
        olds.append((copy / THIRD).read_bytes())
        change_course(course, setup=f"ranks = {number}")
        lab("--update", "all")
    kept = [path.read_bytes() for path in (copy / "chapters").glob("03_*before*.ipynb")]
    assert sorted(kept) == sorted(olds)


def test_an_edited_file_beside_the_chapters_is_kept_under_another_name(course, copy, lab):
    (copy / "chapters/03_launch/train.py").write_text("print('mine')\n")
    (course / "chapters/03_launch/train.py").write_text("print('newer')\n")
    commit(course)
    assert "03_launch/train.py" in lab().out
    lab("--update", "03")
    [old] = (copy / "chapters/03_launch").glob("train.before-*.py")
    assert old.read_text() == "print('mine')\n"
    assert (copy / "chapters/03_launch/train.py").read_text() == "print('newer')\n"


FIRST = "chapters/00_start_here.ipynb"


def test_a_chapter_that_left_the_course_stays_in_the_copy(course, copy, lab):
    set_source(copy / THIRD, "stub-total", ANSWER)
    (course / THIRD).unlink()
    commit(course)
    lab()
    assert ANSWER in sources(read(copy / THIRD))


@pytest.mark.parametrize("arguments", [[], ["--update", "all"], ["--fresh", "03"],
                                       ["--import", "."]])
def test_nothing_is_replaced_while_jupyterlab_has_the_copy_open(
        course, copy, lab, monkeypatch, arguments):
    set_source(copy / FIRST, "stub-total", ANSWER)
    change_course(course, setup="ranks = 8")
    before = everything(copy)
    monkeypatch.setattr(jupyterlab, "running_at", lambda place: "http://127.0.0.1:1/lab")
    said = lab(*arguments, status=1 if arguments else 0)
    assert "Close JupyterLab" in said.err if arguments else "127.0.0.1:1/lab" in said.out
    assert everything(copy) == before
    monkeypatch.undo()
    monkeypatch.setattr(command, "ROOT", course)
    lab()
    assert "ranks = 8" in sources(read(copy / THIRD))


@pytest.mark.parametrize("place", ["other/03_all_reduce (1).ipynb", "other/chapters/03.ipynb"])
def test_answers_in_another_folder_are_imported_and_nothing_is_lost(
        course, copy, lab, tmp_path, place):
    """By slug, whatever the file is called, from a newer chapter too; the newest file wins, and a
    broken one, a stub and what the copy has already are left out.
    """
    for number, answer in enumerate((ANSWER.replace("sum", "min"), ANSWER)):
        notebook = chapter("Another title")
        by_id(notebook["cells"], "stub-total")["source"] = answer
        write((tmp_path / place).with_stem(f"03 ({number})"), notebook)
        os.utime((tmp_path / place).with_stem(f"03 ({number})"), (number, number))
    write(tmp_path / "other/bare.ipynb", chapter())
    (tmp_path / "other/broken.ipynb").write_text("{")
    set_source(copy / THIRD, "last", "of_the_reader = 1")
    before = (copy / THIRD).read_bytes()
    lab("--import", str(tmp_path / "other"))
    assert {ANSWER, "# All-reduce", "of_the_reader = 1"} <= {
        source.split("\n\n!")[0] for source in sources(read(copy / THIRD))}
    assert [path.read_bytes() for path in (copy / "chapters").glob("03*.before-*")] == [before]
    assert "No answers" in lab("--import", str(tmp_path / "other")).out


def test_an_import_leaves_the_answer_that_the_copy_has(course, copy, lab):
    set_source(copy / THIRD, "stub-total", ANSWER.replace("sum", "min"))
    set_source(course / THIRD, "stub-total", ANSWER)
    before = everything(copy)
    assert "No answers" in lab("--import", str(course)).out
    assert everything(copy) == before


def break_off(path):
    """A file that a full disk or a stop cut in the middle."""
    path.write_text(path.read_text()[:300])
    return path.read_bytes()


def test_a_broken_notebook_is_named_and_left_alone_until_a_new_one_is_asked_for(course, copy, lab):
    broken = break_off(copy / THIRD)
    change_course(course, last="print(8)")
    for arguments in (["--update", "all"], ["--import", str(course)]):
        said = lab(*arguments).out
        assert str(copy / THIRD) in said and "--fresh 03" in said and "--update 03" not in said
    said = lab("--update", "03", status=1)
    assert "no answers" in said.err and "Nothing newer" not in said.out
    assert (copy / THIRD).read_bytes() == broken
    said = lab("--fresh", "03").out
    assert "is broken" not in said and "Newer" not in said
    assert sources(read(copy / THIRD)) == sources(read(course / THIRD))
    [old] = (copy / "chapters").glob("03_all_reduce.before-*.ipynb")
    assert old.read_bytes() == broken and old.name in said


def test_a_chapter_that_is_begun_anew_keeps_the_old_notebook_beside(course, copy, lab):
    set_source(copy / THIRD, "stub-total", ANSWER)
    set_source(copy / FIRST, "stub-total", ANSWER)
    lab("--fresh", "3")
    assert STUB in sources(read(copy / THIRD))
    [old] = (copy / "chapters").glob("03_all_reduce.before-*.ipynb")
    assert ANSWER in sources(read(old)) and ANSWER in sources(read(copy / FIRST))
    lab("--fresh", "3")
    assert len(list((copy / "chapters").glob("03_*.ipynb"))) == 2
    for option in ("--fresh", "--update"):
        assert "no chapter 77" in lab(option, "77", status=1).err
    assert "is not there" in lab("--import", "nowhere", status=1).err


def test_a_broken_notebook_of_the_course_is_named_and_changes_nothing(course, copy, lab):
    """One that is committed so; where a conflict of git is open, the last commit counts."""
    before = everything(copy)
    (course / THIRD).write_text("<<<<<<< HEAD\n" + (course / THIRD).read_text())
    lab()
    commit(course)
    assert str(course / THIRD) in lab(status=1).err
    assert everything(copy) == before


@pytest.mark.parametrize("place", [".", "chapters/mine", "figures"])
def test_a_copy_does_not_go_into_the_course_or_among_other_files(course, lab, place):
    before = files(course)
    assert "Name a" in lab(str(course / place), status=1).err
    assert files(course) == before


def test_a_package_without_chapters_says_so(course, lab):
    shutil.rmtree(course / "chapters")
    assert "clone" in lab(status=1).err


def script_of(course, *arguments):
    """What a Python of its own runs for ``dplab lab --copy-only`` on this course."""
    return ("import sys; from dplab.lab import command; from pathlib import Path\n"
            f"command.ROOT = Path({str(course)!r})\n"
            f"sys.exit(command.lab([*{arguments!r}, '--copy-only']))")


def without_room(course, *arguments):
    """Runs the command in a process that can write no more than 500 bytes to a file."""
    return subprocess.run(
        [sys.executable, "-B", "-c", script_of(course, *arguments)], text=True, timeout=60,
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)))


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_update_that_finds_no_room_changes_nothing(course, copy, lab):
    set_source(copy / THIRD, "stub-total", ANSWER)
    change_course(course, setup="ranks = 8")
    before = everything(copy)
    done = without_room(course, "--update", "03")
    assert done.returncode == 1 and "Nothing of yours was changed" in done.stderr
    assert everything(copy) == before
    lab("--update", "03")
    assert {ANSWER, "ranks = 8"} <= set(sources(read(copy / THIRD)))


def test_a_first_copy_that_finds_no_room_is_completed_later(course, lab):
    done = without_room(course)
    assert done.returncode == 1 and "File too large" in done.stderr
    assert not list((course / "my_course").rglob("*.part"))
    lab()
    assert sources(read(course / "my_course" / THIRD)) == sources(chapter())


def test_the_read_only_clone_names_the_way_out(course, lab, tmp_path):
    if os.geteuid():
        course.chmod(0o500)
    elif subprocess.run(["mount", "--bind", "-o", "ro", course, course]).returncode:
        pytest.skip("cannot mount")
    try:
        assert "dplab lab ~/my_course" in lab(status=1).err
        lab(str(tmp_path / "elsewhere"))
        assert THIRD in files(tmp_path / "elsewhere")
    finally:
        if os.geteuid():
            course.chmod(0o700)
        else:
            subprocess.run(["umount", course], check=True)


def test_the_words_that_start_jupyterlab(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    words = jupyterlab.command(tmp_path, ["--port", "9000"], first_time=True, browser=True)
    assert {"--allow-root", "--no-browser"} <= set(words) and words[-2:] == ["--port", "9000"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("DISPLAY", ":0")
    words = jupyterlab.command(tmp_path, [], first_time=True, browser=True)
    assert not {"--allow-root", "--no-browser"} & set(words)
    assert "--no-browser" in jupyterlab.command(tmp_path, [], first_time=True, browser=False)


def test_a_python_without_jupyterlab_says_what_to_install(course, copy, monkeypatch, capsys):
    monkeypatch.setattr(jupyterlab.util, "find_spec",
                        lambda name: None if name == "jupyterlab" else True)
    assert command.lab([]) == 1
    assert "no jupyterlab" in (said := capsys.readouterr().err) and "pip install" in said


def test_settings_go_before_those_of_the_machine_and_after_the_readers(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", "/of/the/machine")
    environment = jupyterlab.prepare(tmp_path)
    assert environment["JUPYTER_PATH"] == f"{tmp_path}{os.pathsep}/of/the/machine"
    overrides = read(tmp_path / "labconfig/default_setting_overrides.json")
    assert overrides["@jupyter-widgets/jupyterlab-manager:plugin"] == {"saveState": True}


def test_a_copy_of_the_real_course_is_complete(tmp_path):
    """Every link and picture of the copied chapters leads to a file of the copy."""
    assert command.lab([str(tmp_path / "copy"), "--copy-only"]) == 0
    dead, count = [], 0
    for path in (tmp_path / "copy/chapters").glob("*.ipynb"):
        cells = [each for each in read(path)["cells"] if each["cell_type"] == "markdown"]
        for target in re.findall(r"\]\(([^)#\s]+)", "\n".join(sources({"cells": cells}))):
            if "://" not in target:
                count += 1
                dead += [(path.name, target)] * (not Path(path.parent, target).exists())
    assert count > 5 and not dead
    data = {name for path in (tmp_path / "copy/chapters").glob("*.ipynb")
            for name in re.findall(r'Path\(\\"((?:data/|launch)[^"\\]*)', path.read_text())}
    assert data and all((tmp_path / "copy/chapters" / name).exists() for name in data)
