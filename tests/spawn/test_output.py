"""What the ranks write and warn of, in a terminal or file: whole, labelled, in order, or cut."""

import io
import os
import subprocess
import sys
import time
import warnings

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from failing import failure
from kernel import no_ranks_left
from tqdm import tqdm

from dplab import RankError, run
from dplab.spawn.parent.output import KEPT, RankText

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def shown(capsys):
    """The lines that the ranks wrote, one list for each rank."""
    def lines(ranks=2):
        text = capsys.readouterr().out
        assert all(line.startswith("[rank ") for line in text.splitlines()), text
        return [[line.removeprefix(f"[rank {rank}] ") for line in text.split("\n")
                 if line.startswith(f"[rank {rank}] ")] for rank in range(ranks)]
    yield lines
    no_ranks_left()


def test_every_way_to_write(shown):
    def work():
        import matplotlib.pyplot as plt
        from IPython.display import display

        rank = dist.get_rank()
        print("print", rank)
        print("unicode é→漢字🎈", flush=True)
        print("to stderr", file=sys.stderr)
        os.write(1, b"to the descriptor\n")
        os.write(1, b"not utf-8: \xff\xfe\n")
        os.system("echo from a shell")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        print("\ud800 is no text")
        print()
        display(f"displayed {rank}")
        plt.figure()
        plt.show()
        for _ in tqdm(range(30 + rank), mininterval=0, desc="steps"):
            pass
        print("without an end", rank, end=" ")
        if rank == 1:
            sys.stdout = None

    run(work, 2)
    for rank, lines in enumerate(shown()):
        assert lines.pop(-2).startswith("steps: 100%")  # of a progress bar, the last state
        figures = "" if rank else "a rank shows no figures: return what they are drawn from, or "
        assert lines.pop().startswith(f"without an end {rank} {figures}")
        assert lines == [f"print {rank}", "unicode é→漢字🎈", "to stderr", "to the descriptor",
                         "not utf-8: \ufffd\ufffd", "from a shell", "from a child",
                         "\\ud800 is no text", "", f"displayed {rank}"]


@pytest.mark.parametrize(("leave", "ending"), [
    (lambda: os._exit(3), "\n"), (lambda: os.kill(os.getpid(), 9), ""), (lambda: 1 // 0, "")])
def test_nothing_is_lost_when_a_rank_ends(shown, leave, ending):
    def work():
        dist.barrier()
        print("\n".join(f"line {number}" for number in range(2000)), end=ending)
        leave()

    with pytest.raises(RankError):
        run(work, 2)
    for lines in shown():
        assert lines == [f"line {number}" for number in range(2000)]


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [lambda: None, closed])
def test_output_that_nobody_takes_costs_neither_value_nor_report(monkeypatch, make):
    def work():
        print("to nobody")
        dist.barrier()
        return 1 // (dist.get_rank() - divisor)

    monkeypatch.setattr(sys, "stdout", make())
    divisor = 2
    assert run(work, 2) == [-1, -1]
    divisor = 1
    with pytest.raises(RankError, match="rank 1 of 2 raised ZeroDivisionError"):
        run(work, 2)


def test_letters_that_the_output_does_not_know(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert run(lambda: print("é→") or 5, 1) == [5]
    assert stream.buffer.getvalue() == b"[rank 0] \\xe9\\u2192\n"


def test_very_much_output_is_cut_quickly(shown):
    def work():
        for number in range(100_000 * dist.get_rank()):
            print(f"{number:7d} " + "x" * 66)
        if dist.get_rank() == 0:
            print("x" * 5_000_000, end="")

    started = time.monotonic()
    run(work, 2)
    assert time.monotonic() - started < 30
    endless, many = shown()
    assert endless == ["… 5.0 MB not shown …", "x" * KEPT]
    assert sum(map(len, many)) < 1_200_000
    assert many[0].startswith("      0 x") and many[-1].startswith("  99999 x")
    assert sum("6.5 MB not shown" in line for line in many) == 1


@pytest.mark.parametrize("chunk", [7, 100_000])
def test_what_is_kept_does_not_depend_on_how_it_arrives(chunk):
    def kept(written):
        text = RankText()
        for start in range(0, len(written), chunk):
            text.feed(written[start:start + chunk])
        return text.lines()

    assert kept(b"a\r\nb\n\nc") == ["a", "b", "", "c"]
    assert kept(b"\r 10%\r 50%\r100%\nnext\r 1%\r 2%") == ["100%", " 2%"]
    assert kept("é→\n".encode() * 3) == ["é→"] * 3
    assert kept(b"\x1b[2Kred \x1b[31mtext\x1b[0m\n") == ["red \x1b[31mtext\x1b[0m"]
    exact = [f"{number:09d}" for number in range(2 * KEPT // 10)]
    assert kept("".join(f"{line}\n" for line in exact).encode()) == exact
    lines = kept("".join(f"{number:09d}\n" for number in range(10_000)).encode())
    assert lines[0] == "000000000" and lines[-1] == "000009999"
    assert lines[1600:-1600] == ["… 0.1 MB not shown …"]


# Warnings, and what gloo says of a failure

def test_equal_warnings_of_several_ranks_are_one_and_each_is_said_once(capsys):
    def work():
        for _ in range(3):
            warnings.warn("of all", stacklevel=1)
        if dist.get_rank() in (1, 3):
            warnings.warn("of some", stacklevel=1)
        if dist.get_rank() == 2:
            warnings.warn("of one", stacklevel=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("caught", stacklevel=1)
        # of torch's own warning, the learner's line is named
        dist.all_gather_into_tensor(torch.empty(dist.get_world_size() * 3), torch.ones(3))
        if fails and dist.get_rank() == 0:
            warnings.warn("the last", stacklevel=1)
            raise ValueError
        return len(caught)

    fails = False
    assert run(work, 4) == [1] * 4
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line[:line.index(", line ")] for line in lines] == [
        f"{ranks} UserWarning: {text} (test_output.py" for ranks, text in (
            ("[ranks 0-3]", "of all"), ("[ranks 1, 3]", "of some"), ("[rank 2]", "of one"))]
    assert lines[0].endswith(': warnings.warn("of all", stacklevel=1))')
    assert last.startswith("[ranks 0-3] FutureWarning: ") and "test_output.py, line " in last
    fails = True
    failure(work, 3)  # this process has seen the others
    assert capsys.readouterr().out.startswith("[rank 0] UserWarning: the last (test_output.py")


def other_shape():
    print("own words", file=sys.stderr)
    dist.all_reduce(torch.ones(3 + 1000 * dist.get_rank()))


def wrong_parts():
    print("own words", file=sys.stderr)
    dist.reduce_scatter(torch.empty(3), [torch.ones(3), torch.ones(4)])


@pytest.mark.parametrize(("work", "kind"), [(other_shape, "mismatched"), (wrong_parts, "raised")])
def test_words_of_gloo_that_the_report_repeats_are_held_back(work, kind, capsys):
    error = failure(work, 2)
    assert error.kind == kind
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[rank 0] own words", "[rank 1] own words"]
    assert "ProcessGroupGloo.cpp" not in str(error)
    if work is wrong_parts:
        assert str(error).startswith(f"rank {error.rank} of 2 raised RuntimeError: Check failed")
        assert "all_reduce" not in str(error)  # which gloo calls, and nobody else


def test_words_of_gloo_that_no_report_repeats_stay(capsys):
    def larger_than_expected():
        if dist.get_rank() == 0:
            dist.send(torch.ones(7), 1)
        else:
            dist.recv(torch.ones(3), 0)

    error = failure(larger_than_expected, 2)
    assert (error.kind, error.rank) == ("died", 1)
    assert "[rank 1] " in (text := capsys.readouterr().out) and "28 vs 12" in text
    words = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
    run(lambda: os.write(2, words.encode()), 1)
    assert capsys.readouterr().out == f"[rank 0] {words}\n"
