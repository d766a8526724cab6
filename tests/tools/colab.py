"""Puts the cell that sets the course up on Colab and Kaggle behind the title of every notebook.

    python tests/tools/colab.py        # after a new notebook, or a new address in pyproject.toml

Where pyproject.toml has no address yet, they have nothing to fetch, so it takes the cell out.
"""

import tomllib
from pathlib import Path

import notebooks
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"]["urls"]["Repository"]
IS_KNOWN = "/OWNER/" not in ADDRESS
ID = "on-colab"
TAGS = [notebooks.FOLDED, "remove-cell"]  # the second is the web book's, which leaves the cell out
SOURCE = f"""\
# On Google Colab and on Kaggle, fetches and installs the course, and enters its folder.
if ("google.colab" in str(get_ipython())
        or "KAGGLE_KERNEL_RUN_TYPE" in get_ipython().run_line_magic("env", "")):
    import site
    from pathlib import Path
    !test -d ~/dplab || git clone -q --depth 1 {ADDRESS} ~/dplab
    %pip install -q -e ~/dplab
    site.addsitedir(Path.home() / "dplab")  # this kernel started before the course was installed
    %cd -q ~/dplab/chapters"""


def for_colab(notebook, is_known=IS_KNOWN):
    """The notebook, with this cell alone of its kind as the second of its cells, or without."""
    notebook.cells = [cell for cell in notebook.cells if cell.id != ID]
    if is_known:
        notebook.cells.insert(1, new_code_cell(SOURCE, id=ID, metadata={"tags": TAGS}))
    return notebook


if __name__ == "__main__":
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        path.write_text(notebooks.normalise(for_colab(notebooks.read(path))), encoding="utf-8")
