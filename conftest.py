"""Two repairs of nbval 0.11, a setting of PyTorch, a table: for every pytest run here.

* A kernel that dies is reported within about a second, as what it is. nbval waits out the cell's
  timeout and then blames the timeout.
* Cells run with their history stored, as in JupyterLab: without it IPython ignores a trailing
  `;`, and `_`, `Out` and `In` stay empty.

* `torch.compile` compiles in the process that asks: its pool of compilers outlives a test, and
  tests of the launcher would take it for processes that the launcher has left behind.
* jsonschema, under nbformat, does without a grammar of URLs that it builds at import, for seconds.
* A run of more than one file ends with a table of the slowest, so that growth is seen.

It stands at the root because `pytest notebooks` reads no other. Drop the repairs when nbval does
both.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from queue import Empty
from typing import Any

import pytest

sys.modules.setdefault("rfc3987_syntax", None)  # before anything imports jsonschema

from nbval.kernel import RunningKernel  # noqa: E402 (imports jsonschema)

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # before anything imports Inductor

_get_message = RunningKernel.get_message


def get_message(self: RunningKernel, stream: str, timeout: float | None = None) -> Any:
    """The next message of `stream`; raises Empty at `timeout`, RuntimeError for a dead kernel."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while True:
        remaining_s = deadline - time.monotonic()
        try:
            return _get_message(self, stream, timeout=max(0.0, min(1.0, remaining_s)))
        except Empty:
            if not self.is_alive():
                raise RuntimeError("the kernel died while running this cell") from None
            if remaining_s <= 1.0:
                raise


def execute_cell_input(
    self: RunningKernel, cell_input: str, allow_stdin: bool | None = None
) -> str:
    """Send a cell to the kernel, its history stored; the message id."""
    message_id: str = self.kc.execute(
        cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False
    )
    return message_id


RunningKernel.get_message = get_message
RunningKernel.execute_cell_input = execute_cell_input

NUM_SLOWEST = 15


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of the slowest files, and of all; the sum over xdist's processes."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.split("::")[0]
                seconds[file] += report.duration
                tests[file].add(report.nodeid)
    if len(seconds) < 2:
        return
    files = sorted(seconds, key=lambda file: -seconds[file])
    terminalreporter.section("seconds by file")
    terminalreporter.write_line(f"{'seconds':>8}  {'tests':>5}  file")

    def write(name: str, files: list[str]) -> None:
        spent, count = sum(seconds[file] for file in files), sum(len(tests[file]) for file in files)
        terminalreporter.write_line(f"{spent:8.1f}  {count:5}  {name}")

    for file in files[:NUM_SLOWEST]:
        write(file, [file])
    if rest := files[NUM_SLOWEST:]:
        write(f"{len(rest)} more files", rest)
    write("all", files)
