"""What is kept of the reader's work: by kind and slug, whole, and apart from the first edition."""

import json
import multiprocessing

import pytest

from dplab.desk import record


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    return tmp_path


def test_entries_are_kept_by_kind_and_slug():
    assert record.update("exercises", "global-mean", lambda entry: entry.update(tries=1))
    assert record.update("guesses", "global-mean", lambda entry: entry.update(answer="10 %"))
    assert record.update("exercises", "global-mean", lambda entry: entry.update(hints=2))
    assert record.entries("exercises") == {"global-mean": {"tries": 1, "hints": 2}}
    assert record.entries("guesses") == {"global-mean": {"answer": "10 %"}}
    assert record.entries("drills") == {}
    assert record.forget("exercises", "global-mean")
    assert not record.forget("exercises", "global-mean")
    assert record.entries("exercises") == {} and record.entries("guesses")


def test_progress_of_the_first_edition_is_set_aside(home):
    old = {"0.1": {"outcome": "passed", "hints": 2}, "10.2": {"outcome": "passed"},
           "4.2": {"outcome": "passed"}, "4.3": {"outcome": "wrong"}}
    (home / "progress.json").write_text(json.dumps(old))
    assert record.entries("exercises") == {}
    assert record.of_first_edition() == ["0.1", "4.2", "10.2"]
    assert record.update("exercises", "global-mean", lambda entry: entry.update(outcome="wrong"))
    assert json.loads((home / "progress-first-edition.json").read_text()) == old
    assert record.entries("exercises") == {"global-mean": {"outcome": "wrong"}}
    assert record.of_first_edition() == ["0.1", "4.2", "10.2"]


@pytest.mark.parametrize("content", [
    '{"4.2": 3}', '{"edition": 2}', '{"edition": 2, "exercises": [1]}',
    '{"edition": 2, "exercises": {"global-mean": "passed"}}'])
def test_a_record_without_entries_starts_over(home, content):
    (home / "progress.json").write_text(content)
    assert record.entries("exercises") == {}
    assert record.update("exercises", "global-mean", lambda entry: entry.update(outcome="wrong"))
    assert record.entries("exercises") == {"global-mean": {"outcome": "wrong"}}


@pytest.mark.parametrize("content", [
    b"", b"\xff", b"[]", b'{"edition": 2, "exercises": {"global-me', b'{"edition": 3}'])
@pytest.mark.parametrize("is_read_first", [True, False])
def test_a_damaged_record_is_set_aside_and_said_to_be_so_once(
        home, capsys, content, is_read_first):
    (home / "progress-damaged-1.json").write_text("an earlier one")
    (home / "progress.json").write_bytes(content)
    if is_read_first:
        assert record.entries("exercises") == {}
    assert record.update("exercises", "global-mean", lambda entry: entry.update(outcome="wrong"))
    assert record.entries("exercises") == {"global-mean": {"outcome": "wrong"}}
    assert (home / "progress-damaged-1.json").read_text() == "an earlier one"
    assert (home / "progress-damaged-2.json").read_bytes() == content
    assert capsys.readouterr().out.count(str(home / "progress-damaged-2.json")) == 1
    assert record.of_first_edition() == []


def test_a_record_that_cannot_be_opened_is_not_overwritten(home):
    (home / "progress.json").symlink_to("progress.json")  # opening it raises, replacing it does not
    assert record.entries("exercises") == {}
    assert not record.update("exercises", "global-mean", lambda entry: entry.update(tries=1))
    assert (home / "progress.json").is_symlink()


def test_a_record_that_cannot_be_written_is_no_error(home, monkeypatch):
    (home / "file").write_text("")
    monkeypatch.setenv("DPLAB_HOME", str(home / "file" / "below"))
    assert not record.update("exercises", "global-mean", lambda entry: entry.update(tries=1))
    assert record.entries("exercises") == {}


def test_a_stop_midway_leaves_the_old_record_whole(home, monkeypatch):
    record.update("exercises", "global-mean", lambda entry: entry.update(tries=1))
    monkeypatch.setattr(record.os, "replace", _full_disk)
    assert not record.update("exercises", "local-part", lambda entry: entry.update(tries=1))
    assert record.entries("exercises") == {"global-mean": {"tries": 1}}
    assert {path.name for path in home.iterdir()} == {"progress.json", "lock"}


def _full_disk(*paths):
    raise OSError(28, "No space left on device")


def _count(slug, times):
    for _ in range(times):
        record.update("exercises", slug, lambda entry: entry.update(n=entry.get("n", 0) + 1))
        record.update("exercises", "shared", lambda entry: entry.update(n=entry.get("n", 0) + 1))


def test_two_notebooks_write_at_once_and_nothing_is_lost():
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_count, args=(f"notebook-{number}", 40 + number))
               for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {slug: entry["n"] for slug, entry in record.entries("exercises").items()} == {
        "notebook-0": 40, "notebook-1": 41, "notebook-2": 42, "shared": 123}
