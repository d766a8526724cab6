"""The GitHub workflows: their rights, and what they run. Their form: see test_licences.py."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from skips import need_program

ROOT = Path(__file__).resolve().parents[1]
PATHS = sorted((ROOT / ".github/workflows").glob("*.yml"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in PATHS}
STEPS = {name: [step for job in workflow["jobs"].values() for step in job["steps"]]
         for name, workflow in WORKFLOWS.items()}

each_workflow = pytest.mark.parametrize("name", WORKFLOWS)


@each_workflow
def test_a_workflow_may_only_read_and_the_book_be_published(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    more = {job: each["permissions"] for job, each in WORKFLOWS[name]["jobs"].items()
            if "permissions" in each}
    assert more == ({"publish": {"pages": "write", "id-token": "write"}} if name == "book" else {})
    for step in STEPS[name]:
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_the_book_is_published_only_from_the_main_branch_where_the_repository_says_so():
    book = WORKFLOWS["book"]["jobs"]
    publishing = [book["publish"], *(step for step in book["build"]["steps"]
                                     if "upload-pages" in step.get("uses", ""))]
    assert [each["if"] for each in publishing] == [
        "github.ref == 'refs/heads/main' && vars.PUBLISH_BOOK == 'yes'"] * 2


@each_workflow
def test_each_action_is_one_commit(name):
    used = [step["uses"] for step in STEPS[name] if "uses" in step]
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in used), used


@each_workflow
def test_a_shell_gets_no_expression_and_shellcheck_finds_nothing(name):
    """A branch's name, say, could hold a command; an environment variable is only a text."""
    need_program("shellcheck")
    script = "\n".join(step.get("run", "") for step in STEPS[name])
    assert "${{" not in script
    done = subprocess.run(["shellcheck", "--shell=bash", "-"], input=script, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout
