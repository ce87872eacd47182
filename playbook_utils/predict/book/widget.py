"""The memory calculator on the book's first page, formula by formula, faults included.

    widget_memory(dim=4096, ff_dim=16384, num_layers=32, num_heads=32, seq_len=4096,
                  vocab_size=128256)            # {"params": ..., "activations": ...}, bytes
    widget_shape(...)                           # the model that these inputs describe
    widget_on(train(preset("gpt2")))            # the same for a training; None where it has none

With tp=1, the MLP "gelu" or "relu", ff_dim = 4 dim and a power of two for the ZeRO ranks, it gives
what `predict_memory` gives for `widget_shape`, byte for byte (tests/predict/book/test_widget.py).
`WIDGET_FAULTS` lists where it does not, and what we do. From the page's script (main.bundle.js) of
August 2025. s, b, h, a, t are sequence, micro-batch, dim, heads and tp; B is 2 bytes, or 4 in FP32.
"""

from __future__ import annotations

from playbook_utils.predict._checks import flag, whole
from playbook_utils.predict.activations import RECOMPUTE
from playbook_utils.predict.estimate import CATEGORIES
from playbook_utils.predict.presets import gpt_style
from playbook_utils.predict.shapes import ModelShape
from playbook_utils.predict.training import Training

__all__ = ["WIDGET_FAULTS", "widget_memory", "widget_on", "widget_shape"]

WIDGET_FAULTS: tuple[tuple[str, str], ...] = (
    (
        "attention is unfused: (2B+1) a s^2 b are kept",
        "flash attention, which keeps none of it; choose attention = unfused to compare",
    ),
    (
        "the head shares the embedding's matrix",
        "a matrix of its own where the model has one",
    ),
    (
        "tp never divides params, gradients and optimizer states",
        "divided by tp, all but norms, positions and the biases of row-parallel matrices",
    ),
    (
        "with sequence parallelism the a s^2 b term is not divided by tp",
        "divided: heads are split with or without sequence parallelism (Korthikanti et al. 2022, "
        "eq. 4)",
    ),
    (
        "the logits are whole on each tp rank unless sequence parallelism is on",
        "divided by tp: the head's rows are split (their section 4.3)",
    ),
    (
        "params ignore ff_dim and the third matrix of SwiGLU: always 8 h^2 in the MLP",
        "counted from the shape: 3 h ff_dim for SwiGLU",
    ),
    (
        "SwiGLU stores 4 tensors of ff_dim",
        'true of PyTorch\'s own operators (kernels="eager"); a fused kernel stores 3',
    ),
    (
        "Llama is given LayerNorm, dropout masks, biases, learned positions, as many key/value "
        "heads as heads",
        "RMSNorm, no dropout, no biases, rotary positions, grouped key/value heads",
    ),
    (
        "the presets named Llama 3 have 30,522 tokens, ff_dim = 4 h and sequences of 256",
        "128,256 tokens, Llama's ff_dim, and a sequence length of your choice",
    ),
    (
        "k, the optimizer's bytes per parameter, is 8 and grows by 4 in mixed precision unseen",
        "a named recipe: master copy 4, moments 8",
    ),
    (
        "full recomputation keeps s b h B a layer on each tp rank, also with sequence parallelism",
        "divided by tp with it; and one layer is there again while it is recomputed",
    ),
    (
        "no FP32 gradients, grouped heads, experts, CP, PP or EP; ZeRO shards over dp alone",
        "all of them; ZeRO shards over dp x cp",
    ),
)
"""(what the book's widget does, what `predict_memory` does instead)."""

_FF_TERMS = {"relu": 1, "gelu": 2, "swiglu": 4}


def widget_memory(
    *,
    dim: int,
    ff_dim: int,
    num_layers: int,
    num_heads: int,
    seq_len: int,
    vocab_size: int,
    microbatch_size: int = 1,
    optimizer_multiplier: int = 8,
    tp: int = 1,
    dp: int = 1,
    zero_stage: int = 0,
    mlp: str = "gelu",
    mixed: bool = True,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> dict[str, int]:
    """Bytes per rank by the widget's formulas: its params, grads, optimizer_states and activations
    (the latter also by part: attention, mlp, norms, once, or recomputed), each rounded up.

    Raises:
        ValueError: a size is no whole number, or `mlp` or `recompute` is none of the widget's.
    """
    counts = dict(
        dim=dim, ff_dim=ff_dim, num_layers=num_layers, num_heads=num_heads, seq_len=seq_len,
        vocab_size=vocab_size, microbatch_size=microbatch_size, tp=tp, dp=dp,
    )  # fmt: skip
    for name, count in counts.items():
        whole(name, count, minimum=1)
    whole("optimizer_multiplier", optimizer_multiplier, minimum=0)
    flag("mixed", mixed)
    flag("sequence_parallel", sequence_parallel)
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage is {zero_stage!r}: expected 0, 1, 2 or 3")
    if mlp not in _FF_TERMS or recompute not in RECOMPUTE:
        raise ValueError(
            f'found mlp={mlp!r}, recompute={recompute!r}; expected "relu", "gelu" or "swiglu", and '
            '"none", "selective" or "full"'
        )
    size, t, tokens = (2 if mixed else 4), tp, seq_len * microbatch_size  # B, t, s b
    split = t if sequence_parallel else 1
    sbh = tokens * dim
    square = (2 * size + 1) * num_heads * seq_len * tokens * (recompute == "none")
    if sequence_parallel:
        attention = _up(sbh * (5 * size + 1), t) + square  # sic: the square is not divided
    else:
        attention = _up(4 * size * sbh + square, t) + sbh * (size + 1)
    hidden = _FF_TERMS[mlp] * tokens * ff_dim * size
    mlp_bytes = _up(sbh * (size + 1), split) + _up(hidden, t)
    norms = _up(2 * sbh * size, split)
    once = _up(sbh + 2 * sbh * size + 4 * tokens * vocab_size, split)
    layers = {"attention": attention, "mlp": mlp_bytes, "norms": norms}
    if recompute == "full":
        layers = {"recomputed": sbh * size}
    n = dim * (vocab_size + seq_len) + num_layers * (12 * dim**2 + 13 * dim) + 2 * dim
    k = optimizer_multiplier + (4 if mixed else 0)
    parts = {part: num_layers * amount for part, amount in layers.items()} | {"once": once}
    return {
        "params": _up(size * n, dp if zero_stage >= 3 else 1),
        "grads": _up(size * n, dp if zero_stage >= 2 else 1),
        "optimizer_states": _up(k * n, dp if zero_stage >= 1 else 1),
        "activations": sum(parts.values()),
        **{f"activations.{part}": amount for part, amount in parts.items()},
    }


def widget_shape(
    *,
    dim: int,
    ff_dim: int,
    num_layers: int,
    num_heads: int,
    seq_len: int,
    vocab_size: int,
    mlp: str = "gelu",
) -> ModelShape:
    """The model that the widget's inputs describe: GPT-2's block, with the chosen MLP."""
    return gpt_style(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        ff_dim=ff_dim,
        max_seq_len=seq_len,
        mlp=mlp,
    )


def _up(amount: int, ways: int) -> int:
    return -(-amount // ways)


def widget_on(training: Training, recompute: str | None = None) -> dict[str, int] | None:
    """What the widget says of a training, in bytes by category and in total.

    None with pipelines, split contexts or experts, which it does not have. recompute: instead of
    the training's own.
    """
    shape, layout = training.shape, training.layout
    if shape.moe or max(layout.pp, layout.cp, layout.ep) > 1:
        return None
    sizes = ("dim", "ff_dim", "num_layers", "num_heads", "vocab_size", "mlp")
    degrees = ("tp", "dp", "zero_stage", "sequence_parallel")
    found = widget_memory(
        **{name: getattr(shape, name) for name in sizes},
        **{name: getattr(layout, name) for name in degrees},
        seq_len=training.seq_len,
        microbatch_size=training.microbatch_size,
        optimizer_multiplier=training.recipe.moments_bytes,
        mixed=training.recipe.activation_bytes == 2,
        recompute=recompute or training.recompute,
    )
    four = {name: found[name] for name in CATEGORIES}
    return four | {"total": sum(four.values())}
