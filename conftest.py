"""Two repairs of nbval 0.11, and one setting of PyTorch, for every pytest run in this repository.

* A kernel that dies is reported within about a second, as what it is. nbval waits out the cell's
  timeout and then blames the timeout.
* Cells run with their history stored, as in JupyterLab: without it IPython ignores a trailing
  `;`, and `_`, `Out` and `In` stay empty.

* `torch.compile` compiles in the process that asks: its pool of compilers outlives a test, and
  tests of the launcher would take it for processes that the launcher has left behind.

It stands at the root because `pytest notebooks` reads no other. Drop the repairs when nbval does
both.
"""

from __future__ import annotations

import os
import time
from queue import Empty
from typing import Any

from nbval.kernel import RunningKernel

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
