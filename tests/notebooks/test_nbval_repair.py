"""The repairs in the root's conftest.py, seen through pytest on tiny notebooks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from playbook_utils.commands import main
from tests.commands.tiny import write_notebook

ROOT = Path(__file__).resolve().parents[2]


def nbval(notebook: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`pytest --nbval` with the repairs, as the Makefile calls it."""
    command = [sys.executable, "-m", "pytest", str(notebook), "-p", "conftest", "--nbval"]
    command += ["--nbval-current-env", "--nbval-sanitize-with", "tests/sanitize.cfg", "--color=no"]
    command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "--timeout=0", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_stored_outputs_compare_equal(tmp_path: Path) -> None:
    """What only the repairs and the masks let pass: `;`, `Out`, `_`, a warning, an address."""
    path = write_notebook(
        tmp_path,
        "00_good",
        "6 * 7",
        "Out[1] + _",
        "'not shown';",
        "import warnings\nwarnings.warn('careful', stacklevel=1)\nobject()",
    )
    assert main(["refresh", str(path), "--notebooks", str(tmp_path)]) == 0
    assert '"84"' in path.read_text()
    done = nbval(path)
    assert "4 passed" in done.stdout, done.stdout


def test_changed_output_fails(tmp_path: Path) -> None:
    path = write_notebook(tmp_path, "00_changed", "6 * 7")
    assert main(["refresh", str(path), "--notebooks", str(tmp_path)]) == 0
    path.write_text(path.read_text().replace("42", "43"))
    done = nbval(path)
    assert done.returncode == 1
    assert "1 failed" in done.stdout, done.stdout


def test_killed_kernel_is_reported_without_waiting_for_the_timeout(tmp_path: Path) -> None:
    path = write_notebook(tmp_path, "00_dead", "import os\nos.kill(os.getpid(), 9)")
    done = nbval(path, "--nbval-cell-timeout=10000")
    assert done.returncode == 1
    assert "the kernel died while running this cell" in done.stdout


def test_cell_past_its_timeout_is_still_called_that(tmp_path: Path) -> None:
    path = write_notebook(tmp_path, "00_long", "import time\nwhile True: time.sleep(0.1)")
    done = nbval(path, "--nbval-cell-timeout=2")
    assert done.returncode == 1
    assert "Timeout of 2 seconds exceeded" in done.stdout
