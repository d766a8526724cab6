"""What the reader does with a sick job, whatever its chapter: taking, asking, answering, mending.

The jobs are chapter 04's, on real ranks. One run of a job serves several tests.
"""

import drill_jobs
import pytest
import torch
import torch.distributed as dist
from drill_jobs import faults_of, said_by, seeds_of
from IPython.core.interactiveshell import InteractiveShell

import dplab
from dplab.desk import record
from dplab.drills import scores, silent_failures
from dplab.drills.silent_failures import CASES, SilentFailure


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path))


def seed_of(slug, fault=0):
    """The first seed whose job is this case with this fault, on two ranks: they are the fastest."""
    fault = faults_of(SilentFailure, slug)[fault]
    return next(seed for seed in seeds_of(SilentFailure, fault, 12)
                if SilentFailure(seed)._world_size == 2)


def job_of(slug, fault=0):
    """A job that has run already."""
    return drill_jobs.job_of(SilentFailure, seed_of(slug, fault))


def entry(job):
    return record.entries("drills")[f"04/{job._case.slug}"]


def evaluate(model, test_set, mine):
    images, labels = test_set[mine]
    counts = torch.tensor([(model(images).argmax(dim=1) == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    return counts[0] / counts[1]


# Taking a job


def test_the_card_says_what_can_be_typed_and_what_may_be_wrong_once(capsys):
    job = dplab.drill("04", seed=4)
    said = capsys.readouterr().out
    assert job._complaint.format(n=job._world_size) in said
    for name in [*job._instruments(), *job.suspects, 'dplab.drill("04", seed=4)']:
        assert name in said
    assert {*job._instruments(), "suspects", "diagnose"} <= set(dir(job))
    shell = InteractiveShell.instance()
    try:  # the cell that takes a job shows its card once, and a later one again
        for cell in ("import dplab\ndplab.drill('04', seed=4)", "job = dplab.drill('04', seed=4)",
                     "job"):
            shell.run_cell(cell, store_history=True)
            assert capsys.readouterr().out.count("On call") == 1
    finally:
        InteractiveShell.clear_instance()


def test_a_seed_repeats_a_job_and_other_seeds_give_others():
    one, same, *others = (SilentFailure(seed) for seed in (7, 7, *range(8, 20)))
    assert one._case is same._case and one._fault is same._fault
    assert one._settings.seed == same._settings.seed and one._settings.stop == same._settings.stop
    assert len({job._settings.seed for job in (one, *others)}) == 13
    assert len({job._case.slug for job in (one, *others)}) >= 4


def test_each_job_comes_once_before_one_comes_again_and_solved_ones_come_last(
        tmp_path, monkeypatch):
    orders = set()
    for reader in range(4):
        monkeypatch.setenv("DPLAB_HOME", str(tmp_path / str(reader)))
        slugs = [dplab.drill("04")._case.slug for _ in range(2 * len(CASES))]
        assert sorted(slugs[:8]) == sorted(slugs[8:]) == [case.slug for case in CASES]
        orders.add("".join(slugs[:4]))
    assert len(orders) > 1
    for slug in "abdefgh":
        record.update("drills", f"04/{slug}", lambda entry: entry.update(solved=True))
    assert [dplab.drill("04")._case.slug for _ in range(3)] == ["c", "c", "c"]
    assert scores()[4] == (7, 0, 8)


def test_a_chapter_or_a_seed_that_cannot_be():
    with pytest.raises(ValueError, match='"04"'):
        dplab.drill("03")
    with pytest.raises(TypeError, match="integer"):
        dplab.drill("04", "7")
    assert dplab.drill(4, seed=3).seed == 3


# Saying what is wrong


def test_a_right_answer_shows_the_reading_and_both_lines():
    job = job_of("d")
    for read in (job.weights, job.samples, job.weights):
        said_by(read)
    assert entry(job) == {"readings": ["samples", "weights"]}
    said = said_by(job.diagnose, "different start")
    for words in ("job.weights()", "of 9 tensors", "solved at the 1st try",
                  "You asked 2 of 7 instruments.", "-        message = tensor.clone()",
                  "+        dist.broadcast(tensor, src=0)"):
        assert words in said
    said = said_by(job.repair, evaluate)
    assert "First say" not in said and "solved" in said and "job.solution()" in said
    kept = {"readings": ["samples", "weights"], "tries": 1, "diagnosed": True, "solved": True}
    assert entry(job) == kept and scores()[4] == (1, 1, 8)
    for answer in ("biased metric", "different start"):  # which count no more
        said = said_by(job.diagnose, answer)
        assert entry(job) == kept
    assert "solved again" in said


def test_a_wrong_answer_is_ruled_out_by_a_reading_of_this_job_and_counts():
    job = job_of("d")
    said = said_by(job.diagnose, "overlapping parts")
    taken = sum(map(len, job._readings.samples(0)))
    assert f"took {taken:,} samples, of which {taken:,} are distinct" in said
    assert "broadcast" not in said and entry(job) == {"tries": 1, "diagnosed": False}
    assert "solved at the 2nd try" in said_by(job.diagnose, "Different  start")
    assert scores()[4] == (1, 0, 8)


@pytest.mark.parametrize("said", ["", None, 3, "diferent start", "the moon"])
def test_an_unknown_suspect_is_asked_about_and_no_try(said):
    job = job_of("d")
    shown = said_by(job.diagnose, said)
    assert all(suspect in shown for suspect in job.suspects)
    assert ('Did you mean `job.diagnose("different start")`' in shown) == (said == "diferent start")
    assert "04/d" not in record.entries("drills")


def test_who_has_read_the_solution_solves_it_at_no_first_try():
    job = job_of("d")
    assert "+        dist.broadcast(tensor, src=0)" in said_by(job.solution)
    assert scores()[4] == (0, 0, 8)
    said_by(job.diagnose, "different start")
    assert scores()[4] == (1, 0, 8)


# Mending it


@pytest.mark.slow
def test_a_job_to_repair_is_solved_by_the_mended_function_alone():
    job = job_of("f")
    assert "First say what is wrong" in said_by(job.repair, evaluate)
    said = said_by(job.diagnose, "biased metric")
    assert "def evaluate(model, test_set, mine):" in said and "job.repair(evaluate)" in said
    assert "counts" not in said, "the mended lines are the reader's to write"
    assert "“biased metric” it is at the 1st try" in said
    for part, words in ((None, "without brackets"), (job_of("f", 1)._sick_part(), "not mended"),
                        (lambda model, test_set, mine: None, "failed"),
                        (lambda model, test_set, mine: 0.9, "test_set[mine]")):
        assert words in said_by(job.repair, part)
    assert entry(job)["diagnosed"] and "solved" not in entry(job)
    assert "solved" in said_by(job.repair, evaluate)
    assert entry(job)["solved"] and scores()[4] == (1, 1, 8)


@pytest.mark.slow
def test_a_repair_with_a_fault_of_its_own_is_told_of_that_one():
    def averager(model):
        def average():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    dist.all_reduce(parameter.grad)

        return average

    job = job_of("h")
    said_by(job.diagnose, "left-out layer")
    said = said_by(job.repair, averager)
    assert "another fault now: “wrong divisor”" in said and "2.00 times as long" in said
    assert "still “left-out layer”" in said_by(job.repair, job._sick_part())


# When something is in the way


def test_a_failure_of_the_ranks_or_an_interrupt_does_not_quote_the_code(monkeypatch):
    """And the next instrument runs the job again."""
    def fails_with(error):
        def run(*_, **__):
            raise error

        monkeypatch.setattr(silent_failures, "run", run)

    job = SilentFailure(seed_of("d"))
    fails_with(dplab.RankError("rank 1: dist.broadcast(message, src=0)", rank=1, kind="died"))
    said = said_by(job.weights) + said_by(job.diagnose, "different start")
    assert "died" in said and "broadcast" not in said
    assert "04/d" not in record.entries("drills")
    fails_with(KeyboardInterrupt("rank 0 was in begin_with_copies"))
    with pytest.raises(KeyboardInterrupt) as caught:
        job.weights()
    assert "copies" not in str(caught.value) and caught.value.__suppress_context__
    monkeypatch.setattr(job, "_run", lambda part: job_of("d")._readings)
    assert "norm.running_mean" in said_by(job.weights)


def test_a_record_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DPLAB_HOME", str(tmp_path / "file" / "folder"))
    dplab.drill("04")
    assert "solved" in said_by(job_of("d").diagnose, "different start")
