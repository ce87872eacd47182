"""Parameters that one rank holds under TP, PP and EP (before ZeRO shards them).

    params_on_rank(shape, ParallelLayout(tp=8, pp=4), stage=0)    # {"embedding": ..., ...}

TP as in Megatron-LM (Shoeybi et al. 2019, section 3): columns of q, k, v, gate and up, with their
biases; rows of o and down, whose bias every rank holds; rows of the embedding and of the head,
the vocabulary filled up to a multiple of tp. Whole on every rank are norms, learned positions, the
router and the matrices down to a latent. Where tp exceeds the key/value heads, each rank holds one
whole head. EP spreads a layer's experts, and TP splits each of them as it does an MLP.

Embedding and positions stand on the first stage, the final norm and the head on the last; a tied
matrix on both. Left out: padding to more than tp (Megatron-LM fills up to 128 tp rows).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.stages import layers_of

if TYPE_CHECKING:
    from playbook_utils.predict.shapes import Linear, ModelShape

__all__ = ["PARTS", "kinds_in", "layer_params_on_rank", "params_on_rank", "vocabulary_params"]

PARTS: tuple[str, ...] = (
    "embedding",
    "positions",
    "attention",
    "mlp",
    "experts",
    "router",
    "norms",
    "head",
)
"""In the order of the forward pass; "mlp" includes the experts that every token meets."""

_ROWS = ("o_proj", "down_proj")
_WHOLE = ("router", "q_a_proj", "kv_a_proj")


def params_on_rank(shape: ModelShape, layout: ParallelLayout, stage: int) -> dict[str, int]:
    """Parameters on each rank of that stage, by part (`PARTS`)."""
    parts = dict.fromkeys(PARTS, 0)
    layers = layers_of(shape.num_layers, layout, stage)
    for index, count in kinds_in(shape, layers):
        for part, params in layer_params_on_rank(shape, layout, index).items():
            parts[part] += count * params
    table = vocabulary_params(shape, layout)
    if stage == 0:
        parts["embedding"] = table
        parts["positions"] = shape.max_seq_len * shape.dim if shape.position == "learned" else 0
    if stage == layout.pp - 1:
        parts["norms"] += shape.norm_params
        parts["head"] = 0 if shape.tied and layout.pp == 1 else table
    return parts


def vocabulary_params(shape: ModelShape, layout: ParallelLayout) -> int:
    """Of the embedding's rows on a rank, or of the head's."""
    return -(-shape.vocab_size // layout.tp) * shape.dim


def layer_params_on_rank(
    shape: ModelShape, layout: ParallelLayout, index: int = 0
) -> dict[str, int]:
    """Parameters of layer `index` on each of the ranks that hold it, by part."""
    parts = dict.fromkeys(("attention", "mlp", "experts", "router"), 0)
    for matrix in shape.linears(index):
        parts[matrix.part] += _matrix_on_rank(matrix, shape.num_kv_heads, layout)
    return {**parts, "norms": shape.layer_params(index)["norms"]}


def kinds_in(shape: ModelShape, layers: tuple[range, ...]) -> list[tuple[int, int]]:
    """(index of one, how many) for each kind of layer among `layers`."""
    found, start = [], 0
    for index, count in shape.distinct_layers():
        inside = sum(
            max(0, min(part.stop, start + count) - max(part.start, start)) for part in layers
        )
        if inside:
            found.append((index, inside))
        start += count
    return found


def _matrix_on_rank(matrix: Linear, num_kv_heads: int, layout: ParallelLayout) -> int:
    copies = matrix.copies // (layout.ep if matrix.part == "experts" else 1)
    ways = 1 if matrix.name in _WHOLE else layout.tp
    if matrix.name in ("k_proj", "v_proj"):
        ways = min(ways, num_kv_heads)
    bias = matrix.outputs if matrix.bias else 0
    share = bias if matrix.name in _ROWS else bias // ways
    return copies * (matrix.inputs * matrix.outputs // ways + share)
