"""Floating-point operations of one training step, and what share of a machine they use.

A multiply and an add are two operations, and only matrix multiplications count: norms, softmax,
activations, the embedding's lookup and the optimizer are left out, as in every MFU. For a batch
of B sequences of T tokens the forward pass takes

    projections and head    2 B T (weights that a token meets)      `ModelShape.num_matmul_params`
    scores, q k^T           2 B H T T (head dim of the keys)        each layer
    values, p v             2 B H T T (head dim of the values)      each layer

and the backward pass twice that: one product for the gradient of each factor (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1). A causal mask makes T(T+1)/2 of the T T scores useful; most counts,
FlopCounterMode's and the book's among them, take all, and so does this one unless `causal` is set.
These numbers equal those of torch's FlopCounterMode on the course's `Decoder`, with three things
to know about the counter:

- It takes fused attention's backward pass as five products for the forward pass's two, because
  the scores are computed again: 2.5 times, not 2. That is `attention="flash"` here. It is hardware
  work, which `training_flops` counts and `model_flops` does not.
- On the CPU the fused kernel is missing from its table: it then counts no attention at all, only
  `FlopCount.linear` (torch 2.13). Count on the meta device, where attention is not fused.
- torch's checkpoint stops recomputing at the last tensor that it needs, so that the last product
  of a region is not repeated: `early_stop` of `recompute_flops`.

    >>> from playbook_utils.predict.presets import preset
    >>> shape = preset("llama-3-8b")
    >>> forward_flops(shape, seq_len=8192).total
    158140695838720
"""

from __future__ import annotations

from dataclasses import dataclass

from playbook_utils.predict._checks import whole
from playbook_utils.predict.activations import RECOMPUTE
from playbook_utils.predict.shapes import ModelShape

__all__ = [
    "FlopCount", "backward_flops", "book_flops", "forward_flops", "hfu", "mfu", "model_flops",
    "recompute_flops", "six_n", "training_flops",
]  # fmt: skip


@dataclass(frozen=True)
class FlopCount:
    """Operations of one pass over the model, by kind of product."""

    projections: int  # attention's matrices
    mlp: int  # of the active experts, shared experts and the router too
    head: int
    attention_scores: int  # q k^T
    attention_values: int  # p v

    @property
    def linear(self) -> int:
        """Products with weights: linear in the sequence length."""
        return self.projections + self.mlp + self.head

    @property
    def attention_core(self) -> int:
        """Products without weights: quadratic in the sequence length."""
        return self.attention_scores + self.attention_values

    @property
    def layers(self) -> int:
        """All but the head."""
        return self.total - self.head

    @property
    def total(self) -> int:
        """All of it."""
        return self.linear + self.attention_core


def forward_flops(
    shape: ModelShape, seq_len: int, batch_size: int = 1, causal: bool = False
) -> FlopCount:
    """One forward pass; `causal` counts only the scores that the mask leaves."""
    whole("seq_len", seq_len, minimum=1)
    whole("batch_size", batch_size, minimum=1)
    tokens = batch_size * seq_len
    weights = {"attention": 0, "mlp": 0, "experts": 0, "router": 0}
    for index, count in shape.distinct_layers():
        for matrix in shape.linears(index):
            weights[matrix.part] += count * matrix.num_matmul_params
    pairs = batch_size * (seq_len * (seq_len + 1) // 2 if causal else seq_len * seq_len)
    per_head_dim = 2 * pairs * shape.num_heads * shape.num_layers
    return FlopCount(
        projections=2 * tokens * weights.pop("attention"),
        mlp=2 * tokens * sum(weights.values()),
        head=2 * tokens * shape.vocab_size * shape.dim,
        attention_scores=per_head_dim * shape.head_dim,
        attention_values=per_head_dim * shape.value_head_dim,
    )


def backward_flops(
    shape: ModelShape,
    seq_len: int,
    batch_size: int = 1,
    causal: bool = False,
    attention: str = "unfused",
) -> int:
    """One backward pass: twice the forward pass, and with "flash" the scores once more."""
    forward = forward_flops(shape, seq_len, batch_size, causal)
    again = forward.attention_scores if _is_flash(attention) else 0
    return 2 * forward.total + again


def recompute_flops(
    shape: ModelShape,
    seq_len: int,
    batch_size: int = 1,
    recompute: str = "none",
    causal: bool = False,
    attention: str = "unfused",
    early_stop: bool = False,
) -> int:
    """What activation recomputation adds to a step.

    "full" repeats the layers' forward pass (the head and the embedding are outside), "selective"
    the attention core (Korthikanti et al. 2022, arXiv:2205.05198, section 5). Fused attention
    stores no core: with `attention="flash"`, "selective" adds nothing to what the kernel repeats
    by itself (`backward_flops`).

    `early_stop` is what `torch.utils.checkpoint(..., use_reentrant=False)` does unless told
    otherwise: the region's last product gives nothing that the backward pass needs and is
    skipped. With "full" that is the MLP's last matrix, unless a dropout with its mask follows;
    with "selective" it is p v.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute is {recompute!r}: expected one of {', '.join(RECOMPUTE)}")
    forward = forward_flops(shape, seq_len, batch_size, causal)
    if recompute == "none" or (recompute == "selective" and _is_flash(attention)):
        return 0
    if recompute == "selective":
        return forward.attention_scores if early_stop else forward.attention_core
    if not early_stop or shape.dropout:
        return forward.layers
    if shape.moe:
        raise ValueError("early_stop depends on how experts are run: found a shape with moe")
    last = shape.linears()[-1].num_matmul_params * shape.num_layers
    return forward.layers - 2 * batch_size * seq_len * last


def training_flops(
    shape: ModelShape,
    seq_len: int,
    batch_size: int = 1,
    recompute: str = "none",
    causal: bool = False,
    attention: str = "unfused",
    early_stop: bool = False,
) -> int:
    """What the hardware does in one step: forward, backward, and what is computed again."""
    sizes = (shape, seq_len, batch_size)
    again = recompute_flops(*sizes, recompute, causal, attention, early_stop)
    return forward_flops(*sizes, causal).total + backward_flops(*sizes, causal, attention) + again


def model_flops(shape: ModelShape, seq_len: int, batch_size: int = 1, causal: bool = False) -> int:
    """What one step needs however it is run: three forward passes. MFU divides this."""
    return 3 * forward_flops(shape, seq_len, batch_size, causal).total


def six_n(num_params: int, tokens: int) -> int:
    """6 N operations a token (Kaplan et al. 2020, table 1).

    N should be `num_matmul_params`; then only attention is missing. Taken over all parameters it
    counts an embedding that nothing is multiplied with, unless the head is tied to it: for
    Llama 3 8B 7.0 % of the linear part too much, as much as attention adds at 2,005 tokens.
    """
    _not_negative(num_params=num_params, tokens=tokens)
    return 6 * num_params * tokens


def book_flops(num_params: int, num_layers: int, dim: int, seq_len: int, tokens: int) -> int:
    """(6 N + 12 L h s) operations a token: the book's appendix A2, and the MFU of its benchmark
    (N there is a rounded count of all parameters, the peak 989e12).

    With N = `num_matmul_params` and heads that fill h it equals `model_flops` exactly; the causal
    half is not taken off.
    """
    _not_negative(
        num_params=num_params, num_layers=num_layers, dim=dim, seq_len=seq_len, tokens=tokens
    )
    return (6 * num_params + 12 * num_layers * dim * seq_len) * tokens


def mfu(model_flops: float, time_s: float, peak_flops_per_s: float) -> float:
    """Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, section 4.1): the share of
    the peak that the step's necessary operations took; recomputation does not raise it."""
    return _utilisation("model_flops", model_flops, time_s, peak_flops_per_s)


def hfu(hardware_flops: float, time_s: float, peak_flops_per_s: float) -> float:
    """Hardware FLOPs utilisation: the same with all operations that were done."""
    return _utilisation("hardware_flops", hardware_flops, time_s, peak_flops_per_s)


def _utilisation(name: str, flops: float, time_s: float, peak_flops_per_s: float) -> float:
    if not flops >= 0:
        raise ValueError(f"{name} is {flops!r}: expected a count of at least 0")
    if not time_s > 0 or not peak_flops_per_s > 0:
        found = f"time_s={time_s!r}, peak_flops_per_s={peak_flops_per_s!r}"
        raise ValueError(f"found {found}: expected more than 0 (seconds; operations a second)")
    return flops / (time_s * peak_flops_per_s)


def _not_negative(**counts: float) -> None:
    """A rounded count, 8e9, is a count too."""
    for name, count in counts.items():
        number = isinstance(count, (int, float)) and not isinstance(count, bool)
        if not number or not count >= 0:
            raise ValueError(f"{name} is {count!r}: expected a count of at least 0")


def _is_flash(attention: str) -> bool:
    if attention not in ("unfused", "flash"):
        raise ValueError(f'attention is {attention!r}: expected "unfused" or "flash"')
    return attention == "flash"
