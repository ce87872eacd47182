"""FlashAttention-2: exact attention that keeps O(seq_len) numbers, not O(seq_len^2), for backward.

    flash_attention(q, k, v, causal=True)                    # (batch, heads, seq_len, head_dim)
    out, lse = flash_attention_with_lse(q, k, v)             # to merge parts (ring attention)

A program holds BLOCK_M queries and walks over the keys and values, BLOCK_N at a time. Scores live
in registers only. A row's maximum and sum are corrected as it goes (online softmax: Dao et al.
2022, algorithm 1); the division by the sum comes once, at the end, and one number a row is saved,
the log-sum-exp (Dao 2023, algorithm 1). Under `causal`, blocks of keys that no query of the block
may see are not read, and only blocks on the diagonal are masked. Backward is in
`flash_attention_backward`.

Grouped-query attention: `k` and `v` may have fewer heads, each shared by as many consecutive query
heads. With fewer queries than keys, `causal` lets the last query see the last key, as
FlashAttention does since its version 2.1 (PyTorch's is_causal aligns the first ones). Copies what
is not contiguous.

Left out: dropout, biases, windows, sequences packed without padding, head_dim above 256, and what
FlashAttention-3 adds for Hopper.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check_float, check_like, no_second_derivative
from kernels.triton.flash_attention_backward import backward
from kernels.triton.storage import for_dot, stored
from kernels.triton.tuning import plain, tuned

__all__ = [
    "CONFIGS",
    "FP32_CONFIGS",
    "flash_attention",
    "flash_attention_kernel",
    "flash_attention_with_lse",
]

CONFIGS = [
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 128}, num_warps=8, num_stages=2),
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=4, num_stages=2),
    triton.Config({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=4, num_stages=1),  # 256 wide
]
FP32_CONFIGS = CONFIGS[:-3:-1]


@triton.jit
def _attend(
    accumulator, total, maximum, q, k_ptr, v_ptr, m, low, high, seq_k, diagonal, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys `low` to `high`: the sum of exponentials times values, their sum, the maximum so far."""
    d = tl.arange(0, BLOCK_D)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < seq_k) & (d[None, :] < HEAD_DIM)
        tile = n[:, None] * HEAD_DIM + d[None, :]
        k = for_dot(tl.load(k_ptr + tile, mask=inside, other=0.0))
        # Powers of two are what the hardware computes: e^s = 2^(s log2 e).
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            visible = n[None, :] < seq_k
            if CAUSAL:
                visible = visible & (n[None, :] <= m[:, None] + diagonal)
            scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(maximum, tl.max(scores, axis=1))
        exponentials = tl.exp2(scores - larger[:, None])
        correction = tl.exp2(maximum - larger)
        total = total * correction + tl.sum(exponentials, axis=1)
        v = for_dot(tl.load(v_ptr + tile, mask=inside, other=0.0))
        accumulator = tl.dot(
            exponentials.to(v.dtype), v, accumulator * correction[:, None], input_precision="ieee"
        )
        maximum = larger
    return accumulator, total, maximum


@tuned(CONFIGS, key=["HEAD_DIM", "CAUSAL"], fp32_configs=FP32_CONFIGS)
@triton.jit
def flash_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale, seq_q, seq_k,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Heads of all batches in a row: query head h reads key head h // GROUP, across batches too.
    head = tl.program_id(1).to(tl.int64)
    q_ptr += head * seq_q * HEAD_DIM
    out_ptr += head * seq_q * HEAD_DIM
    k_ptr += head // GROUP * seq_k * HEAD_DIM
    v_ptr += head // GROUP * seq_k * HEAD_DIM
    first = tl.program_id(0) * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    tile = m[:, None] * HEAD_DIM + d[None, :]
    inside = (m[:, None] < seq_q) & (d[None, :] < HEAD_DIM)
    q = for_dot(tl.load(q_ptr + tile, mask=inside, other=0.0))
    scale_log2 = scale * 1.4426950408889634
    # Query m sees keys up to m + diagonal.
    diagonal = seq_k - seq_q
    high = seq_k
    unmasked = seq_k // BLOCK_N * BLOCK_N
    if CAUSAL:
        high = tl.minimum(seq_k, first + BLOCK_M + diagonal)
        unmasked = tl.minimum(unmasked, (first + diagonal + 1) // BLOCK_N * BLOCK_N)
    accumulator = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # The lowest fp32 number, not -inf: -inf - -inf is NaN.
    maximum = tl.full((BLOCK_M,), -3.4028234663852886e38, tl.float32)
    accumulator, total, maximum = _attend(
        accumulator, total, maximum, q, k_ptr, v_ptr, m, 0, unmasked, seq_k, diagonal, scale_log2,
        False, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    accumulator, total, maximum = _attend(
        accumulator, total, maximum, q, k_ptr, v_ptr, m, unmasked, high, seq_k, diagonal,
        scale_log2, True, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    out = accumulator / total[:, None]
    tl.store(out_ptr + tile, stored(out, out_ptr.dtype.element_ty), mask=inside)
    lse = (maximum + tl.log2(total)) * 0.6931471805599453
    tl.store(lse_ptr + head * seq_q + m, lse, mask=m < seq_q)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, heads, seq_q, head_dim = q.shape
        out = torch.empty_like(q)
        lse = torch.empty(batch, heads, seq_q, device=q.device)
        with torch.cuda.device_of(q):
            flash_attention_kernel[
                lambda meta: (triton.cdiv(seq_q, meta["BLOCK_M"]), batch * heads)
            ](
                q, k, v, out, lse, scale, seq_q, k.shape[2], GROUP=heads // k.shape[1],
                CAUSAL=causal, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out, lse

    @staticmethod
    @no_second_derivative("flash_attention", instead="torch.softmax and torch.matmul")
    def backward(
        ctx: Any, dout: torch.Tensor, dlse: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = backward(q, k, v, out, lse, dout, dlse, ctx.causal, ctx.scale)
        return *grads, None, None


@plain
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v for each batch and head, in the dtype of `q`; sums in fp32.

    Args:
        q: (batch, heads, seq_q, head_dim), fp32, fp16 or bf16.
        k, v: (batch, key_heads, seq_k, head_dim), where key_heads divides heads.
        causal: query i sees keys up to i + seq_k - seq_q; needs seq_q <= seq_k.
        scale: None for 1 / sqrt(head_dim).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    return flash_attention_with_lse(q, k, v, causal, scale)[0]


@plain
def flash_attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attention`, and log(sum(exp(scores))) of each query: fp32 (batch, heads, seq_q).

    Gradients flow through both.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_float(name, x, ndim=4)
        check_like(name, x, "q", q)
    _check_shapes(q, k, v, causal)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out, lse = _FlashAttention.apply(q, k, v, bool(causal), scale)
    return out, lse


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    found = f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{found}: expected (batch, heads, seq_q, head_dim) and twice (batch, key_heads, "
            "seq_k, head_dim)"
        )
    if min(*q.shape, *k.shape) < 1 or q.shape[3] > 256 or q.shape[0] * q.shape[1] > 65535:
        raise ValueError(
            f"{found}: expected no empty dimension, head_dim up to 256 (a block has to fit in "
            "shared memory) and batch * heads up to 65,535 (CUDA's grid)"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{found}: expected key heads ({k.shape[1]}) that divide the heads ({q.shape[1]})"
        )
    if causal and q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{found}: causal, expected no more queries than keys, since the last query sees the "
            "last key and the first ones would see none"
        )
