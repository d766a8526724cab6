"""``dplab lab`` from a shell: JupyterLab comes up, is found again, and ends by Ctrl-C."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest
from jupyter import until

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)(/lab[^\s?]*)\?token=(\w+)")


def ask(port, token, path):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}",
                                     headers={"Authorization": f"token {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()
    except urllib.error.URLError:
        return None


@pytest.mark.slow
def test_a_start_with_a_busy_port_a_second_one_and_ctrl_c(tmp_path):
    """As root too, if the tests run as root, and with a space in the folder's name."""
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    environment = os.environ | dict.fromkeys(folders, str(tmp_path / "private"))
    place, log = tmp_path / "my course", tmp_path / "log"
    words = [sys.executable, "-m", "dplab", "lab", str(place)]
    keyboard, terminal = pty.openpty()
    with socket.create_server(("127.0.0.1", 0)) as taken, open(log, "w") as file:
        busy = taken.getsockname()[1]
        process = subprocess.Popen(
            [*words, "--no-browser", "--", "--ServerApp.ip=127.0.0.1", f"--port={busy}"],
            cwd=tmp_path, env=environment, stdin=terminal, stdout=file, stderr=file,
            start_new_session=True)
        try:
            port, path, token = until(lambda: ADDRESS.search(log.read_text()), 60, "no address"
                                      ).groups()
            assert int(port) != busy and path == "/lab/tree/chapters/00_start_here.ipynb"
            page = until(lambda: ask(port, token, "files/figures/collectives.svg"), 60, "no answer")
            assert page == (place / "figures/collectives.svg").read_bytes()
            kernels = json.loads(ask(port, token, "api/kernelspecs"))
            assert kernels["kernelspecs"]["python3"]["spec"]["argv"][0] == sys.executable
            for more, status, said in (([], 0, f"127.0.0.1:{port}/lab"),
                                       (["--update", "all"], 1, "Close JupyterLab")):
                again = subprocess.run([*words, *more], cwd=tmp_path, env=environment, text=True,
                                       capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
                assert again.returncode == status and said in again.stdout + again.stderr
            os.killpg(process.pid, signal.SIGINT)
            until(lambda: "(y/[n])" in log.read_text(), 20, "Ctrl-C asks nothing")
            os.write(keyboard, b"y\n")
            assert process.wait(timeout=60) == 0
            assert "Traceback" not in log.read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=30)
            os.close(keyboard)
            os.close(terminal)


@pytest.mark.parametrize(("arguments", "status", "said"), [
    ([], 0, "dplab lab"), (["--version"], 0, "dplab "), (["lob"], 2, "no command 'lob'"),
    (["lab", "--copy-only", "copy"], 0, "set()")])
def test_words_after_dplab_load_neither_torch_nor_numpy(tmp_path, arguments, status, said):
    script = ("import sys, dplab.__main__; status = dplab.__main__.main(sys.argv[1:]);"
              "print(sys.modules.keys() & {'torch', 'numpy', 'IPython'}); sys.exit(status)")
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True,
                          text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == status and said in done.stdout + done.stderr
    assert done.stdout.endswith("set()\n")


FOREIGN_KERNEL = """
import json, sys
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell

sys.modules["dplab"] = None  # as in a Python that has no such package
shell = InteractiveShell.instance(colors="nocolor")
for path in sorted(Path("chapters").glob("*.ipynb")):
    first = next(cell for cell in json.loads(path.read_text())["cells"]
                 if cell["cell_type"] == "code" and cell["id"] != "on-colab")
    print("chapter", path.stem)
    shell.run_cell("".join(first["source"]))
"""


@pytest.mark.slow
def test_in_a_kernel_without_dplab_each_chapter_says_so_in_a_few_lines():
    done = subprocess.run([sys.executable, "-c", FOREIGN_KERNEL], cwd=ROOT, text=True, timeout=120,
                          capture_output=True)
    shown = done.stdout.split("chapter ")[1:]
    assert len(shown) == len(list((ROOT / "chapters").glob("*.ipynb")))
    for text in shown:
        assert "ModuleNotFoundError" in text and "Change Kernel" in text
        assert len(text.splitlines()) <= 12, text


@pytest.mark.slow
def test_a_clone_called_dplab_is_no_package_in_the_folder_above_it(tmp_path):
    """As `pip install -e .` puts the package into an environment."""
    clone, site = tmp_path / "dplab", tmp_path / "site"
    for name in ("pyproject.toml", "README.md", "dplab/__init__.py", "dplab/needs.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools.build_meta import build_editable as build; build({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    assert "dplab = dplab.__main__:main" in next(site.glob("*/entry_points.txt")).read_text()
    script = f"import site; site.addsitedir({str(site)!r}); import dplab; print(dplab.__file__)"
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=tmp_path, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": ""}, timeout=60)
    assert done.stdout.strip() == str(clone / "dplab/__init__.py"), done.stderr
