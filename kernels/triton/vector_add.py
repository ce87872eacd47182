"""z = x + y: the first Triton kernel.

    vector_add(x, y)

A program (CUDA's block) handles BLOCK elements at once; there are no threads to write code for. The
mask stops the last program at the end of the vector. Three words of memory traffic an element, one
addition: bound by memory. Autograd is left out: inputs that require gradients are refused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check_float, check_like, check_no_gradient
from kernels.triton.storage import stored
from kernels.triton.tuning import plain

__all__ = ["vector_add", "vector_add_kernel"]


@triton.jit
def vector_add_kernel(x_ptr, y_ptr, z_ptr, size, BLOCK: tl.constexpr):
    # 64 bits: an offset in a tensor of more than 2^31 elements does not fit in 32.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=inside).to(tl.float32)
    tl.store(z_ptr + offsets, stored(x + y, z_ptr.dtype.element_ty), mask=inside)


@plain
def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x + y` of two tensors of one shape, dtype (fp32, fp16, bf16) and device.

    Raises:
        ValueError: shapes, dtypes or devices differ or are not supported, or a gradient is wanted.
    """
    check_float("x", x)
    check_float("y", y)
    check_like("y", y, "x", x)
    if x.shape != y.shape:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, y {tuple(y.shape)}: expected one shape; nothing is "
            "broadcast here: y.expand_as(x)"
        )
    check_no_gradient("vector_add", "x + y", x=x, y=y)
    x, y = x.contiguous(), y.contiguous()
    z = torch.empty_like(x)
    if z.numel():
        with torch.cuda.device_of(x):
            grid = (triton.cdiv(z.numel(), 1024),)
            vector_add_kernel[grid](x, y, z, z.numel(), BLOCK=1024)
    return z
