"""Memory of one rank while training: params, gradients, optimizer states and activations.

    estimate = predict_memory(preset("llama-3-8b"), seq_len=4096, layout=ParallelLayout(dp=8))
    estimate.total_bytes, estimate.fits("h100")
    estimate.parts["activations"]["attention"]

Per rank of one pipeline stage, at its peak. Params follow `playbook_utils.predict.weights`, bytes
per parameter `precision`, activations `activations`, micro-batches in flight `stages`, shards
`zero`.

`total_bytes` is what the formulas of the papers and of the book add up. Its activations are those
at the end of a forward pass, or, where layers are recomputed, in the backward pass of the last one:
then its tensors are there again ("recomputed_layer" in the parts, `recomputed_bytes`; the formulas
leave that layer out, subtract it to compare), while those of the final norm, head and loss of that
micro-batch are gone.

`peak_bytes` adds what is there for a moment only (`transient_bytes`). With K for what is kept and A
for what the final norm, head and loss keep of one micro-batch, it is the largest of
    loss       K + 2 x the FP32 logits: the gradients after and before the log-softmax (measured in
               lesson 01: "saved + 2 x logits"); last stage
    head       K + unit(head): a gradient of logits has taken the log-probabilities' place; last
    layer      K - A + the recomputed tensors + unit(layer); A is 0 but for the last stage
    embedding  K - one micro-batch of the first chunk + unit(embedding); first stage
where unit is what ZeRO shards and needs whole (`zero.unit_bytes`): the params that ZeRO-3 gathers,
and from ZeRO-2 on the gradient before it is reduced (gradients are reduced unit by unit).

Left out: the CUDA context, the allocator's fragmentation, buffers of NCCL, gradients of
activations but for the logits', a 16-bit copy of the logits where one is held, ZeRO's prefetching
and buckets. So are the optimizer step's own temporaries, which come after the backward pass, when
activations are gone: PyTorch's foreach AdamW, its default on a GPU, takes 4 bytes for each
parameter that the rank updates (the square roots of the second moments); a fused one has none.
"""

from __future__ import annotations

from collections.abc import Iterable

from playbook_utils.predict._checks import expect_type, whole
from playbook_utils.predict.activations import SavedTerm, layer_terms, output_terms
from playbook_utils.predict.estimate import CATEGORIES, MemoryEstimate
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.precision import PrecisionRecipe, recipe
from playbook_utils.predict.shapes import ModelShape
from playbook_utils.predict.stages import layers_of, peak_in_flight
from playbook_utils.predict.weights import (
    kinds_in,
    layer_params_on_rank,
    params_on_rank,
    vocabulary_params,
)
from playbook_utils.predict.zero import gathered_bytes, states_bytes, unit_bytes

__all__ = ["CATEGORIES", "MemoryEstimate", "predict_memory"]


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
    """Memory of a rank of `stage`, or, where that is None, of the stage with the highest peak.

    Args:
        layout: None is one rank.
        precision: a recipe or the name of one.
        recompute: "none", "selective" or "full", of every layer.
        attention, kernels, statistics: as in `layer_terms`.

    Raises:
        ValueError: the model does not fit the layout, or a size or name is wrong.
    """
    layout = ParallelLayout() if layout is None else layout
    expect_type("shape", shape, ModelShape)
    expect_type("layout", layout, ParallelLayout)
    whole("seq_len", seq_len, minimum=1)
    whole("microbatch_size", microbatch_size, minimum=1)
    layout.check(shape, seq_len)
    if shape.position == "learned" and seq_len > shape.max_seq_len:
        raise ValueError(
            f"seq_len is {seq_len}, and the model has {shape.max_seq_len} learned positions; "
            f"use at most {shape.max_seq_len:,} tokens"
        )
    each = recipe(precision)
    sizes = (seq_len, microbatch_size, each.activation_bytes)
    same = dict(kernels=kernels, statistics=statistics)
    # Recomputation is checked, then read off the terms: it keeps some and brings back the others.
    how = dict(attention=attention, **same)
    layers = {
        index: (
            layer_terms(shape, *sizes, **how, recompute=recompute, index=index),  # type: ignore[arg-type]
            _dropped(layer_terms(shape, *sizes, **how, index=index), recompute),  # type: ignore[arg-type]
        )
        for index, _ in shape.distinct_layers()
    }
    outside = output_terms(shape, *sizes, **same)  # type: ignore[arg-type]
    case = _Case(shape, layout, each, layers, outside)
    stages = _unlike_stages(shape, layout) if stage is None else (stage,)
    return max((case.estimate(one) for one in stages), key=lambda found: found.peak_bytes)


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
        layers: dict[int, tuple[tuple[SavedTerm, ...], tuple[SavedTerm, ...]]],
        outside: tuple[SavedTerm, ...],
    ) -> None:
        self.shape, self.layout, self.precision = shape, layout, precision
        self.kept = {index: _by_part(kept, layout) for index, (kept, _) in layers.items()}
        self.recomputed = {
            index: sum(term.bytes_on_rank(layout) for term in dropped)
            for index, (_, dropped) in layers.items()
        }
        self.params = {index: layer_params_on_rank(shape, layout, index) for index in layers}
        self.table = {"embedding": vocabulary_params(shape, layout)}  # or the head's
        self.outside = _by_part(outside, layout)
        self.after = {part: self.outside.get(part, 0) for part in ("norms", "head", "logits")}
        self.logits = sum(
            term.bytes_on_rank(layout)
            for term in outside
            if term.part == "logits" and not term.statistic
        )

    def estimate(self, stage: int) -> MemoryEstimate:
        """One rank of that stage."""
        layout, precision = self.layout, self.precision
        params = params_on_rank(self.shape, layout, stage)
        chunks = self._chunks(stage)
        counts = peak_in_flight(layout, stage, [sum(sizes.values()) for sizes in chunks])
        activations: dict[str, int] = {}
        for sizes, count in zip(chunks, counts, strict=True):
            _add(activations, sizes, count)
        if self.shape.position == "rope":  # one table for all micro-batches and chunks
            _add(activations, {"positions": self.outside["positions"]}, 1)
        kept = sum(activations.values())
        moments = self._moments(stage, kept, sum(chunks[0].values()))
        again = max(self.recomputed[index] for index in self._kinds(stage))
        recomputed = max(0, again - self._released(stage))
        activations["recomputed_layer"] = recomputed
        parts = {
            "params": states_bytes(params, precision.params_bytes, 3, layout),
            "grads": states_bytes(params, precision.all_grads_bytes, 2, layout),
            "optimizer_states": states_bytes(params, precision.optimizer_states_bytes, 1, layout),
            "activations": activations,
        }
        moment = max(moments, key=lambda name: moments[name])
        return MemoryEstimate(
            stage=stage,
            num_params=sum(params.values()),
            parts={
                name: {part: size for part, size in sizes.items() if size}
                for name, sizes in parts.items()
            },
            microbatches_in_flight=counts,
            recomputed_bytes=recomputed,
            gathered_bytes=self._gathered(stage),
            transient_bytes=moments[moment] - kept - recomputed,
            moment=moment,
        )

    def _chunks(self, stage: int) -> list[dict[str, int]]:
        """For each of the stage's chunks, what one micro-batch keeps there, by part."""
        layout, shape = self.layout, self.shape
        chunks: list[dict[str, int]] = []
        for chunk in layers_of(shape.num_layers, layout, stage):
            sizes: dict[str, int] = {}
            for index, count in kinds_in(shape, (chunk,)):
                _add(sizes, self.kept[index], count)
            chunks.append(sizes)
        if stage == 0:
            before = ("embedding", "positions") if shape.position == "learned" else ("embedding",)
            _add(chunks[0], {part: self.outside.get(part, 0) for part in before}, 1)
        if stage == layout.pp - 1:
            _add(chunks[-1], self.after, 1)
        return chunks

    def _moments(self, stage: int, kept: int, first_chunk: int) -> dict[str, int]:
        """Bytes of activations and of what is there for a moment (`MOMENTS`)."""
        table = self._unit(self.table)
        layer = max(self.recomputed[i] + self._unit(self.params[i]) for i in self._kinds(stage))
        found = {"layer": kept - self._released(stage) + layer}
        if stage == self.layout.pp - 1:
            found |= {"loss": kept + 2 * self.logits, "head": kept + table}
        if stage == 0:
            found["embedding"] = kept - first_chunk + table
        return found

    def _kinds(self, stage: int) -> list[int]:
        """One layer of each kind on that stage."""
        layers = layers_of(self.shape.num_layers, self.layout, stage)
        return [index for index, _ in kinds_in(self.shape, layers)]

    def _released(self, stage: int) -> int:
        """What the loss, head and final norm kept, gone when the last layer's backward begins."""
        return sum(self.after.values()) if stage == self.layout.pp - 1 else 0

    def _unit(self, params: dict[str, int]) -> int:
        return unit_bytes(params, self.precision.params_bytes, self.layout)

    def _gathered(self, stage: int) -> int:
        units = [self.params[index] for index in self._kinds(stage)]
        if stage in (0, self.layout.pp - 1):
            units.append(self.table)
        size = self.precision.params_bytes
        return max(gathered_bytes(unit, size, self.layout) for unit in units)


def _by_part(terms: Iterable[SavedTerm], layout: ParallelLayout) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for term in terms:
        sizes[term.part] = sizes.get(term.part, 0) + term.bytes_on_rank(layout)
    return sizes


def _dropped(terms: tuple[SavedTerm, ...], recompute: str) -> tuple[SavedTerm, ...]:
    """Those that are computed again; a layer's input was never dropped."""
    if recompute == "full":
        return tuple(term for term in terms if not term.layer_input)
    return tuple(term for term in terms if recompute == "selective" and term.attention_core)


def _add(total: dict[str, int], sizes: dict[str, int], times: int) -> None:
    for part, size in sizes.items():
        total[part] = total.get(part, 0) + times * size
