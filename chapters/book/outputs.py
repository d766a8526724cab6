"""Stored outputs as the book shows them: pictures in files, and nothing that needs a kernel."""

import base64
import hashlib
import posixpath
import re
from pathlib import Path

IMAGE = re.compile(r'(<img )([^>]*?src=")data:image/png;base64,([A-Za-z0-9+/=]+)("[^>]*>)')
WIDGET = "application/vnd.jupyter.widget-view+json"
# Of a stored card or slider: what asks the reader to run a cell.
ASKS_TO_RUN = re.compile(
    r'<div>To guess, write answer=.*?</div>|<p class="dplab-run-this">.*?</p>', re.DOTALL)
# What speaks of the reader's own guesses and solutions: the run that was stored had none.
GUESS = r"your guess(?:es)?: (?:\w+ )?none(?:, (?:\w+ )?none)*"
PART_OF_A_LINE = re.compile(rf"{GUESS} \| | \| {GUESS}|your guess none, ")
LINE = re.compile(rf"^(?:{GUESS} *|\w+: the course's, until you pass exercise [\w.]+)(?:\n|\Z)",
                  re.MULTILINE)


def for_readers(app, docname, outputs):
    """The outputs of a cell, changed; those of which nothing is left are left out."""
    for output in outputs:
        if "text" in output:
            output.text = without_the_reader(output.text)
        if "data" in output:
            show(app, docname, output.data)
    return [each for each in outputs if each.get("text") != ""]


def show(app, docname, data):
    """Changes what an output shows, by its kind."""
    data.pop(WIDGET, None)
    for kind, text in data.items():
        if kind.startswith("text/"):
            data[kind] = without_the_reader(text)
    if "text/html" in data:
        data.pop("image/png", None)  # the same picture, for what shows no HTML
        text = IMAGE.sub(lambda match: picture(app, docname, match),
                         ASKS_TO_RUN.sub("", data["text/html"]))
        data["text/html"] = re.sub(r"<pre\b([^>]*)>(.*?)</pre>", preformatted, text,
                                   flags=re.DOTALL)


def without_the_reader(text):
    """A text without the lines and parts of lines that say that nobody guessed or passed."""
    left = without_empty_guesses(LINE.sub("", PART_OF_A_LINE.sub("", text)))
    return left if left == text else left.lstrip("\n")


def without_empty_guesses(table):
    """A table in Markdown without its column of guesses, if each of them is "none"."""
    rows = [line.split("|") for line in table.splitlines()]
    heads = [head.strip() for head in rows[0]] if rows else []
    if "your guess" not in heads or len({len(row) for row in rows}) > 1:
        return table
    place = heads.index("your guess")
    if {row[place].strip() for row in rows[2:]} != {"none"}:
        return table
    return "\n".join("|".join(row[:place] + row[place + 1:]) for row in rows)


def preformatted(match):
    attributes = match[1] + ' class="columns"' * has_columns(re.sub("<[^>]*>", "", match[2]))
    return f"<pre{attributes}>{match[2]}</pre>"


def has_columns(text):
    """Whether a text has lines with parts that stand below one another: wrapped, it is lost."""
    return sum(bool(re.search(r"\S {2,}\S", line)) for line in text.splitlines()) > 1


def picture(app, docname, match):
    """A picture as a file beside the page, in a link to it: on a phone only a part is seen."""
    before, attributes, png, after = match.groups()
    address = saved(app, docname, png)
    return (f'<a class="whole" href="{address}">{before}loading="lazy" {attributes}{address}'
            f"{after}</a>")


def saved(app, docname, png):
    """Writes a picture, given in base64, beside the page; returns its address from there."""
    content = base64.b64decode(png)
    name = f"{hashlib.sha256(content).hexdigest()[:16]}.png"
    folder = Path(app.outdir, "_images")
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return in_images(docname, name)


def in_images(docname, name):
    """The address of a picture of the book, as seen from a page."""
    return posixpath.join(posixpath.relpath("_images", posixpath.dirname(docname) or "."), name)
