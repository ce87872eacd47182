"""What one worker process does: set itself up, run the function, answer, wait for the others.

`run` is entered in a process forked from the server (`forkserver`), or started anew where
forking is not sound (`main`). It never returns. A worker that has answered stays until the
notebook says that all ranks have, because one that leaves early resets the connections of peers
that are still connecting. It then ends by `os._exit`: gloo aborts in some teardowns, and
destroying a group costs 10 ms a rank. `atexit` handlers therefore do not run in workers.

Left out: starting and killing processes (`servers`), reading what is sent (`session`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from playbook_utils.workers import pickling, private, wire
from playbook_utils.workers.holders import unreturnable
from playbook_utils.workers.mends import mend
from playbook_utils.workers.raised import describe

__all__ = ["Descriptors", "Setup", "device", "main", "run"]

MARK = "PLAYBOOK_WORKER"
"""Set in the environment of workers, so that a launch inside a launch is recognised."""


@dataclass(frozen=True)
class Descriptors:
    """The file descriptors a worker starts with."""

    task: int
    """Stream socket: the answer out, "bye" in."""
    stdout: int
    stderr: int
    dump: int
    """faulthandler writes the Python stack here on SIGUSR1."""
    payload: int
    """File of parts (`wire`): the pickled `Setup`, the pickled (fn, args), its buffers."""
    rendezvous: int
    """File that FileStore uses to let the ranks find each other; -1 where it has a path."""
    lifeline: int = -1
    """Closed when the notebook is gone; -1 in a forked worker, which the kernel signals."""


@dataclass(frozen=True)
class Setup:
    """What a worker must know before it can unpickle the function."""

    world_size: int
    backend: str
    collective_timeout_s: float
    threads: int
    environ: dict[str, str]
    cwd: str
    sys_path: list[str]
    sources: dict[str, str]
    notebook_folder: str | None
    notebooks: dict[str, str]
    rendezvous_path: str | None
    dtype: torch.dtype
    matmul_precision: str
    deterministic: bool
    warn_only: bool


def device() -> torch.device:
    """The device on which this rank computes: its GPU under nccl, else the CPU."""
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def run(rank: int, fds: Descriptors) -> NoReturn:
    """Be rank `rank`: run the function that the payload holds, answer, exit."""
    status = 1
    try:
        _redirect(fds)
        mend()
        task = socket.socket(fileno=fds.task)
        wire.send_frame(task, wire.READY)
        try:
            fn, args = _prepare(rank, fds)
            result = fn(*args)
            kind, answer = wire.RESULT, _pickled_result(result)
        except BaseException as error:
            kind, answer = wire.RAISED, pickling.Payload(memoryview(pickle.dumps(describe(error))))
        _flush()
        for buffer in answer.buffers:
            wire.send_frame(task, wire.BUFFER, buffer)
        wire.send_frame(task, kind, answer.data)
        task.recv(9)  # "bye", or the end of the notebook
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _redirect(fds: Descriptors) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(fds.stdout, 1)
    os.dup2(fds.stderr, 2)
    for fd in (null, fds.stdout, fds.stderr):
        os.close(fd)
    # They live as long as the process.
    sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # interrupts are the notebook's to handle
    faulthandler.register(signal.SIGUSR1, file=fds.dump, all_threads=False)
    if fds.lifeline >= 0:
        threading.Thread(target=_die_with_notebook, args=(fds.lifeline,), daemon=True).start()


def _die_with_notebook(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def _prepare(rank: int, fds: Descriptors) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    head, body, *buffers = wire.map_parts(fds.payload)
    setup: Setup = pickle.loads(head)
    _enter(rank, setup)
    path = setup.rendezvous_path or f"/proc/self/fd/{fds.rendezvous}"
    _join(rank, setup, path)
    fn, args = pickling.loads(body, buffers)
    for sent in (*args, fn):
        if callable(sent):
            pickling.fill_main(sent)
    return fn, args


def _enter(rank: int, setup: Setup) -> None:
    """Take over the notebook's folder, paths, environment and cells."""
    os.environ.clear()
    me, world = str(rank), str(setup.world_size)
    os.environ.update(setup.environ | {MARK: "1", "RANK": me, "LOCAL_RANK": me})
    os.environ.update({"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world})
    # Loopback only: nothing listens where others could reach it, and no name is looked up.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.setdefault("OMP_NUM_THREADS", str(setup.threads))
    os.chdir(setup.cwd)
    sys.path[:] = setup.sys_path
    pickling.add_sources(setup.sources)
    if setup.notebook_folder is not None:
        from playbook_utils import notebooks

        notebooks.install(setup.notebook_folder)
        notebooks.expect_notebooks(setup.notebooks)
    torch.set_num_threads(setup.threads)
    torch.set_default_dtype(setup.dtype)
    torch.set_float32_matmul_precision(setup.matmul_precision)
    if setup.deterministic:  # not else: the call imports Inductor's configuration
        torch.use_deterministic_algorithms(True, warn_only=setup.warn_only)
    random.seed()
    if "numpy" in sys.modules:  # else every rank of every launch draws the same numbers
        sys.modules["numpy"].random.seed()
    # Read at import, which was before the notebook's environment came.
    private.set_debug_level_from_env()


def _join(rank: int, setup: Setup, rendezvous_path: str) -> None:
    store = private.FileStore(rendezvous_path, setup.world_size)
    device = torch.device("cuda", rank) if "nccl" in setup.backend else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        setup.backend,
        store=store,
        rank=rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=setup.collective_timeout_s),
        device_id=device,
    )


def _pickled_result(result: Any) -> pickling.Payload:
    try:
        return pickling.dumps(result, out_of_band=True)
    except Exception as error:
        raise TypeError(unreturnable(result, error)) from None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or the notebook is gone
            stream.flush()


def main(rank: int, fds: dict[str, int]) -> NoReturn:
    """Entry of a worker that was started anew rather than forked."""
    run(rank, Descriptors(**fds))
