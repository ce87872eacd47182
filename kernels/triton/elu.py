"""ELU, forward and backward, right near zero: y = x where x > 0, else alpha (e^x - 1).

    elu(x, alpha=1.0)

e^x - 1 as it is written loses all digits for small x: at x = -1e-8, fp32 gives 0. The C library has
expm1 for that; Triton's language does not (its libdevice has, for GPUs alone, not for the
interpreter). Here: the Taylor series for -1/2 < x < 0, e^x - 1 below. At -1/2 the subtraction costs
less than one bit more than e^x itself.

ELU: Clevert, Unterthiner, Hochreiter 2016, equation 15. No fp64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check_float, no_second_derivative
from kernels.triton.storage import stored
from kernels.triton.tuning import plain

__all__ = ["elu", "elu_backward_kernel", "elu_kernel"]


@triton.jit
def expm1_of_negative(x):
    """e^x - 1 for x <= 0, in fp32.

    x (1 + x/2 (1 + x/3 (... (1 + x/8)))): what is left out is below |x|^9 / 9!, which at -1/2 is
    5.4e-9, an eighth of fp32's rounding (6e-8) of the result, 0.39.
    """
    series = 1.0 + x / 8.0
    series = 1.0 + x / 7.0 * series
    series = 1.0 + x / 6.0 * series
    series = 1.0 + x / 5.0 * series
    series = 1.0 + x / 4.0 * series
    series = 1.0 + x / 3.0 * series
    series = 1.0 + x / 2.0 * series
    return tl.where(x > -0.5, x * series, tl.exp(x) - 1.0)


@triton.jit
def elu_kernel(x_ptr, y_ptr, size, alpha, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    # Both sides are computed and one is kept; without the inner select e^x would overflow.
    y = tl.where(x > 0, x, alpha * expm1_of_negative(tl.where(x > 0, 0.0, x)))
    tl.store(y_ptr + offsets, stored(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def elu_backward_kernel(x_ptr, dy_ptr, dx_ptr, size, alpha, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dx = dy * tl.where(x > 0, 1.0, alpha * tl.exp(tl.where(x > 0, 0.0, x)))
    tl.store(dx_ptr + offsets, stored(dx, dx_ptr.dtype.element_ty), mask=inside)


class _Elu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alpha: float) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        if x.numel():
            with torch.cuda.device_of(x):
                elu_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), alpha, BLOCK=1024)
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return y

    @staticmethod
    @no_second_derivative("elu", instead="torch.nn.functional.elu")
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        if x.numel():
            with torch.cuda.device_of(x):
                grid = (triton.cdiv(x.numel(), 1024),)
                elu_backward_kernel[grid](x, dy, dx, x.numel(), ctx.alpha, BLOCK=1024)
        return dx, None


@plain
def elu(x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """ELU of a tensor of any shape, fp32, fp16 or bf16; computed in fp32.

    Raises:
        ValueError: another dtype, or a device on which kernels do not run here.
    """
    check_float("x", x)
    y: torch.Tensor = _Elu.apply(x, float(alpha))
    return y
