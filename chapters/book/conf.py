"""Sphinx's settings. `build.py` beside this file runs it, on the folder of the chapters."""

import os
import sys
import tomllib
from pathlib import Path

from ipython_pygments_lexers import IPython3Lexer

BOOK = Path(__file__).resolve().parent
sys.path[:0] = [str(BOOK), str(BOOK.parents[1])]  # the book's own extensions, and dplab

project = "dplab"
author = "the dplab authors"
html_title = "Data-parallel training"
root_doc = "book/index"
extensions = ["myst_nb", "sphinx.ext.mathjax", "contents", "glossary", "links", "pages"]
exclude_patterns = ["**/node_modules", "**/_build", "**/.ipynb_checkpoints"]

# Of the repository: for "run this chapter", and for links to files that are no pages of the book.
with open(BOOK.parents[1] / "pyproject.toml", "rb") as file:
    repository = tomllib.load(file)["project"]["urls"]["Repository"]
if name := os.environ.get("GITHUB_REPOSITORY"):
    repository = f"https://github.com/{name}"

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"
nb_ipywidgets_js = {}
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4

html_theme = "furo"
html_static_path = ["static"]
templates_path = ["templates"]
html_additional_pages = {"index": "to_front_page.html"}
html_css_files = ["book.css"]
html_js_files = ["theme.js", "copy.js"]
html_favicon = "static/icon.svg"
html_copy_source = False  # the notebooks name their solutions' files
html_use_index = False
html_show_sphinx = html_show_copyright = False
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"

# All from this folder, also the font.
mathjax_path = "mathjax/tex-chtml.js"
mathjax4_config = {"loader": {"paths": {"fonts": "[mathjax]"}}}


def setup(app):
    """Cells are IPython's: `!` runs a program, which Python's own lexer refuses."""
    app.add_lexer("python", IPython3Lexer)
