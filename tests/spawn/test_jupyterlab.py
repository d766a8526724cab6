"""What only a real browser shows of the ranks' output, as a reader of JupyterLab sees it."""

import pytest
from jupyter import jupyter_lab, write_cells

CELLS = {
    "load": "%load_ext dplab\nimport time\nimport torch.distributed as dist\nimport dplab",
    "many-lines": """%%ranks 4
for number in range(5_000):
    print(f"line {number} of rank {dist.get_rank()}")""",
    "long": "dplab.run(time.sleep, 2, 7)\nprint('done')",
}


@pytest.mark.slow
def test_many_lines_are_scrolled_and_of_what_is_said_of_silent_ranks_nothing_is_left(tmp_path):
    write_cells(tmp_path / "ranks.ipynb", CELLS)
    with jupyter_lab(tmp_path) as lab, lab.open("ranks.ipynb") as notebook:
        notebook.run_cell("load")
        notebook.run_cell("many-lines")
        lines = notebook.output("many-lines")
        assert 200 < lines.bounding_box()["height"] < 900  # pixels; of 118,000 without
        box = lines.locator("div", has=notebook.page.locator("> pre")).last
        assert box.evaluate("box => box.scrollHeight") > 10_000
        assert "line 4999 of rank 3" in notebook.output_text("many-lines")

        notebook.run_cell("long", wait=False)
        notebook.output("long").get_by_text("rank 1 was running").wait_for(timeout=30_000)
        notebook.wait()
        text = notebook.output_text("long")
        assert "done" in text and "running" not in text
        assert notebook.output("long").locator(".jp-OutputArea-child").count() == 1  # the print's
