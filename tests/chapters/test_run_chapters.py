"""Run All of a notebook as the tool measures it: its memory, and a cell that fails."""

import notebooks
import pytest
import run_chapters

MIB = 2**20
DRAFT = """\
# %% id=much
held = bytearray(b"x") * (300 * 2**20)

# %% id=wait
import time; time.sleep(1)

# %% id=less
del held; held = bytearray(b"x") * (100 * 2**20)

# %% id=beside
open("beside", "w").write("x")

# %% id=fails
1 / 0
"""


@pytest.mark.slow
def test_the_peak_of_a_notebook_is_seen_and_a_failure_is_the_tools(tmp_path, monkeypatch, capsys):
    path = tmp_path / "03_small.ipynb"
    path.write_text(notebooks.normalise(notebooks.from_percent(DRAFT)), encoding="utf-8")
    text = path.read_bytes()
    seconds, peak, error = run_chapters.run_all(path)
    assert 300 * MIB < peak.bytes < 450 * MIB and peak.processes == 1
    assert 1 < seconds < 60 and error == "ZeroDivisionError: division by zero"
    assert path.read_bytes() == text and (tmp_path / "beside").exists()

    monkeypatch.setattr(run_chapters, "FOLDER", tmp_path)
    monkeypatch.setattr(run_chapters, "run_all", lambda path: (seconds, peak, error))
    with pytest.raises(SystemExit, match="03 failed"):
        run_chapters.main([])
    assert "03_small" in capsys.readouterr().out
