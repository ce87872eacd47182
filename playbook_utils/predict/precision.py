"""Bytes that training stores for each parameter, by recipe.

    recipe       weights  gradients  master  FP32 gradients  Adam's moments   sum
    fp32            4         4         -           -              4 + 4       16
    bf16, fp16      2         2         4           -              4 + 4       16
    bf16-fp32-grads 2         2         4           4              4 + 4       20
    megatron        2         -         4           4              4 + 4       18
    bf16-no-master  2         2         -           -              4 + 4       12

The first three are the book's ("Memory for weights, gradients and optimizer states"; Rajbhandari
et al. 2020, "ZeRO", section 3.1, for the 16 of mixed precision). "megatron" is what Megatron-LM
keeps: each micro-batch's gradient is added to one FP32 buffer, and no BF16 gradient outlives its
layer. "bf16-no-master" is none that trains well: it is what most of the book's memory charts add
up (Adam's 8 bytes, and no master copy), and is here to reproduce them.

`activation_bytes` is the size of one activation: 4 in FP32, 2 in the others.

Left out: FP8 and 8-bit optimizers, and optimizers other than Adam.

    recipe("bf16").bytes_per_param     # 16
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["RECIPES", "PrecisionRecipe", "recipe"]


@dataclass(frozen=True)
class PrecisionRecipe:
    """Bytes per parameter of each thing that is kept, and bytes per element of activations."""

    name: str
    params_bytes: int
    """Weights as the forward pass reads them."""
    grads_bytes: int
    """Gradients in the weights' precision."""
    master_bytes: int
    """The FP32 copy of the weights that the optimizer updates; 0 where weights are FP32."""
    fp32_grads_bytes: int
    """The buffer in which micro-batches' gradients are added up in FP32."""
    moments_bytes: int
    """Adam's two moments together."""
    activation_bytes: int
    """Bytes per element of an activation (not per parameter)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and (type(value) is not int or value < 0):
                raise ValueError(f"{field.name} is {value!r}; expected bytes, 0 or more")
        if self.params_bytes < 1 or self.activation_bytes < 1:
            raise ValueError(
                f"params_bytes is {self.params_bytes} and activation_bytes "
                f"{self.activation_bytes}; both must be at least 1"
            )

    @property
    def bytes_per_param(self) -> int:
        """All that is kept for one parameter."""
        return self.params_bytes + self.all_grads_bytes + self.optimizer_states_bytes

    @property
    def all_grads_bytes(self) -> int:
        """Gradients and the FP32 buffer: what ZeRO-2 shards."""
        return self.grads_bytes + self.fp32_grads_bytes

    @property
    def optimizer_states_bytes(self) -> int:
        """Master copy and moments, the k of the ZeRO paper: what ZeRO-1 shards."""
        return self.master_bytes + self.moments_bytes


RECIPES: dict[str, PrecisionRecipe] = {
    row[0]: PrecisionRecipe(*row)
    for row in (
        ("fp32", 4, 4, 0, 0, 8, 4),
        ("bf16", 2, 2, 4, 0, 8, 2),
        ("bf16-fp32-grads", 2, 2, 4, 4, 8, 2),
        ("megatron", 2, 0, 4, 4, 8, 2),
        ("bf16-no-master", 2, 2, 0, 0, 8, 2),
        ("fp16", 2, 2, 4, 0, 8, 2),
    )
}
"""The recipes of the module's table by name."""


def recipe(name: str | PrecisionRecipe) -> PrecisionRecipe:
    """The recipe of that name (capitals don't matter); a recipe is returned as it is.

    Raises:
        ValueError: no recipe has that name.
    """
    if isinstance(name, PrecisionRecipe):
        return name
    found = RECIPES.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"precision is {name!r}; expected one of {', '.join(RECIPES)}")
    return found
