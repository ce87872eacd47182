"""Products of FP8 matrices with a scale for every block, as DeepSeek-V3 trains.

    a, a_scales = quantize_activations(x)            # (M, K), a scale a row and 128 columns
    b, b_scales = quantize_weights(weight)           # (N, K), a scale a block of 128 x 128
    y = fp8_matmul(a, a_scales, b, b_scales)         # x @ weight.T

e4m3 has three bits of mantissa and ends at 448. One scale for a whole tensor gives its largest
number the whole range and flushes small ones to zero; with small blocks an outlier spoils its own
block alone (DeepSeek-V3 report, 2024, section 3.3.2 and figure 7). Within a block of 128 along K
the tensor cores add up FP8 products; the kernel then multiplies by both scales and adds in fp32,
because Hopper's tensor cores keep about 14 bits while they add (same section, "increasing
accumulation precision").

In the interpreter, matrices are stored as float8_e4m3fn too, and decoded bit by bit. On a GPU,
compute capability 8.9 (Ada, Hopper) or newer is needed. Left out: e5m2, gradients, scales that are
powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check_float, check_no_gradient, check_tensor
from kernels.triton.matmul import tile_of
from kernels.triton.storage import fp8_bits, fp8_for_dot, stored
from kernels.triton.tuning import plain, tuned

__all__ = [
    "CONFIGS",
    "SCALE_BLOCK",
    "dequantize",
    "fp8_matmul",
    "fp8_matmul_kernel",
    "quantize_activations",
    "quantize_kernel",
    "quantize_weights",
]

SCALE_BLOCK = 128
"""Numbers along a block's side: DeepSeek-V3's 1 x 128 and 128 x 128."""

CONFIGS = [
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 128, "GROUP_M": 8}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 128, "GROUP_M": 8}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "GROUP_M": 8}, num_warps=4, num_stages=4),
]


@triton.jit
def quantize_kernel(
    x_ptr, y_ptr, scale_ptr, rows, columns,
    PER_ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS x BLOCK_K, a scale for each row or for all: the largest becomes 448."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (m[:, None] < rows) & (k[None, :] < columns)
    x = tl.load(x_ptr + m[:, None] * columns + k[None, :], mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    if not PER_ROW:
        largest = tl.zeros_like(largest) + tl.max(largest, axis=0)
    # Not below fp32's smallest normal number: a subnormal scale loses digits, or becomes 0.
    scale = tl.maximum(largest / 448.0, 1.1754943508222875e-38)
    scale = tl.where(largest == 0.0, 1.0, scale)
    y = stored(x / scale[:, None], y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None] * columns + k[None, :], y, mask=inside)
    scale_row = m if PER_ROW else m // ROWS
    first = (m < rows) if PER_ROW else (m == tl.program_id(0) * ROWS)
    tl.store(scale_ptr + scale_row * tl.num_programs(1) + tl.program_id(1), scale, mask=first)


@tuned(CONFIGS, key=["M", "N", "K"])
@triton.jit
def fp8_matmul_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, M, N, K, SCALE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, SCALE_BLOCK)
    scales_per_row = tl.cdiv(K, SCALE_BLOCK)
    a_scale_ptr += m * scales_per_row
    # BLOCK_N divides SCALE_BLOCK: all columns of this tile lie in one row of b's scales.
    b_scale_ptr += tile_n * BLOCK_N // SCALE_BLOCK * scales_per_row
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(0, scales_per_row):
        column = block * SCALE_BLOCK + k
        a_inside = (m[:, None] < M) & (column[None, :] < K)
        b_inside = (n[None, :] < N) & (column[:, None] < K)
        a = tl.load(a_ptr + m[:, None] * K + column[None, :], mask=a_inside, other=0.0)
        b = tl.load(b_ptr + n[None, :] * K + column[:, None], mask=b_inside, other=0.0)
        a_scale = tl.load(a_scale_ptr + block, mask=m < M, other=0.0)
        b_scale = tl.load(b_scale_ptr + block)
        products = tl.dot(fp8_for_dot(a), fp8_for_dot(b))
        accumulator += products * (a_scale * b_scale)[:, None]
    c = stored(accumulator, c_ptr.dtype.element_ty)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c, mask=(m[:, None] < M) & (n[None, :] < N))


def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` (M, K) in e4m3 and its scales, fp32 (M, K / 128 rounded up): x ~ y * scale."""
    return _quantize("x", x, per_row=True)


def quantize_weights(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` (N, K) in e4m3 and its scales, fp32 (N / 128, K / 128), both rounded up."""
    return _quantize("weight", weight, per_row=False)


@plain
def _quantize(name: str, x: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    check_float(name, x, ndim=2)
    check_no_gradient(f"quantising {name}", "an autograd function around it", **{name: x})
    _check_capability(x)
    x = x.contiguous()
    tile_rows = 32 if per_row else SCALE_BLOCK
    grid = (triton.cdiv(x.shape[0], tile_rows), triton.cdiv(x.shape[1], SCALE_BLOCK))
    y = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(x.shape[0] if per_row else grid[0], grid[1], device=x.device)
    if y.numel():
        with torch.cuda.device_of(x):
            quantize_kernel[grid](
                x, y, scales, *x.shape, PER_ROW=per_row, ROWS=tile_rows, BLOCK_K=SCALE_BLOCK
            )
    return y, scales


def dequantize(y: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `y` and `scales` of either quantiser stand for, in fp64, by PyTorch: a reference."""
    rows = 1 if scales.shape[0] == y.shape[0] else SCALE_BLOCK
    spread = scales.double().repeat_interleave(rows, 0).repeat_interleave(SCALE_BLOCK, 1)
    return y.to(torch.float32).double() * spread[: y.shape[0], : y.shape[1]]


@plain
def fp8_matmul(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """(a * a_scales) @ (b * b_scales).T, added up in fp32, as `out_dtype` (M, N).

    Args:
        a, a_scales: (M, K) of float8_e4m3fn and (M, K / 128), from `quantize_activations`.
        b, b_scales: (N, K) of float8_e4m3fn and (N / 128, K / 128), from `quantize_weights`.
        out_dtype: bf16, fp16 or fp32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or scales that require a gradient.
        RuntimeError: a GPU without FP8.
    """
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"out_dtype is {out_dtype}: expected bf16, fp16 or fp32")
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x, (torch.float8_e4m3fn,), ndim=2)
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"a has shape {tuple(a.shape)}, b {tuple(b.shape)}: expected (M, K) and (N, K); b is "
            "kept as nn.Linear keeps its weight"
        )
    (M, K), N = a.shape, b.shape[0]
    _check_scales("a_scales", a_scales, (M, triton.cdiv(K, SCALE_BLOCK)), a)
    _check_scales("b_scales", b_scales, (triton.cdiv(N, SCALE_BLOCK), triton.cdiv(K, 128)), a)
    scales = {"a_scales": a_scales, "b_scales": b_scales}
    check_no_gradient("fp8_matmul", "the product of what dequantize gives", **scales)
    _check_capability(a)
    c = torch.empty(M, N, device=a.device, dtype=out_dtype)
    if c.numel():
        with torch.cuda.device_of(a):
            fp8_matmul_kernel[
                lambda meta: (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)
            ](
                fp8_bits(a.contiguous()), a_scales.contiguous(), fp8_bits(b.contiguous()),
                b_scales.contiguous(), c, M, N, K, SCALE_BLOCK=SCALE_BLOCK,
            )  # fmt: skip
    return c


def _check_scales(name: str, x: torch.Tensor, shape: tuple[int, int], like: torch.Tensor) -> None:
    check_tensor(name, x, (torch.float32,), ndim=2)
    if tuple(x.shape) != shape or x.device != like.device:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} on {x.device}: expected {shape} on {like.device}, "
            "one scale a block of 128"
        )


def _check_capability(x: torch.Tensor) -> None:
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        name = torch.cuda.get_device_name(x.device)
        raise RuntimeError(
            f"{name} has compute capability {torch.cuda.get_device_capability(x.device)}: e4m3 "
            "needs (8, 9) or newer (Ada, Hopper, Blackwell)"
        )
