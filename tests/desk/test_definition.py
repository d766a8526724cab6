"""What a reader defines in a notebook or a script, as source that stands on its own."""

import math
import subprocess
import sys
import textwrap

import pytest
from kernel import Kernel

from dplab.desk.definition import written_down


@pytest.fixture(scope="module")
def notebook():
    with Kernel() as kernel:
        yield kernel


@pytest.fixture
def written(notebook):
    """A function: after these cells, the source of `attempt`, or why there is none. The source by
    itself gives for ``call`` what the notebook gives.
    """
    def run(cell):
        reply = notebook.run(textwrap.dedent(cell).strip())
        assert reply.status == "ok", reply.error
        return reply

    def written(*cells, call="attempt()", attempt="attempt"):
        for cell in ("%reset -f", *cells):
            run(cell)
        [shown] = run(f"""
            from dplab.desk.definition import CannotWrite as _cannot, written_down as _written
            try:
                _text, _value = _written({attempt}, "attempt", lambda value: None), repr({call})
            except _cannot as _error:
                _text, _value = str(_error), ""
            __import__("IPython").display.display(
                {{"text/plain": _text, "text/value": _value}}, raw=True)""").displays.values()
        if shown["text/value"]:
            script = shown["text/plain"] + f"print(repr({call}))"
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
            assert done.stdout.strip() == shown["text/value"], done.stderr
        return shown["text/plain"]
    return written


def test_what_it_uses_comes_along_and_nothing_else(written):
    """Names of every kind, through helpers, classes, decorators, and what was defined again."""
    source = written(
        "import concurrent.futures, fractions\nimport os.path as p\nimport functools, re, math",
        """
        try:
            from math import floor as down
        except ImportError:
            raise
        from itertools import *
        from typing import Sequence
        from dataclasses import dataclass
        """,
        "STEP = 3\nSIZES = {'a': [1, (2.5, None)], 'b': {True}}\nunused = object()",
        "FLAG = re.IGNORECASE\nroot = math.sqrt\nedge = -math.inf\nlen = 5",
        "def sum(numbers):\n    return -1\n\ndef is_odd(n):\n    return 'old'",
        """
        def doubled(function):
            @functools.wraps(function)
            def inner(*numbers):
                return 2 * function(*numbers)
            return inner

        @doubled
        @functools.cache
        def helper():
            return 3

        class Base:
            def one(self):
                return helper()

        @dataclass
        class Marked(Base):
            number: int
            kind: type = fractions.Fraction

            def all(self):
                return [self.kind(self.number), self.one()]
        """,
        "def is_even(n):\n    return n == 0 or is_odd(n - 1)",
        "def is_odd(n):\n    return n > 0 and is_even(n - 1)",
        "other = helper\nadd = lambda a, b: a + b\nnumber = data = (n for n in [])", """
        def attempt(numbers: Sequence = (4,), start=STEP) -> 'NotThere':
            # a comment of the reader's
            def scaled(number):
                return (lambda: root(number) * STEP)()
            with concurrent.futures.ThreadPoolExecutor() as pool:
                lower = pool.submit(down, 2.5).result()
            return (*map(scaled, numbers), start, lower, p.join("a", "b"), SIZES["a"], FLAG.name,
                    edge, len, sum(numbers), max(1, 2), add(1, other()), Marked(7).all(),
                    is_even(4), list(chain([1], [2])))
        """)
    assert "# a comment of the reader's" in source and "import os.path as p" in source
    for absent in ("unused", "old", "data =", "number ="):
        assert absent not in source
    places = [source.index(part) for part in ("STEP = 3", "@doubled\n@functools.cache\ndef helper",
                                              "class Base", "@dataclass\nclass Marked",
                                              "def attempt")]
    assert places == sorted(places)


@pytest.mark.parametrize("cells", [
    ["def attempt():\n    return 1\n\ndef other():\n    return 2",
     "def attempt():\n    return 3"],  # the last one, of a cell that ran
    ["START = [2]", "def attempt():\n    return START", "START.append(3)"],
    ["%%time\ndef attempt():\n    return 4"], ["%pwd\nclass attempt(int):\n    pass\n!true"],
    ["with open('/dev/null'):\n    def attempt():\n        return 5"],
    ["try:\n    class attempt(int):\n        pass\nexcept ZeroDivisionError:\n    raise"]])
def test_what_counts_is_what_ran_in_whatever_cell(written, cells):
    assert written(*cells).rstrip().endswith(("3", "START", "4", "pass", "5"))


def test_what_is_checked_under_another_name_gets_that_of_the_exercise(written):
    source = written("def my_own():\n    return 1", attempt="my_own", call="my_own()")
    assert source.endswith("\nattempt = my_own\n")


@pytest.mark.parametrize(("cells", "culprit"), [
    (["import numpy\nscale = numpy.ones(3)", "def helper():\n    return scale",
      "def attempt():\n    return helper()"], "`scale`, a ndarray that `helper` uses"),
    (["def make(n):\n    def helper():\n        return n\n    return helper", "helper = make(2)",
      "def attempt():\n    return helper()"], "`helper` is a function"),
    (["def attempt():\n    return 1", "import functools\nattempt = functools.cache(attempt)"],
     "`attempt`"),
    (["LIMITS = [0, float('inf')]", "def attempt():\n    return LIMITS"], "`LIMITS`"),
    (["exec('def helper(): return 98765')", "def attempt():\n    return helper()"], "`helper`"),
    (["import re\nattempt = [lambda: re]"], "`attempt`")])
def test_what_cannot_be_written_down_is_named(written, cells, culprit):
    attempt = "attempt[0]" if len(cells) == 1 else "attempt"
    said = written(*cells, attempt=attempt)
    assert culprit in said and "def attempt" not in said


# A file's own, as a script's

SHIFT = 2


class Base:
    def shifted(self, number):
        return number + SHIFT


class OfThisFile(Base):
    def root(self, number):
        return math.sqrt(self.shifted(number))


def test_a_class_of_a_file_and_a_part_that_mine_gave():
    source, names = written_down(OfThisFile, "Root", lambda value: None), {"__name__": "__main__"}
    exec(source, names)
    assert names["Root"]().root(7) == 3.0 and "pytest" not in source
    source = written_down(OfThisFile, "OfThisFile", {Base: "the-base"}.get)
    assert source.startswith("import dplab\n") and "class Base" not in source
    assert 'Base = dplab.mine("the-base")' in source
