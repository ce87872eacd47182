"""C = A B, tiled, with the programs in an order that reuses the L2 cache.

    matmul(a, b)

A program computes one BLOCK_M x BLOCK_N tile of C and walks along K. Programs run in the order of
their number, a few hundred at once. Numbered row by row, those that run together need one row of
tiles of A and all of B; in groups of GROUP_M rows, column by column within the group, they need a
block of A and a block of B, which fit in L2 (`tile_of`). Strides are arguments, so a transposed
view costs no copy; backward is two such products.

Left out: split-K for small C and long K, batches, and what Hopper adds (TMA, persistent programs).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check_float, check_like, no_second_derivative
from kernels.triton.storage import for_dot, stored
from kernels.triton.tuning import plain, tuned

__all__ = ["CONFIGS", "FP32_CONFIGS", "matmul", "matmul_kernel", "tile_of"]


def _config(m: int, n: int, k: int, warps: int, stages: int) -> triton.Config:
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}
    return triton.Config(blocks, num_warps=warps, num_stages=stages)


CONFIGS = [
    _config(64, 64, 32, 4, 3),
    _config(128, 128, 32, 4, 4),
    _config(128, 128, 64, 8, 3),
    _config(128, 256, 64, 8, 3),
    _config(64, 128, 64, 4, 4),
]
FP32_CONFIGS = [_config(64, 64, 32, 4, 3), _config(128, 64, 32, 8, 3)]


@triton.jit
def tile_of(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the tile of program number `program`: down a group of rows, then right."""
    per_group = GROUP_M * tiles_n
    first_m = program // per_group * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)  # the last group may be lower
    return first_m + program % per_group % group_m, program % per_group // group_m


@tuned(CONFIGS, key=["M", "N", "K"], fp32_configs=FP32_CONFIGS)
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + m[:, None] * a_stride_m + k[None, :] * a_stride_k
    b_ptrs = b_ptr + k[:, None] * b_stride_k + n[None, :] * b_stride_n
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = K - start
        a = tl.load(a_ptrs, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0)
        b = tl.load(b_ptrs, mask=(k[:, None] < left) & (n[None, :] < N), other=0.0)
        # "ieee" concerns fp32 alone: its default, TF32, keeps 10 bits of the mantissa.
        accumulator = tl.dot(for_dot(a), for_dot(b), accumulator, input_precision="ieee")
        a_ptrs += BLOCK_K * a_stride_k
        b_ptrs += BLOCK_K * b_stride_k
    c = stored(accumulator, c_ptr.dtype.element_ty)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c, mask=(m[:, None] < M) & (n[None, :] < N))


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    if c.numel():
        with torch.cuda.device_of(a):
            matmul_kernel[
                lambda meta: (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)
            ](a, b, c, M, N, K, *a.stride(), *b.stride())
    return c


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _multiply(a, b)

    @staticmethod
    @no_second_derivative("matmul", instead="torch.matmul")
    def backward(ctx: Any, dc: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        da = _multiply(dc, b.t()) if ctx.needs_input_grad[0] else None
        db = _multiply(a.t(), dc) if ctx.needs_input_grad[1] else None
        return da, db


@plain
def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a` (M, K) times `b` (K, N), of one dtype (fp32, fp16, bf16), added up in fp32.

    Any strides. fp32 is not rounded to TF32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_float("a", a, ndim=2)
    check_float("b", b, ndim=2)
    check_like("b", b, "a", a)
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}: expected (M, K) and (K, N), with "
            f"a's columns ({a.shape[1]}) equal to b's rows ({b.shape[0]})"
        )
    c: torch.Tensor = _Matmul.apply(a, b)
    return c
