"""The repairs and the table of the root's conftest.py, seen through pytest on tiny notebooks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from playbook_utils.commands import main
from tests.commands.tiny import write_notebook

pytestmark = pytest.mark.timeout(300)  # the first test waits for all of them
ROOT = Path(__file__).resolve().parents[2]
# What only the repairs and the masks let pass: `;`, `Out`, `_`, a warning, an address.
GOOD = (
    "6 * 7",
    "Out[1] + _",
    "'not shown';",
    "import warnings\nwarnings.warn('careful', stacklevel=1)\nobject()",
)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `pytest --nbval` prints, with the repairs and as the Makefile calls it."""
    folder = tmp_path_factory.mktemp("lessons")
    good = write_notebook(folder, "00_good", *GOOD)
    assert main(["refresh", "--notebooks", str(folder)]) == 0
    assert '"84"' in good.read_text()
    (folder / "01_changed.ipynb").write_text(good.read_text().replace('"84"', '"85"'))
    write_notebook(folder, "02_dead", "import os\nos.kill(os.getpid(), 9)")
    write_notebook(folder, "03_long", "import time\nwhile True: time.sleep(0.1)")
    command = [sys.executable, "-m", "pytest", str(folder), "-p", "conftest", "--nbval"]
    command += ["--nbval-current-env", "--nbval-sanitize-with", "tests/sanitize.cfg", "--color=no"]
    command += ["--nbval-cell-timeout=3", "--timeout=0", "-n2", "--dist=loadscope"]
    command += ["--rootdir", str(folder), "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stdout
    return done.stdout


def failures(printed: str, notebook: str) -> dict[str, str]:
    """Cell -> the report of its failure."""
    parts = re.split(r"^_+ (\S+)::(Cell \d+) _+$", printed, flags=re.MULTILINE)
    found = zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    return {cell: text for file, cell, text in found if notebook in file}


def test_stored_outputs_compare_equal(printed: str) -> None:
    assert failures(printed, "00_good") == {}


def test_changed_output_fails(printed: str) -> None:
    (cell, said), *others = failures(printed, "01_changed").items()
    assert (cell, others) == ("Cell 1", [])
    assert "'85' == '84'" in said


def test_killed_kernel_is_reported_as_what_it_is(printed: str) -> None:
    said = failures(printed, "02_dead")["Cell 0"]
    assert "the kernel died while running this cell" in said, "and not a timeout"


def test_cell_past_its_timeout_is_still_called_that(printed: str) -> None:
    assert "Timeout of 3 seconds exceeded" in failures(printed, "03_long")["Cell 0"]


def test_a_run_ends_with_the_seconds_of_each_file(printed: str) -> None:
    """Of all of xdist's processes, failed tests too; the slowest first."""
    _, table = printed.split(" seconds by file ", 1)
    heading, *lines = table.splitlines()[1:7]
    assert heading.split() == ["seconds", "tests", "file"]
    rows = [(float(seconds), int(tests), name) for seconds, tests, name in map(str.split, lines)]
    *files, (total, num_tests, name) = rows
    counts = {file: tests for _, tests, file in files}
    expected = {"00_good": 4, "01_changed": 4, "02_dead": 1, "03_long": 1}
    assert counts == {f"{file}.ipynb": tests for file, tests in expected.items()}
    assert (name, num_tests) == ("all", 10)
    assert files[0][2] == "03_long.ipynb", "3 s to the timeout, and a kernel as the others"
    seconds = [taken for taken, *_ in files]
    assert seconds == sorted(seconds, reverse=True)
    assert total == pytest.approx(sum(seconds for seconds, *_ in files), abs=0.3)
