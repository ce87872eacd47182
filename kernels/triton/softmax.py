"""Softmax over the last dimension, fused: a row is read once and written once.

    softmax(scores)

Written as PyTorch operations (maximum, subtract, exponential, sum, divide) a row crosses memory
about eight times. Here a program holds a whole row. A row longer than `WIDEST` does not fit: it is
read in pieces that keep a running maximum and a running sum (online softmax: Milakov and Gimelshein
2018, algorithm 3), then a second time to be written. FlashAttention rests on that recurrence.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check_float, no_second_derivative
from kernels.triton.storage import stored
from kernels.triton.tuning import plain, row_block

__all__ = [
    "WIDEST",
    "online_softmax_kernel",
    "softmax",
    "softmax_backward_kernel",
    "softmax_kernel",
]

WIDEST = 16384
"""Numbers in a row that a program holds at once: 64 KiB in fp32, a quarter of an SM's registers."""


@triton.jit
def softmax_kernel(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + start + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    exponentials = tl.exp(x - tl.max(x, axis=0))
    y = exponentials / tl.sum(exponentials, axis=0)
    tl.store(y_ptr + start + offsets, stored(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def online_softmax_kernel(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    # The lowest fp32 number, not -inf: a first piece that is all -inf would give -inf - -inf = NaN.
    maximum = tl.full((), -3.4028234663852886e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + offsets, mask=offsets < columns, other=float("-inf"))
        x = x.to(tl.float32)
        larger = tl.maximum(maximum, tl.max(x, axis=0))
        total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(x - larger), axis=0)
        maximum = larger
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        x = tl.load(x_ptr + row + offsets, mask=inside, other=0.0).to(tl.float32)
        y = tl.exp(x - maximum) / total
        tl.store(y_ptr + row + offsets, stored(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, columns, BLOCK: tl.constexpr):
    """dx = y (dy - sum(y dy)), in pieces: the second pass mostly finds its row in the cache."""
    row = tl.program_id(0).to(tl.int64) * columns
    dot = tl.full((), 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        y = tl.load(y_ptr + row + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row + offsets, mask=inside, other=0.0).to(tl.float32)
        dot += tl.sum(y * dy, axis=0)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        y = tl.load(y_ptr + row + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row + offsets, mask=inside, other=0.0).to(tl.float32)
        dx = y * (dy - dot)
        tl.store(dx_ptr + row + offsets, stored(dx, dx_ptr.dtype.element_ty), mask=inside)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        if x.numel():
            columns = x.shape[-1]
            kernel = softmax_kernel if columns <= WIDEST else online_softmax_kernel
            with torch.cuda.device_of(x):
                kernel[(x.numel() // columns,)](x, y, columns, **row_block(columns, WIDEST))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @no_second_derivative("softmax", instead="torch.softmax")
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(y)
        if y.numel():
            columns = y.shape[-1]
            grid = (y.numel() // columns,)
            with torch.cuda.device_of(y):
                softmax_backward_kernel[grid](y, dy, dx, columns, **row_block(columns, 4096))
        return dx


@plain
def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax of `x` (fp32, fp16, bf16) over its last dimension, computed in fp32.

    Raises:
        ValueError: no dimension, another dtype, or a device on which kernels do not run here.
    """
    check_float("x", x)
    y: torch.Tensor = _Softmax.apply(x)
    return y
