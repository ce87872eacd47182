"""Layers that the course's Decoder does not have, to measure what `layer_terms` derives.

Plain PyTorch modules, small, on the CPU: GPT's block with unfused attention and 1-byte dropout
masks, Llama's with kernels that fuse a norm and SwiGLU, experts under a router that spreads tokens
evenly, and latent attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from playbook_utils.model import RMSNorm, apply_rope
from playbook_utils.predict.shapes import ModelShape


def dropout(x: Tensor) -> Tensor:
    """Dropout with a mask of one byte an element, as on a GPU (F.dropout's is wider on a CPU)."""
    out: Tensor = torch.native_dropout(x, 0.1, True)[0]
    return out


class GPTLayer(nn.Module):
    """LayerNorm, attention with its weights kept, biases, dropout: Korthikanti et al., figure 2."""

    def __init__(self, dim: int, num_heads: int, ff_dim: int, activation: Any = F.gelu) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.o_proj, self.up = nn.Linear(dim, dim), nn.Linear(dim, ff_dim)
        self.down, self.num_heads, self.activation = nn.Linear(ff_dim, dim), num_heads, activation

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        normed = self.norms[0](x)
        q, k, v = (
            proj(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).contiguous()
            for proj in self.qkv
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = dropout((scores + torch.where(causal, 0.0, -1e9).to(q.dtype)).softmax(dim=-1))
        x = x + dropout(self.o_proj((weights @ v).transpose(1, 2).flatten(2)))
        return x + dropout(self.down(self.activation(self.up(self.norms[1](x)))))


class FusedRMSNorm(torch.autograd.Function):
    """Keeps its input and 1 / rms, as Liger's and Apex's kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, weight, scale)
        return (x.float() * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        inner = grad.float() * weight.float()
        normed = x.float() * scale
        out = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return out.to(x.dtype), (grad.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)


class FusedSwiGLU(torch.autograd.Function):
    """Keeps its two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return grad * up * slope, grad * F.silu(gate)


class FusedNorm(nn.Module):
    """`FusedRMSNorm` with its weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        out: Tensor = FusedRMSNorm.apply(x, self.weight)
        return out


class LlamaLayer(nn.Module):
    """RMSNorm, rotary grouped-query attention (normed queries and keys if asked), SwiGLU."""

    def __init__(self, shape: ModelShape, fused: bool) -> None:
        super().__init__()
        dim, self.head_dim, self.fused = shape.dim, shape.head_dim, fused
        norm: Any = FusedNorm if fused else RMSNorm
        self.norms = nn.ModuleList(norm(dim) for _ in range(2))
        self.qk_norms = nn.ModuleList(norm(self.head_dim) for _ in range(2 * shape.qk_norm))
        widths = [n * self.head_dim for n in (shape.num_heads, *[shape.num_kv_heads] * 2)]
        self.qkv = nn.ModuleList(nn.Linear(dim, width, bias=False) for width in widths)
        self.o_proj = nn.Linear(widths[0], dim, bias=False)
        self.gate, self.up = (nn.Linear(dim, shape.ff_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ff_dim, dim, bias=False)

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        normed = self.norms[0](x)
        q, k, v = (proj(normed).unflatten(-1, (-1, self.head_dim)) for proj in self.qkv)
        if len(self.qk_norms):
            q, k = self.qk_norms[0](q), self.qk_norms[1](k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        q, k = apply_rope(q, cos_sin), apply_rope(k, cos_sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(out.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        gate, up = self.gate(normed), self.up(normed)
        return x + self.down(FusedSwiGLU.apply(gate, up) if self.fused else F.silu(gate) * up)


class Experts(nn.Module):
    """k of E SwiGLU experts a token, taken in turn; one shared MLP beside them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.moe is not None
        self.k, self.num_experts = shape.moe.experts_per_token, shape.moe.num_experts
        dim, width, shared = shape.dim, shape.moe.expert_ff_dim, shape.moe.shared_ff_dim
        self.router = nn.Linear(dim, self.num_experts, bias=False)
        self.gate, self.up = (
            nn.Parameter(torch.randn(self.num_experts, dim, width)) for _ in range(2)
        )
        self.down = nn.Parameter(torch.randn(self.num_experts, width, dim))
        self.shared = nn.ModuleList(
            nn.Linear(*sizes, bias=False)
            for sizes in ((dim, shared), (dim, shared), (shared, dim))
            if shared
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) -> (N, D); N k must be a multiple of E."""
        tokens = x.size(0)
        turn = torch.arange(tokens * self.k) % self.num_experts  # (N k,)
        weights = self.router(x).float().softmax(-1).gather(1, turn.view(tokens, self.k))
        order = turn.argsort(stable=True)
        sent = x[order // self.k].view(self.num_experts, -1, x.size(1))  # (E, N k / E, D)
        out = (F.silu(sent @ self.gate) * (sent @ self.up)) @ self.down
        scaled = out.flatten(0, 1) * weights.flatten()[order].to(x.dtype)[:, None]
        total = scaled[order.argsort()].view(tokens, self.k, -1).sum(1)
        if len(self.shared):
            gate, up, down = self.shared
            total = total + down(F.silu(gate(x)) * up(x))
        return total


class LatentAttention(nn.Module):
    """DeepSeek-V2's attention, keys and values expanded for every head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.mla is not None
        self.mla, self.heads, dim = shape.mla, shape.num_heads, shape.dim
        queries = self.heads * self.mla.head_dim
        q_rank, kv_rank = self.mla.q_rank, self.mla.kv_rank
        self.q_a = nn.Linear(dim, q_rank, bias=False) if q_rank else None
        self.q_norm = RMSNorm(q_rank) if q_rank else None
        self.q_b = nn.Linear(q_rank or dim, queries, bias=False)
        self.kv_a = nn.Linear(dim, kv_rank + self.mla.rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(kv_rank)
        expanded = self.heads * (self.mla.nope_head_dim + self.mla.value_head_dim)
        self.kv_b = nn.Linear(kv_rank, expanded, bias=False)
        self.o_proj = nn.Linear(self.heads * self.mla.value_head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        nope, rope = self.mla.nope_head_dim, self.mla.rope_head_dim
        latent = x if self.q_a is None or self.q_norm is None else self.q_norm(self.q_a(x))
        q = self.q_b(latent).unflatten(-1, (self.heads, -1))
        q_nope, q_rope = q.split([nope, rope], dim=-1)
        kv, k_rope = self.kv_a(x).split([self.mla.kv_rank, rope], dim=-1)
        kv = self.kv_b(self.kv_norm(kv)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split([nope, self.mla.value_head_dim], dim=-1)
        cos_sin = cos_sin[:, :, None]  # (2, T, 1, K): heads stand last but one here
        k_rope = apply_rope(k_rope[:, :, None], cos_sin).expand(-1, -1, self.heads, -1)
        q = torch.cat([q_nope, apply_rope(q_rope, cos_sin)], dim=-1).transpose(1, 2)
        k = torch.cat([k_nope, k_rope], dim=-1).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
