"""`playbook run`: execute lessons, print time and memory of each.

Minutes are a learner's, for the core path; seconds the machine's, for all cells.

Left out: comparing with the stored outputs (`make test`) and storing new ones (`refresh`).

    playbook run
    playbook run 06
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playbook_utils.commands.execution import Execution, execute, read_notebook
from playbook_utils.commands.lessons import add_folder_option, find_folder, select
from playbook_utils.notebooks.length import length

__all__ = ["DESCRIPTION", "add_arguments", "as_table", "report_failure", "run", "stop_on_sigterm"]

DESCRIPTION = (
    "Execute lessons in fresh kernels. The files are not changed. Exits with 1 where one fails, "
    "and names the cell."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the lessons and the limit, which `refresh` takes, too."""
    parser.add_argument(
        "lessons", nargs="*", metavar="LESSON", help="06, 06_data_parallelism or a path"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds a cell may take (600)"
    )
    add_folder_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    paths = select(arguments.lessons, arguments.notebooks or find_folder())
    executions: dict[str, Execution] = {}
    with stop_on_sigterm(), progress_bar(paths) as bar:
        for path in paths:
            bar.set_description(path.stem)
            executions[path.stem] = execute(path, timeout_s=arguments.timeout, on_cell=bar.update)
    print(as_table(executions, {path.stem: length(path).minutes for path in paths}))
    failures = [execution.failure for execution in executions.values() if execution.failure]
    for failure in failures:
        print(f"\n{report_failure(failure)}", file=sys.stderr)
    return int(bool(failures))


def as_table(executions: dict[str, Execution], minutes: dict[str, int]) -> str:
    """Lesson, a learner's minutes, seconds, cells, peak memory and outcome of each, and sums."""
    width = max(len("lesson"), *(len(name) for name in executions))
    heads = f"{'minutes':>7}  {'seconds':>8}  {'cells':>5}  {'peak memory':>11}"
    lines = [f"{'lesson':<{width}}  {heads}  result"]
    for name, of in executions.items():
        result = "ok" if of.failure is None else f"FAILED at cell [{of.failure.cell}]"
        memory = f"{of.peak_memory_bytes / 2**20:.0f} MiB"
        numbers = f"{minutes[name]:>7}  {of.seconds:>8.1f}  {of.cells:>5}  {memory:>11}"
        lines.append(f"{name:<{width}}  {numbers}  {result}")
    if len(executions) > 1:
        seconds = sum(of.seconds for of in executions.values())
        cells = sum(of.cells for of in executions.values())
        memory = f"{max(of.peak_memory_bytes for of in executions.values()) / 2**20:.0f} MiB"
        numbers = f"{sum(minutes.values()):>7}  {seconds:>8.1f}  {cells:>5}  {memory:>11}"
        lines.append(f"{'all':<{width}}  {numbers}")
    return "\n".join(lines)


def report_failure(failure: Any) -> str:
    """The cell's own traceback, then one line that names notebook, cell and error."""
    line = f"{failure.notebook}, cell [{failure.cell}]: {failure.error}"
    return f"{failure.traceback.rstrip()}\n{line}" if failure.traceback else line


def progress_bar(paths: list[Path], runs: int = 1) -> Any:
    """A bar on standard error that counts the code cells of all of `paths`, run `runs` times."""
    from tqdm import tqdm

    cells = [cell for path in paths for cell in read_notebook(path).cells]
    code = [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]
    return tqdm(total=runs * len(code), unit="cell", file=sys.stderr, dynamic_ncols=True)


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C within the block, so that it too stops the kernel."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
