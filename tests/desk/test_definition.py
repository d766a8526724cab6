"""What a reader defines in a notebook or a script, as source that stands on its own."""

import math
import subprocess
import sys
import textwrap

import pytest
from kernel import Kernel

from dplab.desk.definition import CannotWrite, written_down


@pytest.fixture(scope="module")
def notebook():
    with Kernel() as kernel:
        yield kernel


@pytest.fixture
def written(notebook):
    """The source that a notebook with these cells gives for a name; CannotWrite where there is
    none. ``expression`` is the value in the notebook, where that is not the name itself."""
    def written(*cells, name="attempt", expression=None):
        assert notebook.run("%reset -f").status == "ok"
        for cell in cells:
            reply = notebook.run(textwrap.dedent(cell).strip())
            assert reply.status == "ok", reply.error
        reply = notebook.run(f"""
from dplab.desk.definition import CannotWrite, written_down
try:
    text, refusal = written_down({expression or name}, {name!r}, lambda value: None), ""
except CannotWrite as error:
    text, refusal = "", str(error)
__import__("IPython").display.display({{"text/plain": text + refusal}}, raw=True)
bool(refusal)""")
        assert reply.status == "ok", reply.error
        [data] = reply.displays.values()
        if reply.value == "True":
            raise CannotWrite(data["text/plain"])
        return data["text/plain"]
    return written


def defined(source, name="attempt"):
    """What the source defines in a fresh process's names."""
    names = {"__name__": "__main__"}
    exec(source, names)
    return names[name]


def test_a_function_with_what_it_uses(written):
    source = written(
        "import math as m\nimport fractions\nfrom itertools import *",
        "STEP = 3\nSIZES = {'a': [1, (2.5, None)], 'b': {True}}\nunused = object()",
        """
        def helper(number):
            return fractions.Fraction(number) + STEP

        def attempt(number):
            # a comment of the reader's
            return helper(m.floor(number)), SIZES['a'][1], list(chain([1], [2]))
        """)
    assert defined(source)(4.5) == (7, (2.5, None), [1, 2])
    assert "# a comment of the reader's" in source and "import math as m" in source
    assert source.index("STEP = 3") < source.index("def helper") < source.index("def attempt")
    assert "unused" not in source


def test_a_class_with_its_base_and_a_helper(written):
    source = written(
        "class Base:\n    def one(self):\n        return twice(1)",
        "def twice(number):\n    return 2 * number",
        """
        class attempt(Base):
            step = 5

            def __init__(self, start):
                self.start = start

            def all(self):
                return [self.start, self.one(), self.step]
        """)
    assert defined(source)(7).all() == [7, 2, 5]


def test_classes_without_methods_of_their_own(written):
    source = written("from dataclasses import dataclass\nclass attempt:\n    x = 'an older one'",
                     """
                     class Marker:
                         word = "mark"

                     @dataclass
                     class attempt:
                         number: int
                         marker: type = Marker
                     """)
    assert defined(source)(3).marker.word == "mark"
    assert "older" not in source


@pytest.mark.parametrize("wraps", ["", "@functools.wraps(function)"])
def test_decorators(written, wraps):
    source = written("import functools", f"""
        def doubled(function):
            {wraps}
            def inner(number):
                return 2 * function(number)
            return inner

        @functools.cache
        def step():
            return 1

        @doubled
        def attempt(number):
            return number + step()
        """)
    assert defined(source)(10) == 22
    assert "@doubled\ndef attempt" in source and "@functools.cache\ndef step" in source


def test_functions_that_call_each_other_and_were_defined_again(written):
    source = written("def is_odd(n):\n    return 'old'",
                     "def is_even(n):\n    return n == 0 or is_odd(n - 1)",
                     "def attempt(n):\n    return [is_even(n), *(attempt(n - 1) if n else [])]",
                     "def is_odd(n):\n    return n > 0 and is_even(n - 1)")
    assert defined(source)(3) == [False, True, False, True] and "old" not in source


@pytest.mark.parametrize(("cells", "value"), [
    (("def attempt():\n    return 1\n\ndef other():\n    return 2",
      "def attempt():\n    return 3"), 3),
    (("START = [2]", "def attempt():\n    return START", "START.append(3)"), [2, 3]),
])
def test_what_counts_is_what_ran_and_in_its_order(written, cells, value):
    assert defined(written(*cells))() == value


@pytest.mark.parametrize("cell", [
    "%%time\n{}", "%pwd\n{}\n!true", "with open('/dev/null'):\n{}",
    "try:\n{}\nexcept ZeroDivisionError:\n    raise",
])
@pytest.mark.parametrize("text", [
    "def attempt(number):\n    return number + 1\n",
    "class attempt(int):\n    def __new__(cls, number):\n        return number + 1\n"])
def test_cells_with_magic_lines_and_blocks(written, cell, text):
    source = written(cell.format(textwrap.indent(text, "    ") if ":\n" in cell else text))
    assert defined(source)(1) == 2
    assert source.startswith(text)


def test_local_names_and_attributes_are_not_taken_for_the_notebooks(written):
    source = written("data = (n for n in [])\nnumber = data\nexit = data\nself = data", """
        class attempt:
            def all(self, exit):
                self.data = [number for number in exit]
                return self.data
        """)
    assert defined(source)().all([1, 2]) == [1, 2]
    assert "=" not in source.split("def all")[0]


def test_names_of_every_kind_are_followed(written):
    source = written(
        "import concurrent.futures\nimport os.path as p\nimport re, math", """
        try:
            from math import floor as down
        except ImportError:
            raise
        from math import pi, inf
        from typing import Sequence
        """, "FACTOR = 3\nSTART = 2\nFLAG = re.IGNORECASE\nroot = math.sqrt\nedge = -math.inf",
        "len = 5\ndef sum(numbers):\n    return -1",
        "def helper():\n    return 3", "other = helper\nadd = lambda a, b: a + b", """
        def attempt(numbers: Sequence = (4,), start=START) -> 'NotThere':
            def scaled(number):
                return (lambda: root(number) * FACTOR)()
            with concurrent.futures.ThreadPoolExecutor() as pool:
                lower = pool.submit(down, 2.5).result()
            return (*map(scaled, numbers), start, lower, p.join("a", "b"), pi, inf, FLAG.name,
                    edge, len, sum(numbers), max(1, 2), add(1, other()))
        """)
    done = subprocess.run([sys.executable, "-c", f"{source}\nprint(attempt())"],
                          capture_output=True, text=True)
    assert done.stdout == (f"(6.0, 2, 2, 'a/b', {math.pi}, inf, 'IGNORECASE', -inf, 5, -1, 2, 4)\n"
                           ), done.stderr


def test_what_is_checked_under_another_name_gets_that_of_the_exercise(written):
    source = written("def my_own():\n    return 1", expression="my_own")
    assert defined(source)() == 1


@pytest.mark.parametrize(("cells", "culprit"), [
    (("import numpy\nscale = numpy.ones(3)", "def helper():\n    return scale",
      "def attempt():\n    return helper()"), "`scale`, a ndarray that `helper` uses"),
    (("rows = [1, object()]", "def attempt():\n    return rows"), "`rows`"),
    (("@staticmethod\ndef attempt():\n    pass", "def make(n):\n    return lambda: n",
      "attempt = make(3)"), "`attempt`"),
    (("def make(n):\n    def helper():\n        return n\n    return helper", "helper = make(2)",
      "def attempt():\n    return helper()"), "`helper` is a function"),
    (("def attempt():\n    return 1", "import functools\nattempt = functools.cache(attempt)"),
     "`attempt`"),
    (("class Scale:\n    pass", "attempt = Scale()\nScale.__call__ = lambda self: 1"), "`attempt`"),
    (("LONG = list(range(9999))", "def attempt():\n    return LONG"), "`LONG`"),
    (("LIMITS = [0, float('inf')]", "def attempt():\n    return LIMITS"), "`LIMITS`"),
    (("exec('def helper(): return 98765')", "def attempt():\n    return helper()"), "`helper`"),
])
def test_what_cannot_be_written_down_is_named(written, cells, culprit):
    with pytest.raises(CannotWrite) as refusal:
        written(*cells)
    assert culprit in str(refusal.value)


def test_a_function_without_a_name_is_refused(written):
    with pytest.raises(CannotWrite, match="`attempt`"):
        written("import re", expression="lambda: re")


# A file's own functions, as those of a script


SHIFT = 2


class Base:
    def shifted(self, number):
        return number + SHIFT


class OfThisFile(Base):
    def root(self, number):
        return math.sqrt(self.shifted(number))


def test_a_class_of_a_file():
    source = written_down(OfThisFile, "Root", lambda value: None)
    assert defined(source, "Root")().root(7) == 3.0
    assert "pytest" not in source


def test_what_dplab_gave_is_asked_for_again():
    slugs = {Base: "the-base"}
    source = written_down(OfThisFile, "OfThisFile", slugs.get)
    assert 'Base = dplab.mine("the-base")' in source and "class Base" not in source


def test_a_script(tmp_path):
    script = tmp_path / "a script.py"
    script.write_text(textwrap.dedent("""
        import math
        from dplab.desk.definition import written_down
        STEP = 4
        def helper(number): return math.sqrt(number) + STEP
        def attempt(number):
            return helper(number)
        print(written_down(attempt, "attempt", lambda value: None))
        """))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert defined(done.stdout)(9) == 7.0, done.stderr
