"""How a model is laid out over ranks: the degrees of parallelism, ZeRO and the pipeline schedule.

    layout = ParallelLayout(dp=8, tp=4, pp=2, zero_stage=1, sequence_parallel=True)
    layout.world_size                    # 64
    layout.check(shape, seq_len=4096)    # ValueError where the model does not fit the layout
    layout.notes(shape, seq_len=4096)    # what is allowed, but worth knowing

world_size = dp x tp x cp x pp. Expert parallelism takes its ranks from dp x cp (as in Megatron-LM
and DeepSpeed-MoE): each expert stands on dp x cp / ep ranks, and everything that is not an expert
is replicated over dp x cp. ZeRO shards over the same ranks that replicate: dp x cp, and
dp x cp / ep for experts.

Left out: which ranks share a node; expert tensor parallelism other than tp; ZeRO within a part of
the replicas (HSDP).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from playbook_utils.predict._checks import is_whole, whole

if TYPE_CHECKING:
    from playbook_utils.predict.shapes import ModelShape

__all__ = ["SCHEDULES", "ParallelLayout"]

SCHEDULES: tuple[str, ...] = ("afab", "1f1b", "interleaved_1f1b")
"""All-forward-all-backward (GPipe), one-forward-one-backward, and the latter with several
stages a rank (Narayanan et al. 2021, section 2.2)."""


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of parallelism; ValueError where they do not fit together."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    zero_stage: int = 0
    """0 replicates all; 1 shards the optimizer states, 2 the gradients too, 3 the params too."""
    sequence_parallel: bool = False
    """What TP leaves whole (norms, dropout, residuals) is split by sequence over its ranks
    (Korthikanti et al. 2022). Without effect where tp is 1."""
    schedule: str = "1f1b"
    num_microbatches: int | None = None
    """In one step. None: as many as fill the pipeline (`microbatches`)."""
    virtual_stages: int = 1
    """Stages a rank holds, v; more than 1 only with "interleaved_1f1b"."""
    layers_per_chunk: tuple[int, ...] | None = None
    """Layers of each of the pp x v chunks, in the model's order. None: as even as can be
    (`playbook_utils.predict.stages.layers_of`)."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp", "pp", "ep", "virtual_stages"):
            whole(name, getattr(self, name), minimum=1)
        if self.num_microbatches is not None:
            whole("num_microbatches", self.num_microbatches, minimum=1)
        if type(self.zero_stage) is not int or self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage is {self.zero_stage!r}; expected 0, 1, 2 or 3")
        flag: object = self.sequence_parallel
        if type(flag) is not bool:
            raise TypeError(f"sequence_parallel is {flag!r}; expected True or False")
        self._check_schedule()
        self._check_layers_per_chunk()
        if self.dp * self.cp % self.ep:
            raise ValueError(
                f"ep is {self.ep} and dp x cp is {self.dp} x {self.cp} = {self.dp * self.cp}: "
                "experts are spread over these ranks, so ep must divide their number"
            )

    def _check_layers_per_chunk(self) -> None:
        split: object = self.layers_per_chunk
        if split is None:
            return
        if not isinstance(split, tuple) or not all(is_whole(count, 1) for count in split):
            raise ValueError(
                f"layers_per_chunk is {split!r}: expected a tuple of whole numbers of at least 1"
            )
        if len(split) != self.chunks:
            raise ValueError(
                f"layers_per_chunk has {len(split)} numbers: expected one for each of the "
                f"pp x virtual_stages = {self.pp} x {self.virtual_stages} chunks"
            )

    def _check_schedule(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; expected one of {SCHEDULES}")
        interleaved = self.schedule == "interleaved_1f1b"
        if self.virtual_stages > 1 and not interleaved:
            raise ValueError(
                f"virtual_stages is {self.virtual_stages} with schedule {self.schedule!r}; "
                'only "interleaved_1f1b" has more than 1'
            )
        if interleaved and self.pp > 1:
            if self.virtual_stages < 2:
                raise ValueError(
                    'virtual_stages is 1 with schedule "interleaved_1f1b"; use 2 or more, or "1f1b"'
                )
            if self.microbatches % self.pp:
                raise ValueError(
                    f"num_microbatches is {self.num_microbatches} and pp {self.pp}: an "
                    "interleaved schedule takes micro-batches in groups of pp, so use a multiple"
                )

    @property
    def world_size(self) -> int:
        """Ranks in all: dp x tp x cp x pp (ep reuses the ranks of dp and cp)."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same non-expert weights, dp x cp: what ZeRO shards over."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts, dp x cp / ep."""
        return self.dp * self.cp // self.ep

    @property
    def chunks(self) -> int:
        """Pieces that the layers are cut into: pp, times v where stages are interleaved."""
        return self.pp * self.virtual_stages

    @property
    def microbatches(self) -> int:
        """`num_microbatches`, or where that is None the fewest at which memory stops growing
        under 1F1B: pp, and 2 pp when interleaved (for "afab", which never stops: pp)."""
        if self.num_microbatches is not None:
            return self.num_microbatches
        return 2 * self.pp if self.schedule == "interleaved_1f1b" and self.pp > 1 else self.pp

    def with_changes(self, **changes: Any) -> ParallelLayout:
        """A copy with these fields changed, checked again."""
        return replace(self, **changes)

    def check(self, shape: ModelShape, seq_len: int | None = None) -> None:
        """ValueError where `shape`, at this sequence length if given, cannot be laid out so."""
        if seq_len is not None:
            whole("seq_len", seq_len, minimum=1)
        for problem in self._problems(shape, seq_len):
            raise ValueError(problem)

    def _problems(self, shape: ModelShape, seq_len: int | None) -> Iterator[str]:
        tp, kv_heads = self.tp, shape.num_kv_heads
        if shape.num_heads % tp:
            yield (
                f"tp is {tp} and must divide num_heads, {shape.num_heads}: each rank holds the "
                "same number of heads"
            )
        if max(kv_heads, tp) % min(kv_heads, tp) and shape.mla is None:
            yield (
                f"num_kv_heads is {kv_heads} and tp {tp}: one must be a multiple of the other, "
                "so that each rank holds whole key/value heads"
            )
        if shape.ff_dim % tp:
            yield f"ff_dim is {shape.ff_dim} and tp {tp}: the MLP's columns must divide evenly"
        if shape.num_layers < self.chunks:
            pieces = f"pp {self.pp}"
            pieces += f" x virtual_stages {self.virtual_stages}" if self.virtual_stages > 1 else ""
            yield f"num_layers is {shape.num_layers} and {pieces}: each stage needs a layer"
        split = self.layers_per_chunk
        if split is not None and sum(split) != shape.num_layers:
            yield (
                f"layers_per_chunk adds up to {sum(split)}: expected num_layers={shape.num_layers}"
            )
        if shape.moe is not None and shape.moe.expert_ff_dim % tp:
            yield f"expert_ff_dim is {shape.moe.expert_ff_dim} and tp {tp}: tp must divide it"
        num_experts = 0 if shape.moe is None else shape.moe.num_experts
        if self.ep > 1 and not num_experts:
            yield f"ep is {self.ep}, but the model has no experts; use ep=1"
        elif num_experts % self.ep:
            yield f"the model has {num_experts} experts and ep is {self.ep}: ep must divide them"
        if seq_len is not None:
            yield from self._sequence_problems(seq_len)

    def _sequence_problems(self, seq_len: int) -> Iterator[str]:
        if seq_len % self.cp:
            yield (
                f"cp is {self.cp} and must divide seq_len, {seq_len}: each rank holds the same "
                "number of tokens"
            )
        elif self.sequence_parallel and seq_len // self.cp % self.tp:
            yield (
                f"seq_len / cp is {seq_len // self.cp} and tp {self.tp}: sequence_parallel "
                "splits the tokens of a rank over tp as well"
            )

    def notes(self, shape: ModelShape, seq_len: int | None = None) -> tuple[str, ...]:
        """What this layout means for the model that one might not expect; () if nothing."""
        return tuple(self._notes(shape, seq_len))

    def _notes(self, shape: ModelShape, seq_len: int | None) -> Iterator[str]:
        if shape.mla is None and self.tp > shape.num_kv_heads:
            copies = self.tp // shape.num_kv_heads
            yield f"tp exceeds num_kv_heads: each key/value head is held by {copies} ranks"
        if self.sequence_parallel and self.tp == 1:
            yield "sequence_parallel has no effect at tp=1"
        if self.sequence_parallel and self.tp > 1:
            yield (
                "sequence parallelism as in Megatron-LM: what a matrix's input is gathered to is "
                "dropped and gathered again in the backward pass; DTensor keeps it"
            )
        if self.zero_stage and self.replicas == 1:
            yield f"zero_stage={self.zero_stage} has no effect on one replica (dp x cp = 1)"
        if self.zero_stage == 3 and self.pp > 1:
            yield "zero_stage=3 with pp: each stage gathers its params again for every micro-batch"
        if self.zero_stage == 2 and self.pp > 1:
            yield "zero_stage=2 with pp: gradients are reduced again for every micro-batch"
        if self.layers_per_chunk is None and self.pp > 1 and shape.num_layers % self.chunks:
            yield "the layers do not divide evenly: the first stages hold one more"
        if self.pp > 1 and shape.tied:
            yield "the tied matrix is held by the first and by the last stage"
        if self.pp > 1 and self.microbatches < self.pp:
            yield "fewer micro-batches than stages: the pipeline never fills"
        if seq_len is not None and self.cp > 1 and seq_len % (2 * self.cp):
            yield "zigzag context parallelism needs a seq_len that 2 x cp divides"
