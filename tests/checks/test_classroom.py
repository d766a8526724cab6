"""The table of a class, from files as the course exports them."""

import json

import pytest

import dplab
from dplab.checks import classroom, find
from dplab.desk import record


@pytest.fixture
def class_of_three(tmp_path, monkeypatch):
    """The exported files of Ada, of Ben, and of Cem, who has not begun."""
    files = {name: tmp_path / f"{name}.json" for name in ("ada", "ben", "cem")}
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "home of ada"))
    dplab.check("rows-to-hide", find("rows-to-hide").solution)
    dplab.hint("average-gradients")
    dplab.hint("average-gradients")
    dplab.solution("global-mean")
    record.update("exercises", "gather-by-adding", lambda entry: entry.update(outcome="wrong"))
    record.update("drills", "04-one", lambda entry: entry.update(solved=True))
    record.update("drills", "04-two", lambda entry: entry.update(taken=1))
    dplab.progress(export=files["ada"])
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "home of ben"))
    record.update("exercises", "average-gradients",
                  lambda entry: entry.update(outcome="passed", tries=2))
    dplab.progress(export=files["ben"])
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "home of cem"))
    dplab.progress(export=files["cem"])
    return list(map(str, files.values()))


def lines_of(text):
    """The words of each line of a table, by its first word."""
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}


def test_exported_files_become_one_table(class_of_three, capsys):
    capsys.readouterr()
    assert classroom.main(class_of_three) == 0
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


@pytest.mark.parametrize(("content", "said"), [
    (None, "cannot be read"), ("{", "cannot be read"), ("[]", "no progress of this edition"),
    ('{"0.1": {"outcome": "passed"}}', "no progress of this edition")])
def test_a_file_that_cannot_be_read_is_named_and_the_others_are_shown(
        class_of_three, tmp_path, capsys, content, said):
    broken = tmp_path / "dan.json"
    if content is not None:
        broken.write_text(content)
    assert classroom.main([str(broken), *class_of_three]) == 1
    shown = capsys.readouterr()
    assert "ada" in shown.out and "dan " not in shown.out
    assert str(broken) in shown.err and said in shown.err


def test_no_code_of_a_student_is_run(class_of_three, tmp_path):
    file = tmp_path / "ada.json"
    exported = json.loads(file.read_text())
    exported["exercises"][0]["code"] = f"open({str(tmp_path / 'was_run')!r}, 'w')"
    file.write_text(json.dumps(exported))
    assert classroom.main(class_of_three) == 0
    assert not (tmp_path / "was_run").exists()


def test_where_no_file_can_be_read_there_is_no_table(tmp_path, capsys):
    assert classroom.main([str(tmp_path / "none.json")]) == 1
    assert capsys.readouterr().out == ""


def test_without_a_file_it_says_how_it_is_called(capsys):
    assert classroom.main([]) == 1
    assert "python -m dplab.checks.classroom FILE" in capsys.readouterr().err
