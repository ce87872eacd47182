"""Memory of one rank while training: params, gradients, optimizer states and activations.

    estimate = predict_memory(preset("llama-3-8b"), seq_len=4096, layout=ParallelLayout(dp=8))
    estimate.total_bytes, estimate.fits("h100")
    estimate.parts["activations"]["attention"]

Per rank of one pipeline stage, at its peak. Params follow `playbook_utils.predict.weights`, bytes
per parameter `precision`, activations `activations`, micro-batches in flight `stages`. ZeRO shards
optimizer states (1), gradients (2) and params (3) over dp x cp ranks, experts over dp x cp / ep
(Rajbhandari et al. 2020, section 5), each part rounded up.

The peak of the activations lies at the end of a forward pass, or, where layers are recomputed, in
the backward pass of the last one: then its tensors are there again ("recomputed_layer" in the
parts, `recomputed_bytes`), while those of the final norm, head and loss are gone. The formulas of
the papers and of the book leave that layer out; subtract it to compare.

Left out: the CUDA context, the allocator's fragmentation, buffers of NCCL, gradients of
activations and the logits' copies inside the loss, ZeRO's buckets, and what ZeRO-3 gathers for the
moment (`gathered_bytes`, not in the total).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from playbook_utils.predict.activations import SavedTerm, layer_terms, output_terms
from playbook_utils.predict.hardware import Accelerator, gpu
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.precision import PrecisionRecipe, recipe
from playbook_utils.predict.stages import layers_of, peak_in_flight
from playbook_utils.predict.weights import kinds_in, layer_params_on_rank, params_on_rank

if TYPE_CHECKING:
    from playbook_utils.predict.shapes import ModelShape

__all__ = ["CATEGORIES", "MemoryEstimate", "predict_memory"]

CATEGORIES: tuple[str, ...] = ("params", "grads", "optimizer_states", "activations")
"""The keys of `MemoryEstimate.parts`."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, by category and part."""

    stage: int
    """The pipeline stage that this is."""
    num_params: int
    """Parameters that the rank computes with (before ZeRO shards them)."""
    parts: dict[str, dict[str, int]]
    """For each of `CATEGORIES`, bytes by part (embedding, attention, mlp, ...); zeros left out."""
    microbatches_in_flight: tuple[int, ...]
    """Kept at the peak, for each of the stage's chunks (one, unless stages are interleaved)."""
    recomputed_bytes: int = 0
    """What recomputing one layer adds to the activations at the peak (in `activations_bytes`)."""
    gathered_bytes: int = 0
    """ZeRO-3: the largest unit's params (a layer, the embedding or the head), whole, while it is
    computed; twice that with prefetching. Not in `total_bytes`."""

    @property
    def params_bytes(self) -> int:
        """Weights as the forward pass reads them."""
        return sum(self.parts["params"].values())

    @property
    def grads_bytes(self) -> int:
        """Gradients, and the FP32 buffer where the recipe has one."""
        return sum(self.parts["grads"].values())

    @property
    def optimizer_states_bytes(self) -> int:
        """Adam's moments, and the FP32 master copy where the recipe has one."""
        return sum(self.parts["optimizer_states"].values())

    @property
    def activations_bytes(self) -> int:
        """What is kept for the backward pass, and one layer that is being recomputed."""
        return sum(self.parts["activations"].values())

    @property
    def total_bytes(self) -> int:
        """All four categories."""
        return sum(sum(parts.values()) for parts in self.parts.values())

    def fits(self, accelerator: Accelerator | str) -> bool:
        """Whether the total is no more than that GPU's memory, as its driver reports it where that
        is known; one or two GiB of it are never free."""
        if isinstance(accelerator, str):
            accelerator = gpu(accelerator)
        return self.total_bytes <= (accelerator.reported_bytes or accelerator.memory_bytes)

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return {
            "stage": self.stage,
            "num_params": self.num_params,
            **{f"{name}_bytes": getattr(self, f"{name}_bytes") for name in CATEGORIES},
            "total_bytes": self.total_bytes,
            "recomputed_bytes": self.recomputed_bytes,
            "gathered_bytes": self.gathered_bytes,
            "microbatches_in_flight": list(self.microbatches_in_flight),
            "parts": {name: dict(parts) for name, parts in self.parts.items()},
        }


def predict_memory(
    shape: ModelShape,
    *,
    seq_len: int,
    microbatch_size: int = 1,
    layout: ParallelLayout | None = None,
    precision: str | PrecisionRecipe = "bf16",
    recompute: str = "none",
    attention: str | None = None,
    kernels: str = "fused",
    statistics: bool = False,
    stage: int | None = None,
) -> MemoryEstimate:
    """Memory of a rank of `stage`, or, where that is None, of the stage that needs most.

    Args:
        layout: None is one rank.
        precision: a recipe or the name of one.
        recompute: "none", "selective" or "full", of every layer.
        attention, kernels, statistics: as in `layer_terms`.

    Raises:
        ValueError: the model does not fit the layout, or a size or name is wrong.
    """
    layout = ParallelLayout() if layout is None else layout
    layout.check(shape, seq_len)
    if shape.position == "learned" and seq_len > shape.max_seq_len:
        raise ValueError(
            f"seq_len is {seq_len}, and the model has {shape.max_seq_len} learned positions; "
            "use fewer tokens, or a shape with a larger max_seq_len"
        )
    sizes = (seq_len, microbatch_size, recipe(precision).activation_bytes)
    options = dict(attention=attention, kernels=kernels, statistics=statistics)
    terms = {
        index: (
            layer_terms(shape, *sizes, **options, recompute=recompute, index=index),  # type: ignore[arg-type]
            layer_terms(shape, *sizes, **options, index=index),  # type: ignore[arg-type]
        )
        for index, _ in shape.distinct_layers()
    }
    outside = output_terms(shape, *sizes, kernels=kernels, statistics=statistics)
    case = _Case(shape, layout, recipe(precision), terms, outside)
    stages = _unlike_stages(shape, layout) if stage is None else (stage,)
    return max((case.estimate(one) for one in stages), key=lambda found: found.total_bytes)


def _unlike_stages(shape: ModelShape, layout: ParallelLayout) -> list[int]:
    """The first stage of each make: of those that hold the same, it has most in flight."""
    found: dict[object, int] = {}
    for stage in range(layout.pp):
        chunks = layers_of(shape.num_layers, layout, stage)
        kinds = [tuple(kinds_in(shape, (chunk,))) for chunk in chunks]
        found.setdefault((stage == 0, stage == layout.pp - 1, *kinds), stage)
    return list(found.values())


class _Case:
    """One model under one layout: what all stages share is computed once."""

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        precision: PrecisionRecipe,
        terms: dict[int, tuple[tuple[SavedTerm, ...], tuple[SavedTerm, ...]]],
        outside: tuple[SavedTerm, ...],
    ) -> None:
        self.shape, self.layout, self.precision = shape, layout, precision
        self.kept = {index: _by_part(kept, layout) for index, (kept, _) in terms.items()}
        self.added = {index: _recomputed(*both, layout) for index, both in terms.items()}
        self.outside = _by_part(outside, layout)
        self.after = {part: self.outside.get(part, 0) for part in ("norms", "head", "logits")}
        self.unit = max(
            max(sum(self._layer(index).values()) for index in terms),
            -(-shape.vocab_size // layout.tp) * shape.dim,
        )

    def _layer(self, index: int) -> dict[str, int]:
        return layer_params_on_rank(self.shape, self.layout, index)

    def estimate(self, stage: int) -> MemoryEstimate:
        """One rank of that stage."""
        layout, precision = self.layout, self.precision
        params = params_on_rank(self.shape, layout, stage)
        activations, counts, recomputed = self._activations(stage)
        parts = {
            "params": self._states(params, precision.params_bytes, 3),
            "grads": self._states(params, precision.all_grads_bytes, 2),
            "optimizer_states": self._states(params, precision.optimizer_states_bytes, 1),
            "activations": activations,
        }
        return MemoryEstimate(
            stage=stage,
            num_params=sum(params.values()),
            parts={
                name: {part: size for part, size in sizes.items() if size}
                for name, sizes in parts.items()
            },
            microbatches_in_flight=counts,
            recomputed_bytes=recomputed,
            gathered_bytes=self.unit * precision.params_bytes if layout.zero_stage == 3 else 0,
        )

    def _states(self, params: dict[str, int], bytes_each: int, from_stage: int) -> dict[str, int]:
        """Bytes by part, sharded where ZeRO's stage is at least `from_stage`."""
        layout = self.layout
        sharded = layout.zero_stage >= from_stage
        ways = {"experts": layout.expert_replicas if sharded else 1}
        other = layout.replicas if sharded else 1
        return {
            part: -(-count // ways.get(part, other)) * bytes_each for part, count in params.items()
        }

    def _activations(self, stage: int) -> tuple[dict[str, int], tuple[int, ...], int]:
        """Bytes by part, micro-batches in flight, and what recomputing one layer adds."""
        layout, shape = self.layout, self.shape
        layers = layers_of(shape.num_layers, layout, stage)
        last = len(layers) - 1
        chunks = []
        for number, chunk in enumerate(layers):
            sizes = {"positions": self.outside.get("positions", 0)}
            if stage == 0 and number == 0:
                sizes["embedding"] = self.outside.get("embedding", 0)
            for index, count in kinds_in(shape, (chunk,)):
                _add(sizes, self.kept[index], count)
            if stage == layout.pp - 1 and number == last:
                _add(sizes, self.after, 1)
            chunks.append(sizes)
        counts = peak_in_flight(layout, stage, [sum(sizes.values()) for sizes in chunks])
        total: dict[str, int] = {}
        for sizes, count in zip(chunks, counts, strict=True):
            _add(total, sizes, count)
        added = max(self.added[index] for index, _ in kinds_in(shape, layers))
        if stage == layout.pp - 1:  # the loss and the head come first in the backward pass
            added = max(0, added - sum(self.after.values()))
        total["recomputed_layer"] = added
        return total, counts, added


def _by_part(terms: Iterable[SavedTerm], layout: ParallelLayout) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for term in terms:
        sizes[term.part] = sizes.get(term.part, 0) + term.bytes_on_rank(layout)
    return sizes


def _recomputed(
    kept: tuple[SavedTerm, ...], whole: tuple[SavedTerm, ...], layout: ParallelLayout
) -> int:
    """Bytes that are there again while a layer is recomputed; its input was never dropped."""
    names = {term.name for term in kept}
    if "layer input" in names:
        names.add("attention norm: input")
    return sum(term.bytes_on_rank(layout) for term in whole if term.name not in names)


def _add(total: dict[str, int], sizes: dict[str, int], times: int) -> None:
    for part, size in sizes.items():
        total[part] = total.get(part, 0) + times * size
