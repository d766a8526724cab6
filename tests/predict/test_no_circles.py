"""What computes lies above what it computes with."""

import graphlib
from pathlib import Path

import imports

FILES = {path.stem: path for path in
         (Path(__file__).resolve().parents[2] / "dplab/predict").glob("*.py")}


def test_no_module_of_predict_needs_itself():
    """Inside functions as well."""
    needs = {name: {module.split(".")[2] for module, _ in imports.of_file(path)
                    if module.startswith("dplab.predict.")} & set(FILES)
             for name, path in FILES.items()}
    assert needs["choose"] > {"cluster", "memory"}
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError
