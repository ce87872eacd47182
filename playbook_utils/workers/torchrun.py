"""`launch` inside processes that torchrun has started: no new ones, the same results.

    torchrun --nproc-per-node 2 lesson.py        # lesson.py calls launch(train, world_size=2)

Every process runs the function as the rank it is and gets the list of all results. The process
group is made on first use and kept: over any number of nodes, making it anew would meet the keys
of the old one in torchrun's store.

Left out: labels before output and stopping the others on a failure, which torchrun does.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["is_active", "run"]

R = TypeVar("R")


def is_active() -> bool:
    """Whether this process was started by torchrun."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def run(
    fn: Callable[..., R],
    args: tuple[Any, ...],
    world_size: int,
    backend: str | None,
    collective_timeout_s: float,
) -> list[R]:
    """Run `fn(*args)` here, as one of torchrun's ranks; returns the results of all ranks."""
    if not dist.is_initialized():
        _join(backend, collective_timeout_s)
    if world_size != dist.get_world_size() and dist.get_rank() == 0:
        print(
            f"launch(world_size={world_size}) runs on the {dist.get_world_size()} ranks that "
            "torchrun started",
            file=sys.stderr,
        )
    result = fn(*args)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    return results


def _join(backend: str | None, collective_timeout_s: float) -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_gpus = torch.cuda.device_count() >= local_world
    backend = backend or ("cpu:gloo,cuda:nccl" if has_gpus else "gloo")
    if "nccl" in backend:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backend, timeout=timedelta(seconds=collective_timeout_s))
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized() and not isinstance(sys.exc_info()[1], BaseException):
        dist.barrier()  # gloo aborts in some teardowns that peers are not ready for
        dist.destroy_process_group()
