"""The Dockerfile and the dev container: what can be known of them without building them."""

import json
import re
import shlex
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[1]
DEVCONTAINER = json.loads(re.sub(  # JSON with comments in `//`; in an address, `//` is none
    r"(?<!:)//.*", "", (ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def dockerfile(tmp_path_factory):
    """What stands behind each kind of instruction, as lists by name."""
    copy = tmp_path_factory.mktemp("docker") / "Dockerfile"  # the library writes into its folder
    copy.write_bytes((ROOT / "Dockerfile").read_bytes())
    found = {}
    for each in DockerfileParser(str(copy)).structure:
        found.setdefault(each["instruction"], []).append(each["value"])
    return found


def test_both_are_set_up_as_the_readme_says(dockerfile):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^(python3 -m venv \.venv && .+)$", readme, re.MULTILINE)
    [torch] = [line for line in lines if "download.pytorch.org" in line]
    [course] = [line for line in lines if line.endswith(" && .venv/bin/dplab lab")]
    assert DEVCONTAINER["updateContentCommand"] == f"{torch} && {course} --copy-only"
    assert {torch, course.removesuffix(" && .venv/bin/dplab lab")} <= set(dockerfile["RUN"])


def test_what_is_copied_and_named_is_there(dockerfile):
    for value in dockerfile["COPY"]:
        *sources, _ = [word for word in shlex.split(value) if not word.startswith("--")]
        assert all((ROOT / source).exists() for source in sources)
    build = DEVCONTAINER["build"]
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert f"AS {build['target']}" in dockerfile["FROM"][0]


def test_the_course_runs_as_the_reader_who_owns_it(dockerfile):
    assert dockerfile["USER"] == ["$NB_USER"]
    assert f"NB_USER={DEVCONTAINER['remoteUser']}" in dockerfile["ARG"]
    assert all("--chown=$NB_UID" in value for value in dockerfile["COPY"])


def test_work_and_progress_outlive_the_container(dockerfile):
    head = (ROOT / "Dockerfile").read_text(encoding="utf-8").split("FROM")[0]
    [kept] = re.findall(r"-v dplab:(\S+)", head)
    assert kept == f"{dockerfile['WORKDIR'][0]}/my_course"  # where `dplab lab` puts the copy
    assert f"DPLAB_HOME={kept}/" in str(dockerfile["ENV"])
