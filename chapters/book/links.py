"""Links between notebooks and to files of the repository, as pages of the book need them.

A notebook's links are JupyterLab's: `03_all_reduce.ipynb#cell-id=ring`. Sphinx knows no cells, so a
cell to which a link leads gets a label. What is no page of the book is linked in the repository.
"""

import os
import posixpath
import re
from pathlib import Path

from nbformat.v4 import new_markdown_cell

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = ROOT / "chapters"
BRANCH = "main"
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
CELL = re.compile(r"([^()\s/]+)\.ipynb#cell-id=([^()\s]+)")


def setup(app):
    app.connect("builder-inited", find_linked_cells)
    app.connect("source-read", rewrite_page)
    app.connect("include-read", rewrite_included)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def find_linked_cells(app):
    """Notes the cells to which any page links, by notebook."""
    app.linked_cells = set()
    for path in [*CHAPTERS.glob("*.ipynb"), *CHAPTERS.rglob("*.md")]:
        if "node_modules" not in path.parts:
            app.linked_cells.update(CELL.findall(path.read_text(encoding="utf-8")))


def label(stem, cell):
    """The name under which the book knows a cell."""
    return f"{stem}.{cell}"


def rewrite_page(app, docname, source):
    if Path(app.env.doc2path(docname)).suffix == ".md":
        folder = (CHAPTERS / docname).parent
        source[0] = rewritten(app, docname, source[0], folder)
        # Text made for the book lies beside the built page.
        built = Path(app.outdir, docname).parent
        source[0] = re.sub(r"^(:file: )(?=\w+/)", rf"\1{built.as_posix()}/", source[0],
                           flags=re.MULTILINE)


def rewrite_included(app, relative_path, parent_docname, content):
    path = (CHAPTERS / relative_path).resolve()
    content[0] = rewritten(app, app.env.docname, content[0], path.parent)


def rewritten(app, docname, text, folder):
    """The Markdown text of a page, which lies in this folder, with its links as the book's."""
    return LINK.sub(lambda match: _rewritten(app, docname, match[1], match[2], folder), text)


def _rewritten(app, docname, words, address, folder):
    if re.match(r"#|[a-z]+:", address):
        return f"[{words}]({address})"
    path, hash_, place = address.partition("#")
    target = Path(os.path.normpath(folder / path))
    if place.startswith("cell-id="):
        return f"[{words}](#{label(target.stem, place.removeprefix('cell-id='))})"
    if app.env.path2doc(target) in app.project.docnames:
        return f"[{words}](/{target.relative_to(CHAPTERS).as_posix()}{hash_}{place})"
    if target.suffix == ".svg":  # the book shows each drawing, and keeps it under its name
        to_images = posixpath.relpath("_images", posixpath.dirname(docname) or ".")
        return f'<a href="{to_images}/{target.name}">{words}</a>'
    if target.exists() and target.is_relative_to(ROOT):
        return f"[{words}]({in_repository(app, target)}{hash_}{place})"
    return f"[{words}]({address})"  # Sphinx then says that it leads nowhere


def in_repository(app, path):
    """The address of a file or folder of the repository."""
    if path == ROOT:
        return app.config.repository
    kind = "tree" if path.is_dir() else "blob"
    return f"{app.config.repository}/{kind}/{BRANCH}/{path.relative_to(ROOT).as_posix()}"


def labelled(app, stem, cells):
    """The cells of a notebook, with a label before each to which a link leads."""
    for cell in cells:
        if (stem, cell.id) in app.linked_cells:
            mark = f"({label(stem, cell.id)})=\n"
            if cell.cell_type == "markdown":
                cell.source = mark + cell.source
            else:
                yield new_markdown_cell(mark)
        yield cell
