"""Shapes of published models, of the book's benchmark models and of the course's tiny ones.

Sizes are those of the models' public `config.json`; the parameter counts that follow are the
published ones, to the parameter (tests/predict/test_presets.py). GPT-3 175B is the exception: its
sizes are Table 2.1 of Brown et al. 2020 and its count, 174.6 billion, is a formula's. DeepSeek-V3
is counted without its multi-token-prediction layer and with the 58 x 256 numbers of its routers'
correction bias, which Hugging Face keeps as buffers. Llama 3 has the context of 3.1, on which no
parameter depends.

    >>> preset("Llama-3.1-8B").num_params
    8030261248
"""

from __future__ import annotations

import difflib

from playbook_utils.predict._checks import expect_type
from playbook_utils.predict.layers import LatentAttention, MoEShape
from playbook_utils.predict.shapes import ModelShape

__all__ = ["ALIASES", "PRESETS", "gpt_style", "preset"]


def gpt_style(
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    max_seq_len: int,
    vocab_size: int,
    ff_dim: int | None = None,
    mlp: str = "gelu",
    name: str = "",
) -> ModelShape:
    """GPT-2's block at these sizes, trained with dropout; ff_dim is 4 dim unless given."""
    return ModelShape(
        name=name, vocab_size=vocab_size, dim=dim, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=num_heads, ff_dim=4 * dim if ff_dim is None else ff_dim,
        max_seq_len=max_seq_len, norm="layernorm", mlp=mlp, position="learned", bias=True,
        tied=True, dropout=True,
    )  # fmt: skip


def _gpt(name: str, dim: int, num_layers: int, num_heads: int, max_seq_len: int) -> ModelShape:
    return gpt_style(
        name=name, vocab_size=50257, dim=dim, num_layers=num_layers, num_heads=num_heads,
        max_seq_len=max_seq_len,
    )  # fmt: skip


def _llama(
    name: str, dim: int, num_layers: int, heads: tuple[int, int], ff_dim: int, **more: object
) -> ModelShape:
    """Llama 3's vocabulary and the longest context of its family, unless told otherwise."""
    sizes = {"vocab_size": 128256, "max_seq_len": 131072} | more
    return ModelShape(
        name=name, dim=dim, num_layers=num_layers, num_heads=heads[0], num_kv_heads=heads[1],
        ff_dim=ff_dim, **sizes,  # type: ignore[arg-type]
    )  # fmt: skip


def _book(
    name: str, dim: int, num_layers: int, num_heads: int, ff_dim: int, tied: bool
) -> ModelShape:
    """As in nanotron's scripts/scaling_benchmarks.py: no grouped queries, sequences of 4,096."""
    return _llama(
        name, dim, num_layers, (num_heads, num_heads), ff_dim,
        vocab_size=131072, max_seq_len=4096, tied=tied,
    )  # fmt: skip


_SHAPES = (
    _gpt("gpt2", 768, 12, 12, 1024),
    _gpt("gpt-3-175b", 12288, 96, 96, 2048),
    _llama("llama-2-7b", 4096, 32, (32, 32), 11008, vocab_size=32000, max_seq_len=4096),
    _llama("llama-3.2-1b", 2048, 16, (32, 8), 8192, tied=True),
    _llama("llama-3.2-3b", 3072, 28, (24, 8), 8192, tied=True),
    _llama("llama-3-8b", 4096, 32, (32, 8), 14336),
    _llama("llama-3-70b", 8192, 80, (64, 8), 28672),
    _llama("llama-3-405b", 16384, 126, (128, 8), 53248),
    _llama("mistral-7b", 4096, 32, (32, 8), 14336, vocab_size=32000, max_seq_len=32768),
    _llama(
        "mixtral-8x7b", 4096, 32, (32, 8), 14336, vocab_size=32000, max_seq_len=32768,
        moe=MoEShape(num_experts=8, experts_per_token=2, expert_ff_dim=14336),
    ),
    _llama("qwen2.5-7b", 3584, 28, (28, 4), 18944, vocab_size=152064, qkv_bias=True),
    _llama(
        "qwen3-8b", 4096, 36, (32, 8), 12288, vocab_size=151936, max_seq_len=40960, head_dim=128,
        qk_norm=True,
    ),
    _llama(
        "deepseek-v3", 7168, 61, (128, 128), 18432, vocab_size=129280, max_seq_len=163840,
        moe=MoEShape(
            num_experts=256, experts_per_token=8, expert_ff_dim=2048, num_shared_experts=1,
            num_dense_layers=3, router_bias=True,
        ),
        mla=LatentAttention(
            q_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128
        ),
    ),
    _book("book-1b", 2048, 16, 32, 8192, tied=True),
    _book("book-3b", 3072, 28, 32, 8192, tied=True),
    _book("book-8b", 4096, 32, 32, 14336, tied=False),
    _book("book-80b", 8192, 80, 64, 28672, tied=False),
    _book("book-469b", 16384, 126, 128, 53248, tied=False),
    _llama("course-tiny", 64, 2, (4, 2), 176, vocab_size=256, max_seq_len=256),
    _gpt("course-gpt-tiny", 64, 2, 4, 256).with_changes(
        name="course-gpt-tiny", vocab_size=256, dropout=False
    ),
)  # fmt: skip

PRESETS: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}
"""Every preset by its name."""

ALIASES = {
    "gpt-2": "gpt2",
    "gpt-3": "gpt-3-175b",
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.1-405b": "llama-3-405b",
    "llama-3.3-70b": "llama-3-70b",
}
"""Other names of presets: Llama 3, 3.1 and 3.3 have the same sizes."""


def preset(name: str) -> ModelShape:
    """The shape called `name`, in any case; ValueError that lists the near names."""
    expect_type("the name of a preset", name, str)
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in PRESETS:
        return PRESETS[key]
    near = difflib.get_close_matches(key, [*PRESETS, *ALIASES], n=5, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(PRESETS)}"
    raise ValueError(f"no preset is called {name!r}: {hint}")
