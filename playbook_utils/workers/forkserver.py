"""The server that workers are forked from: one small process that has imported torch, and waits.

It is exec'ed by the notebook's kernel, so it holds none of the kernel's threads, locks or CUDA
contexts, and it stays single-threaded, so that forking it is sound. It must never call
`torch.cuda`. What first use would cost every worker anew (`SLOW_IMPORTS`: an optimizer imports
torch._dynamo) it imports once, and only while no rank is alive: when the notebook asks for it
(the function names an optimizer), when a rank of the launch before imported it, or when idle.

Every process it forks, and every process those leave behind, is killed when a launch ends or the
kernel closes the control socket, be it because it was killed itself. It is its descendants'
reaper (PR_SET_CHILD_SUBREAPER), so that none escapes. Linux only; elsewhere `servers` starts
each worker anew.

Messages on the control socket (SEQPACKET), JSON, from the kernel: fork (rank; the descriptors
ride along), signal (pids, number), end (kill all), import (modules, as many of `SLOW_IMPORTS`). To the kernel: ready, forked (pid), exited
(pid, status), ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import select
import signal
import socket
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from playbook_utils.workers.worker import Descriptors, run

__all__ = ["main"]

SLOW_IMPORTS = {
    "torch._dynamo": {"optim", "SGD", "Adam", "AdamW", "DistributedDataParallel", "DDP"}
    | {"checkpoint", "profile"},
    "torch.distributed.optim": {"ZeroRedundancyOptimizer"},
}
"""{module: names in a function's code which tell that calling it will import the module}."""
GRACE_S = 0.5
POLL_S = 0.3
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Noticer:
    """Stands first among a rank's import finders, finds nothing, and tells the server."""

    def __init__(self, imported: mmap.mmap) -> None:
        self._imported = imported

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in SLOW_IMPORTS:
            self._imported[list(SLOW_IMPORTS).index(name)] = 1


class _Server:
    def __init__(self, control: socket.socket, kernel: int) -> None:
        self._control = control
        # Not the socket alone: a process that the kernel forked may hold its other end open.
        self._kernel = kernel
        self._ranks: set[int] = set()
        self._imports = list(SLOW_IMPORTS)
        # One byte a module, which a rank sets: shared memory needs no message and no descriptor.
        self._imported = mmap.mmap(-1, len(SLOW_IMPORTS))
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._libc = ctypes.CDLL(None)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def serve(self) -> None:
        """Answer until the kernel closes the control socket, then kill what is left."""
        signal.setitimer(signal.ITIMER_REAL, 0)  # from here on this loop watches the kernel
        gc.freeze()
        self._tell(event="ready", threads=len(os.listdir("/proc/self/task")))
        while True:
            sources: list[Any] = [self._control, self._wake]
            readable, _, _ = select.select(sources, [], [], POLL_S)
            if os.getppid() != self._kernel:
                break
            if not readable and self._imports and not self._ranks:
                self._import(self._imports[:1])
            if self._wake in readable:
                os.read(self._wake, 4096)
                self._reap()
            if self._control in readable and not self._answer():
                break
        self._end()

    def _import(self, modules: list[str]) -> None:
        modules = [m for m in modules if m in self._imports]
        if not modules:
            return
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)  # watch the kernel, as during start
        for module in modules:
            self._imports.remove(module)
            with contextlib.suppress(Exception):  # a comfort: the server serves without it
                importlib.import_module(module)
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()
        gc.freeze()

    def _answer(self) -> bool:
        number = len(fields(Descriptors))
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 65536, number)
        except ConnectionError:
            return False
        if not message:
            return False
        order = json.loads(message)
        if order["do"] == "fork":
            self._fork(order["rank"], fds)
        elif order["do"] == "signal":
            for pid in self._ranks.intersection(order["pids"]):
                os.kill(pid, order["number"])
        elif order["do"] == "import":
            self._import(order["modules"])
        else:
            self._end()
            self._tell(event="ended")
            self._import([m for m, n in zip(SLOW_IMPORTS, self._imported, strict=True) if n])
        return True

    def _fork(self, rank: int, fds: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(rank, fds, parent)
        self._ranks.add(pid)
        for fd in fds:
            os.close(fd)
        self._tell(event="forked", pid=pid)

    def _become_worker(self, rank: int, fds: list[int], parent: int) -> NoReturn:
        os.setsid()
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._control.close()
        os.close(self._wake)
        sys.meta_path.insert(0, _Noticer(self._imported))
        gc.enable()
        names = [f.name for f in fields(Descriptors)][: len(fds)]
        run(rank, Descriptors(**dict(zip(names, fds, strict=True))))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._ranks:
                self._ranks.remove(pid)
                self._tell(event="exited", pid=pid, status=os.waitstatus_to_exitcode(status))

    def _end(self) -> None:
        """Kill the ranks, then whatever they left, which by then are children of ours."""
        groups = set(self._ranks)
        for pid in groups:
            # The ranks first and alone: their resource trackers then remove shared memory.
            os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        asked: set[int] = set()
        while (children := self._children()) and time.monotonic() < started + 10 * GRACE_S:
            late = time.monotonic() > started + GRACE_S
            for pid in children - groups if late else children - groups - asked:
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
            self._reap()
            if self._children():
                time.sleep(0.002)

    def _children(self) -> set[int]:
        """Processes whose parent is this one, zombies included."""
        pid = os.getpid()
        try:
            return {int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
        except FileNotFoundError:  # a kernel without that file: the ranks at least
            return set(self._ranks)

    def _tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the kernel is gone: serve() sees it too, and ends
            self._control.send(json.dumps(message).encode())


def main(fd: int, kernel: int) -> None:
    """Serve on the control socket `fd` for the process with the id `kernel`.

    Until it serves, a timer ends this process when the kernel is gone (`servers` sets it up).
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _Server(control, kernel).serve()
    except BaseException:
        import traceback

        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    os._exit(0)
