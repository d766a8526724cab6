"""Writes the folder of the planner: all that its page needs, beside the book.

    python chapters/book/planner/bundle.py FOLDER NODE_MODULES

``NODE_MODULES`` is where npm has put the package ``pyodide``. What comes out: the page's modules
and style, its colours from `dplab.show`, the form and the stored plan as HTML (``fragment.html``),
Pyodide's core, and ``predict.zip`` with `dplab.predict` as it is here.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from dplab.predict import fields, plan
from dplab.show import palette
from dplab.show.memory_areas import CATEGORY_COLORS
from dplab.show.timelines import HIDDEN

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGE = ("planner.mjs", "python.mjs", "worker.mjs", "form.mjs", "answer.mjs", "charts.mjs",
        "format.mjs", "html.mjs", "planner.css")
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip",
           "pyodide-lock.json", "package.json", "README.md")
"""The last two say which version it is, under which licence, and where its source is."""

TEXTS_AND_LINES = {"ink": palette.INK, "muted": palette.MUTED, "faint": palette.FAINT,
                   "grid": palette.GRID, "warning": palette.WARNING,
                   "reference": palette.REFERENCE, "curve": palette.rank_color(0)}
AREAS = CATEGORY_COLORS | palette.PART_COLORS | {"hidden-part": HIDDEN}


def bundle(folder: Path, node_modules: Path) -> None:
    """Fills ``folder``, which is made if it is not there.

    Raises FileNotFoundError where Pyodide or Node.js is missing, and says how to get it; ValueError
    where the default plan has an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGE:
        shutil.copy(HERE / name, folder)
    (folder / "colors.css").write_text(colors(), encoding="utf-8")
    (folder / "fragment.html").write_text(fragment(), encoding="utf-8")
    _copy_pyodide(node_modules / "pyodide", folder / "pyodide")
    _zip_predict(folder / "predict.zip")


def fragment() -> str:
    """The form and the stored plan as HTML, drawn by the modules that draw the live plan."""
    answer = json.loads(plan.answer(""))
    if answer["errors"]:
        raise ValueError(f"the default plan has errors: {answer['errors']}")
    node = shutil.which("node")
    if node is None:
        raise FileNotFoundError("the planner's page needs Node.js to be built: install nodejs")
    given = json.dumps({"schema": json.loads(fields.schema()), "answer": answer})
    return subprocess.run([node, HERE / "fragment.mjs"], input=given, stdout=subprocess.PIPE,
                          encoding="utf-8", check=True).stdout


def colors() -> str:
    """The course's colours as CSS variables, for a light page and for a dark one."""
    light = TEXTS_AND_LINES | AREAS
    changed = {name: palette.on_dark(color) for name, color in light.items()}
    rules = "".join(f".{name} {{ --fill: var(--{name}); }}\n" for name in AREAS)
    return (f"#planner {{ {_variables(light)} }}\n"
            f'[data-theme="dark"] #planner {{ {_variables(changed)} }}\n'
            "@media (prefers-color-scheme: dark) {\n"
            f'  body:not([data-theme="light"]) #planner {{ {_variables(changed)} }}\n}}\n{rules}')


def _variables(found):
    return " ".join(f"--{name}: {color};" for name, color in found.items())


def _copy_pyodide(package, to):
    missing = [name for name in PYODIDE if not (package / name).is_file()]
    if missing:
        raise FileNotFoundError(f"no {missing[0]} in {package}: npm ci --prefix chapters/book "
                                "brings Pyodide")
    to.mkdir(exist_ok=True)
    for name in PYODIDE:
        shutil.copy(package / name, to)


def _zip_predict(archive):
    """What ``import dplab.predict`` needs of the package."""
    package = ROOT / "dplab"
    files = [package / "__init__.py", package / "needs.py",
             *(path for path in sorted((package / "predict").iterdir())
               if path.suffix in (".py", ".json"))]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as zipped:
        for path in files:
            zipped.write(path, path.relative_to(ROOT))


if __name__ == "__main__":
    bundle(*map(Path, sys.argv[1:]))
