"""What is kept of the reader's work: by kind and slug, and whole."""

import multiprocessing

import pytest

from dplab.desk import record


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))
    return tmp_path


def note(slug="global-mean", kind="exercises", **entry):
    return record.update(kind, slug, lambda kept: kept.update(entry))


def test_entries_are_kept_by_kind_and_slug(home):
    assert record.entries("exercises") == {} and not list(home.iterdir())  # it leaves nothing
    assert note(tries=1) and note(kind="guesses", answer="10 %") and note(hints=2)
    assert record.entries("exercises") == {"global-mean": {"tries": 1, "hints": 2}}
    assert record.entries("guesses") == {"global-mean": {"answer": "10 %"}}
    assert record.entries("drills") == {}
    assert record.forget("exercises", "global-mean")
    assert not record.forget("exercises", "global-mean")
    assert record.entries("exercises") == {} and record.entries("guesses")


@pytest.mark.parametrize(("content", "is_read_first"), [
    (b"[]", True), (b"\xff", False), (b'{"edition": 2, "exercises": {"global-me', False),
    (b'{"edition": 3}', True)])
def test_a_damaged_record_is_set_aside_and_said_to_be_so_once(home, capsys, content, is_read_first):
    (home / "progress-damaged-1.json").write_text("an earlier one")
    (home / "progress.json").write_bytes(content)
    if is_read_first:
        assert record.entries("exercises") == {}
    assert note(outcome="wrong")
    assert record.entries("exercises") == {"global-mean": {"outcome": "wrong"}}
    assert (home / "progress-damaged-1.json").read_text() == "an earlier one"
    assert (home / "progress-damaged-2.json").read_bytes() == content
    assert capsys.readouterr().out.count(str(home / "progress-damaged-2.json")) == 1


def test_a_full_disk_or_a_file_that_cannot_be_opened_loses_nothing(home, monkeypatch):
    def full_disk(*paths):
        raise OSError(28, "No space left on device")

    assert note(tries=1)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full_disk)
        assert not note(tries=2)
    assert record.entries("exercises") == {"global-mean": {"tries": 1}}
    assert {path.name for path in home.iterdir()} == {"progress.json", "lock"}
    (home / "progress.json").unlink()
    (home / "progress.json").symlink_to("progress.json")  # opening it raises, replacing it does not
    assert record.entries("exercises") == {} and not note(tries=1)
    assert (home / "progress.json").is_symlink()


def _count(slug, times):
    for _ in range(times):
        for each in (slug, "shared"):
            record.update("exercises", each, lambda entry: entry.update(n=entry.get("n", 0) + 1))


def test_two_notebooks_write_at_once_and_nothing_is_lost():
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_count, args=(f"notebook-{number}", 20 + number))
               for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {slug: entry["n"] for slug, entry in record.entries("exercises").items()} == {
        "notebook-0": 20, "notebook-1": 21, "notebook-2": 22, "shared": 63}
