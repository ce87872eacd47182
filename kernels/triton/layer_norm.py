"""LayerNorm over the last dimension, forward and backward, each one kernel.

    layer_norm(x, weight, bias, eps=1e-5)

Forward keeps two numbers a row, the mean and 1 / sqrt(variance + eps); backward computes the
normalised row again from them and x. The gradients of weight and bias are sums over all rows: each
program adds up its own rows, and PyTorch adds the few partial sums, so the result is the same in
every run (atomics would not be).

Ba, Kiros, Hinton 2016, equation 4. Rows longer than 65,536 are refused. Left out: a fused
residual addition.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check_float, check_vector, no_second_derivative
from kernels.triton.storage import stored
from kernels.triton.tuning import check_row, plain, row_block, row_programs

__all__ = ["layer_norm", "layer_norm_backward_kernel", "layer_norm_kernel"]


@triton.jit
def layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, columns, eps,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / columns
    # Two steps over the row in registers: E[x^2] - E[x]^2 would cancel for a large mean.
    centred = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    y = centred * rstd * tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + offsets, stored(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_backward_kernel(
    x_ptr, weight_ptr, dy_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows, columns, rows_per_program,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, rows_per_program):
        row = program * rows_per_program + i
        inside = offsets < tl.where(row < rows, columns, 0)  # the last program may have fewer
        x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * columns + offsets, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normalised = tl.where(inside, (x - mean) * rstd, 0.0)
        dnormalised = dy * weight
        # The gradient less its mean and less its part along the normalised row: x may move in
        # neither direction without the mean or the variance taking it back.
        along = tl.sum(normalised * dnormalised, axis=0) / columns
        dx = (dnormalised - tl.sum(dnormalised, axis=0) / columns - normalised * along) * rstd
        tl.store(dx_ptr + row * columns + offsets, stored(dx, dx_ptr.dtype.element_ty), mask=inside)
        if DWEIGHT:
            dweight += dy * normalised
        if DBIAS:
            dbias += dy
    # One row of partial sums a program, fp32.
    if DWEIGHT:
        tl.store(dweight_ptr + program * columns + offsets, dweight, mask=offsets < columns)
    if DBIAS:
        tl.store(dbias_ptr + program * columns + offsets, dbias, mask=offsets < columns)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        columns = x.shape[-1]
        rows = x.numel() // columns
        y = torch.empty_like(x)
        mean, rstd = (torch.empty(rows, device=x.device) for _ in range(2))
        if rows:
            with torch.cuda.device_of(x):
                layer_norm_kernel[(rows,)](
                    x, weight, weight if bias is None else bias.contiguous(), y, mean, rstd,
                    columns, eps, HAS_BIAS=bias is not None, **row_block(columns),
                )  # fmt: skip
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @no_second_derivative("layer_norm", instead="torch.nn.functional.layer_norm")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        columns = x.shape[-1]
        rows = x.numel() // columns
        programs = row_programs(rows, x)
        # Sums that nobody wants are neither made nor stored: their pointer is not used.
        wanted = ctx.needs_input_grad[1:3]
        dweight, dbias = (
            torch.zeros(programs, columns, device=x.device) if sums else mean for sums in wanted
        )
        if rows:
            with torch.cuda.device_of(x):
                layer_norm_backward_kernel[(programs,)](
                    x, weight, dy, mean, rstd, dx, dweight, dbias,
                    rows, columns, triton.cdiv(rows, programs),
                    DWEIGHT=wanted[0], DBIAS=wanted[1], **row_block(columns),
                )  # fmt: skip
        dtypes = weight.dtype, ctx.bias_dtype
        sums = (
            x.sum(0).to(dtype) if use else None
            for x, dtype, use in zip((dweight, dbias), dtypes, wanted, strict=True)
        )
        return dx, *sums, None


@plain
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """LayerNorm of `x` (..., columns), computed in fp32, stored in the dtype of `x`.

    Args:
        weight, bias: (columns,), each in its own dtype of fp32, fp16 and bf16.

    Raises:
        ValueError: a length, dtype or device that does not fit, or rows longer than 65,536.
    """
    check_float("x", x)
    check_row("x", x)
    check_vector("weight", weight, x.shape[-1], x)
    if bias is not None:
        check_vector("bias", bias, x.shape[-1], x)
    y: torch.Tensor = _LayerNorm.apply(x, weight, bias, float(eps))
    return y
