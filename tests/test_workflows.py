"""The GitHub workflows, which nobody has run yet: their form, their rights, what they run."""

import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PATHS = sorted((ROOT / ".github/workflows").glob("*.yml"))

each_workflow = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def read(path):
    """The workflow; as in YAML 1.1, its key `on` is read as True."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_are_three():
    assert [path.stem for path in PATHS] == ["book", "nightly", "tests"]


@pytest.mark.slow
def test_the_schema_takes_them():
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows",
         *PATHS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@each_workflow
def test_a_workflow_may_only_read_and_ends_and_runs_once_at_a_time(path):
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"].startswith("${{ github.workflow }}")
    assert all(job["timeout-minutes"] <= 300 for job in workflow["jobs"].values())
    more = {name: job["permissions"] for name, job in workflow["jobs"].items()
            if "permissions" in job}
    assert more == ({"publish": {"pages": "write", "id-token": "write"}}
                    if path.stem == "book" else {})
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_each_action_is_one_commit_whose_version_stands_beside_it():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PATHS)
    uses = re.findall(r"uses: (.*)", text)
    pinned = [re.fullmatch(r"([\w./-]+)@([0-9a-f]{40})  # (v[\d.]+)", line) for line in uses]
    assert all(pinned), uses
    versions = {match.groups() for match in pinned}
    assert len(versions) == len({action for action, _, _ in versions}), "two versions of an action"


@each_workflow
def test_what_goes_into_a_shell_is_no_expression(path):
    """A branch's name, say, could hold a command; an environment variable is only a text."""
    assert not [step["run"] for step in steps(read(path)) if "${{" in step.get("run", "")]


@each_workflow
def test_shellcheck_finds_nothing(path):
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    for step in steps(read(path)):
        done = subprocess.run(["shellcheck", "--shell=bash", "-"], input=step.get("run", ""),
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_quick_tests_run_on_these_systems_and_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    matrix = read(ROOT / ".github/workflows/tests.yml")["jobs"]["quick"]["strategy"]["matrix"]
    assert matrix["torch"] == [re.search(r"^torch==(\S+)", requirements, re.MULTILINE)[1], "newest"]
    assert project["requires-python"] == f">={matrix['python'][0]}"
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    systems = {*matrix["os"], *(each["os"] for each in matrix["include"])}
    assert {system.split("-")[0] for system in systems} == {"ubuntu", "macos"}
    assert {each["torch"] for each in matrix["include"]} == set(matrix["torch"])


def requirements(files):
    """These files and those that they include."""
    for file in files:
        yield file
        if (ROOT / file).exists():
            text = (ROOT / file).read_text(encoding="utf-8")
            yield from requirements(
                (ROOT / file).parent.joinpath(each).resolve().relative_to(ROOT).as_posix()
                for each in re.findall(r"^-r (\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", ["book", "tests"])
def test_the_files_that_are_hashed_for_a_cache_are_those_that_are_installed(name):
    found = steps(read(ROOT / f".github/workflows/{name}.yml"))
    hashed = [step["with"]["cache-dependency-path"].split() for step in found
              if "cache" in step.get("with", {})]
    installed = re.findall(r' -r "?(?:\$RUNNER_TEMP/)?([\w./]+)',
                           "\n".join(step.get("run", "") for step in found))
    assert [sorted(each) for each in hashed] == [sorted({*requirements(installed)})]


def test_the_kinds_of_torch_share_no_cache():
    """The file with the kind is written before its hash becomes the cache's key."""
    before = list(itertools.takewhile(lambda step: "cache" not in step.get("with", {}),
                                      steps(read(ROOT / ".github/workflows/tests.yml"))))
    assert "matrix.torch" in before[-1]["env"]["TORCH"]
    assert before[-1]["run"] == 'echo "$TORCH" > .github/torch.txt'


def test_the_book_is_published_only_from_the_main_branch_where_the_repository_says_so():
    book = read(ROOT / ".github/workflows/book.yml")["jobs"]
    publishing = [book["publish"], *(step for step in book["build"]["steps"]
                                     if "upload-pages" in step.get("uses", ""))]
    assert [each["if"] for each in publishing] == [
        "github.ref == 'refs/heads/main' && vars.PUBLISH_BOOK == 'yes'"] * 2


def test_every_night_runs_what_ci_runs_and_the_soaks():
    nightly = read(ROOT / ".github/workflows/nightly.yml")
    run = [step["run"] for step in steps(nightly) if "run" in step]
    assert [line.split()[-1] for line in run] == [".ci/run", "nightly"]
    assert (ROOT / ".ci/run").exists()
