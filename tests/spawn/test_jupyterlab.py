"""What the ranks show, as a reader of JupyterLab sees it, in a real browser."""

import pytest
from jupyter import jupyter_lab, write_cells

pytestmark = pytest.mark.slow

CELLS = {
    "load": "%load_ext dplab\nimport time\nimport torch.distributed as dist\nimport dplab",
    "many-lines": """%%ranks 4
for number in range(5_000):
    print(f"line {number} of rank {dist.get_rank()}")""",
    "figures": """%%ranks 2
import matplotlib.pyplot as plt
from IPython.display import Markdown
print("before the figure")
plt.figure(figsize=(3, 1.5))
plt.plot([0, 1 + dist.get_rank()], label="a line")
plt.show()
print("after it")
display(Markdown(f"**strong** words of {dist.get_rank()}"))""",
    "long": "dplab.run(time.sleep, 2, 7)\nprint('done')",
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_cells(folder / "ranks.ipynb", CELLS)
    with jupyter_lab(folder) as lab, lab.open("ranks.ipynb") as notebook:
        notebook.run_cell("load")
        yield notebook


def height(notebook, cell):
    """Of what stands below the cell, in pixels."""
    return notebook.output(cell).bounding_box()["height"]


def test_very_many_lines_are_scrolled(notebook):
    notebook.run_cell("many-lines")
    assert 200 < height(notebook, "many-lines") < 900  # of 118,000 without
    box = notebook.output("many-lines").locator("div", has=notebook.page.locator("> pre")).last
    assert box.evaluate("box => box.scrollHeight") > 10_000
    box.evaluate("box => { box.scrollTop = box.scrollHeight; }")
    assert "line 4999 of rank 3" in notebook.output_text("many-lines")


def test_figures_and_markdown_stand_below_the_labels_of_their_ranks(notebook):
    notebook.run_cell("figures")
    output = notebook.output("figures")
    pictures = output.locator("img")
    assert pictures.count() == 2
    assert output.locator("strong").all_inner_texts() == ["strong", "strong"]
    tops = [pictures.nth(rank).bounding_box()["y"] for rank in range(2)]
    labels = [output.get_by_text(f"rank {rank}", exact=True).nth(1).bounding_box()["y"]
              for rank in range(2)]  # the first is that of the line before it
    assert labels[0] < tops[0] < labels[1] < tops[1]
    assert tops[0] - labels[0] < 60 and tops[1] - labels[1] < 60


def test_what_is_said_of_silent_ranks_goes_without_a_trace_for_the_eye(notebook):
    notebook.run_cell("long", wait=False)
    notebook.output("long").get_by_text("rank 1 was running").wait_for(timeout=30_000)
    notebook.wait()
    text = notebook.output_text("long")
    assert "done" in text and "running" not in text
    assert notebook.output("long").locator(".jp-OutputArea-child").count() == 1  # the print's
