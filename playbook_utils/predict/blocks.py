"""What each part of a decoder layer keeps for the backward pass, one method a part.

    block = Block(shape, seq_len=4096, tokens=4096, element_bytes=2, eager=False)
    list(block.mlp(shape.ff_dim))            # SavedTerm("mlp", "MLP input", ...), ...

`playbook_utils.predict.activations` puts the parts together, and says what the words mean and
what is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from playbook_utils.predict.layout import ParallelLayout

if TYPE_CHECKING:
    from playbook_utils.predict.shapes import ModelShape

__all__ = ["Block", "SavedTerm"]


@dataclass(frozen=True)
class SavedTerm:
    """One tensor, or several that are kept for one reason."""

    part: str
    """attention, mlp, experts, router, norms; embedding, positions, head, logits; or, where a
    layer is recomputed, layer_inputs."""
    name: str
    num_bytes: int
    """Of the whole tensor: one micro-batch, one layer, no parallelism."""
    tp_sharded: bool = False
    """Split over tp; what isn't is split over the same ranks by sequence parallelism alone."""
    attention_core: bool = False
    """Dropped by selective recomputation."""
    tp_limit: int | None = None
    """Ways that it can be split over tp: as many as there are key/value heads."""
    statistic: bool = False
    """One number a token, or a head and token."""
    whole_over_tp: bool = False
    """The same on every tp rank, whether or not sequence parallelism splits its neighbours."""
    layer_input: bool = False
    """The layer's input itself, which full recomputation keeps."""

    def bytes_on_rank(self, layout: ParallelLayout) -> int:
        """What one rank keeps of it, rounded up (context parallelism splits all by sequence)."""
        ways = layout.cp
        if self.tp_sharded:
            ways *= layout.tp if self.tp_limit is None else min(layout.tp, self.tp_limit)
        elif layout.sequence_parallel and not self.whole_over_tp:
            ways *= layout.tp
        return -(-self.num_bytes // ways)


@dataclass(frozen=True)
class Block:
    """The parts of a layer for so many tokens of so many bytes an element."""

    shape: ModelShape
    seq_len: int
    tokens: int  # s b
    element_bytes: int
    eager: bool

    def term(
        self,
        part: str,
        name: str,
        width: int,
        size: int | None = None,
        tp: bool = False,
        core: bool = False,
        limit: int | None = None,
        statistic: bool = False,
        whole: bool = False,
        layer_input: bool = False,
    ) -> SavedTerm:
        """`width` elements a token, each of `size` bytes (None: the activations')."""
        size = self.element_bytes if size is None else size
        num_bytes = self.tokens * width * size
        return SavedTerm(part, name, num_bytes, tp, core, limit, statistic, whole, layer_input)

    def norm(
        self,
        name: str,
        width: int,
        part: str = "norms",
        rows: int = 1,
        tp: bool = False,
        limit: int | None = None,
        rms: bool | None = None,
        first: bool = False,
    ) -> Iterator[SavedTerm]:
        """A norm over `width`, `rows` times a token (heads, for queries and keys); the `first` of
        a layer reads the layer's input."""
        rms = self.shape.norm == "rmsnorm" if rms is None else rms
        full, wide = rows * width, max(4, self.element_bytes)
        if rms and self.eager:
            copied = self.element_bytes < wide
            copy = f"{name}: float32 copy" if copied else f"{name}: input"
            own = first and not copied
            yield self.term(part, copy, full, wide, tp, limit=limit, layer_input=own)
            yield self.term(part, f"{name}: normalised", full, None, tp, limit=limit)
        else:
            yield self.term(part, f"{name}: input", full, None, tp, limit=limit, layer_input=first)
        # Statistics are float32, but PyTorch's LayerNorm keeps them as its input on the CPU.
        size = self.element_bytes if self.eager and not rms else wide
        count, which = (rows, "1 / rms") if rms else (2 * rows, "mean, 1 / std")
        yield self.term(part, f"{name}: {which}", count, size, tp, limit=limit, statistic=True)

    def projections(self) -> Iterator[SavedTerm]:
        """Queries, keys and values; what makes them."""
        shape, groups = self.shape, self.shape.num_kv_heads
        yield self.term("attention", "shared input of q, k, v", shape.dim)
        if shape.qk_norm:
            sizes = dict(width=shape.head_dim, part="attention", tp=True, rms=True)
            yield from self.norm("query norm", rows=shape.num_heads, **sizes)  # type: ignore[arg-type]
            yield from self.norm("key norm", rows=groups, limit=groups, **sizes)  # type: ignore[arg-type]
        yield self.term("attention", "queries", shape.num_heads * shape.head_dim, tp=True)
        width = groups * shape.head_dim
        yield self.term("attention", "keys", width, tp=True, limit=groups)
        yield self.term("attention", "values", width, tp=True, limit=groups)

    def latent_projections(self) -> Iterator[SavedTerm]:
        """DeepSeek-V2 (arXiv:2405.04434), eqs. 37 to 47: latents are whole on every tp rank."""
        mla, heads = self.shape.mla, self.shape.num_heads
        assert mla is not None
        yield self.term("attention", "shared input of the latents", self.shape.dim)
        if mla.q_rank is not None:
            yield from self.norm("query latent norm", mla.q_rank, "attention", rms=True)
            yield self.term("attention", "query latent", mla.q_rank)
        yield from self.norm("key/value latent norm", mla.kv_rank, "attention", rms=True)
        if not self.eager or self.element_bytes >= 4:  # a slice of what the norm keeps whole
            yield self.term("attention", "rotary key", mla.rope_head_dim)
        yield self.term("attention", "key/value latent", mla.kv_rank)
        yield self.term("attention", "queries", heads * mla.head_dim, tp=True)
        yield self.term("attention", "keys", heads * mla.head_dim, tp=True)
        # Without a copy, a value is a slice of the product that its key was cut from as well.
        width = mla.value_head_dim + (mla.nope_head_dim if self.eager else 0)
        yield self.term("attention", "values", heads * width, tp=True)

    def attention(self, flash: bool) -> Iterator[SavedTerm]:
        """Weights (unless flash), output, and the dropout after the block."""
        shape, heads = self.shape, self.shape.num_heads
        if flash:
            wide = max(4, self.element_bytes)
            yield self.term("attention", "log-sum-exp", heads, wide, tp=True, statistic=True)
        else:
            square = dict(width=heads * self.seq_len, tp=True, core=True)
            yield self.term("attention", "softmax output", **square)  # type: ignore[arg-type]
            if shape.dropout:
                name = "attention dropout mask"
                yield self.term("attention", name, size=1, **square)  # type: ignore[arg-type]
                yield self.term("attention", "attention dropout output", **square)  # type: ignore[arg-type]
        yield self.term("attention", "output (o_proj input)", heads * shape.value_head_dim, tp=True)
        if shape.dropout:
            yield self.term("attention", "dropout mask", shape.dim, size=1)

    def mlp(self, ff_dim: int, with_input: bool = True) -> Iterator[SavedTerm]:
        """The MLP that every token meets, and the dropout after it."""
        if with_input:
            yield self.term("mlp", "MLP input", self.shape.dim)
        yield from self.hidden("mlp", ff_dim)
        if self.shape.dropout:
            yield self.term("mlp", "dropout mask", self.shape.dim, size=1)

    def hidden(self, part: str, width: int) -> Iterator[SavedTerm]:
        """Between the first matrix and the last, `width` elements a token each."""
        if self.shape.mlp == "swiglu":
            yield self.term(part, "gate", width, tp=True)
            if self.eager:
                yield self.term(part, "SiLU output", width, tp=True)
            yield self.term(part, "up", width, tp=True)
            yield self.term(part, "product (down_proj input)", width, tp=True)
        elif self.shape.mlp == "gelu":
            yield self.term(part, "GELU input", width, tp=True)
            yield self.term(part, "GELU output (down_proj input)", width, tp=True)
        else:  # ReLU's derivative reads its output, which down_proj keeps anyway
            yield self.term(part, "ReLU output (down_proj input)", width, tp=True)

    def experts(self) -> Iterator[SavedTerm]:
        """Router, the k experts of each token, shared experts.

        Tokens come to the experts split by sequence and are gathered over tp before the first
        matrix, which keeps them whole (Megatron-LM, MoEAlltoAllTokenDispatcher in
        core/transformer/moe/token_dispatcher.py: "permute->A2A(EP)->AG(TP)"); the outputs are
        scattered again before they are weighed.
        """
        moe, dim = self.shape.moe, self.shape.dim
        assert moe is not None
        k = moe.experts_per_token
        yield self.term("router", "router input", dim)
        yield self.term("router", "router probabilities", moe.num_experts, size=4)
        yield self.term("router", "chosen experts, weights", k, size=8 + 4, statistic=True)
        yield self.term("experts", "tokens sent to experts", k * dim, whole=True)
        yield from self.hidden("experts", k * moe.expert_ff_dim)
        yield self.term("experts", "experts' outputs (weighted sum's input)", k * dim)
        if moe.shared_ff_dim:
            yield from self.mlp(moe.shared_ff_dim, with_input=False)  # it is the router's
