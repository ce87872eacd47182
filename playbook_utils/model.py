"""One small decoder, plain single-device code: techniques are applied to it from outside.

Llama's blocks (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU;
or GPT-2's: LayerNorm, learned positions, GELU, biases, dropout. Modules are named as in Hugging
Face's Llama. Left out: a key-value cache, other masks, Llama 3.1's scaled rotary frequencies.

    model = Decoder(DecoderConfig.tiny(tied=True))     # a preset, with one field changed
    loss = cross_entropy(model(tokens), targets)       # tokens, targets (B, T) int64

Shapes: B batch, T sequence, D model, H query heads, G key/value heads, K head dim (D = H * K),
F feed-forward, V vocabulary. Attention reads H and G off its projections, which may be sharded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from playbook_utils.predict.shapes import ModelShape

__all__ = [
    "MLP", "Attention", "Decoder", "DecoderConfig", "DecoderLayer", "RMSNorm", "apply_rope",
    "cross_entropy", "num_params", "rope_cos_sin",
]  # fmt: skip


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and style of a `Decoder`; ValueError where they do not fit together."""

    vocab_size: int = 256
    dim: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    ff_dim: int = 176
    max_seq_len: int = 256
    norm: str = "rmsnorm"  # or "layernorm"
    mlp: str = "swiglu"  # three matrices; or "gelu", two
    position: str = "rope"  # no parameters; or "learned", a table of max_seq_len x D
    rope_theta: float = 500_000.0  # base of the rotary frequencies; 10,000 before Llama 3
    norm_eps: float = 1e-5
    dropout: float = 0.0  # of the embedding, attention weights, attention and MLP, as in GPT-2
    bias: bool = False  # in the layers' projections and LayerNorm; the head has none
    tied: bool = False  # the head uses the embedding's matrix (Press & Wolf 2017)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (type(value) is not int or value < 1):
                raise ValueError(f"{field.name} is {value!r}; use a whole number of at least 1")
        for name, value, choices in (
            ("norm", self.norm, ("rmsnorm", "layernorm")),
            ("mlp", self.mlp, ("swiglu", "gelu")),
            ("position", self.position, ("rope", "learned")),
        ):
            if value not in choices:
                raise ValueError(f'{name} is {value!r}; use "{choices[0]}" or "{choices[1]}"')
        if self.dim % self.num_heads or self.num_heads % self.num_kv_heads:
            found = f"dim={self.dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            raise ValueError(f"found {found}; each must be a multiple of the next")
        if self.position == "rope" and self.head_dim % 2:
            found = f"{self.dim} / {self.num_heads} = {self.head_dim}"
            raise ValueError(f"rope rotates pairs: dim / num_heads must be even; found {found}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; use a probability in [0, 1)")

    @property
    def head_dim(self) -> int:
        """K."""
        return self.dim // self.num_heads

    @classmethod
    def tiny(cls, **changes: Any) -> DecoderConfig:
        """Llama's blocks, 125,248 parameters, bytes as tokens: trains in seconds on two cores."""
        return cls(**changes)

    @classmethod
    def gpt_tiny(cls, **changes: Any) -> DecoderConfig:
        """GPT-2's blocks at the same width, tied: 132,864 parameters; dropout is 0 until asked."""
        sizes = dict(num_kv_heads=changes.get("num_heads", 4), ff_dim=4 * changes.get("dim", 64))
        style = dict(norm="layernorm", mlp="gelu", position="learned", bias=True, tied=True)
        return cls(**(sizes | style | changes))

    @classmethod
    def from_shape(cls, shape: ModelShape, **changes: Any) -> DecoderConfig:
        """The sizes of a published model, dropout 0.1 where it has any; ValueError for what a
        `Decoder` cannot have. Build a large one under `torch.device("meta")`."""
        extras = {
            "moe": shape.moe, "mla": shape.mla, "qk_norm": shape.qk_norm,
            "qkv_bias without bias": shape.qkv_bias and not shape.bias,
            "head_dim other than dim / num_heads": shape.head_dim * shape.num_heads != shape.dim,
        }  # fmt: skip
        if found := ", ".join(name for name, has in extras.items() if has):
            raise ValueError(f"a Decoder cannot have {found}; found in the shape {shape.name!r}")
        known = {field.name for field in fields(cls)} & {field.name for field in fields(shape)}
        sizes = {name: getattr(shape, name) for name in known}
        return cls(**(sizes | {"dropout": 0.1 if shape.dropout else 0.0} | changes))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, eq. 4); float32 or better."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D), in the dtype of `x`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)  # (..., 1)
        out: Tensor = self.weight * (wide * scale).to(x.dtype)
        return out


def rope_cos_sin(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines, (2, T, K), of angles t * theta^(-2i / K) (Su et al. 2021, eq. 15)."""
    wide = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(0, head_dim, 2, dtype=wide, device=positions.device)  # (K/2,)
    angles = positions.to(wide)[:, None] * theta ** (-pairs / head_dim)  # (T, K/2)
    return torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2).to(dtype)


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + K/2) of `x` (B, H, T, K); Hugging Face's pairs, not the paper's."""
    first, second = x.chunk(2, dim=-1)
    return x * cos_sin[0] + torch.cat([-second, first], dim=-1) * cos_sin[1]


class Attention(nn.Module):
    """Causal self-attention; G key/value heads serve H query heads (Ainslie et al. 2023)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.dropout
        dim, kv_dim, bias = config.dim, config.num_kv_heads * config.head_dim, config.bias
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(dim, kv_dim, bias=bias)
        self.v_proj = nn.Linear(dim, kv_dim, bias=bias)
        self.o_proj = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, cos_sin: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); `cos_sin` (2, T, K) rotates queries and keys."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, H, T, K), (B, G, T, K), (B, G, T, K)
        if cos_sin is not None:
            q, k = apply_rope(q, cos_sin), apply_rope(k, cos_sin)
        out: Tensor = self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(K)) v under the causal mask: (B, H, T, K)."""
        dropout, gqa = self.dropout if self.training else 0.0, q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(q, k, v, None, dropout, True, enable_gqa=gqa)


class MLP(nn.Module):
    """SwiGLU, down(silu(gate(x)) * up(x)) (Shazeer 2020, eq. 6), or GPT-2's down(gelu(up(x)))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        dim, ff_dim, bias = config.dim, config.ff_dim, config.bias
        self.gate_proj = nn.Linear(dim, ff_dim, bias=bias) if config.mlp == "swiglu" else None
        self.up_proj = nn.Linear(dim, ff_dim, bias=bias)
        self.down_proj = nn.Linear(ff_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        gate, up = self.gate_proj, self.up_proj(x)  # (B, T, F)
        hidden = F.gelu(up, approximate="tanh") if gate is None else F.silu(gate(x)) * up
        out: Tensor = self.down_proj(hidden)  # (B, T, D)
        return out


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos_sin: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos_sin))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


def _norm(config: DecoderConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.dim, config.norm_eps)
    return nn.LayerNorm(config.dim, config.norm_eps, bias=config.bias)


class Decoder(nn.Module):
    """Tokens in, one score per vocabulary entry out; seed with `torch.manual_seed` before."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        table = (config.max_seq_len, config.dim)
        self.positions = nn.Embedding(*table) if config.position == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw parameters anew: N(0, 0.02), as in GPT-2 (Radford et al. 2019, section 2.3) less
        where a branch ends; fills and ties a meta-device model after `to_empty`."""
        if self.config.tied:
            self.head.weight = self.embedding.weight
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif param.dim() == 1:
                nn.init.ones_(param)
            else:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                branches = 2 * self.config.num_layers if last else 1
                nn.init.normal_(param, std=0.02 / math.sqrt(branches))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) for `tokens` (B, T) int64 that stand at `positions` (T,), or 0 to T-1;
        ValueError where T is more than `max_seq_len`."""
        if tokens.dim() != 2 or tokens.size(1) > self.config.max_seq_len:
            expected = f"(B, T) with T at most max_seq_len={self.config.max_seq_len}"
            raise ValueError(f"tokens have shape {tuple(tokens.shape)}; expected {expected}")
        if positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device)  # (T,)
        x = self.embedding(tokens)  # (B, T, D)
        if self.positions is None:
            head_dim, theta = self.config.head_dim, self.config.rope_theta
            cos_sin = rope_cos_sin(positions, head_dim, theta, x.dtype)  # (2, T, K)
        else:
            cos_sin, x = None, x + self.positions(positions)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, cos_sin)  # (B, T, D)
        logits: Tensor = self.head(self.norm(x))  # (B, T, V)
        return logits


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """-ln p(target) in nats, in float32 or better; `logits` (..., V), `targets` (...) int64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction=reduction)


def num_params(module: nn.Module) -> int:
    """Number of parameters, those used twice (a tied head) counted once."""
    return sum(param.numel() for param in module.parameters())
