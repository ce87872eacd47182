"""Where workers come from: the fork server, or new interpreters where forking is not sound.

Both start one worker with the descriptors it is given, tell when one has exited, and end all of
them with all that they left. A server belongs to the process that made it.

Left out: what workers do (`worker`), what they are asked (`session`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from typing import Any

from playbook_utils.errors import PlaybookError
from playbook_utils.workers.forkserver import SLOW_IMPORTS
from playbook_utils.workers.worker import Descriptors

__all__ = ["ForkServer", "Server", "SpawnServer"]

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0  # the server may be importing, on a busy machine
# First `sys.path`, then import: the current folder may hold a file named like one of ours.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
# Importing torch can take seconds; the kernel may be gone by then, and nothing is to outlive it.
_WATCH = """
import os, signal
control, kernel = map(int, sys.argv[2:])
signal.signal(signal.SIGALRM, lambda *_: os.getppid() != kernel and os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
"""


class ForkServer:
    """The kernel's end of `forkserver`; its methods are those of every server."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._exited: dict[int, int] = {}
        self._ready = False
        self._has_ranks = False
        code = _START + _WATCH
        code += "from playbook_utils.workers.forkserver import main; main(control, kernel)"
        with theirs:
            path = json.dumps(sys.path, default=str)  # which may hold a Path: Python skips it
            arguments = [path, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Jupyter interrupts the kernel's whole process group
                cwd="/",  # the kernel's own may be deleted, and torch would not load from there
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )

    def start(self, rank: int, fds: Descriptors) -> int:
        """Start one worker; returns its process id. The descriptors stay open here."""
        if not self._ready:
            self._wait_for("ready", START_TIMEOUT_S)
            self._ready = True
        self._has_ranks = True
        numbers = [n for n in asdict(fds).values() if n >= 0]
        order = json.dumps({"do": "fork", "rank": rank}).encode()
        try:
            socket.send_fds(self._control, [order], numbers)
        except OSError as error:
            raise self._lost() from error
        return int(self._wait_for("forked", START_TIMEOUT_S)["pid"])

    def expect(self, names: frozenset[str]) -> None:
        """Make ready, before a launch, for a function whose code uses these names."""
        modules = [module for module, marks in SLOW_IMPORTS.items() if marks & names]
        if modules:
            self._order(do="import", modules=modules)

    def fileno(self) -> int:
        """A descriptor that can be read when a worker has exited; -1: ask from time to time."""
        return self._control.fileno()

    def exited(self) -> dict[int, int]:
        """{pid: exit code, negative for a signal} of those that exited since the last call."""
        self._control.setblocking(False)
        try:
            while True:
                self._take()
        except BlockingIOError:
            pass
        finally:
            if self._control.fileno() >= 0:
                self._control.setblocking(True)
        exited, self._exited = self._exited, {}
        return exited

    def signal(self, pids: list[int], number: int) -> None:
        """Send a signal to workers; those that are gone are left out."""
        self._order(do="signal", pids=pids, number=int(number))

    def end(self) -> None:
        """Kill all workers and what they started; returns when none is left."""
        if not self._ready or not self.alive():
            return
        self._order(do="end")
        self._wait_for("ended", END_TIMEOUT_S)
        self._has_ranks = False
        self._exited.clear()

    def close(self) -> None:
        """End the server itself."""
        if self._has_ranks:
            with contextlib.suppress(PlaybookError, OSError):
                self.end()
        self._control.close()
        # Nothing is left that it would have to end, and it may be in the middle of an import.
        self._process.kill()
        self._process.wait()

    def alive(self) -> bool:
        """Whether it can still start workers."""
        return self._control.fileno() >= 0 and self._process.poll() is None

    def threads(self) -> int:
        """Threads of the server after start: 1, or forking it is not sound."""
        return int(self._wait_for("ready", START_TIMEOUT_S)["threads"])

    def _order(self, **order: Any) -> None:
        try:
            self._control.send(json.dumps(order).encode())
        except OSError as error:
            raise self._lost() from error

    def _take(self) -> dict[str, Any]:
        try:
            message = self._control.recv(65536)
        except ConnectionError:
            message = b""
        if not message:
            raise self._lost()
        event: dict[str, Any] = json.loads(message)
        if event["event"] == "exited":
            self._exited[event["pid"]] = event["status"]
        return event

    def _wait_for(self, name: str, timeout_s: float) -> dict[str, Any]:
        self._control.settimeout(timeout_s)
        try:
            while (event := self._take())["event"] != name:
                pass
        except TimeoutError as error:
            raise PlaybookError(
                f"the worker server said nothing for {timeout_s:.0f} s (waiting for {name!r}); "
                "restart the kernel"
            ) from error
        finally:
            if self._control.fileno() >= 0:  # closed where the server was lost
                self._control.settimeout(None)
        return event

    def _lost(self) -> PlaybookError:
        self._control.close()
        status = self._process.wait()
        how = f"exit code {status}; its own message is above or in the terminal"
        if status < 0:
            how = f"killed by signal {-status}, {signal.strsignal(-status)}"
        return PlaybookError(
            f"the process that workers are forked from ended ({how}); the next launch starts a "
            "new one"
        )


class SpawnServer:
    """Starts each worker as a new interpreter: slower, but sound on every POSIX system."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # Workers read the other end; it closes when this process is gone, however it went.
        self._lifeline, self._lifeline_write = os.pipe()

    def start(self, rank: int, fds: Descriptors) -> int:
        fds = replace(fds, lifeline=self._lifeline)
        numbers = {f.name: getattr(fds, f.name) for f in fields(fds)}
        code = _START + "from playbook_utils.workers.worker import main; "
        code += "main(int(sys.argv[2]), json.loads(sys.argv[3]))"
        path = json.dumps(sys.path, default=str)
        process = subprocess.Popen(
            [sys.executable, "-c", code, path, str(rank), json.dumps(numbers)],
            pass_fds=[n for n in numbers.values() if n >= 0],
            start_new_session=True,
        )
        self._processes[process.pid] = process
        return process.pid

    def expect(self, names: frozenset[str]) -> None:
        pass

    def fileno(self) -> int:
        return -1

    def exited(self) -> dict[int, int]:
        done = {pid: p.returncode for pid, p in self._processes.items() if p.poll() is not None}
        for pid in done:
            _kill_group(pid, signal.SIGKILL)  # what a finished worker left running
            del self._processes[pid]
        return done

    def signal(self, pids: list[int], number: int) -> None:
        for pid in pids:
            if pid in self._processes:
                self._processes[pid].send_signal(number)

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
        for pid, process in self._processes.items():
            process.wait()
            _kill_group(pid, signal.SIGTERM)
        if self._processes:
            time.sleep(0.05)  # resource trackers remove shared memory when their rank is gone
        for pid in self._processes:
            _kill_group(pid, signal.SIGKILL)
        self._processes.clear()

    def close(self) -> None:
        self.end()
        os.close(self._lifeline)
        os.close(self._lifeline_write)

    def alive(self) -> bool:
        return True


def _kill_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


Server = ForkServer | SpawnServer
