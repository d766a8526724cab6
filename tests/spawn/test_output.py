"""What the ranks write: in a terminal or file, whole and labelled; in Python, C and children."""

import io
import os
import resource
import subprocess
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
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
        for _ in tqdm(range(30 + rank), mininterval=0, desc="steps"):
            pass
        print("without an end", rank, end="")

    run(work, 2)
    for rank, lines in enumerate(shown()):
        assert lines.pop(-2).startswith("steps: 100%")  # of a progress bar, the last state
        assert lines == [f"print {rank}", "unicode é→漢字🎈", "to stderr", "to the descriptor",
                         "not utf-8: \ufffd\ufffd", "from a shell", "from a child",
                         "\\ud800 is no text", "", f"without an end {rank}"]


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


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", buffering=1, closefd=False)


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [lambda: None, closed, broken_pipe],
                         ids=["None", "closed", "broken pipe"])
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


def test_a_rank_may_close_its_output(shown):
    def work():
        print("before")
        if dist.get_rank() == 1:
            sys.stdout = None
        return dist.get_rank()

    assert run(work, 2) == [0, 1]
    assert shown() == [["before"], ["before"]]


def test_very_much_output_is_cut(shown):
    def work():
        for number in range(100_000):
            print(f"{number:7d} " + "x" * 66)

    run(work, 2)
    for lines in shown():
        assert sum(map(len, lines)) < 1_200_000
        assert lines[0].startswith("      0 x")
        assert lines[-1].startswith("  99999 x")
        assert sum("6.5 MB not shown" in line for line in lines) == 1


def test_one_endless_line_is_cut_quickly(shown):
    started = time.monotonic()
    run(lambda: print("x" * 5_000_000, end=""), 2)
    assert time.monotonic() - started < 15
    for lines in shown():
        assert lines == ["… 5.0 MB not shown …", "x" * KEPT]


@pytest.mark.parametrize("chunk", [7, 100_000])
def test_what_is_kept_does_not_depend_on_how_it_arrives(chunk):
    def kept(written):
        text = RankText()
        for start in range(0, len(written), chunk):
            text.feed(written[start:start + chunk])
        return text.lines()

    assert kept(b"") == []
    assert kept(b"a\r\nb\n\nc") == ["a", "b", "", "c"]
    assert kept(b"\r 10%\r 50%\r100%\nnext\r 1%\r 2%") == ["100%", " 2%"]
    assert kept("é→\n".encode() * 3) == ["é→"] * 3
    assert kept(b"\x1b[2Kred \x1b[31mtext\x1b[0m\n") == ["red \x1b[31mtext\x1b[0m"]
    exact = [f"{number:09d}" for number in range(2 * KEPT // 10)]
    assert kept("".join(f"{line}\n" for line in exact).encode()) == exact
    lines = kept("".join(f"{number:09d}\n" for number in range(10_000)).encode())
    assert lines[0] == "000000000" and lines[-1] == "000009999"
    assert lines[1600:-1600] == ["… 0.1 MB not shown …"]


@pytest.mark.slow
def test_large_values_come_back_whole_and_memory_is_given_back():
    def work():
        return torch.full((2**27,), 1.0 + dist.get_rank()) if dist.get_rank() else "small"

    before = resident()
    small, big = run(work, 2)
    assert small == "small"
    assert (big.numel(), big[0], big[-1], big.sum()) == (2**27, 2.0, 2.0, 2.0**28)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert peak - before < 2.5e9  # 0.5 GB, and the copies on its way
    del big
    assert resident() - before < 0.3e9


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
