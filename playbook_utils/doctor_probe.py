"""Try PyTorch, gloo, CUDA and Triton for real, and print what happened as one line of JSON.

`playbook_utils.doctor` runs this in a process of its own: looking for a GPU may initialise CUDA,
after which a process can no longer fork workers, so the kernel must not do it itself.

    python -m playbook_utils.doctor_probe
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from typing import Any

__all__ = ["probe"]


def _torch() -> dict[str, Any]:
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda}


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in found]


def _gloo() -> str:
    """One all-reduce in a group of one: creates gloo's device and connects it."""
    import torch
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        total = torch.ones(3)
        dist.all_reduce(total)
    finally:
        dist.destroy_process_group()
    if total.tolist() != [1.0, 1.0, 1.0]:
        raise RuntimeError(f"an all-reduce of ones over one rank gave {total.tolist()}")
    return "all-reduce works"


def _nccl() -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise RuntimeError("not in this build of PyTorch")
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _triton() -> str:
    """Add one to 70 numbers, 32 a program, the last of them masked off."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def add_one(x_ptr, size, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < size
        tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + 1, mask=mask)

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    x = torch.zeros(70, device="cpu" if interpreted else "cuda")
    add_one[(3,)](x, 70, BLOCK=32)
    if not bool((x == 1).all()):
        raise RuntimeError("a kernel that adds one gave wrong numbers")
    return importlib.metadata.version("triton")


def _attempt(try_it: Callable[[], Any]) -> dict[str, Any]:
    """`{"works": value}` or `{"error": "one line"}`; anything may be raised by a broken install."""
    try:
        return {"works": try_it()}
    except Exception as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return {"error": f"{type(error).__name__}: {first_line}"}


def probe() -> dict[str, dict[str, Any]]:
    """What was tried, by name, each as `{"works": ...}` or `{"error": ...}`.

    Sets TRITON_INTERPRET in this process where there is no GPU.
    """
    found = {"torch": _attempt(_torch), "gpus": _attempt(_gpus)}
    if not found["gpus"].get("works"):
        os.environ["TRITON_INTERPRET"] = "1"
    tried = {"gloo": _gloo, "nccl": _nccl, "triton": _triton}
    return found | {name: _attempt(try_it) for name, try_it in tried.items()}


if __name__ == "__main__":
    print(json.dumps(probe()))
