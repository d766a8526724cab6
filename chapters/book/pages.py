"""A notebook as a page of the book: what is folded, each exercise's hints, how to run it."""

import html
import re
from pathlib import Path

import nbformat
from docutils import nodes
from links import BRANCH, labelled, rewritten
from nbformat.v4 import new_markdown_cell
from outputs import for_readers, has_columns, in_images
from sphinx.errors import ExtensionError

from dplab.desk import cards

CHECK = re.compile(r"""\bdplab\.check\(\s*["']([\w.-]+)["']""")
# Of what a reader of the book cannot do: in a notebook, a call shows one hint after the other.
CALL_FOR_HINTS = re.compile(r"\s+Stuck\?\s+`dplab\.hint\([^`]*\)`(?:[^.`]*\bhint more\b[^.]*)?\.")
NOT_IN_THE_BOOK = re.compile(r"<!-- not in the book -->\n.+?(?:\n\n|\Z)", re.DOTALL)
UNKNOWN = "https://github.com/OWNER/"  # an address that nobody has filled in
COLAB = "on-colab"  # the cell without which Colab lacks the course: tests/tools/colab.py writes it
STORED = ("You read the stored outputs of one run. To answer the guesses and check the exercises, "
          "run the chapter")


def setup(app):
    app.add_config_value("repository", "", "env", str)
    app.connect("source-read", make_page)
    app.connect("doctree-read", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def make_page(app, docname, source):
    """Rewrites a notebook, and what is for readers of the files only, before Sphinx reads it."""
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".ipynb":
        address = "ADDRESS" if unknown(app) else app.config.repository
        source[0] = NOT_IN_THE_BOOK.sub("", source[0]).replace("git clone ADDRESS",
                                                               f"git clone {address}")
        return
    notebook = nbformat.reads(source[0], as_version=4)
    refuse_without_outputs(path, notebook)
    cells = [cell for each in notebook.cells for cell in book_cells(app, docname, path, each)]
    notebook.cells = list(labelled(app, path.stem, cells))
    title = next(cell for cell in notebook.cells if "# " in cell.source)
    line = run_this(app, path, on_colab=any(cell.id == COLAB for cell in notebook.cells))
    title.source = re.sub(r"^# .*$", lambda heading: heading[0] + "\n\n" + line,
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
        cell.source = rewritten(app, docname, CALL_FOR_HINTS.sub("", cell.source), path.parent)
    elif "check" in cell.metadata.get("tags", []):
        cell.outputs = []  # the verdict on an untouched stub
        slugs = CHECK.findall(cell.source)
    elif cell.cell_type == "code":
        # Of progress, the stored run has none.
        cell.outputs = [] if "dplab.progress(" in cell.source else for_readers(
            app, docname, cell.outputs)
        fold(cell)
    yield cell
    for slug in slugs:
        yield new_markdown_cell(hints(slug))


def fold(cell):
    """Folds the result of a guess; a folded source says in its first comment what it does."""
    tags = cell.metadata.get("tags", [])
    if ".reveal(" in cell.source and cell.outputs:
        cell.metadata["tags"] = [*tags, "hide-output"]
        words = "Result"
    elif "hide-input" in tags and (comment := re.match(r"# (.+)", cell.source)):
        words = f"Code: {comment[1][0].lower()}{comment[1][1:]}"
    else:
        return
    cell.metadata["mystnb"] = {"code_prompt_show": words, "code_prompt_hide": words}


def hints(slug):
    """The hints of an exercise, each folded."""
    from dplab.checks import every_exercise  # loads torch

    given = next(each for each in every_exercise() if slug in (each.slug, each.number)).hints
    return "\n".join(f'<details class="hint"><summary>Hint {place} of {len(given)}</summary>'
                     f"<p>{cards.inline(hint)}</p></details>"
                     for place, hint in enumerate(given, start=1))


def unknown(app):
    """Whether this build does not know its repository's address."""
    return app.config.repository.startswith(UNKNOWN)


def run_this(app, path, *, on_colab):
    """Where this chapter can be run in a browser, if that is known, and what reading leaves out."""
    to_setup = '<a href="book/setup.html">on your own machine</a>'
    if unknown(app):
        return f'<p class="run-this">{STORED} {to_setup}.</p>\n'
    name = app.config.repository.removeprefix("https://github.com/")
    file = f"chapters/{path.name}"
    places = {
        "Colab": (f"https://colab.research.google.com/github/{name}/blob/{BRANCH}/{file}",
                  "Opens this chapter"),
        "Codespaces": (f"https://codespaces.new/{name}",
                       f"Opens the repository, where this chapter is {file}"),
        "Binder": (f"https://mybinder.org/v2/gh/{name}/{BRANCH}?urlpath=lab/tree/{file}",
                   "Opens this chapter"),
    }
    if not on_colab:
        del places["Colab"]
    links = " ".join(f'<a href="{html.escape(link)}" title="{title}">{place}</a>'
                     for place, (link, title) in places.items())
    return (f'<p class="run-this">Run this chapter: {links}<br><small>{STORED}, there or '
            f"{to_setup}.</small></p>\n")


def finish(app, doctree):
    """Changes a page as Sphinx has read it."""
    docname = app.env.docname
    for text in doctree.findall(nodes.literal_block):
        if has_columns(text.astext()):
            text["classes"].append("columns")
    for image in [*doctree.findall(nodes.image)]:
        if not re.match(r"[a-z]+:", image["uri"]):
            link = nodes.reference("", "", refuri=in_images(docname, Path(image["uri"]).name),
                                   classes=["whole"])
            image.replace_self(link)
            link += image
    if unknown(app):
        for link in [*doctree.findall(nodes.reference)]:
            if link.get("refuri", "").startswith(app.config.repository):
                link.replace_self(link.children)
