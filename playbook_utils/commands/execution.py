"""Execute one notebook in a kernel of this very environment; never writes the file.

Left out: comparing outputs (nbval does that) and storing them (`refresh`).

    execution = execute(Path("notebooks/06_data_parallelism.ipynb"))
    execution.failure or execution.peak_memory_bytes

The kernel is driven from a thread, so that the main thread can watch its memory, and so that an
interrupt arrives there and nowhere else. However it ends, no kernel is left behind.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CellFailure", "Execution", "execute", "read_notebook"]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class CellFailure:
    """The cell at which a notebook stopped."""

    notebook: str
    cell: int
    """The number JupyterLab shows beside the cell: 7 for `[7]`; 0 if the kernel did not start."""
    error: str
    """One line: "ZeroDivisionError: division by zero", "the kernel died"."""
    traceback: str = ""


@dataclass(frozen=True)
class Execution:
    """What one run of a notebook gave."""

    notebook: Any
    """The executed `NotebookNode`, outputs included."""
    seconds: float
    cells: int
    """Code cells that were started."""
    peak_memory_bytes: int
    """Most memory ever seen in use at once by the kernel and all processes under it."""
    failure: CellFailure | None


def execute(
    path: Path,
    *,
    timeout_s: float = 600.0,
    on_cell: Callable[[], None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Execution:
    """Run all cells of a notebook, in its own folder, in a fresh kernel.

    timeout_s limits each cell; `on_cell` is called, in another thread, each time one has run; the
    kernel gets `environ` besides this process's variables. A failing cell, a dead kernel and a
    timeout are the outcome's `failure`. Raises ValueError where `path` is no notebook.
    """
    run = _Run(path, timeout_s, on_cell, os.environ | dict(environ or {}))
    peak_bytes = 0
    started_s = time.perf_counter()
    run.start()
    try:
        while not run.ended.is_set():
            asked_s = time.perf_counter()
            peak_bytes = max(peak_bytes, _tree_memory_bytes(run.kernel_pid))
            # Reading the memory of many processes is slow: spend at most a tenth of a core on it.
            run.ended.wait(min(0.5, max(0.05, 10 * (time.perf_counter() - asked_s))))
    finally:
        # Only an interrupt comes here before the thread has ended.
        while not run.ended.is_set():
            run.cancel()
            run.ended.wait(0.5)
    seconds = time.perf_counter() - started_s
    if run.crash is not None:
        raise run.crash
    return Execution(run.notebook, seconds, run.started_cells, peak_bytes, run.failure)


class _Run(threading.Thread):
    """The thread that drives one kernel through one notebook."""

    def __init__(
        self,
        path: Path,
        timeout_s: float,
        on_cell: Callable[[], None] | None,
        environ: dict[str, str],
    ) -> None:
        super().__init__(name=f"run {path.stem}", daemon=True)
        self.path, self.timeout_s, self.on_cell, self.environ = path, timeout_s, on_cell, environ
        self.notebook = read_notebook(path)
        self.kernel_pid: int | None = None
        self.started_cells = 0
        self.failure: CellFailure | None = None
        self.crash: BaseException | None = None
        # Not join: interrupted, it takes the thread for ended, and so does is_alive (Python 3.11).
        self.ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._cancelled = self._in_cell = False

    def run(self) -> None:
        """Thread body."""
        try:
            asyncio.run(self._drive())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.crash = error
        finally:
            self.ended.set()

    def cancel(self) -> None:
        """Stop the kernel and end, from another thread; repeat it until that has happened.

        Before Python 3.12 `wait_for` may lose a cancellation. Only a cell is cancelled again, never
        the stopping of the kernel that follows it.
        """
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._cancel_task)

    def _cancel_task(self) -> None:
        if self._task is not None and (self._in_cell or not self._cancelled):
            self._cancelled = True
            self._task.cancel()

    async def _drive(self) -> None:
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        sockets = tempfile.TemporaryDirectory(prefix="playbook-run-")
        manager = _kernel_manager(Path(sockets.name))
        client = NotebookClient(
            self.notebook,
            km=manager,
            timeout=self.timeout_s,
            record_timing=False,
            coalesce_streams=True,
            iopub_timeout=60,  # else output that is late is lost, with a line in a log
            raise_on_iopub_timeout=True,
            resources={"metadata": {"path": str(self.path.parent)}},
            on_cell_executed=lambda **_: self.on_cell and self.on_cell(),
        )
        waker: asyncio.Future[None] | None = None
        client.owns_km = True  # so that it stops the kernel however this ends
        try:
            async with client.async_setup_kernel(env=self.environ):
                self.kernel_pid = getattr(manager.provisioner, "pid", None)
                waker = asyncio.ensure_future(_keep_awake(client.kc))
                for index, cell in enumerate(self.notebook.cells):
                    self._in_cell = True
                    try:
                        await client.async_execute_cell(cell, index)
                    finally:
                        self._in_cell = False
                    self.started_cells = client.code_cells_executed
        except CellTimeoutError:
            self._fail(client, f"still running after {self.timeout_s:g} s")
        except DeadKernelError:
            self._fail(client, "the kernel died")
        except CellExecutionError as error:
            reason = f"{error.ename}: {_ANSI.sub('', error.evalue)}".strip().splitlines()[0]
            self._fail(client, reason, _ANSI.sub("", error.traceback))
        except RuntimeError as error:
            self._fail(client, f"the kernel did not start: {error}")
        finally:
            if waker is not None:
                waker.cancel()
            # Where the start itself was cut short nbclient has not stopped the kernel yet, and
            # would trip over that at exit.
            atexit.unregister(client._cleanup_kernel)
            if manager.has_kernel:
                await manager.shutdown_kernel(now=True)
            sockets.cleanup()

    def _fail(self, client: Any, error: str, traceback: str = "") -> None:
        self.started_cells = client.code_cells_executed
        self.failure = CellFailure(self.path.stem, self.started_cells, error, traceback)


async def _keep_awake(kernel_client: Any) -> None:
    """Look at the sockets now and then, so that no reply is slept through.

    A widget's message is sent on the socket behind asyncio's back, which can swallow the wake-up
    for a reply that arrives just then: the cell never ends (nbclient issue 312). Reading EVENTS
    makes the socket notice what has arrived.
    """
    import zmq

    sockets = [kernel_client.shell_channel.socket, kernel_client.iopub_channel.socket]
    while True:
        await asyncio.sleep(0.2)
        for socket in sockets:
            socket.get(zmq.EVENTS)


def read_notebook(path: Path) -> Any:
    """Read a notebook; ValueError where `path` is none."""
    import nbformat

    try:
        return nbformat.read(str(path), as_version=4)
    except (OSError, nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise ValueError(f"{path} is not a notebook: {error}") from error


def _kernel_manager(sockets: Path) -> Any:
    """A manager whose "python3" is the interpreter running now, whatever kernels are installed."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    # Sockets are files in a private folder: no port that others on this machine could reach.
    return AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # none is left but its own
        transport="ipc",
        ip=str(sockets / "kernel"),
    )


def _tree_memory_bytes(pid: int | None) -> int:
    """Memory of a process and all under it; pages that forked workers share count once on Linux."""
    import psutil

    if pid is None:
        return 0
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):  # it ended, or belongs to someone else
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.uss)
    return total
