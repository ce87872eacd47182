"""CUDA C++ and Triton kernels that run on this machine, with or without a GPU.

    from kernels import load
    module = load("06_matmul_tiled", defines={"TILE": 16})
    report = module.matmul_tiled[(16, 16), (16, 16)](a, b, c, 256, 256, 256)
    print(report.table())

`load` compiles a file of `kernels/cuda` for the GPU (nvcc) or, where there is none, for the CPU
(g++ and `kernels.emulator`); the launch is the same. `kernels.triton` holds the Triton kernels. The
package imports nothing of `playbook_utils`, and importing it compiles nothing and loads no PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.errors import (
        BarrierError,
        CompileError,
        KernelError,
        OutOfBoundsError,
        RaceError,
    )
    from kernels.loader import load

__all__ = [
    "BarrierError",
    "CompileError",
    "KernelError",
    "OutOfBoundsError",
    "RaceError",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562)."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    return getattr(
        importlib.import_module("kernels.loader" if name == "load" else "kernels.errors"), name
    )
