"""The table of a class: from folders and from exported files, as the course writes them."""

import csv
import json

import pytest

import dplab
from dplab.checks import classroom, every_exercise, find
from dplab.desk import record


def passes(entry):
    entry.update(outcome="passed", tries=2)


@pytest.fixture
def class_of_three(tmp_path, monkeypatch):
    """Ada's own folder, Ben's exported file, and the folder of Cem, who has not begun."""
    ada, ben, cem = tmp_path / "ada" / ".dplab", tmp_path / "home of ben", tmp_path / "cem"
    monkeypatch.setenv("DPLAB_HOME", str(ada))
    dplab.check("rows-to-hide", find("rows-to-hide").solution)
    dplab.hint("average-gradients")
    dplab.hint("average-gradients")
    dplab.solution("global-mean")
    record.update("exercises", "one-call-each", lambda entry: entry.update(outcome="wrong"))
    record.update("drills", "04-one", lambda entry: entry.update(solved=True))
    record.update("drills", "04-two", lambda entry: entry.update(taken=1))
    monkeypatch.setenv("DPLAB_HOME", str(ben))
    record.update("exercises", "average-gradients", passes)
    dplab.progress(export=tmp_path / "ben.json")
    cem.mkdir()
    return [ada, tmp_path / "ben.json", cem]


def lines_of(text):
    """The words of each line of a table, by its first word."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def test_folders_and_exported_files_become_one_table(class_of_three, capsys):
    capsys.readouterr()
    assert classroom.main(list(map(str, class_of_three))) == 0
    students, exercises = capsys.readouterr().out.split("Exercises that were begun")
    rows = lines_of(students)
    columns = rows["00"]  # after the first
    for name, chapter in (("ada", "01"), ("ben", "04")):
        passed = dict(zip(["00", *columns], rows[name], strict=False))
        assert next(label for label, count in passed.items() if count == "1") == chapter
    assert rows["ada"][-4:] == ["1", "2", "1", "1"]  # passed, hints, solutions, sick jobs
    assert rows["ben"][-4:] == ["1", "0", "0", "0"]
    assert rows["cem"][-4:] == ["0", "0", "0", "0"]
    counts = {number: words[-5:] for number, words in lines_of(exercises).items()}
    # begun, passed, median of tries, hints, solutions
    assert counts[find("average-gradients").number] == ["2", "1", "1", "2", "0"]
    assert counts[find("global-mean").number] == ["1", "0", "0", "0", "1"]
    assert counts[find("rows-to-hide").number] == ["1", "1", "1", "0", "0"]
    order = list(lines_of(exercises))
    assert order.index(find("global-mean").number) < order.index(find("rows-to-hide").number)


def test_the_spreadsheet_has_a_line_for_each_student_and_exercise(class_of_three, tmp_path):
    assert classroom.main([*map(str, class_of_three), "--csv", str(tmp_path / "class.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "class.csv").open()))
    assert len(rows) == 3 * len(every_exercise())
    [row] = [row for row in rows
             if (row["student"], row["exercise"]) == ("ben", "average-gradients")]
    assert (row["passed"], row["tries"], row["hints"]) == ("1", "2", "0")


@pytest.mark.parametrize(("content", "said"), [
    (None, "No such file"), ("{", "damaged"), ("[]", "no progress of this edition"),
    ('{"0.1": {"outcome": "passed"}}', "no progress of this edition"),
    ('{"edition": 2, "exercises": [1], "drills": {}}', "damaged"),
    ('{"edition": 2, "exercises": {"global-mean": {"tries": Infinity}}, "drills": {}}', "damaged"),
    (f'{{"edition": 2, "exercises": {{"global-mean": {{"tries": {"9" * 400}}}}}, "drills": {{}}}}',
     "damaged"),
    ('{"edition": 2, "exercises": {"global-mean": {"hints": -1}}, "drills": {}}', "damaged"),
    ("[" * 200_000, "damaged")])
def test_a_file_that_cannot_be_read_is_named_and_the_others_are_shown(
        class_of_three, tmp_path, capsys, content, said):
    broken = tmp_path / "dan.json"
    if content is not None:
        broken.write_text(content)
    assert classroom.main([str(broken), *map(str, class_of_three)]) == 1
    shown = capsys.readouterr()
    assert "ada" in shown.out and "dan " not in shown.out
    assert str(broken) in shown.err and said in shown.err


def test_students_of_one_name_are_told_apart_and_a_file_counts_once(class_of_three, capsys):
    ada, ben, _ = class_of_three
    for folder in ("a", "b"):
        (ben.parent / folder).mkdir()
        (ben.parent / folder / "ben.json").write_bytes(ben.read_bytes())
    names = list(map(str, [ada, ben.parent / "a/ben.json", ben.parent / "b/ben.json", "x" * 300]))
    capsys.readouterr()
    assert classroom.main([*names, names[1], str(ada.parent / ".." / "ada" / ".dplab")]) == 1
    shown = capsys.readouterr()
    assert "File name too long" in shown.err  # as where a home of mode 700 is named
    students = lines_of(shown.out.split("Exercises that were begun")[0])
    assert {"ada", *names[1:3]} <= set(students) and not {"ben", names[3]} & set(students)


@pytest.mark.parametrize("name", ["new.json", "work"])
def test_no_file_of_a_student_becomes_the_spreadsheet(class_of_three, capsys, name):
    """Nor does `--csv handed_in/*.json`, where the shell puts a student's file behind --csv."""
    folder = class_of_three[1].parent
    handed_in = [*class_of_three, folder / "work"]
    handed_in[-1].write_bytes(class_of_three[1].read_bytes())
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as stop:
        classroom.main([*map(str, handed_in), "--csv", str(folder / "cem" / ".." / name)])
    assert stop.value.code == 2 and "--csv" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_code_of_a_student_is_run(class_of_three, tmp_path):
    """Neither what is kept as theirs, nor what stands in an exported file."""
    trap = f"open({str(tmp_path / 'was_run')!r}, 'w')"
    mine = class_of_three[0] / "mine"
    mine.mkdir(exist_ok=True)
    (mine / "average-gradients.py").write_text(trap)
    exported = json.loads(class_of_three[1].read_text())
    exported["exercises"][0]["code"] = trap
    class_of_three[1].write_text(json.dumps(exported))
    assert classroom.main(list(map(str, class_of_three))) == 0
    assert not (tmp_path / "was_run").exists()


def test_where_no_name_can_be_read_there_is_no_table(tmp_path, capsys):
    assert classroom.main([str(tmp_path / "none.json")]) == 1
    assert capsys.readouterr().out == ""
