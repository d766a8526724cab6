"""``dplab lab`` from a shell: JupyterLab comes up, is found again, and ends by Ctrl-C."""

import contextlib
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

import pytest
from jupyter import until

ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)(/lab[^\s?]*)\?token=(\w+)")


def ask(port, token, path):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}",
                                     headers={"Authorization": f"token {token}"})
    with (contextlib.suppress(urllib.error.URLError),
          urllib.request.urlopen(request, timeout=30) as answer):
        return answer.read()


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
            again = subprocess.run(words, cwd=tmp_path, env=environment, text=True,
                                   capture_output=True, timeout=60)
            assert again.returncode == 0 and f"127.0.0.1:{port}/lab" in again.stdout
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
