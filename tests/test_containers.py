"""The Dockerfile and the dev container: what can be known of them without building them."""

import itertools
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = (ROOT / "chapters/book/setup.md").read_text(encoding="utf-8")
DEVCONTAINER = (ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def dockerfile(tmp_path_factory):
    """The instructions of the Dockerfile, as (name, value), a list for each stage."""
    copy = tmp_path_factory.mktemp("docker") / "Dockerfile"  # the library writes into its folder
    copy.write_bytes((ROOT / "Dockerfile").read_bytes())
    stages = []
    for each in DockerfileParser(str(copy)).structure:
        if each["instruction"] == "FROM":
            stages.append([])
        if each["instruction"] != "COMMENT":
            stages[-1].append((each["instruction"], each["value"]))
    return stages


@pytest.fixture(scope="module")
def devcontainer():
    """The settings of the dev container, which is JSON with comments in `//`, and no `//` else
    but in an address.
    """
    return json.loads(re.sub(r"(?<!:)//.*", "", DEVCONTAINER))


def commands_of_readme():
    """What the README has for a start without a GPU: first the smaller torch, then the course."""
    found = re.findall(r"^(python3 -m venv \.venv && .+)$", README, re.MULTILINE)
    [torch] = [line for line in found if "download.pytorch.org" in line]
    [course] = [line for line in found if line.endswith(" && .venv/bin/dplab lab")]
    return torch, course.removesuffix(" && .venv/bin/dplab lab")


def test_the_image_is_set_up_as_the_readme_says(dockerfile):
    run = [value for name, value in dockerfile[-1] if name == "RUN"]
    assert run[:2] == list(commands_of_readme())


def test_the_dev_container_is_set_up_as_the_readme_says(devcontainer):
    before, after = commands_of_readme()
    command = devcontainer["updateContentCommand"]
    assert command == f"{before} && {after} && .venv/bin/dplab lab --copy-only"


def test_the_image_starts_what_the_readme_starts(dockerfile):
    [command] = [json.loads(value) for name, value in dockerfile[-1] if name == "CMD"]
    assert command[:2] == ["dplab", "lab"]
    assert f"-- {command[-1]}" in SETUP  # in a container, JupyterLab listens to the host
    [path] = [value for name, value in dockerfile[-1] if name == "ENV" and "PATH" in value]
    assert "PATH=/course/.venv/bin:$PATH" in path


def test_a_change_of_the_course_does_not_fetch_torch_again(dockerfile):
    """Docker keeps the layers before the first that changed."""
    names = [name for name, _ in dockerfile[-1]]
    assert names.index("RUN") < names.index("COPY")
    assert "torch==" in dockerfile[-1][names.index("RUN")][1]


def test_nothing_of_the_course_runs_as_root(dockerfile, devcontainer):
    system, course = dockerfile
    names = [name for name, _ in system]
    arguments = dict(value.split("=") for name, value in system if name == "ARG")
    assert arguments["NB_USER"] != "root" and int(arguments["NB_UID"]) > 0
    assert [value for name, value in system if name == "USER"] == ["$NB_USER"]
    assert "pip" not in " ".join(value for name, value in system[:names.index("USER")])
    assert "USER" not in [name for name, _ in course]
    assert devcontainer["remoteUser"] == arguments["NB_USER"]
    assert "sudo" not in str(dockerfile)


def test_the_second_stage_stands_on_the_first(dockerfile, devcontainer):
    first, second = (dict(stage[:1])["FROM"] for stage in dockerfile)
    image, stage = first.split(" AS ")
    assert second == stage == devcontainer["build"]["target"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = re.search(r"\d\.\d+", project["requires-python"])[0]
    assert image.startswith(f"python:{oldest}-slim-")  # the Python of the requirements


def test_what_is_copied_and_named_is_there(dockerfile, devcontainer):
    for name, value in itertools.chain(*dockerfile):
        if name in ("COPY", "ADD"):
            *sources, _ = [word for word in shlex.split(value) if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources)
            assert "--chown=$NB_UID" in value
    build = devcontainer["build"]
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (ROOT / ".devcontainer" / build["context"]).resolve() == ROOT


def test_what_git_ignores_is_not_copied():
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {line.rstrip("/") for line in ignored} <= {line.removeprefix("**/") for line in left_out}


def test_ranks_have_shared_memory_and_jupyterlab_has_its_port(dockerfile, devcontainer):
    assert "--shm-size=1g" in devcontainer["runArgs"]
    [port] = [int(value) for name, value in dockerfile[-1] if name == "EXPOSE"]
    assert devcontainer["forwardPorts"] == [port]
    head = (ROOT / "Dockerfile").read_text(encoding="utf-8").split("FROM")[0]
    assert "--shm-size=1g" in head and f"-p 127.0.0.1:{port}:{port}" in head


def test_work_and_progress_outlive_the_container(dockerfile, devcontainer):
    head = (ROOT / "Dockerfile").read_text(encoding="utf-8").split("FROM")[0]
    [folder] = [value for name, value in dockerfile[0] if name == "WORKDIR"]
    [kept] = re.findall(r"-v dplab:(\S+)", head)
    assert kept == f"{folder}/my_course"  # where `dplab lab` puts the copy
    assert f"DPLAB_HOME={kept}/" in str(dockerfile[-1])
    assert "${containerWorkspaceFolder}/my_course/" in devcontainer["containerEnv"]["DPLAB_HOME"]
