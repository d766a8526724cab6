"""The glossary's table as a list of terms: it fits a phone, and each term has an address."""

import re

ROW = re.compile(r"^\| \*\*(?P<term>.+?)\*\* \| (?P<text>.+) \| (?P<place>.+) \|$")


def setup(app):
    app.connect("source-read", make_list)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def make_list(app, docname, source):
    """Puts a directive, which gives each term the address `term-…`, in place of the table."""
    if docname != "glossary":
        return
    lines = source[0].splitlines()
    rows = [place for place, line in enumerate(lines) if ROW.match(line)]
    terms = ["```{glossary}", *[part for place in rows for part in entry(lines[place])], "```"]
    lines[rows[0] - 2:rows[-1] + 1] = terms  # with the table's head
    source[0] = "\n".join(lines)


def entry(row):
    match = ROW.match(row)
    return [match["term"], f"    {match['text']}", f"    {match['place']}", ""]
