"""What stands around the course: licences, sources of numbers, workflows, containers."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner
from dockerfile_parse import DockerfileParser
from skips import need_program

ROOT = Path(__file__).resolve().parents[1]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_citation_agrees_with_the_project():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["repository-code"] == project["urls"]["Repository"]
    assert citation["version"] == project["version"]
    assert citation["license"] in project["license"].split(" AND ")
    assert all((ROOT / name).stat().st_size > 10_000 for name in project["license-files"])


@pytest.mark.parametrize(("schema", "pattern"), [
    ("citation-file-format", "CITATION.cff"),
    ("github-issue-forms", ".github/ISSUE_TEMPLATE/*.yml"),
    ("github-workflows", ".github/workflows/*.yml")])
def test_forms_and_workflows_are_what_their_readers_take(schema, pattern):
    paths = sorted(ROOT.glob(pattern))
    assert paths
    done = CliRunner().invoke(check_jsonschema.main,
                              ["--builtin-schema", f"vendor.{schema}", *map(str, paths)])
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


def test_published_numbers_have_a_source():
    for path in sorted((ROOT / "dplab/predict").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert not list(unsourced(content, path.name))
        for run in content.get("runs", []):
            assert content["tables"][run["table"]]["source"], run["id"]


# GitHub's workflows

WORKFLOWS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
             for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}


def test_a_workflow_may_only_read_and_the_book_be_published_where_its_owner_says_so():
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}
        more = {job: each["permissions"] for job, each in workflow["jobs"].items()
                if "permissions" in each}
        assert more == ({"publish": {"pages": "write", "id-token": "write"}}
                        if name == "book" else {})
    book = WORKFLOWS["book"]["jobs"]
    publishing = [book["publish"], *(step for step in book["build"]["steps"]
                                     if "upload-pages" in step.get("uses", ""))]
    assert [each["if"] for each in publishing] == [
        "github.ref == 'refs/heads/main' && vars.PUBLISH_BOOK == 'yes'"] * 2


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_commits_and_scripts_get_no_expression(name):
    """A branch's name, say, could hold a command; an environment variable is only a text."""
    need_program("shellcheck")
    steps = [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]
    for step in steps:
        used = step.get("uses", "")
        assert not used or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used)
        assert "actions/checkout" not in used or step["with"]["persist-credentials"] is False
    script = "\n".join(step.get("run", "") for step in steps)
    assert "${{" not in script
    done = subprocess.run(["shellcheck", "--shell=bash", "-"], input=script, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout


# The containers: what can be known of them without building them


def test_dockerfile_and_dev_container_are_set_up_as_the_readme_says(tmp_path):
    """And the reader owns the course, and work and progress outlive the container."""
    (tmp_path / "Dockerfile").write_text(read("Dockerfile"))  # the library writes into its folder
    docker = {}
    for each in DockerfileParser(str(tmp_path / "Dockerfile")).structure:
        docker.setdefault(each["instruction"], []).append(each["value"])
    dev = json.loads(re.sub(  # JSON with comments in `//`; in an address, `//` is none
        r"(?<!:)//.*", "", read(".devcontainer/devcontainer.json")))

    lines = re.findall(r"^(python3 -m venv \.venv && .+)$", read("README.md"), re.MULTILINE)
    [torch] = [line for line in lines if "download.pytorch.org" in line]
    [course] = [line for line in lines if line.endswith(" && .venv/bin/dplab lab")]
    assert dev["updateContentCommand"] == f"{torch} && {course} --copy-only"
    assert {torch, course.removesuffix(" && .venv/bin/dplab lab")} <= set(docker["RUN"])

    for value in docker["COPY"]:
        assert "--chown=$NB_UID" in value
        *sources, _ = [word for word in shlex.split(value) if not word.startswith("--")]
        assert all((ROOT / source).exists() for source in sources)
    assert (ROOT / ".devcontainer" / dev["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert f"AS {dev['build']['target']}" in docker["FROM"][0]
    assert docker["USER"] == ["$NB_USER"] and f"NB_USER={dev['remoteUser']}" in docker["ARG"]
    [kept] = re.findall(r"-v dplab:(\S+)", read("Dockerfile").split("FROM")[0])
    assert kept == f"{docker['WORKDIR'][0]}/my_course"  # where `dplab lab` puts the copy
    assert f"DPLAB_HOME={kept}/" in str(docker["ENV"])
