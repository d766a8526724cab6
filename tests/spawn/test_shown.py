"""What ranks show beside text, in a notebook's kernel and elsewhere: figures, `display`, warnings.
And what they say that a report makes superfluous.
"""

import base64
import os
import struct
import sys
import warnings

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from failing import failure
from kernel import Kernel

from dplab import run

# functions of this file travel as those of a notebook do: by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SETUP = """
%load_ext dplab
import warnings
import torch
import torch.distributed as dist
from IPython.display import display, HTML, Markdown
import dplab
"""
FIGURE = """import matplotlib.pyplot as plt
figure = plt.figure(figsize=(2 + dist.get_rank(), 1), dpi=100)
plt.plot([0, 1], [dist.get_rank(), 2])
"""


@pytest.fixture(scope="module")
def kernel():
    with Kernel() as kernel:
        assert kernel.run(SETUP).status == "ok"
        yield kernel


def kinds(reply):
    """For each thing shown below the cell, in order: its kinds but text."""
    return [sorted(set(data) - {"text/plain"}) for data in reply.displays.values()]


def widths(reply):
    """Of the pictures, in order, in pixels."""
    pictures = [data["image/png"] for data in reply.displays.values() if "image/png" in data]
    return [struct.unpack(">I", base64.b64decode(picture)[16:20])[0] for picture in pictures]


TEXT, PICTURE = ["text/html"], ["image/png"]


@pytest.mark.slow
def test_figures_stand_once_below_the_label_of_their_rank_and_in_order_with_text(kernel):
    reply = kernel.run(f"""%%ranks 2
print("before", dist.get_rank())
{FIGURE}plt.show()
print("between", end="")
plt.figure(figsize=(9, 1), dpi=100).show()
print("after")
figure = plt.figure(figsize=(2, 1))
figure""")
    assert kinds(reply) == [TEXT, PICTURE, TEXT, PICTURE, TEXT, PICTURE] * 2, reply
    first, wide, _, second, _, _ = widths(reply)
    assert first < second < wide
    texts = [data["text/plain"].splitlines() for data in list(reply.displays.values())[::2]]
    for rank, (before, between, after) in enumerate((texts[:3], texts[3:])):
        label = f"[rank {rank}] "
        assert [lines[0] for lines in (before, between, after)] == [
            f"{label}before {rank}", f"{label}between", f"{label}after"]
        assert before[1].startswith(f"{label}<Figure")
    reply = kernel.run("[each.get_size_inches()[0].item() for each in _]")
    assert reply.value == "[2.0, 2.0]" and not reply.displays, reply


def test_display_of_ipython_on_a_rank(kernel):
    reply = kernel.run("""%%ranks 2
from IPython.display import display
rank = dist.get_rank()
display(Markdown(f"**rank** {rank}"))
display("plain", rank)
handle = display(HTML(f"<i>first of {rank}</i>"), display_id=True)
handle.update(HTML(f"<b>second of {rank}</b>"))""")
    assert kinds(reply) == [TEXT, ["text/markdown"], *[TEXT, ["text/html"]] * 2] * 2, reply
    shown = list(reply.displays.values())
    assert [shown[place]["text/markdown"] for place in (1, 7)] == ["**rank** 0", "**rank** 1"]
    assert [shown[place]["text/html"] for place in (3, 5, 9, 11)] == [
        "<i>first of 0</i>", "<b>second of 0</b>", "<i>first of 1</i>", "<b>second of 1</b>"]
    assert shown[8]["text/plain"].startswith("[rank 1] 'plain'\n[rank 1] 1\n")


def test_what_is_too_large_for_a_browser_is_said_to_be(kernel):
    reply = kernel.run("""%%ranks 2
display(HTML("<i>small</i>"))
display(HTML("x" * (3_000_000 if dist.get_rank() else 5)))""")
    assert kinds(reply) == [TEXT, TEXT, TEXT, TEXT, TEXT, TEXT, TEXT], reply
    assert "[rank 1] <IPython.core.display.HTML object> is not shown: it takes 3.0 MB" in reply.text


def test_what_is_shown_amid_very_much_output_is_not_lost(kernel):
    reply = kernel.run("""%%ranks 2
if dist.get_rank() == 0:
    print("x\\n" * 20_000)
    display(Markdown("*here*"))
    print("y\\n" * 20_000)""")
    assert [data["text/markdown"] for data in reply.displays.values()
            if "text/markdown" in data] == ["*here*"], reply


@pytest.mark.slow
def test_outside_a_notebook_it_is_text(capsys):
    def work():
        import matplotlib.pyplot as plt
        from IPython.display import Markdown, display

        print("before")
        plt.figure(figsize=(2, 1))
        plt.show()
        display(Markdown("**bold**"))

    run(work, 2)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        assert [line.removeprefix(f"[rank {rank}] ") for line in lines
                if line.startswith(f"[rank {rank}] ")] == [
            "before", "<Figure size 200x100 with 0 Axes>", "**bold**"]


WARN = """%%ranks 4
for number in range(3):
    warnings.warn("of all")
if dist.get_rank() in (1, 3):
    warnings.warn("of some")
print("x", end="")
warnings.warn(f"of rank {dist.get_rank()}" * (dist.get_rank() == 2))
"""


def test_equal_warnings_of_several_ranks_are_one(kernel):
    reply = kernel.run(WARN)
    lines = reply.text.strip().splitlines()
    assert lines[:4] == [f"[rank {rank}] x" for rank in range(4)], reply
    assert [line[:line.index(" (cell In[")] for line in lines[4:]] == [
        "[ranks 0-3] UserWarning: of all", "[ranks 1, 3] UserWarning: of some",
        "[ranks 0, 1, 3] UserWarning: ", "[rank 2] UserWarning: of rank 2"]  # by their lines
    assert lines[4].endswith(', line 3: warnings.warn("of all"))')
    again = kernel.run("""
def work():
    warnings.warn("of run", stacklevel=1)
    return dist.get_rank()
dplab.run(work, 2)
dplab.run(work, 3)""")
    assert again.value == "[0, 1, 2]" and again.text.count("of run") == 2, again  # text and line
    assert kernel.run("dplab.run(work, 2)").text.count("UserWarning") == 1


def test_of_torchs_own_warnings_the_learners_line_is_named(capsys):
    def work():
        dist.all_gather_into_tensor(torch.empty(dist.get_world_size() * 3),
                                    torch.ones(3))

    run(work, 2)
    text = capsys.readouterr().out
    assert text.count("FutureWarning") == text.count("\n") == 1, text
    assert text.startswith("[ranks 0-1] FutureWarning: ") and "test_shown.py, line " in text
    run(work, 3)  # this process has seen it
    assert capsys.readouterr().out == ""


def test_a_rank_that_catches_its_warnings_keeps_them(capsys):
    def work():
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("caught", stacklevel=1)
        return [str(each.message) for each in caught]

    assert run(work, 2) == [["caught"]] * 2
    assert capsys.readouterr().out == ""


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


def test_words_of_gloo_without_a_report_of_their_cause_stay(capsys):
    def larger_than_expected():
        if dist.get_rank() == 0:
            dist.send(torch.ones(7), 1)
        else:
            dist.recv(torch.ones(3), 0)

    error = failure(larger_than_expected, 2)
    assert (error.kind, error.rank) == ("died", 1)
    assert "[rank 1] " in (text := capsys.readouterr().out) and "28 vs 12" in text


def test_words_of_gloo_in_a_run_without_a_fault_stay(capsys):
    words = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
    run(lambda: os.write(2, words.encode()), 1)
    assert capsys.readouterr().out == f"[rank 0] {words}\n"
