"""`launch`: run a function of the notebook on several ranks and get their results back.

    def hello(greeting):
        print(greeting, "from", dist.get_rank())
        return dist.get_rank() ** 2

    launch(hello, "hi", world_size=4)        # [0, 1, 4, 9]

Each call gets fresh processes in which `torch.distributed` is initialised: gloo on the CPU, nccl
where there are enough GPUs. Anything a cell defines can be sent and returned. Under torchrun the
same call runs in the processes that exist (`torchrun`). `prewarm()` in a lesson's first cell
starts the server that workers are forked from, which takes about as long as `import torch`.

Left out: Windows (run Jupyter in WSL2); several machines without torchrun.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, TypeVar

import torch

from playbook_utils.errors import LaunchError, LaunchInterrupted, NestedLaunchError
from playbook_utils.workers import pickling, torchrun, wire
from playbook_utils.workers.output import Order, RankedOutput
from playbook_utils.workers.servers import ForkServer, Server, SpawnServer
from playbook_utils.workers.session import Session, rendezvous_file
from playbook_utils.workers.worker import MARK, Setup

__all__ = ["launch", "prewarm", "shutdown"]

R = TypeVar("R")
StartMethod = Literal["fork", "spawn"]

MAX_WORLD_SIZE = 64
MAX_TIMEOUT_S = 30 * 86400.0
DEFAULT_COLLECTIVE_TIMEOUT_S = 30.0


class _Servers:
    """This process's servers, one for each start method; made on first use."""

    def __init__(self) -> None:
        self._servers: dict[tuple[int, str], Server] = {}
        self.lock = threading.Lock()

    def get(self, method: StartMethod) -> Server:
        # By process: a forked copy of a kernel must not talk on the kernel's socket.
        key = (os.getpid(), method)
        if key not in self._servers or not self._servers[key].alive():
            if not self._servers:
                atexit.register(self.close)
            self._servers[key] = ForkServer() if method == "fork" else SpawnServer()
        return self._servers[key]

    def close(self) -> None:
        for (pid, _), server in list(self._servers.items()):
            if pid == os.getpid():
                server.close()
        self._servers.clear()


_SERVERS = _Servers()
"""The package's one piece of module state: servers outlive the call that started them."""


def launch(
    fn: Callable[..., R],
    *args: Any,
    world_size: int,
    backend: str | None = None,
    timeout_s: float = 120.0,
    collective_timeout_s: float | None = None,
    order: Order = "rank",
    threads: int | None = None,
    start_method: StartMethod | None = None,
) -> list[R]:
    """Run `fn(*args)` on `world_size` ranks; returns [result of rank 0, result of rank 1, ...].

    Args:
        fn: any callable, defined in a cell or imported. Keyword arguments: use a closure or
            `functools.partial`.
        args: sent to every rank, pickled once; tensors arrive on the CPU.
        world_size: number of processes, 1 to 64. Under torchrun, torchrun's own counts,
            and its processes are used: see `torchrun` for what is different there.
        backend: "gloo" or "nccl"; None takes nccl where there are `world_size` GPUs.
        timeout_s: seconds after which all ranks are stopped, whatever they do.
        collective_timeout_s: seconds a collective may wait for its peers. None is 30 with gloo;
            with nccl, whose watchdog then ends the process without a word, longer than
            `timeout_s`, which does say where the ranks are.
        order: "rank" shows rank 0's output as it comes and the others' after it, the same text on
            every run; "arrival" shows each line at once.
        threads: CPU threads of each rank; None divides the cores among the ranks.
        start_method: None is "fork" (from a server) on Linux, "spawn" elsewhere.

    Raises:
        ValueError, TypeError: an argument that cannot be.
        LaunchError: a rank failed; `failures` holds each cause, `positions` where all were.
        LaunchTimeout: nothing failed, but the ranks no longer moved.
        LaunchInterrupted: the kernel was interrupted.
        NestedLaunchError: called inside a worker.
    """
    if os.environ.get(MARK):
        raise NestedLaunchError(
            "launch() was called inside a worker of another launch(). Workers cannot start "
            "workers: call collectives of torch.distributed there, or make a subgroup with "
            "torch.distributed.new_group, and call launch() from the notebook only"
        )
    _check(fn, world_size, backend, timeout_s, collective_timeout_s, order, threads)
    if torchrun.is_active():
        return torchrun.run(fn, args, world_size, backend, collective_timeout_s)
    _check_machine(world_size, backend)
    method = _start_method(start_method)
    threads = threads or max(1, _cores() // world_size)
    chosen = backend or _default_backend(world_size)
    try:
        with _SERVERS.lock, ExitStack() as stack:
            server = _SERVERS.get(method)
            rendezvous, path = rendezvous_file(stack, server)
            setup = Setup(
                world_size=world_size,
                backend=chosen,
                collective_timeout_s=_collective_timeout_s(chosen, collective_timeout_s, timeout_s),
                threads=threads,
                environ=dict(os.environ),
                cwd=os.getcwd(),
                sys_path=list(sys.path),
                sources={},
                rendezvous_path=path,
                **_notebooks(),
            )
            payload, names = _payload(setup, fn, args)
            stack.callback(os.close, payload)
            server.expect(names)
            session = Session(server, world_size, RankedOutput(world_size, order))
            return session.run(payload, rendezvous, timeout_s)
    except LaunchError as error:
        cause = error.failures[0].exception if error.failures else None
        raise error.with_traceback(None) from cause
    except LaunchInterrupted as error:
        raise error.with_traceback(None) from None


def prewarm() -> None:
    """Start the server that workers are forked from, so that the first launch need not wait.

    Returns at once. Does nothing under torchrun or in a worker.
    """
    if not os.environ.get(MARK) and not torchrun.is_active() and _start_method(None) == "fork":
        with _SERVERS.lock:
            _SERVERS.get("fork")


def shutdown() -> None:
    """End the servers of this process; the next launch starts anew."""
    with _SERVERS.lock:
        _SERVERS.close()


def _check(
    fn: object,
    world_size: object,
    backend: object,
    timeout_s: object,
    collective_timeout_s: object,
    order: object,
    threads: object,
) -> None:
    if not callable(fn):
        raise TypeError(
            f"launch() needs a function first, found {type(fn).__name__}: "
            "launch(train, batches, world_size=4), without calling it"
        )
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        raise TypeError(f"world_size must be an int, found {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be 1 or more processes, found {world_size}")
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f'backend must be "gloo", "nccl" or None, found {backend!r}')
    for name, value in (("timeout_s", timeout_s), ("collective_timeout_s", collective_timeout_s)):
        if value is None and name == "collective_timeout_s":
            continue
        if not isinstance(value, (int, float)) or not 0 < value < MAX_TIMEOUT_S:
            raise ValueError(
                f"{name} must be seconds, more than 0 and less than {MAX_TIMEOUT_S:g} (a month), "
                f"found {value!r}"
            )
    if order not in ("rank", "arrival"):
        raise ValueError(f'order must be "rank" or "arrival", found {order!r}')
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads must be a positive int or None, found {threads!r}")


def _check_machine(world_size: int, backend: str | None) -> None:
    """What one machine can carry; under torchrun there are others."""
    if world_size > MAX_WORLD_SIZE:
        raise ValueError(
            f"world_size must be 1 to {MAX_WORLD_SIZE} processes on one machine, found "
            f"{world_size}; over several machines start the script with torchrun"
        )
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        raise ValueError(
            f'backend "nccl" needs a GPU for each of {world_size} ranks, this machine has '
            f'{torch.cuda.device_count()}; use backend="gloo" or a smaller world_size'
        )


def _start_method(asked: StartMethod | None) -> StartMethod:
    if sys.platform == "win32":
        raise OSError("launch() needs a POSIX system: on Windows run Jupyter inside WSL2")
    if asked not in (None, "fork", "spawn"):
        raise ValueError(f'start_method must be "fork", "spawn" or None, found {asked!r}')
    if asked == "fork" and not sys.platform.startswith("linux"):
        raise ValueError('start_method "fork" is sound on Linux only; use "spawn"')
    return asked or ("fork" if sys.platform.startswith("linux") else "spawn")


def _default_backend(world_size: int) -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= world_size else "gloo"


def _collective_timeout_s(backend: str, asked: float | None, timeout_s: float) -> float:
    if asked is not None:
        return asked
    return timeout_s + 60 if "nccl" in backend else DEFAULT_COLLECTIVE_TIMEOUT_S


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _notebooks() -> dict[str, Any]:
    """What workers need to import notebooks as the kernel does."""
    module = sys.modules.get("playbook_utils.notebooks")
    if module is None:
        return {"notebook_folder": None, "notebooks": {}}
    folder = module.notebook_folder()
    return {
        "notebook_folder": None if folder is None else str(folder),
        "notebooks": module.loaded_notebooks(),
    }


def _payload(
    setup: Setup, fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[int, frozenset[str]]:
    """A file that holds what the ranks need, and the names in the code of the functions."""
    try:
        body = pickling.dumps((fn, args))
    except Exception as error:
        raise TypeError(
            f"the function or its arguments cannot be sent to workers "
            f"({type(error).__name__}: {error}); what holds an open file, a lock, a generator or "
            "a process group must be made inside the function"
        ) from error
    setup.sources.update(body.sources)
    head = pickle.dumps(setup)
    fd = wire.anonymous_file(len(head).to_bytes(8, "big") + head)
    view = body.data
    while len(view):
        view = view[os.write(fd, view) :]
    return fd, body.names
