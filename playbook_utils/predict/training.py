"""A model and how it is trained, with the memory that follows: what `playbook memory` and the
memory explorer compute.

    training = train(preset("llama-3-8b"), tp=8, seq_len=8192, num_layers=16)
    training.estimate.total_bytes
    train(preset("llama-3-8b"), tp=64)      # ValueError: tp is 64 and must divide num_heads, 32
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from playbook_utils.predict.activations import default_attention
from playbook_utils.predict.estimate import MemoryEstimate
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import predict_memory
from playbook_utils.predict.precision import PrecisionRecipe, recipe
from playbook_utils.predict.shapes import ModelShape

__all__ = ["LAYOUT_FIELDS", "MOE_FIELDS", "SHAPE_FIELDS", "Training", "longest_seq_len", "train"]

SHAPE_FIELDS = (
    *("num_layers", "num_heads", "num_kv_heads", "dim", "ff_dim", "vocab_size"),
    *("mlp", "tied", "dropout"),
)
"""Fields of a `ModelShape` that `train` may change."""
MOE_FIELDS = ("num_experts", "experts_per_token", "expert_ff_dim")
"""Fields of its `MoEShape`, where the model has experts."""
LAYOUT_FIELDS = (
    *("dp", "tp", "cp", "pp", "ep", "zero_stage", "sequence_parallel"),
    *("schedule", "virtual_stages", "num_microbatches"),
)
"""Fields of a `ParallelLayout`."""


@dataclass(frozen=True)
class Training:
    """What is trained how, and the memory of its fullest rank."""

    shape: ModelShape
    layout: ParallelLayout
    recipe: PrecisionRecipe
    seq_len: int
    microbatch_size: int
    recompute: str
    attention: str
    kernels: str
    estimate: MemoryEstimate

    @property
    def kept_params(self) -> int:
        """Parameters that the rank keeps: under ZeRO-3 fewer than it computes with."""
        return self.estimate.params_bytes // self.recipe.params_bytes


def longest_seq_len(shape: ModelShape) -> int | None:
    """The longest sequence the model has positions for; None where these are not learned."""
    return shape.max_seq_len if shape.position == "learned" else None


def train(
    base: ModelShape,
    *,
    seq_len: int | None = None,
    microbatch_size: int = 1,
    precision: str = "bf16",
    optimizer_bytes: int | None = None,
    recompute: str = "none",
    attention: str | None = None,
    kernels: str = "fused",
    **changes: Any,
) -> Training:
    """The memory of the fullest rank of `base`, with `changes` of it and of its layout.

    Args:
        base: says what `changes` cannot: norms, positions, biases, latent attention.
        seq_len: tokens; by default 4,096, or fewer where the model has fewer learned positions.
        optimizer_bytes: per parameter, in place of the recipe's for Adam's two moments.
        attention: None is unfused where the model trains with dropout, else flash.
        changes: by the names of `SHAPE_FIELDS`, `LAYOUT_FIELDS` and, of a model with experts,
            `MOE_FIELDS`.

    Raises ValueError for other names and for what does not go together.
    """
    known = (*SHAPE_FIELDS, *LAYOUT_FIELDS, *(MOE_FIELDS if base.moe else ()))
    if unknown := [name for name in changes if name not in known]:
        found = ", ".join(map(repr, unknown))
        raise ValueError(f"{base.name} has no {found}: expected names of {', '.join(known)}")
    sizes = {name: changes[name] for name in SHAPE_FIELDS if name in changes}
    if base.moe:
        experts = {name: changes[name] for name in MOE_FIELDS if name in changes}
        sizes["moe"] = replace(base.moe, **experts)
    if base.mla:  # all heads share one latent: there are no groups
        sizes["num_kv_heads"] = sizes.get("num_heads", base.num_heads)
    if any(getattr(base, name) != value for name, value in sizes.items()):
        base = base.with_changes(**sizes)
    degrees = {name: changes[name] for name in LAYOUT_FIELDS if name in changes}
    layout = ParallelLayout(**degrees)
    bytes_each = recipe(precision)
    if optimizer_bytes is not None:
        bytes_each = replace(bytes_each, moments_bytes=optimizer_bytes)
    how: dict[str, Any] = {
        "seq_len": min(4096, longest_seq_len(base) or 4096) if seq_len is None else seq_len,
        "microbatch_size": microbatch_size,
        "recompute": recompute,
        "attention": attention or default_attention(base),
        "kernels": kernels,
    }
    estimate = predict_memory(base, layout=layout, precision=bytes_each, **how)
    return Training(base, layout, bytes_each, **how, estimate=estimate)
