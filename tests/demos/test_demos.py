"""What both demos say to arguments that make no sense, alone and under torchrun."""


import pytest
from demos import SCRIPT, TORCHRUN, run

from dplab.demos import gradient_sync_visualizer as visualizer
from dplab.demos import simple_ddp


@pytest.mark.parametrize("arguments, complaint", [
    ("--ranks 0", "--ranks: needs a whole number of at least 1, not '0'"),
    ("--ranks -1", "--ranks: needs a whole number of at least 1, not '-1'"),
    ("--ranks two", "--ranks: needs a whole number of at least 1, not 'two'"),
    ("--ranks 2.0", "--ranks: needs a whole number of at least 1, not '2.0'"),
    ("--steps 0", "--steps: needs a whole number of at least 1"),
    ("--seed -1", "--seed: needs a whole number of at least 0"),
    ("--ranks 4 --batch 3", "--batch: 3 is not from 4 (one sample for each rank) to 1439"),
    ("--batch 1440", "--batch: 1440 is not from 4"),
    ("--plot .", "neither in .png nor in .svg"),
    ("--plot missing/folder/shares.png", "no folder 'missing/folder': make it first"),
    ("--speed 3", "unrecognized arguments: --speed 3"),
])
def test_arguments_that_make_no_sense(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as exit:
        simple_ddp.main(arguments.split())
    out, err = capsys.readouterr()
    assert exit.value.code == 2
    assert complaint in err and err.count("\n") == 1 and out == ""


def test_a_folder_is_no_figure(tmp_path, capsys):
    (tmp_path / "shares.png").mkdir()
    with pytest.raises(SystemExit):
        simple_ddp.main(["--plot", str(tmp_path / "shares.png")])
    assert f"is a folder: try {tmp_path / 'shares.png' / 'picture.png'}" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_contradicted():
    done = run(*TORCHRUN, 2, SCRIPT, "--ranks", 3)
    assert done.returncode == 1
    assert done.stderr.count("simple_ddp: argument --ranks: 3, but torchrun started 2: leave") == 1
    assert done.stdout == ""


def test_help_explains_itself(capsys):
    with pytest.raises(SystemExit) as exit:
        simple_ddp.main(["--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--ranks", "--steps", "--batch", "--seed", "--plot"))
    assert "torchrun" in text and "default: 256" in text


@pytest.mark.parametrize("arguments, complaint", [
    ("--ranks 0", "--ranks: needs a whole number of at least 1, not '0'"),
    ("--ranks -1", "--ranks: needs a whole number of at least 1, not '-1'"),
    ("--ranks two", "--ranks: needs a whole number of at least 1, not 'two'"),
    ("--link slow", "--link: invalid choice: 'slow' (choose from 'emulated', 'real')"),
    ("--save a.jpg", "--save: 'a.jpg' ends neither in .png nor in .svg: try a.png"),
    ("--save missing/a.png", "--save: there is no folder 'missing': make it first, or try a.png"),
])
def test_what_the_visualizer_cannot_do_it_says_with_what_to_try(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as exit:
        visualizer.main(arguments.split())
    out, err = capsys.readouterr()
    assert exit.value.code == 2
    assert complaint in err and err.count("\n") == 1 and out == ""


def test_the_visualizer_writes_over_no_folder_and_takes_121_ranks_for_too_many(tmp_path, capsys):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(SystemExit):
        visualizer.main(["--save", str(tmp_path / "a.png")])
    assert f"is a folder: try {tmp_path / 'a.png' / 'picture.png'}" in capsys.readouterr().err
    assert visualizer.main(["--ranks", "121"]) == 1
    assert "world_size must be 1 to 120, not 121" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_emulates_no_link(monkeypatch, capsys):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit:
        visualizer.main(["--link", "emulated"])
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == ""
    assert err.count("argument --link: torchrun's job has its own link") == 1
