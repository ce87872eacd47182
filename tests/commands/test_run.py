from __future__ import annotations

import _thread
import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from playbook_utils.commands import main
from playbook_utils.commands.execution import execute
from tests.commands.tiny import write_notebook

MIB = 2**20


def run(folder: Path, *arguments: str) -> int:
    return main(["run", "--notebooks", str(folder), *arguments])


def test_table_and_status_of_lessons_that_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_notebook(tmp_path, "00_first", "a = 1", "", "a + 1")
    path = write_notebook(tmp_path, "01_second", "open('made_here', 'w').close()")
    before = path.read_bytes()
    assert run(tmp_path) == 0
    printed = capsys.readouterr()
    rows = [re.split(r"\s{2,}", line) for line in printed.out.splitlines()]
    assert rows[0] == ["lesson", "minutes", "seconds", "cells", "peak memory", "result"]
    assert [(row[0], row[1], row[3]) for row in rows[1:]] == [
        ("00_first", "5", "2"),
        ("01_second", "5", "1"),
        ("all", "10", "3"),
    ]
    assert [row[-1] for row in rows[1:3]] == ["ok", "ok"]
    assert all(int(row[4].removesuffix(" MiB")) > 10 for row in rows[1:])
    assert "3/3" in printed.err, "the progress bar"
    assert path.read_bytes() == before, "running must not write the notebook"
    assert (tmp_path / "made_here").exists(), "a lesson runs in its own folder"


def test_failing_cell_is_named_and_the_next_lesson_still_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_notebook(tmp_path, "00_bad", "1", "", "def f():\n    return 1 / 0\nf()", "2")
    write_notebook(tmp_path, "01_good", "1")
    assert run(tmp_path) == 1
    printed = capsys.readouterr()
    assert "00_bad, cell [2]: ZeroDivisionError: division by zero" in printed.err
    assert "----> 3 f()" in printed.err, "the cell's own traceback"
    assert re.search(r"00_bad .* 2 .*FAILED at cell \[2\]", printed.out)
    assert re.search(r"01_good .* 1 .*ok", printed.out)


def test_dead_kernel_is_reported_at_once(tmp_path: Path) -> None:
    path = write_notebook(tmp_path, "00_dead", "1", "import os\nos.kill(os.getpid(), 9)", "2")
    execution = execute(path, timeout_s=10_000)
    assert execution.failure is not None
    assert (execution.failure.cell, execution.failure.error) == (2, "the kernel died")


def test_cell_past_its_timeout(tmp_path: Path) -> None:
    path = write_notebook(tmp_path, "00_long", "import time\nwhile True: time.sleep(0.1)")
    execution = execute(path, timeout_s=1)
    assert execution.failure is not None
    assert (execution.failure.cell, execution.failure.error) == (1, "still running after 1 s")


def test_expected_exception_does_not_fail(tmp_path: Path) -> None:
    import nbformat

    path = write_notebook(tmp_path, "00_raises", "1 / 0", "print('on')")
    notebook = nbformat.read(str(path), as_version=4)
    notebook.cells[0].metadata["tags"] = ["raises-exception"]
    nbformat.write(notebook, str(path))
    execution = execute(path)
    assert execution.failure is None
    assert execution.notebook.cells[1].outputs[0].text == "on\n"


def test_peak_memory_counts_the_processes_under_the_kernel(tmp_path: Path) -> None:
    child = "import time; x = bytearray(b'1') * (150 << 20); time.sleep(1.5)"
    held = "x = bytearray(b'1') * (100 << 20)"
    worker = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    small = execute(write_notebook(tmp_path, "00_small", "1"))
    big = execute(write_notebook(tmp_path, "01_big", held, worker, "del x"))
    grown = (big.peak_memory_bytes - small.peak_memory_bytes) / MIB
    assert 240 < grown < 330, "100 MiB in the kernel and 150 MiB, with a Python, under it"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_stops_the_kernel(tmp_path: Path, number: signal.Signals) -> None:
    source = (
        "import os, pathlib, subprocess, time\n"
        "pathlib.Path('pid.new').write_text(str(os.getpid()))\n"
        "os.rename('pid.new', 'pid')\n"
        "while True: time.sleep(0.1)"
    )
    write_notebook(tmp_path, "00_long", source)
    command = [sys.executable, "-m", "playbook_utils", "run", "--notebooks", str(tmp_path)]
    started = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores Ctrl-C, and so do its children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not (tmp_path / "pid").exists():
            assert started.poll() is None
            time.sleep(0.05)
        kernel = psutil.Process(int((tmp_path / "pid").read_text()))
        os.kill(started.pid, number)
        _, errors = started.communicate(timeout=30)
    finally:
        started.kill()
    assert started.returncode == 130
    assert "interrupted" in errors
    assert not kernel.is_running()


def test_kernel_is_the_running_interpreter(tmp_path: Path) -> None:
    execution = execute(write_notebook(tmp_path, "00_which", "import sys\nprint(sys.executable)"))
    assert execution.notebook.cells[0].outputs[0].text.strip() == sys.executable


def test_file_that_is_no_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "00_text.ipynb").write_text("not JSON")
    assert run(tmp_path) == 2
    assert "00_text.ipynb is not a notebook" in capsys.readouterr().err


def test_a_cancellation_that_is_lost_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = []

    async def deaf(*_: object) -> None:  # as wait_for when a message arrives at the same moment
        try:
            asyncio.get_running_loop().call_later(0.5, _thread.interrupt_main)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            lost.append(1)
            await asyncio.sleep(60)

    monkeypatch.setattr("nbclient.NotebookClient.async_execute_cell", deaf)
    write_notebook(tmp_path, "00_long", "1")
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path / "00_long.ipynb")
    assert lost == [1]
