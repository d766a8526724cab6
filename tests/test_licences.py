"""Licences, citation, issue forms: whole, of the right form, and in agreement with each other."""

import hashlib
import json
import tomllib
from pathlib import Path

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOLDER = "the dplab authors"
# SHA-256 of the words of each licence, as its publisher has them: apache.org's LICENSE-2.0.txt and
# creativecommons.org's legal code, by way of choosealicense.com at aed28f9.
WORDS = {
    "LICENSE": "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645",
    "LICENSE-TEXT": "1f5a529dc95849305307f0d6861169d8cae9e99807e4abcec68ef9ad19235652",
}


def words_of_the_licence(name):
    """Without what dplab says before it, and however the lines are broken."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name == "LICENSE-TEXT":
        text = text[text.index("Attribution 4.0 International\n\n"):]
    return " ".join(text.split())


@pytest.mark.parametrize("name", WORDS)
def test_a_licence_is_whole_and_unchanged(name):
    assert hashlib.sha256(words_of_the_licence(name).encode()).hexdigest() == WORDS[name]


def test_project_readme_and_licences_name_the_same():
    assert PROJECT["license"] == "Apache-2.0 AND CC-BY-4.0"
    assert set(PROJECT["license-files"]) == set(WORDS)
    assert f"`{PROJECT['license']}`" in README and HOLDER in README
    head = (ROOT / "LICENSE-TEXT").read_text(encoding="utf-8").split("=====")[0]
    assert "CC-BY-4.0" in head and "Apache-2.0" in head and HOLDER in head


def test_the_citation_agrees_with_the_project():
    assert [author["name"].lower() for author in CITATION["authors"]] == [HOLDER]
    assert CITATION["repository-code"] == PROJECT["urls"]["Repository"]
    assert CITATION["version"] == PROJECT["version"]
    assert CITATION["license"] in PROJECT["license"].split(" AND ")


def follows(schema, path):
    """What check-jsonschema says against the file, by a schema that it ships; "" if nothing."""
    done = CliRunner().invoke(check_jsonschema.main, ["--builtin-schema", schema, str(path)])
    return "" if done.exit_code == 0 else done.output


FORMS = {"vendor.citation-file-format": [ROOT / "CITATION.cff"],
         "vendor.github-issue-forms": sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))}


@pytest.mark.parametrize(("schema", "path"), [
    pytest.param(schema, path, id=path.name) for schema, paths in FORMS.items() for path in paths])
def test_a_form_is_valid(schema, path, tmp_path):
    assert not follows(schema, path)
    first = path.read_text(encoding="utf-8").split(":")[0]
    spoilt = tmp_path / path.name
    spoilt.write_text(path.read_text(encoding="utf-8").replace(f"{first}:", "unknown:", 1))
    assert "unknown" in follows(schema, spoilt)


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
    assert json.dumps(content).count('"source"') >= 3
    for run in [*content.get("runs", []), *content.get("efficiencies", [])]:
        assert content["tables"][run["table"]]["source"], run["id"]


@pytest.mark.parametrize("path", sorted((ROOT / "chapters/data").glob("*.json")),
                         ids=lambda path: path.name)
def test_measured_numbers_have_their_command(path):
    command = json.loads(path.read_text(encoding="utf-8"))["command"]
    assert command.startswith("python ")
