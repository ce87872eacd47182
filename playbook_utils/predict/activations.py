"""Bytes that one forward pass keeps for the backward pass, tensor by tensor.

    terms = layer_terms(shape, seq_len=4096)              # of one layer, one micro-batch
    sum(term.num_bytes for term in terms)
    terms[0].bytes_on_rank(ParallelLayout(tp=8))          # what TP, SP and CP leave of it

For GPT's block with dropout and unfused attention these are the terms of Korthikanti et al. 2022
(arXiv:2205.05198, section 4.1), s b h (34 + 5 a s / h) bytes in all with 2-byte elements (eq. 1):
attention 11 s b h + 5 a s^2 b, MLP 19 s b h, two LayerNorms 4 s b h. Dropout masks take 1 byte an
element. Any other block is counted by the same two rules: a matrix product keeps its inputs, an
operator what its derivative reads, and a tensor kept twice counts once.

`kernels` says what counts as one operator:
    "fused"  kernels such as Megatron's or Liger's: a norm keeps its input, SwiGLU its two inputs,
             and the matrix after it their product.
    "eager"  PyTorch's own operators, as in `playbook_utils.model.Decoder`: RMSNorm keeps a
             float32 copy (where elements are smaller) and the normalised values; SiLU's output is
             kept beside its input. Measured equal, to the byte, on the CPU with dropout 0.
`attention` "flash" keeps queries, keys, values, the output and one log-sum-exp a head and token,
"unfused" the a x s x s weights as well. Statistics (one number a token or a head and token: means,
1 / standard deviations, log-sum-exps, token ids) are counted where `statistics` is set.

Latent attention is counted as trained (keys and values expanded for every head); experts as if
the router spread tokens evenly and dropped none, so that a rank gets as many as it sends, whatever
ep is. The Decoder has neither: these were measured on blocks of their own (tests/predict), as were
the fused kernels and unfused attention.

Under sequence parallelism what a norm or a residual keeps is split over tp, and so are the inputs
of column-parallel matrices although each rank multiplies with the whole of them: as in Megatron-LM
the all-gather is repeated in the backward pass and its result is not kept (Korthikanti et al. 2022,
section 4.2.2). A column-parallel linear of PyTorch's DTensor keeps the gathered input, tp times
"shared input of q, k, v" and "MLP input". Whole on every tp rank in both are token and position
ids, targets, the rotary table, and what is sent to experts (`Block.experts`).

Left out: what is only held while an operator runs (gradients of activations; copies of the logits
in the loss, which `playbook_utils.predict.memory` adds), send buffers of a pipeline, and the
allocator's rounding (512 bytes a tensor on a GPU).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from playbook_utils.predict._checks import flag, whole
from playbook_utils.predict.blocks import Block, SavedTerm

if TYPE_CHECKING:
    from playbook_utils.predict.shapes import ModelShape

__all__ = [
    "ATTENTIONS", "KERNELS", "RECOMPUTE", "SavedTerm", "default_attention", "layer_terms",
    "output_terms",
]  # fmt: skip

RECOMPUTE: tuple[str, ...] = ("none", "selective", "full")
"""Nothing; the attention core (what grows with s^2); all but a layer's input."""

KERNELS: tuple[str, ...] = ("fused", "eager")
ATTENTIONS: tuple[str, ...] = ("flash", "unfused")


def default_attention(shape: ModelShape) -> str:
    """What is meant where nothing is said: "unfused" if the shape has dropout, as the papers count
    it, else "flash"."""
    return "unfused" if shape.dropout else "flash"


def layer_terms(
    shape: ModelShape,
    seq_len: int,
    microbatch_size: int = 1,
    element_bytes: int = 2,
    attention: str | None = None,
    kernels: str = "fused",
    statistics: bool = False,
    recompute: str = "none",
    index: int = 0,
) -> tuple[SavedTerm, ...]:
    """What layer `index` keeps of one micro-batch, in the order of the forward pass.

    Args:
        element_bytes: 2 for BF16 and FP16, 4 for FP32.
        attention: "flash" or "unfused"; None: `default_attention`.
        kernels: "fused" or "eager".
        statistics: count them too.
        recompute: "selective" leaves out the attention core (nothing with "flash", which
            recomputes it by itself), "full" all but the layer's input.
        index: matters where a model has dense layers before those with experts.
    """
    block = _block(shape, seq_len, microbatch_size, element_bytes, kernels, statistics)
    if attention is not None and attention not in ATTENTIONS:
        raise ValueError(f'attention is {attention!r}; expected "flash", "unfused" or None')
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute is {recompute!r}; expected one of {', '.join(RECOMPUTE)}")
    if recompute == "full":
        return (block.term("layer_inputs", "layer input", shape.dim, layer_input=True),)
    flash = (attention or default_attention(shape)) == "flash"
    terms = [
        *block.norm("attention norm", shape.dim, first=True),
        *(block.latent_projections() if shape.mla else block.projections()),
        *block.attention(flash),
        *block.norm("mlp norm", shape.dim),
        *(block.experts() if shape.is_moe_layer(index) else block.mlp(shape.ff_dim)),
    ]
    return tuple(
        term
        for term in terms
        if (statistics or not term.statistic)
        and not (recompute == "selective" and term.attention_core)
    )


def output_terms(
    shape: ModelShape,
    seq_len: int,
    microbatch_size: int = 1,
    element_bytes: int = 2,
    kernels: str = "fused",
    statistics: bool = False,
) -> tuple[SavedTerm, ...]:
    """What the model keeps of one micro-batch outside its layers.

    Part "embedding" stands before them; "positions" is the table of rotary cosines and sines,
    which all read and a rank has once, however many micro-batches it keeps, or with learned
    positions their ids, beside the embedding; "norms", "head" and "logits" (log-probabilities in
    FP32, as the cross entropy keeps them) come after. Korthikanti et al. 2022, section 4.3:
    s b h + 4 s b h (1 + v / h), and a dropout-free model lacks the first.
    """
    block = _block(shape, seq_len, microbatch_size, element_bytes, kernels, statistics)
    dim = shape.dim
    terms = [block.term("embedding", "token ids", 1, size=8, statistic=True, whole=True)]
    if shape.dropout:
        terms.append(block.term("embedding", "dropout mask", dim, size=1))
    if shape.position == "rope":
        width = shape.mla.rope_head_dim if shape.mla else shape.head_dim
        table = 2 * seq_len * width * element_bytes
        terms.append(SavedTerm("positions", "rotary cosines and sines", table, whole_over_tp=True))
    else:
        ids = dict(statistic=True, whole_over_tp=True)
        terms.append(SavedTerm("positions", "position ids", 8 * seq_len, **ids))
    terms += block.norm("final norm", dim)
    terms.append(block.term("head", "head input", dim))
    wide = max(4, element_bytes)
    terms.append(block.term("logits", "log-probabilities", shape.vocab_size, size=wide, tp=True))
    targets = 8 * block.tokens + wide
    same = dict(statistic=True, whole_over_tp=True)
    terms.append(SavedTerm("logits", "targets and their weight", targets, **same))
    return tuple(term for term in terms if statistics or not term.statistic)


def _block(
    shape: ModelShape,
    seq_len: int,
    microbatch_size: int,
    element_bytes: int,
    kernels: str,
    statistics: bool,
) -> Block:
    whole("seq_len", seq_len, minimum=1)
    whole("microbatch_size", microbatch_size, minimum=1)
    whole("element_bytes", element_bytes, minimum=1)
    flag("statistics", statistics)
    if kernels not in KERNELS:
        raise ValueError(f'kernels is {kernels!r}; expected "fused" or "eager"')
    return Block(shape, seq_len, seq_len * microbatch_size, element_bytes, kernels == "eager")
