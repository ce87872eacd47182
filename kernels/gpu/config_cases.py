"""The Triton operations that are tuned, with each configuration and not just the fastest, as cases.

    config_cases("cuda", TIMED)       # to be checked; none is timed

Which configuration is fastest differs from GPU to GPU and from size to size, so a wrong one may
never be chosen here and be chosen elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels.gpu.case import Case, NotRunError, Tensors
from kernels.gpu.triton_cases import TritonSizes, triton_cases

__all__ = ["config_cases"]


def config_cases(
    device: str, sizes: TritonSizes, dtype: torch.dtype = torch.bfloat16
) -> tuple[Iterator[Case], ...]:
    """The operations that are tuned, once with each of the configurations they are tuned over."""
    from kernels.triton.flash_attention import flash_attention_kernel
    from kernels.triton.flash_attention_backward import dkdv_kernel, dq_kernel
    from kernels.triton.fp8_matmul import fp8_matmul_kernel
    from kernels.triton.matmul import matmul_kernel

    _, _, matmuls, fp8, attention = triton_cases(device, sizes, dtype)
    of_attention = (flash_attention_kernel, dkdv_kernel, dq_kernel)
    return (
        _each_config(matmuls, (matmul_kernel,), dtype),
        _each_config(fp8, (fp8_matmul_kernel,), dtype),
        _each_config(attention, of_attention, dtype),
    )


def _each_config(
    cases: Iterator[Case], kernels: tuple[Any, ...], dtype: torch.dtype
) -> Iterator[Case]:
    """Of `cases` those with a gradient, which run forward too (FP8: all), config by config."""
    for case in cases:
        if not case.name.endswith(" + backward") and "fp8" not in case.name:
            continue
        for kernel in kernels:
            for config in kernel.candidates[dtype]:
                blocks = " ".join(f"{key} {value}" for key, value in config.kwargs.items())
                name = (
                    f"{case.name}, {kernel.base_fn.__name__}: {blocks}, "
                    f"{config.num_warps} warps, {config.num_stages} stages"
                )
                yield replace(case, name=name, run=partial(_with, kernel, config, case.run))


def _with(kernel: Any, config: Any, run: Callable[[], Tensors]) -> Tensors:
    """`run()` with this configuration of this kernel; the others are tuned as always."""
    from triton.runtime.errors import OutOfResources, PTXASError

    before, kernel.configs = kernel.configs, [config]
    try:
        return run()
    except (OutOfResources, PTXASError) as error:  # where tuning drops it, too
        raise NotRunError(str(error)) from error
    finally:
        kernel.configs = before
