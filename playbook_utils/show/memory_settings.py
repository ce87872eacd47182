"""What the memory explorer's controls say, and what memory follows from it.

`MemorySettings` is plain data: a model to start from, what was changed of it, and how it is
trained. `explore_memory` is the whole computation behind the explorer, without a widget: an
estimate, or the sentence that says why there is none.

    settings = MemorySettings(preset("llama-3-8b"), layout={"tp": 8})
    explore_memory(settings).total_bytes
    explore_memory(replace(settings, layout={"tp": 64}))     # a sentence: tp must divide num_heads
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import MemoryEstimate, predict_memory
from playbook_utils.predict.precision import PrecisionRecipe, recipe
from playbook_utils.predict.shapes import ModelShape

__all__ = [
    "MOE_FIELDS", "SHAPE_FIELDS", "MemorySettings", "explore_memory", "largest_seq_len",
    "shape_values",
]  # fmt: skip

SHAPE_FIELDS = (
    *("num_layers", "num_heads", "num_kv_heads", "dim", "ff_dim", "vocab_size"),
    *("mlp", "tied", "dropout"),
)
"""Fields of a `ModelShape` that have a control."""
MOE_FIELDS = ("num_experts", "experts_per_token", "expert_ff_dim")
"""Fields of its `MoEShape` that have one, where the model has experts."""


@dataclass(frozen=True)
class MemorySettings:
    """A model and how it is trained; checked only when something is computed from it."""

    base: ModelShape
    """Says what no control changes: norms, positions, biases, latent attention."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the base: values by name, of `SHAPE_FIELDS` and `MOE_FIELDS`."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a `ParallelLayout`."""
    seq_len: int = 4096
    microbatch_size: int = 1
    precision: str = "bf16"
    optimizer_bytes: int = 8
    """Per parameter, beside the recipe's master copy: 8 are Adam's two moments in FP32."""
    recompute: str = "none"
    attention: str | None = None
    """None: unfused where the model trains with dropout, else flash."""

    def shape(self) -> ModelShape:
        """The base with its changes; ValueError where they do not fit together, and for names
        that are none of this model's."""
        known = (*SHAPE_FIELDS, *(MOE_FIELDS if self.base.moe else ()))
        if unknown := [name for name in self.changes if name not in known]:
            raise ValueError(
                f"changes has {', '.join(map(repr, unknown))}: expected names of {', '.join(known)}"
            )
        sizes = {name: self.changes[name] for name in SHAPE_FIELDS if name in self.changes}
        moe = self.base.moe
        if moe is not None:
            experts = {name: self.changes[name] for name in MOE_FIELDS if name in self.changes}
            sizes["moe"] = replace(moe, **experts)
        if self.base.mla is not None:  # all heads share one latent: there are no groups
            sizes["num_kv_heads"] = sizes.get("num_heads", self.base.num_heads)
        if all(getattr(self.base, name) == value for name, value in sizes.items()):
            return self.base
        return self.base.with_changes(**sizes)

    def parallel_layout(self) -> ParallelLayout:
        """The layout; ValueError where its degrees do not fit together."""
        return ParallelLayout(**self.layout)

    def attention_used(self) -> str:
        """ "flash" or "unfused"."""
        dropout = self.changes.get("dropout", self.base.dropout)
        return self.attention or ("unfused" if dropout else "flash")

    def recipe(self) -> PrecisionRecipe:
        """The named recipe, with `optimizer_bytes` in place of Adam's moments."""
        return replace(recipe(self.precision), moments_bytes=self.optimizer_bytes)


def largest_seq_len(shape: ModelShape) -> int | None:
    """The longest sequence the model has positions for; None where these are not learned."""
    return shape.max_seq_len if shape.position == "learned" else None


def shape_values(shape: ModelShape) -> dict[str, Any]:
    """What the controls show for `shape`: values by name."""
    values = {name: getattr(shape, name) for name in SHAPE_FIELDS}
    if shape.moe is not None:
        values |= {name: getattr(shape.moe, name) for name in MOE_FIELDS}
    return values


def explore_memory(settings: MemorySettings) -> MemoryEstimate | str:
    """The memory of the fullest rank, or one sentence where these settings are impossible."""
    try:
        return predict_memory(
            settings.shape(),
            seq_len=settings.seq_len,
            microbatch_size=settings.microbatch_size,
            layout=settings.parallel_layout(),
            precision=settings.recipe(),
            recompute=settings.recompute,
            attention=settings.attention,
        )
    except ValueError as error:
        return str(error)
