"""The shape of a decoder-only model, and its parameters counted to the last one.

Fields are named as in `playbook_utils.model.DecoderConfig`; beyond it a shape may have experts
(`MoEShape`), latent attention, head sizes of its own, biases in the queries, keys and values
alone (Qwen2) and norms on queries and keys (Qwen3). Only sizes are kept: nothing here computes a
model, so rotary bases, epsilons and windows are left out. So are encoders, adapters, and the
multi-token-prediction layers of DeepSeek-V3.

    >>> ModelShape(vocab_size=128256, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8,
    ...            ff_dim=14336).num_params          # Llama 3 8B
    8030261248

`playbook_utils.predict.presets` holds the published models, `hf_config` reads a `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from playbook_utils.predict._checks import expect_type, flag, whole
from playbook_utils.predict.layers import LatentAttention, Linear, MoEShape, mlp_linears

__all__ = ["LatentAttention", "Linear", "MoEShape", "ModelShape"]

_CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "mlp": ("swiglu", "gelu", "relu"),
    "position": ("rope", "learned"),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes and style of a decoder; ValueError where they do not fit together."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ff_dim: int
    max_seq_len: int = 4096  # rows of the learned position table; no parameters with "rope"
    head_dim: int = 0  # 0 (or None): dim / num_heads, or what `mla` says; then never 0
    norm: str = "rmsnorm"  # or "layernorm", which has biases where `bias` is set
    mlp: str = "swiglu"  # three matrices; or "gelu", "relu": two
    position: str = "rope"  # no parameters; or "learned"
    bias: bool = False  # in all of a layer's projections and LayerNorms; the head has none
    qkv_bias: bool = False  # in queries, keys and values alone
    qk_norm: bool = False  # an RMSNorm of head_dim on queries, one on keys
    tied: bool = False  # the head uses the embedding's matrix, counted once
    dropout: bool = False  # trained with it: memory then holds the masks
    moe: MoEShape | None = None
    mla: LatentAttention | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for size in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ff_dim"):
            whole(size, getattr(self, size), minimum=1)
        whole("max_seq_len", self.max_seq_len, minimum=1)
        for style, choices in _CHOICES.items():
            if getattr(self, style) not in choices:
                expected = ", ".join(f'"{choice}"' for choice in choices)
                raise ValueError(f"{style} is {getattr(self, style)!r}: expected one of {expected}")
        for switch in ("bias", "qkv_bias", "qk_norm", "tied", "dropout"):
            flag(switch, getattr(self, switch))
        for part, kind in (("moe", MoEShape), ("mla", LatentAttention)):
            if getattr(self, part) is not None:
                expect_type(part, getattr(self, part), kind)
        if self.num_heads % self.num_kv_heads:
            found = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            raise ValueError(f"found {found}: num_heads must be a multiple of num_kv_heads")
        object.__setattr__(self, "head_dim", self._resolved_head_dim())
        rotated = self.mla.rope_head_dim if self.mla else self.head_dim
        if self.position == "rope" and rotated % 2:
            raise ValueError(
                f"rope rotates pairs: the rotated head size is {rotated}, must be even"
            )
        if self.moe and self.moe.num_dense_layers > self.num_layers:
            found = f"moe.num_dense_layers={self.moe.num_dense_layers}"
            raise ValueError(f"found {found}: expected at most num_layers={self.num_layers}")

    def _resolved_head_dim(self) -> int:
        if self.mla:
            if self.bias or self.qkv_bias or self.qk_norm or self.num_kv_heads != self.num_heads:
                raise ValueError(
                    "latent attention (mla) has no biases, no qk_norm, and as many key/value "
                    f"heads as heads: found bias={self.bias}, qkv_bias={self.qkv_bias}, "
                    f"qk_norm={self.qk_norm}, num_kv_heads={self.num_kv_heads}"
                )
            if self.head_dim not in (0, None, self.mla.head_dim):
                raise ValueError(
                    f"head_dim is {self.head_dim}: leave it out, mla says {self.mla.head_dim}"
                )
            return self.mla.head_dim
        if self.head_dim in (0, None) and type(self.head_dim) is not bool:
            if self.dim % self.num_heads:
                found = f"dim={self.dim}, num_heads={self.num_heads}"
                raise ValueError(f"found {found}: give head_dim, or a dim that num_heads divides")
            return self.dim // self.num_heads
        whole("head_dim", self.head_dim, minimum=1)
        return self.head_dim

    @classmethod
    def from_decoder(cls, config: Any, name: str = "") -> ModelShape:
        """The shape of a `DecoderConfig`, or of any object that has its fields."""
        same = (
            "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ff_dim",
            "max_seq_len", "norm", "mlp", "position", "bias", "tied",
        )  # fmt: skip
        sizes = {field_name: getattr(config, field_name) for field_name in same}
        return cls(**sizes, dropout=config.dropout > 0, name=name)

    def with_changes(self, **changes: Any) -> ModelShape:
        """A copy; head_dim follows dim and num_heads where it did, and the name is dropped."""
        kept: dict[str, Any] = {"name": ""}
        if self.mla is not None or self.head_dim * self.num_heads == self.dim:
            kept["head_dim"] = 0
        return replace(self, **(kept | changes))

    @property
    def value_head_dim(self) -> int:
        """Of the values, which differ from `head_dim` in latent attention alone."""
        return self.mla.value_head_dim if self.mla else self.head_dim

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` has experts; IndexError where there is no such layer."""
        if not 0 <= index < self.num_layers:
            raise IndexError(f"no layer {index}: the model has layers 0 to {self.num_layers - 1}")
        return self.moe is not None and index >= self.moe.num_dense_layers

    def linears(self, index: int = 0) -> tuple[Linear, ...]:
        """The matrices of layer `index`, in the order a token meets them."""
        if self.is_moe_layer(index) and self.moe is not None:
            mlp = self.moe.linears(self.dim, self.mlp)
        else:
            mlp = mlp_linears(self.dim, self.ff_dim, self.mlp, self.bias)
        if self.mla:
            return (*self.mla.linears(self.dim, self.num_heads), *mlp)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv_bias = self.bias or self.qkv_bias
        return (
            Linear("attention", "q_proj", self.dim, queries, qkv_bias),
            Linear("attention", "k_proj", self.dim, keys, qkv_bias),
            Linear("attention", "v_proj", self.dim, keys, qkv_bias),
            Linear("attention", "o_proj", queries, self.dim, self.bias),
            *mlp,
        )

    @property
    def norm_params(self) -> int:
        """Of one norm over `dim`."""
        return self.dim * (2 if self.norm == "layernorm" and self.bias else 1)

    def layer_params(self, index: int = 0) -> dict[str, int]:
        """Parameters of layer `index` by part: attention, mlp, experts, router, norms."""
        parts = dict.fromkeys(("attention", "mlp", "experts", "router"), 0)
        for matrix in self.linears(index):
            parts[matrix.part] += matrix.num_params
        extra = self.mla.num_norm_params if self.mla else 2 * self.head_dim * self.qk_norm
        return {**parts, "norms": 2 * self.norm_params + extra}

    def params_by_part(self) -> dict[str, int]:
        """Parameters of the model by part; a tied head has none of its own. They sum to
        `num_params`. "mlp" includes the experts that all tokens share."""
        parts = {
            "embedding": self.vocab_size * self.dim,
            "positions": self.max_seq_len * self.dim if self.position == "learned" else 0,
            **dict.fromkeys(("attention", "mlp", "experts", "router", "norms"), 0),
            "head": 0 if self.tied else self.vocab_size * self.dim,
        }
        for index, count in self.distinct_layers():
            for part, params in self.layer_params(index).items():
                parts[part] += count * params
        parts["norms"] += self.norm_params
        return parts

    def distinct_layers(self) -> tuple[tuple[int, int], ...]:
        """(index of one, how many) for each kind of layer: dense ones, then those with experts."""
        dense = min(self.moe.num_dense_layers, self.num_layers) if self.moe else self.num_layers
        kinds = ((0, dense), (dense, self.num_layers - dense))
        return tuple((index, count) for index, count in kinds if count)

    @property
    def num_params(self) -> int:
        """All parameters, a tied head counted once."""
        return sum(self.params_by_part().values())

    @property
    def num_active_params(self) -> int:
        """Those that one token uses: all but the experts it is not sent to (its embedding row
        counts as the whole table, as in the published "37B of 671B")."""
        idle = sum(
            count * (matrix.copies - matrix.active) * (matrix.inputs + matrix.bias) * matrix.outputs
            for index, count in self.distinct_layers()
            for matrix in self.linears(index)
        )
        return self.num_params - idle

    @property
    def num_matmul_params(self) -> int:
        """Weights that one token is multiplied with: active experts and always the head; no
        embedding or position lookup, no norms, no biases."""
        layers = sum(
            count * matrix.num_matmul_params
            for index, count in self.distinct_layers()
            for matrix in self.linears(index)
        )
        return layers + self.vocab_size * self.dim
