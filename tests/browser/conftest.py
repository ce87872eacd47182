"""A real JupyterLab and a real browser to open it in, for the tests of a module; both end with
them, also when one fails.

Needs Playwright (in the `test` extra) and a Chromium or Chrome of the machine; without one of them
the tests are skipped and say so. The browser reaches this machine only.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
}
STARTS_WITHIN_S = 90


@dataclass(frozen=True)
class Lab:
    """A JupyterLab server: where it listens, its token and its folder."""

    url: str
    token: str
    folder: Path

    def write_notebook(self, name: str, *cells: str) -> str:
        """Write a notebook with these code cells; returns the address that opens it."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell, id=f"cell-{i}") for i, cell in enumerate(cells)],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        )
        nbformat.write(notebook, self.folder / name)
        # A workspace of its own, so that nothing that an earlier page left open is restored.
        workspace = f"{Path(name).stem}-{secrets.token_hex(4)}"
        return f"{self.url}lab/workspaces/{workspace}/tree/{name}?token={self.token}"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[Lab]:
    """A JupyterLab that knows nothing of the user's settings, in an empty folder."""
    private = tmp_path_factory.mktemp("lab")
    folder = private / "notebooks"
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = Lab(f"http://127.0.0.1:{port}/", secrets.token_hex(16), folder)
    log = private / "jupyter.log"
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
        *(f"--IdentityProvider.token={running.token}", f"--ServerApp.root_dir={folder}"),
        *("--LabApp.news_url=None", "--LabApp.extension_manager=readonly"),
    ]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            env=_private_environment(private),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_until_up(running, server, log)
            yield running
        finally:
            _stop(server)


def _private_environment(folder: Path) -> dict[str, str]:
    """This process's environment, with all that Jupyter reads or writes moved into `folder`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    for name in (
        *("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"),
        *("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR"),
    ):
        env[name] = str(folder / name.lower())
    for plugin, values in SETTINGS.items():
        extension, name = plugin.split(":")
        file = Path(env["JUPYTERLAB_SETTINGS_DIR"]) / extension / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    return env


def _wait_until_up(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{lab.url}api/status?token={lab.token}", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    pytest.fail(f"JupyterLab did not start within {STARTS_WITHIN_S} s:\n{log.read_text()[-3000:]}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and its kernels: by their wish within ten seconds, else by force."""
    try:
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    server.terminate()  # It shuts its kernels down.
    _, left = psutil.wait_procs(family, timeout=10)
    for process in left:
        process.kill()
    server.wait()
    psutil.wait_procs(left, timeout=10)


@pytest.fixture(scope="session")
def chromium_path() -> str:
    pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")
    for path in filter(None, map(shutil.which, BROWSERS)):
        # Ubuntu's packages are only a script that asks for snap.
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
        if version.returncode == 0 and "Chrom" in version.stdout:
            return path
    pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the path and runs")


@pytest.fixture(scope="module")
def new_page(lab: Lab, chromium_path: str) -> Iterator[Callable[[], Any]]:
    """Opens pages of the browser; `page.errors` collects the exceptions of each."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_path,
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            timeout=90_000,
        )

        def open_page() -> Any:
            page = browser.new_page(viewport={"width": 1200, "height": 1500})
            page.set_default_timeout(60_000)
            page.errors = []
            page.on("pageerror", lambda error: page.errors.append(str(error)))
            page.route(
                lambda url: not url.startswith((lab.url, "data:", "blob:")),
                lambda route: route.abort(),
            )
            # "Select Kernel" comes up now and then while a notebook opens: take the one offered.
            dialog = page.locator(".jp-Dialog button.jp-mod-accept")
            page.add_locator_handler(dialog, lambda: dialog.click())
            return page

        try:
            yield open_page
        finally:
            browser.close()


def run_all_cells(page: Any, lab: Lab) -> None:
    """Run the open notebook once its kernel answers, and wait until its last cell is done.

    Lab calls a kernel idle before it is connected, and loses what it is told to run until then: so
    the server is asked, and a cell whose prompt is empty (again) is run once more.
    """
    deadline = time.monotonic() + 90
    while not _kernel_is_idle(lab):
        assert time.monotonic() < deadline, "the kernel did not start"
        page.wait_for_timeout(100)
    last = page.locator(".jp-CodeCell .jp-InputPrompt").last
    while not re.fullmatch(r"\[\d+\]:", prompt := last.inner_text()):
        assert time.monotonic() < deadline, f"the last cell's prompt is {prompt}"
        if prompt == "[ ]:":
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_text("Run All Cells", exact=True).click()
        page.wait_for_timeout(1_000 if prompt == "[ ]:" else 100)
    failure = page.locator('[data-mime-type="application/vnd.jupyter.error"]')
    assert failure.count() == 0, failure.first.inner_text()


def _kernel_is_idle(lab: Lab) -> bool:
    try:
        with urllib.request.urlopen(f"{lab.url}api/kernels?token={lab.token}", timeout=30) as reply:
            kernels = json.load(reply)
    except OSError:  # too busy to answer
        return False
    return any(one["execution_state"] == "idle" and one["connections"] for one in kernels)
