"""Licences, citation, issue forms, sources of numbers: whole, and in agreement with each other."""

import json
import tomllib
from pathlib import Path

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]


def test_the_citation_agrees_with_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["repository-code"] == project["urls"]["Repository"]
    assert citation["version"] == project["version"]
    assert citation["license"] in project["license"].split(" AND ")
    assert all((ROOT / name).stat().st_size > 10_000 for name in project["license-files"])


@pytest.mark.parametrize(("schema", "paths"), [
    ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
    ("vendor.github-issue-forms", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))),
    ("vendor.github-workflows", sorted((ROOT / ".github/workflows").glob("*.yml")))])
def test_forms_and_workflows_are_what_their_readers_take(schema, paths):
    assert paths
    done = CliRunner().invoke(check_jsonschema.main,
                              ["--builtin-schema", schema, *map(str, paths)])
    assert done.exit_code == 0, done.output


def unsourced(part, name=""):
    """Where the tables of a JSON file stand that name no source."""
    if isinstance(part, list):
        for number, each in enumerate(part):
            yield from unsourced(each, f"{name}[{number}]")
    elif isinstance(part, dict) and "source" not in part:
        if {"rows", "bus", "published"} & set(part) and "table" not in part:
            yield name
        for key, each in part.items():
            yield from unsourced(each, f"{name}.{key}")


@pytest.mark.parametrize("path", sorted((ROOT / "dplab/predict").glob("*.json")),
                         ids=lambda path: path.name)
def test_published_numbers_have_a_source(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert not list(unsourced(content))
    for run in content.get("runs", []):
        assert content["tables"][run["table"]]["source"], run["id"]


def test_measured_numbers_have_their_command():
    for path in (ROOT / "chapters/data").glob("*.json"):
        assert json.loads(path.read_text(encoding="utf-8"))["command"].startswith("python "), path
