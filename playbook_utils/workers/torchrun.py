"""`launch` inside processes that torchrun has started: no new ones, the same results.

    torchrun --nproc-per-node 2 lesson.py        # lesson.py calls launch(train, world_size=2)

Every process runs the function as the rank it is and gets the list of all results. Any starter
that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT will do; without LOCAL_RANK the GPU is
RANK modulo the GPUs that the process sees. The process group is made by the first launch, with
its backend and timeout, and kept: over any number of nodes, making it anew would meet the keys of
the old one in torchrun's store.

Left out: `timeout_s`, `order` and `threads`, labels before output, and stopping the others on a
failure, all of which are torchrun's; a failing rank raises its own exception. A script that calls
`destroy_process_group` itself must have waited for its work: it may abort where a global holds a
group whose work is not done.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from playbook_utils.workers import pickling
from playbook_utils.workers.private import world

__all__ = ["is_active", "run"]

R = TypeVar("R")
PATIENCE = timedelta(seconds=10)
"""With a group that a peer may have destroyed."""


def is_active() -> bool:
    """Whether this process was started by torchrun."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def run(
    fn: Callable[..., R],
    args: tuple[Any, ...],
    world_size: int,
    backend: str | None,
    collective_timeout_s: float | None,
) -> list[R]:
    """Run `fn(*args)` here, as one of torchrun's ranks; returns the results of all ranks.

    Args:
        collective_timeout_s: None is PyTorch's own (10 minutes for nccl, 30 for gloo).

    Raises:
        ValueError: there are GPUs, but too few for the processes of this machine.
    """
    if not dist.is_initialized():
        _join(backend, collective_timeout_s)
    if world_size != dist.get_world_size() and dist.get_rank() == 0:
        print(
            f"launch(world_size={world_size}) runs on the {dist.get_world_size()} ranks that "
            "torchrun started",
            file=sys.stderr,
        )
    try:
        result = fn(*args)
    except BaseException:
        atexit.unregister(_leave)  # the others may never come to the barrier there
        raise
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, bytes(pickling.dumps(result).data))
    return [pickling.loads(data) for data in results]


def _join(backend: str | None, collective_timeout_s: float | None) -> None:
    gpus = torch.cuda.device_count()
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if backend is None and 0 < gpus < local_world:
        raise ValueError(
            f"{local_world} processes on this machine, and {gpus} GPUs: start one process a GPU, "
            'or pass backend="gloo" to compute on the CPU'
        )
    backend = backend or ("cpu:gloo,cuda:nccl" if gpus else "gloo")
    device = None
    if "nccl" in backend:
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])) % max(1, gpus)
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = None if collective_timeout_s is None else timedelta(seconds=collective_timeout_s)
    dist.init_process_group(backend, timeout=timeout, device_id=device)
    atexit.register(_leave)


def _leave() -> None:
    """Let gloo's threads end while the interpreter is whole.

    Such a thread lets go of a tensor under the interpreter's lock. Where it still waits for that as
    the interpreter ends, Python stops it inside a destructor: "terminate called without an active
    exception". So all work is waited for, also what the script did not wait for. Then a group joins
    its threads as its last reference goes; one that a global holds does not, but they are idle.
    """
    if getattr(sys, "last_value", None) is None:
        if dist.is_initialized():
            dist.barrier()  # all are here; and the work of the whole world is done
            _wait_for_work_of_groups()
            dist.barrier()  # no rank closes connections that a peer still makes or uses
            dist.destroy_process_group()
        gc.collect()  # a DDP wrapper and its hooks refer to each other, and hold the group
        time.sleep(0.1)  # for a thread that has done its work, and only has to let go


def _wait_for_work_of_groups() -> None:
    """Gloo's barrier of a group ends after all work that the group was given before it.

    One that fails or times out tells of failed work, or of a group that a peer has destroyed.
    """
    gloo = (g for g in world.pg_map if dist.get_backend(g) == "gloo")  # nccl's would connect first
    groups = [group for group in gloo if group is not dist.group.WORLD]
    started = [dist.barrier(group, async_op=True, timeout=PATIENCE) for group in groups]
    for work in started:
        with contextlib.suppress(RuntimeError):
            work.wait(PATIENCE)
