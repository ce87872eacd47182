"""RMSNorm over the last dimension, forward and backward, each one kernel.

    rms_norm(x, weight, eps=1e-6)

`layer_norm` without the mean and the bias: Zhang and Sennrich 2019, equation 4. One number a row is
kept for backward. Rows longer than 65,536 are refused. Everything is computed in fp32 and rounded
once; Llama's own code rounds the normalised row before it multiplies by the weight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check_float, check_vector, no_second_derivative
from kernels.triton.storage import stored
from kernels.triton.tuning import check_row, plain, row_block, row_programs

__all__ = ["rms_norm", "rms_norm_backward_kernel", "rms_norm_kernel"]


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, y_ptr, rstd_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd * tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + offsets, stored(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    x_ptr, weight_ptr, dy_ptr, rstd_ptr, dx_ptr, dweight_ptr,
    rows, columns, rows_per_program, DWEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, rows_per_program):
        row = program * rows_per_program + i
        inside = offsets < tl.where(row < rows, columns, 0)  # the last program may have fewer
        x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normalised = x * rstd
        dnormalised = dy * weight
        along = tl.sum(normalised * dnormalised, axis=0) / columns
        dx = (dnormalised - normalised * along) * rstd
        tl.store(dx_ptr + row * columns + offsets, stored(dx, dx_ptr.dtype.element_ty), mask=inside)
        if DWEIGHT:
            dweight += dy * normalised
    if DWEIGHT:
        tl.store(dweight_ptr + program * columns + offsets, dweight, mask=offsets < columns)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        columns = x.shape[-1]
        rows = x.numel() // columns
        y = torch.empty_like(x)
        rstd = torch.empty(rows, device=x.device)
        if rows:
            with torch.cuda.device_of(x):
                rms_norm_kernel[(rows,)](x, weight, y, rstd, columns, eps, **row_block(columns))
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @no_second_derivative("rms_norm", instead="torch.nn.functional.rms_norm")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        columns = x.shape[-1]
        rows = x.numel() // columns
        programs = row_programs(rows, x)
        wanted = ctx.needs_input_grad[1]
        # Sums that nobody wants are neither made nor stored: their pointer is not used.
        dweight = torch.zeros(programs, columns, device=x.device) if wanted else rstd
        if rows:
            with torch.cuda.device_of(x):
                rms_norm_backward_kernel[(programs,)](
                    x, weight, dy, rstd, dx, dweight,
                    rows, columns, triton.cdiv(rows, programs), DWEIGHT=wanted,
                    **row_block(columns),
                )  # fmt: skip
        return dx, dweight.sum(0).to(weight.dtype) if wanted else None, None


@plain
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm of `x` (..., columns), computed in fp32, stored in the dtype of `x`.

    Args:
        weight: (columns,), in its own dtype of fp32, fp16 and bf16.

    Raises:
        ValueError: a length, dtype or device that does not fit, or rows longer than 65,536.
    """
    check_float("x", x)
    check_row("x", x)
    check_vector("weight", weight, x.shape[-1], x)
    y: torch.Tensor = _RmsNorm.apply(x, weight, float(eps))
    return y
