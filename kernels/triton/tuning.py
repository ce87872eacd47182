"""Which block sizes, and how many programs, a kernel is launched with.

    @tuned([triton.Config({"BLOCK_M": 128}, num_warps=4), ...], key=["seq_len"])
    @triton.jit
    def kernel(...): ...

On a GPU `tuned` is `triton.autotune`: every configuration is timed at the first call with new
values of `key`, and one that needs more shared memory than there is drops out. The interpreter has
nothing to time: it takes the first.

Left out: keeping what was found between processes (Triton does that itself with
TRITON_CACHE_AUTOTUNING=1).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import triton

from kernels.triton import INTERPRETED

__all__ = ["WIDEST_ROW", "check_row", "plain", "row_block", "row_programs", "tuned"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

WIDEST_ROW = 65536
"""Numbers in a row, at most, of a kernel that holds a whole row: 256 KiB, an SM's registers."""


def tuned(
    configs: list[triton.Config], key: list[str], fp32_configs: list[triton.Config] | None = None
) -> Callable[[Any], Any]:
    """Decorates a `triton.jit` function: the fastest of `configs` for each new value of `key`.

    `fp32_configs` are tried instead where the first argument is a tensor of fp32: its products take
    no tensor cores and twice the shared memory.
    """

    def of_dtype(
        _: list[triton.Config], arguments: dict[str, Any], **__: Any
    ) -> list[triton.Config]:
        fp32 = next(iter(arguments.values())).dtype == torch.float32
        return fp32_configs if fp32 and fp32_configs else configs

    def decorate(function: Any) -> Any:
        tuner = triton.autotune(
            configs=configs[:1] if INTERPRETED else configs,
            key=key,
            prune_configs_by={"early_config_prune": of_dtype},
        )(function)
        tuner.candidates = {torch.float32: fp32_configs or configs}
        for dtype in (torch.float16, torch.bfloat16):
            tuner.candidates[dtype] = configs
        return tuner

    return decorate


def plain(function: _Function) -> _Function:
    """Decorates the functions that launch kernels: interpreted, they are nothing to compile.

    torch.compile would follow Triton's interpreter into NumPy. Where kernels are interpreted it
    breaks its graph here instead. On a GPU it takes the kernels into the graph, and this decorator
    does nothing. (torch.compiler.disable itself would load the compiler, for seconds, in every
    process; here it is loaded already if it is at work.)
    """
    if not INTERPRETED:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(_Function, call)


def row_block(columns: int, largest: int = WIDEST_ROW) -> dict[str, int]:
    """BLOCK and num_warps for a program that holds `columns` numbers, `largest` at most, at once.

    A warp has 32 threads, so this is 8 numbers a thread up to 4096 columns, 16 at 8192, and from
    16384 on, with all 32 warps that a program may have, 16 to 64. Triton's layer norm tutorial has
    the same rule with 1 to 8 warps, for rows of 64 KiB at most. The norms' backward holds three
    rows or more, and from 16384 on some of it spills to memory: layer norm's, compiled for an H100
    in bf16, 216 bytes a thread there and 1,336 at 65536 (328 and 3,592 with 16 warps).
    """
    block = min(triton.next_power_of_2(columns), largest)
    warps = 32 if block >= 16384 else max(1, min(16, block // 256))
    return {"BLOCK": block, "num_warps": warps}


def check_row(name: str, x: torch.Tensor) -> None:
    """Refuse rows that are empty, or too long for a program to hold."""
    if not 1 <= x.shape[-1] <= WIDEST_ROW:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: expected a last dimension of 1 to {WIDEST_ROW}, "
            "because one program holds a whole row"
        )


def row_programs(rows: int, like: torch.Tensor) -> int:
    """Programs that share `rows` among them and sum as they go: one an SM; 4 in the interpreter."""
    at_once = 4
    if like.is_cuda:
        at_once = torch.cuda.get_device_properties(like.device).multi_processor_count
    return max(1, min(rows, at_once))
