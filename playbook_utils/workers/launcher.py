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
import numbers
import operator
import os
import pickle
import reprlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeVar

import torch

from playbook_utils.errors import (
    LaunchError,
    LaunchInterrupted,
    NestedLaunchError,
    PlaybookError,
    without_frames,
)
from playbook_utils.workers import pickling, report, torchrun, wire
from playbook_utils.workers.edited import Modules
from playbook_utils.workers.holders import unsendable
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
        self.modules = Modules()
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
    **unknown: Any,
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

    The ranks have the notebook's environment, folder, `sys.path`, default dtype, float32 matmul
    precision and deterministic algorithms. What does not travel: globals of a module that were
    changed after its import (ranks import it anew, and a warning names a file edited since),
    `atexit` handlers (no rank runs any), gradients of tensors that are not leaves, storage that
    two tensors share (each arrives with its own), random seeds (set them in the function),
    `torch.no_grad()` and the default device, PyTorch's and NumPy's print options, log levels.

    Raises:
        ValueError, TypeError: an argument of launch itself is wrong.
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
    try:
        world_size = _checked(fn, world_size, unknown)
        timeout_s = _seconds("timeout_s", timeout_s)
        if collective_timeout_s is not None:
            collective_timeout_s = _seconds("collective_timeout_s", collective_timeout_s)
        threads = _check_options(backend, order, threads)
        method = _start_method(start_method)
        if not torchrun.is_active():
            _check_machine(world_size, backend)
    except (OSError, TypeError, ValueError) as error:
        raise without_frames(error) from None
    if torchrun.is_active():
        return torchrun.run(fn, args, world_size, backend, collective_timeout_s)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    a_gpu_each = torch.cuda.device_count() >= world_size
    chosen = backend or ("cpu:gloo,cuda:nccl" if a_gpu_each else "gloo")
    with _told(world_size), _SERVERS.lock, ExitStack() as stack:
        cwd = _working_directory()
        for file in _SERVERS.modules.edited():
            warnings.warn(
                f"{file} was edited after this kernel imported it, and ranks import it as it "
                "is now: restart the kernel, or reload the module with importlib.reload",
                stacklevel=2,
            )
        server = _SERVERS.get(method)
        rendezvous, path = rendezvous_file(stack, server)
        setup = Setup(
            world_size=world_size,
            backend=chosen,
            collective_timeout_s=_collective_timeout_s(chosen, collective_timeout_s, timeout_s),
            threads=threads or max(1, cores // world_size),
            environ=dict(os.environ),
            cwd=cwd,
            sys_path=list(sys.path),
            sources={},
            rendezvous_path=path,
            dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            **_notebooks(),
        )
        payload = wire.anonymous_file()
        stack.callback(os.close, payload)
        server.expect(_payload(payload, setup, fn, args))
        session = Session(server, world_size, RankedOutput(world_size, order))
        return session.run(payload, rendezvous, timeout_s)


@contextmanager
def _told(world_size: int) -> Iterator[None]:
    """Tells what goes wrong in one message, and shows none of our frames."""
    try:
        yield
    except LaunchError as error:
        raise without_frames(error) from report.cause(error)
    except PlaybookError as error:
        raise without_frames(error) from None
    except KeyboardInterrupt:
        text = f"interrupted; all {world_size} ranks were stopped"
        raise without_frames(LaunchInterrupted(text)) from None
    except OSError as error:
        if missing := report.shortage(error):
            raise without_frames(PlaybookError(missing)) from None
        raise


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


def _checked(fn: object, world_size: object, unknown: dict[str, object]) -> int:
    """The world size, as an int."""
    if not callable(fn):
        raise TypeError(
            f"launch() needs a function first, found {type(fn).__name__}: "
            "launch(train, batches, world_size=4), without calling it"
        )
    if unknown:
        name, called = next(iter(unknown)), getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"launch() has no argument {name!r}; if {called} has, write "
            f"launch(functools.partial({called}, {name}=...), ...)"
        )
    number = _whole(world_size)
    if number is None:
        raise TypeError(f"world_size must be an int, found {reprlib.repr(world_size)}")
    if number < 1:
        raise ValueError(f"world_size must be 1 or more processes, found {number}")
    return number


def _seconds(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real) or not 0 < float(value) < MAX_TIMEOUT_S:
        raise ValueError(
            f"{name} must be seconds, more than 0 and less than {MAX_TIMEOUT_S:g} (a month), "
            f"found {reprlib.repr(value)}"
        )
    return float(value)


def _check_options(backend: object, order: object, threads: object) -> int | None:
    """The threads, as an int."""
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f'backend must be "gloo", "nccl" or None, found {reprlib.repr(backend)}')
    if order not in ("rank", "arrival"):
        raise ValueError(f'order must be "rank" or "arrival", found {reprlib.repr(order)}')
    number = _whole(threads)
    if threads is not None and (number is None or number < 1):
        raise ValueError(f"threads must be a positive int or None, found {reprlib.repr(threads)}")
    return number


def _whole(value: object) -> int | None:
    """An int, where `value` is one or is NumPy's or PyTorch's; a truth value is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise PlaybookError(
            "the folder that this notebook runs in was deleted, and ranks would start in it: "
            "os.chdir() to one that exists, then launch again"
        ) from None


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
        raise ValueError(
            f'start_method must be "fork", "spawn" or None, found {reprlib.repr(asked)}'
        )
    if asked == "fork" and not sys.platform.startswith("linux"):
        raise ValueError('start_method "fork" is sound on Linux only; use "spawn"')
    return asked or ("fork" if sys.platform.startswith("linux") else "spawn")


def _collective_timeout_s(backend: str, asked: float | None, timeout_s: float) -> float:
    if asked is not None:
        return asked
    return timeout_s + 60 if "nccl" in backend else DEFAULT_COLLECTIVE_TIMEOUT_S


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
    fd: int, setup: Setup, fn: Callable[..., Any], args: tuple[Any, ...]
) -> frozenset[str]:
    """Write what the ranks need to a file; the names in the code of the functions."""
    try:
        body = pickling.dumps((fn, args), out_of_band=True)
    except Exception as error:
        raise without_frames(TypeError(unsendable(fn, args, error))) from None
    setup.sources.update(body.sources)
    wire.write_parts(fd, [pickle.dumps(setup), body.data, *body.buffers])
    return body.names
