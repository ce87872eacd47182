"""FlashAttention-2, backward: the scores are computed again, block by block, from q, k and the lse.

    dq, dk, dv = backward(q, k, v, out, lse, dout, dlse, causal, scale)       # by flash_attention

With P = softmax(S), S = scale q k^T (Dao 2023, algorithm 2; Dao et al. 2022, appendix B.2):

    dV = P^T dO     dP = dO V^T     dS = P (dP - delta)     dQ = scale dS K     dK = scale dS^T Q

where delta = rowsum(dO O), one number a query, stands for rowsum(dP P), which would need a whole
row at once. If the lse is used too (ring attention), its gradient adds P dlse to dS: delta - dlse.

One kernel holds a block of keys and walks over queries (dK, dV), one holds a block of queries and
walks over keys (dQ). FlashAttention-2 does both in one and adds to dQ by atomics: five products a
block, not seven, and sums in another order each run. Here the result is the same in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.storage import for_dot, stored
from kernels.triton.tuning import tuned

__all__ = ["CONFIGS", "FP32_CONFIGS", "backward", "delta_kernel", "dkdv_kernel", "dq_kernel"]

CONFIGS = [
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=8, num_stages=2),
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=4, num_stages=2),
    triton.Config({"BLOCK_M": 32, "BLOCK_N": 64}, num_warps=4, num_stages=2),
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=2),
    triton.Config({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=4, num_stages=1),
]
FP32_CONFIGS = CONFIGS[-1:]


@triton.jit
def delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, delta_ptr, queries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m[:, None] < queries) & (d[None, :] < HEAD_DIM)
    tile = m[:, None] * HEAD_DIM + d[None, :]
    out = tl.load(out_ptr + tile, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + tile, mask=inside, other=0.0).to(tl.float32)
    dlse = tl.load(dlse_ptr + m, mask=m < queries, other=0.0)
    tl.store(delta_ptr + m, tl.sum(out * dout, axis=1) - dlse, mask=m < queries)


@triton.jit
def _probabilities_and_ds(q, k, v, dout, lse, delta, visible, scale):
    """P and dS of a block; both 0 where not `visible`."""
    log2_e = 1.4426950408889634
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * log2_e)
    # The select comes after the exponential, which may be inf where nothing is visible.
    p = tl.where(visible, tl.exp2(scores - (lse * log2_e)[:, None]), 0.0)
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    return p, p * (dp - delta[:, None])


@tuned(CONFIGS, key=["HEAD_DIM", "CAUSAL"], fp32_configs=FP32_CONFIGS)
@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, scale, seq_q, seq_k,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    keys = key_head * seq_k * HEAD_DIM + n[:, None] * HEAD_DIM + d[None, :]
    key_inside = (n[:, None] < seq_k) & (d[None, :] < HEAD_DIM)
    k = for_dot(tl.load(k_ptr + keys, mask=key_inside, other=0.0))
    v = for_dot(tl.load(v_ptr + keys, mask=key_inside, other=0.0))
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    low = 0
    if CAUSAL:  # blocks of queries that see none of these keys are not read
        low = tl.maximum(0, first - (seq_k - seq_q)) // BLOCK_M * BLOCK_M
    for member in range(0, GROUP):  # every query head that shares this key head
        head = key_head * GROUP + member
        for start in range(low, seq_q, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            inside = (m[:, None] < seq_q) & (d[None, :] < HEAD_DIM)
            tile = head * seq_q * HEAD_DIM + m[:, None] * HEAD_DIM + d[None, :]
            q = for_dot(tl.load(q_ptr + tile, mask=inside, other=0.0))
            dout = for_dot(tl.load(dout_ptr + tile, mask=inside, other=0.0))
            lse = tl.load(lse_ptr + head * seq_q + m, mask=m < seq_q, other=0.0)
            delta = tl.load(delta_ptr + head * seq_q + m, mask=m < seq_q, other=0.0)
            visible = (m[:, None] < seq_q) & (n[None, :] < seq_k)
            if CAUSAL:
                visible = visible & (n[None, :] <= m[:, None] + (seq_k - seq_q))
            p, ds = _probabilities_and_ds(q, k, v, dout, lse, delta, visible, scale)
            dv = tl.dot(tl.trans(p).to(dout.dtype), dout, dv, input_precision="ieee")
            dk = tl.dot(tl.trans(ds).to(q.dtype), q, dk, input_precision="ieee")
    tl.store(dk_ptr + keys, stored(dk * scale, dk_ptr.dtype.element_ty), mask=key_inside)
    tl.store(dv_ptr + keys, stored(dv, dv_ptr.dtype.element_ty), mask=key_inside)


@tuned(CONFIGS, key=["HEAD_DIM", "CAUSAL"], fp32_configs=FP32_CONFIGS)
@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, scale, seq_q, seq_k,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (m[:, None] < seq_q) & (d[None, :] < HEAD_DIM)
    tile = head * seq_q * HEAD_DIM + m[:, None] * HEAD_DIM + d[None, :]
    q = for_dot(tl.load(q_ptr + tile, mask=inside, other=0.0))
    dout = for_dot(tl.load(dout_ptr + tile, mask=inside, other=0.0))
    lse = tl.load(lse_ptr + head * seq_q + m, mask=m < seq_q, other=0.0)
    delta = tl.load(delta_ptr + head * seq_q + m, mask=m < seq_q, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    high = seq_k
    if CAUSAL:
        high = tl.minimum(seq_k, first + BLOCK_M + (seq_k - seq_q))
    for start in range(0, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        key_inside = (n[:, None] < seq_k) & (d[None, :] < HEAD_DIM)
        keys = head // GROUP * seq_k * HEAD_DIM + n[:, None] * HEAD_DIM + d[None, :]
        k = for_dot(tl.load(k_ptr + keys, mask=key_inside, other=0.0))
        v = for_dot(tl.load(v_ptr + keys, mask=key_inside, other=0.0))
        visible = (m[:, None] < seq_q) & (n[None, :] < seq_k)
        if CAUSAL:
            visible = visible & (n[None, :] <= m[:, None] + (seq_k - seq_q))
        _, ds = _probabilities_and_ds(q, k, v, dout, lse, delta, visible, scale)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    tl.store(dq_ptr + tile, stored(dq * scale, dq_ptr.dtype.element_ty), mask=inside)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv from what forward saved and the gradients of its two outputs."""
    batch, heads, seq_q, head_dim = q.shape
    key_heads, seq_k = k.shape[1:3]
    dout, dlse = dout.contiguous(), dlse.contiguous()
    delta = torch.empty_like(lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    block_d = max(16, triton.next_power_of_2(head_dim))
    sizes = {
        "GROUP": heads // key_heads, "CAUSAL": causal, "HEAD_DIM": head_dim, "BLOCK_D": block_d
    }  # fmt: skip
    with torch.cuda.device_of(q):
        delta_kernel[(triton.cdiv(delta.numel(), 64),)](
            out, dout, dlse, delta, delta.numel(), HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=64
        )
        dkdv_kernel[lambda meta: (triton.cdiv(seq_k, meta["BLOCK_N"]), batch * key_heads)](
            q, k, v, dout, lse, delta, dk, dv, scale, seq_q, seq_k, **sizes
        )
        dq_kernel[lambda meta: (triton.cdiv(seq_q, meta["BLOCK_M"]), batch * heads)](
            q, k, v, dout, lse, delta, dq, scale, seq_q, seq_k, **sizes
        )
    return dq, dk, dv
