"""The answers that a reader wrote into cells with ``dplab.guess("slug", …, answer=…)``."""

import ast
import re

_ANSWER_BEGINS = re.compile(rb"\s*,?\s*(answer\s*=\s*)?\Z")


def answers(source: str) -> dict[str, str]:
    """The text of each answer in a cell, by the slug of its guess."""
    found = {}
    for call in _guesses(source):
        node = _answer(call)
        if node is not None and not (isinstance(node, ast.Constant) and node.value is None):
            found[call.args[0].value] = ast.get_source_segment(source, node) or ""
    return found


def open_guesses(source: str) -> set[str]:
    """The slugs of the cell's guesses that have no answer yet."""
    return {call.args[0].value for call in _guesses(source)} - answers(source).keys()


def with_answers(source: str, given: dict[str, str]) -> str:
    """The cell with ``given`` in those of its guesses that have no answer yet."""
    taken = answers(source)
    calls = [call for call in _guesses(source)
             if call.args[0].value in given and call.args[0].value not in taken]
    data, lines = _bytes_and_lines(source)
    for call in reversed(calls):  # from the end, so that earlier positions stay true
        text, node = given[call.args[0].value].encode(), _answer(call)
        if node is None:
            end = lines[call.end_lineno - 1] + call.end_col_offset - 1
            before = data[:end].rstrip()
            comma = b" " if before.endswith(b",") else b", "
            data = before + comma + b"answer=" + text + data[end:]
        else:
            start = lines[node.lineno - 1] + node.col_offset
            end = lines[node.end_lineno - 1] + node.end_col_offset
            data = data[:start] + text + data[end:]
    return data.decode()


def without_answers(source: str) -> str:
    """The text less the answers of its guesses, and less the commas and words before them."""
    data, lines = _bytes_and_lines(source)
    for call in reversed(_guesses(source)):
        if (node := _answer(call)) is not None:
            start = lines[node.lineno - 1] + node.col_offset
            end = lines[node.end_lineno - 1] + node.end_col_offset
            before = _ANSWER_BEGINS.sub(b"", data[:start])
            data = before + data[end:]
    return data.decode()


def _bytes_and_lines(source):
    """The text in bytes, as positions of `ast` count them, and where each of its lines begins."""
    data, lines = source.encode(), [0]
    for line in data.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    return data, lines


def _parsed(source):
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):  # a cell magic, or a cell half written
        return None


def _guesses(source):
    tree = _parsed(source)
    return [] if tree is None else _guesses_of(tree)


def _guesses_of(tree):
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args
             and ast.unparse(node.func).split(".")[-1] == "guess"
             and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _answer(call):
    named = [each.value for each in call.keywords if each.arg == "answer"]
    return (named or call.args[2:3] or [None])[0]
