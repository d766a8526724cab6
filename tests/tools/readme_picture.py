"""Makes the README's picture, figures/chapter.png: a part of a chapter in JupyterLab.

    python tests/tools/readme_picture.py
"""

import tempfile
from pathlib import Path

from jupyter import copy_course, jupyter_lab
from PIL import Image

PICTURE = Path(__file__).resolve().parents[2] / "figures/chapter.png"
CHAPTER = "chapters/06_where_the_time_goes.ipynb"
FIRST, LAST = "load-the-job", "draw-the-job"  # from the output of one to that of the other

with tempfile.TemporaryDirectory() as folder:
    copy_course(folder)
    with jupyter_lab(folder) as lab, lab.open(CHAPTER) as notebook:
        for cell in notebook.cells()[:notebook.index(LAST) + 1]:
            if cell["cell_type"] == "code":
                notebook.run_cell(cell["id"])
        notebook.page.set_viewport_size({"width": 1200, "height": 3000})
        notebook.page.wait_for_timeout(500)  # JupyterLab lays itself out a moment later
        notebook.output(FIRST).evaluate("node => node.scrollIntoView()")
        top, bottom = (notebook.output(cell).bounding_box() for cell in (FIRST, LAST))
        notebook.page.screenshot(path=PICTURE, clip=top | {
            "height": bottom["y"] + bottom["height"] - top["y"]})
Image.open(PICTURE).convert("RGB").save(PICTURE, optimize=True)
print(PICTURE, PICTURE.stat().st_size // 1000, "kB")
