"""A notebook as a page of the book: its stored outputs, each exercise's hints, how to run it."""

import base64
import hashlib
import html
import posixpath
import re
from pathlib import Path

import nbformat
from links import BRANCH, labelled, rewritten
from nbformat.v4 import new_markdown_cell
from sphinx.errors import ExtensionError

from dplab.desk import cards

CHECK = re.compile(r"""\bdplab\.check\(\s*["']([\w.-]+)["']""")
IMAGE = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]+)")
WIDGET = "application/vnd.jupyter.widget-view+json"
# Of a stored card or slider: what asks the reader to run a cell.
ASKS_TO_RUN = re.compile(
    r'<div>To guess, write answer=.*?</div>|<p class="dplab-run-this">.*?</p>', re.DOTALL)


def setup(app):
    app.add_config_value("repository", "", "env", str)
    app.connect("source-read", make_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def make_page(app, docname, source):
    """Rewrites a notebook before Sphinx reads it."""
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".ipynb":
        return
    notebook = nbformat.reads(source[0], as_version=4)
    refuse_without_outputs(path, notebook)
    cells = [cell for each in notebook.cells for cell in book_cells(app, docname, path, each)]
    notebook.cells = list(labelled(app, path.stem, cells))
    title = next(cell for cell in notebook.cells if "# " in cell.source)
    title.source = re.sub(r"^# .*$", lambda heading: heading[0] + "\n\n" + run_this(app, path),
                          title.source, count=1, flags=re.MULTILINE)
    source[0] = nbformat.writes(notebook)


def refuse_without_outputs(path, notebook):
    """ExtensionError for a notebook none of whose cells has an output."""
    if not any(cell.get("outputs") for cell in notebook.cells):
        name = f"chapters/{path.name}"
        raise ExtensionError(f"{name} has no outputs, and the book runs no notebook. Run: "
                             f"python tests/tools/notebooks.py refresh {name}")


def book_cells(app, docname, path, cell):
    """A cell of the notebook as the book has it, with what follows it."""
    slugs = []
    if cell.cell_type == "markdown":
        cell.source = rewritten(app, docname, cell.source, path.parent)
    elif "check" in cell.metadata.get("tags", []):
        cell.outputs = []  # the verdict on an untouched stub
        slugs = CHECK.findall(cell.source)
    elif cell.cell_type == "code":
        for output in cell.outputs:
            show_without_kernel(app, docname, output)
    yield cell
    for slug in slugs:
        yield new_markdown_cell(hints(slug))


def hints(slug):
    """The hints of an exercise, each folded."""
    from dplab.exercises import every_exercise  # loads torch

    given = next(each for each in every_exercise() if slug in (each.slug, each.number)).hints
    return "\n".join(f'<details class="hint"><summary>Hint {place} of {len(given)}</summary>'
                     f"<p>{cards.inline(hint)}</p></details>"
                     for place, hint in enumerate(given, start=1))


def show_without_kernel(app, docname, output):
    """Takes widgets, which need a kernel, out of a stored output; puts its pictures in files."""
    data = output.get("data", {})
    data.pop(WIDGET, None)
    if "text/html" in data:
        data.pop("image/png", None)  # the same picture, for what shows no HTML
        text = ASKS_TO_RUN.sub("", data["text/html"]).replace("<img ", '<img loading="lazy" ')
        data["text/html"] = IMAGE.sub(lambda match: saved(app, docname, match[1]), text)


def saved(app, docname, png):
    """Writes a picture, given in base64, beside the page; returns its address from there."""
    content = base64.b64decode(png)
    name = f"{hashlib.sha256(content).hexdigest()[:16]}.png"
    folder = Path(app.outdir, "_images")
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return posixpath.join(posixpath.relpath("_images", posixpath.dirname(docname) or "."), name)


def run_this(app, path):
    """Where this chapter can be run in a browser."""
    address = app.config.repository
    name = address.removeprefix("https://github.com/")
    file = f"chapters/{path.name}"
    places = {
        "Colab": f"https://colab.research.google.com/github/{name}/blob/{BRANCH}/{file}",
        "Codespaces": f"https://codespaces.new/{name}",
        "Binder": f"https://mybinder.org/v2/gh/{name}/{BRANCH}?urlpath=lab/tree/{file}",
    }
    links = " ".join(f'<a href="{html.escape(link)}">{place}</a>' for place, link in places.items())
    return f'<p class="run-this">Run this chapter: {links}</p>\n'
