"""The matrices of one decoder layer, and the two ways of building it that need sizes of their own.

`Linear` is one matrix with its bias: parameters and FLOPs are both sums over the same list, so
they cannot disagree. `MoEShape` replaces a layer's MLP by experts, `LatentAttention` its keys and
values by a low-rank latent (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Left out: biases in experts, experts chosen by group limits (the count per token is the same),
gates on shared experts (Qwen2-MoE), the multi-token-prediction layers of DeepSeek-V3.

    >>> MoEShape(num_experts=8, experts_per_token=2, expert_ff_dim=14336).shared_ff_dim
    0
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from playbook_utils.predict._checks import flag, whole

__all__ = ["LatentAttention", "Linear", "MoEShape", "mlp_linears"]


class Linear(NamedTuple):
    """A matrix of `inputs` x `outputs`; `copies` are stored, a token meets `active` of them."""

    part: str  # "attention", "mlp" (shared experts included), "experts" or "router"
    name: str
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    active: int = 1

    @property
    def num_params(self) -> int:
        """All copies, with their biases."""
        return self.copies * (self.inputs + self.bias) * self.outputs

    @property
    def num_matmul_params(self) -> int:
        """Weights that one token is multiplied with: active copies, no bias."""
        return self.active * self.inputs * self.outputs


@dataclass(frozen=True)
class MoEShape:
    """Experts in place of the MLP, in all layers but the first `num_dense_layers`."""

    num_experts: int
    experts_per_token: int
    expert_ff_dim: int
    num_shared_experts: int = 0  # one MLP of this many times `expert_ff_dim` that all tokens meet
    num_dense_layers: int = 0
    router_bias: bool = False  # one number an expert, as DeepSeek-V3's e_score_correction_bias

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "expert_ff_dim"):
            whole(f"moe.{name}", getattr(self, name), minimum=1)
        for name in ("num_shared_experts", "num_dense_layers"):
            whole(f"moe.{name}", getattr(self, name), minimum=0)
        flag("moe.router_bias", self.router_bias)
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"moe.experts_per_token is {self.experts_per_token}: expected at most "
                f"num_experts={self.num_experts}"
            )

    @property
    def shared_ff_dim(self) -> int:
        """Width of the MLP that every token meets beside its experts; 0 where there is none."""
        return self.num_shared_experts * self.expert_ff_dim

    def linears(self, dim: int, mlp: str) -> list[Linear]:
        """The router, the experts, and the shared ones, which are an MLP like any other."""
        found = [Linear("router", "router", dim, self.num_experts, self.router_bias)]
        found += [
            matrix._replace(part="experts", copies=self.num_experts, active=self.experts_per_token)
            for matrix in mlp_linears(dim, self.expert_ff_dim, mlp, bias=False)
        ]
        if self.shared_ff_dim:
            found += mlp_linears(dim, self.shared_ff_dim, mlp, bias=False)
        return found


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are made from one vector of `kv_rank`."""

    kv_rank: int
    nope_head_dim: int  # of queries and keys, without rotation
    rope_head_dim: int  # rotated; one key of this size is shared by all heads
    value_head_dim: int
    q_rank: int | None = None  # None: queries by one full matrix (DeepSeek-V2-Lite)

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "q_rank" or self.q_rank is not None:
                whole(f"mla.{field.name}", getattr(self, field.name), minimum=1)

    @property
    def head_dim(self) -> int:
        """Of queries and keys, both pieces together."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def num_norm_params(self) -> int:
        """The two latents are normalised (RMSNorm) before they are expanded."""
        return self.kv_rank + (self.q_rank or 0)

    def linears(self, dim: int, num_heads: int) -> list[Linear]:
        """In the order of the paper's equations 37 to 47; names as in Hugging Face's DeepSeek."""
        queries = num_heads * self.head_dim
        expanded = num_heads * (self.nope_head_dim + self.value_head_dim)
        if self.q_rank is None:
            found = [Linear("attention", "q_proj", dim, queries)]
        else:
            found = [
                Linear("attention", "q_a_proj", dim, self.q_rank),
                Linear("attention", "q_b_proj", self.q_rank, queries),
            ]
        return [
            *found,
            Linear("attention", "kv_a_proj", dim, self.kv_rank + self.rope_head_dim),
            Linear("attention", "kv_b_proj", self.kv_rank, expanded),
            Linear("attention", "o_proj", num_heads * self.value_head_dim, dim),
        ]


def mlp_linears(dim: int, ff_dim: int, mlp: str, bias: bool) -> list[Linear]:
    """Three matrices with a gate ("swiglu"), two without."""
    found = [Linear("mlp", "gate_proj", dim, ff_dim, bias)] if mlp == "swiglu" else []
    return [
        *found,
        Linear("mlp", "up_proj", dim, ff_dim, bias),
        Linear("mlp", "down_proj", ff_dim, dim, bias),
    ]
