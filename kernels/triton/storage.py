"""Between storage types and fp32, the same on a GPU and in Triton's interpreter.

Kernels load, convert to fp32 at once, compute, and convert at the store:

    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    tl.store(y_ptr + offsets, stored(y, y_ptr.dtype.element_ty), mask=inside)

On a GPU `stored` is a plain cast, and `for_dot` nothing at all: tensor cores take bf16 as it is.
The interpreter of Triton 3.9 needs help (each found by running it): arithmetic on bf16 is wrong
(`kernels.triton.interpreter` refuses it), fp32 -> bf16 truncates instead of rounding, fp32 -> e4m3
loses a carry (31.97 -> 16), and e4m3 -> fp32 is not there. One flaw is left: it reads bf16's
subnormal numbers, below 1.2e-38, wrong by up to their size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton import INTERPRETED

__all__ = ["for_dot", "fp8_bits", "fp8_for_dot", "stored"]

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def stored(x, dtype: tl.constexpr):
    """fp32 `x` in the type it is stored in, rounded to nearest, ties to even.

    e4m3 has no infinity: what is larger than 448 becomes 448, as in PyTorch, and NaN stays NaN.
    """
    if _INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            bits += 0x7FFF + ((bits >> 16) & 1)  # carries into bit 16 from above half, or to even
            return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        if dtype == tl.float8e4nv:
            size = tl.minimum(tl.abs(x), 448.0)
            # The power of two at or below |x|, not below 2^-6, from where e4m3 has steps of 2^-9.
            power = (size.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            # fp32 numbers near 1.5 * 2^20 * power lie power / 8 apart: e4m3's step.
            shift = tl.maximum(power, 0.015625) * 1572864.0
            size = (size + shift) - shift
            rounded = tl.where(x < 0, -size, size).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            return tl.where(x != x, 0x7F, rounded).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(dtype)


@triton.jit
def for_dot(x):
    """A tile as `tl.dot` takes it: as it is; fp32 in the interpreter, which is wrong on bf16."""
    if _INTERPRETED:
        x = x.to(tl.float32)
    return x


@triton.jit
def fp8_for_dot(x):
    """A tile of e4m3 as `tl.dot` takes it: as it is; in the interpreter its bits, made fp32."""
    if _INTERPRETED:
        bits = x.to(tl.uint32)
        sign = (bits & 0x80) << 24
        magnitude = bits & 0x7F
        # Exponent bias 7 -> 127; three mantissa bits -> the top three of 23.
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        small = magnitude.to(tl.float32) * 0.001953125  # exponent field 0: steps of 2^-9
        value = tl.where(magnitude < 8, small, normal)
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        x = tl.where(sign != 0, -value, value)
    return x


def fp8_bits(x: torch.Tensor) -> torch.Tensor:
    """An e4m3 tensor as a kernel receives it: as it is; its bytes in the interpreter."""
    return x.view(torch.uint8) if INTERPRETED else x
