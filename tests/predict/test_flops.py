"""FLOPs against torch's FlopCounterMode on the course's decoder, forward and backward, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from playbook_utils.model import Attention, Decoder, DecoderConfig, DecoderLayer, cross_entropy
from playbook_utils.predict.flops import (
    backward_flops,
    book_flops,
    forward_flops,
    hfu,
    mfu,
    model_flops,
    recompute_flops,
    six_n,
    training_flops,
)
from playbook_utils.predict.presets import preset
from playbook_utils.predict.shapes import ModelShape, MoEShape

CONFIGS = {
    "llama, gqa": DecoderConfig.tiny(vocab_size=37, dim=24, ff_dim=40),
    "llama, mha, tied": DecoderConfig.tiny(
        vocab_size=37, dim=24, ff_dim=41, num_kv_heads=4, num_layers=3, tied=True
    ),
    "llama, biased": DecoderConfig.tiny(vocab_size=37, dim=40, num_kv_heads=1, bias=True),
    "gpt": DecoderConfig.gpt_tiny(vocab_size=37, dim=24, num_layers=3),
    "gpt, dropout": DecoderConfig.gpt_tiny(vocab_size=37, dim=24, dropout=0.1),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
# Three sizes are as many as there are terms: batch_size x seq_len, and x seq_len once more.
sizes = pytest.mark.parametrize(("batch_size", "seq_len"), [(1, 1), (2, 7), (3, 19)])


@cache
def plainly_counted(config: DecoderConfig, batch_size: int, seq_len: int) -> tuple[int, int]:
    """The same with nothing changed, once for all tests."""
    return counted(config, batch_size, seq_len)


def counted(
    config: DecoderConfig, batch_size: int, seq_len: int, device: str = "meta"
) -> tuple[int, int]:
    """What the counter sees in a forward and in a backward pass."""
    with torch.device(device):
        model, tokens = Decoder(config), torch.zeros(batch_size, seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:
        loss = cross_entropy(model(tokens), tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@configs
@sizes
def test_forward_and_backward_are_what_the_counter_sees(
    config: DecoderConfig, batch_size: int, seq_len: int
) -> None:
    shape = ModelShape.from_decoder(config)
    forward, backward = plainly_counted(config, batch_size, seq_len)
    assert forward == forward_flops(shape, seq_len, batch_size).total
    assert backward == backward_flops(shape, seq_len, batch_size) == 2 * forward
    assert model_flops(shape, seq_len, batch_size) == forward + backward
    assert training_flops(shape, seq_len, batch_size) == forward + backward


@configs
def test_on_the_cpu_too_where_attention_is_not_fused(config: DecoderConfig) -> None:
    shape = ModelShape.from_decoder(config)
    with sdpa_kernel(SDPBackend.MATH):
        forward, backward = counted(config, 2, 7, "cpu")
    assert (forward, backward) == (
        forward_flops(shape, 7, 2).total,
        backward_flops(shape, 7, 2),
    )


def test_the_counter_misses_fused_attention_on_the_cpu() -> None:
    """Said in the docstring of `flops`; should torch mend it, this tells us to say so."""
    config = CONFIGS["llama, gqa"]
    found = counted(config, 2, 7, "cpu")
    linear = forward_flops(ModelShape.from_decoder(config), 7, 2).linear
    assert found == (linear, 2 * linear)


def test_layers_as_large_as_llama_3_8b_s_on_the_meta_device() -> None:
    shape = preset("llama-3-8b").with_changes(num_layers=3)
    forward, backward = counted(DecoderConfig.from_shape(shape), 1, 4096)
    assert forward == forward_flops(shape, 4096).total
    assert backward == 2 * forward


def flash_attend(self: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The kernel that CUDA runs; on the meta device it computes shapes."""
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return out


@configs
@sizes
def test_flash_attention_computes_the_scores_again(
    config: DecoderConfig, batch_size: int, seq_len: int
) -> None:
    shape = ModelShape.from_decoder(config)
    with mock.patch.object(Attention, "attend", flash_attend):
        forward, backward = counted(config, batch_size, seq_len)
    flops = forward_flops(shape, seq_len, batch_size)
    assert forward == flops.total
    assert backward == backward_flops(shape, seq_len, batch_size, attention="flash")
    assert backward == 2 * flops.linear + 5 * flops.attention_core // 2
    whole = training_flops(shape, seq_len, batch_size, attention="flash")
    assert whole == forward + backward > model_flops(shape, seq_len, batch_size)


def checkpointed(method: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """`method` under torch's checkpoint; the random state cannot be kept on the meta device."""

    def run(self: Any, *inputs: Any) -> Any:
        return checkpoint(method, self, *inputs, preserve_rng_state=False, **how)

    return run


@contextmanager
def recomputed(recompute: str, **how: Any) -> Iterator[None]:
    owner, name = {
        "full": (DecoderLayer, "forward"),
        "selective": (Attention, "attend"),
    }[recompute]
    with mock.patch.object(owner, name, checkpointed(getattr(owner, name), **how)):
        yield


@configs
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("how", "early_stop"),
    [
        ({"use_reentrant": True}, False),
        ({"use_reentrant": False, "early_stop": False}, False),
        ({"use_reentrant": False}, True),
    ],
    ids=["reentrant", "to the end", "early stop"],
)
def test_recomputation_is_what_the_counter_sees(
    config: DecoderConfig, recompute: str, how: dict[str, bool], early_stop: bool
) -> None:
    shape = ModelShape.from_decoder(config)
    found = plain = sum(plainly_counted(config, 2, 7))
    if recompute != "none":
        with recomputed(recompute, **how):
            found = sum(counted(config, 2, 7))
    again = recompute_flops(shape, 7, 2, recompute, early_stop=early_stop)
    assert found - plain == again
    assert found == training_flops(shape, 7, 2, recompute, early_stop=early_stop)


def test_full_recomputation_is_a_forward_pass_of_the_layers() -> None:
    shape = preset("llama-3-8b")
    flops = forward_flops(shape, 4096)
    assert recompute_flops(shape, 4096, recompute="full") == flops.total - flops.head
    assert recompute_flops(shape, 4096, recompute="selective") == flops.attention_core
    assert recompute_flops(shape, 4096, recompute="selective", attention="flash") == 0
    assert recompute_flops(shape, 4096, recompute="full", attention="flash") == flops.layers


def test_selective_recomputation_of_gpt_3_adds_under_one_percent() -> None:
    """s / (18 h) of 12 h^2 blocks; the book's 2.7 % is s / (6 h), attention's whole share."""
    shape, seq_len = preset("gpt-3-175b"), 2048
    again = recompute_flops(shape, seq_len, recompute="selective")
    layers = 3 * (forward_flops(shape, seq_len).projections + forward_flops(shape, seq_len).mlp)
    assert again / layers == pytest.approx(seq_len / (18 * shape.dim), rel=1e-12)
    assert again / model_flops(shape, seq_len) == pytest.approx(0.0090, abs=0.0001)


def naive_pairs(seq_len: int) -> int:
    return sum(1 for q in range(seq_len) for k in range(seq_len) if k <= q)


@pytest.mark.parametrize("seq_len", [1, 2, 7, 33])
def test_causal_counts_what_the_mask_leaves(seq_len: int) -> None:
    shape = preset("course-tiny")
    every, kept = forward_flops(shape, seq_len, 3), forward_flops(shape, seq_len, 3, causal=True)
    assert kept.linear == every.linear
    pairs = naive_pairs(seq_len)
    assert kept.attention_scores * seq_len**2 == every.attention_scores * pairs
    assert kept.attention_core == 2 * 3 * shape.num_layers * pairs * shape.dim * 2
    assert model_flops(shape, seq_len, 3, causal=True) == 3 * kept.total


def test_latent_attention_by_hand() -> None:
    """DeepSeek-V3, one sequence of 10: keys of 192 and values of 128 in each of 128 heads."""
    flops = forward_flops(preset("deepseek-v3"), 10)
    assert flops.attention_scores == 61 * 128 * 2 * 10 * 10 * 192
    assert flops.attention_values == 61 * 128 * 2 * 10 * 10 * 128
    h = 7168
    projections = h * 1536 + 1536 * 128 * 192 + h * 576 + 512 * 128 * 256 + 128 * 128 * h
    assert flops.projections == 2 * 10 * 61 * projections
    assert flops.mlp == 2 * 10 * (3 * 3 * h * 18432 + 58 * (9 * 3 * h * 2048 + 256 * h))
    again = backward_flops(preset("deepseek-v3"), 10, attention="flash")
    assert again == 2 * flops.total + flops.attention_scores


def test_only_active_experts_count() -> None:
    shape = preset("course-tiny").with_changes(moe=MoEShape(8, 2, 50, num_shared_experts=1))
    assert forward_flops(shape, 5, 3).mlp == 2 * 15 * 2 * (3 * 3 * 64 * 50 + 8 * 64)
    few = shape.with_changes(moe=MoEShape(2, 2, 50, num_shared_experts=1))
    assert forward_flops(shape, 5).mlp - forward_flops(few, 5).mlp == 2 * 5 * 2 * 6 * 64


@pytest.mark.parametrize("name", ["book-1b", "book-3b", "book-8b", "book-80b", "llama-3-405b"])
def test_the_books_formula_is_exact_for_the_right_n(name: str) -> None:
    shape, seq_len, batch_size = preset(name), 4096, 3
    found = book_flops(
        shape.num_matmul_params, shape.num_layers, shape.dim, seq_len, batch_size * seq_len
    )
    assert found == model_flops(shape, seq_len, batch_size)


@pytest.mark.parametrize(
    ("name", "six", "book"),
    [
        ("book-1b", 0.8334, 1.0000),
        ("llama-3-8b", 0.9361, 1.0613),
        ("llama-3-405b", 0.9648, 1.0050),
        ("gpt2", 0.6252, 1.0046),
    ],
)
def test_how_far_the_short_formulas_are_off_at_4096(name: str, six: float, book: float) -> None:
    """With N all parameters, as they are used in practice."""
    shape = preset(name)
    exact = model_flops(shape, 4096)
    assert round(six_n(shape.num_params, 4096) / exact, 4) == six
    long = book_flops(shape.num_params, shape.num_layers, shape.dim, 4096, 4096)
    assert round(long / exact, 4) == book


def test_where_the_two_omissions_of_six_n_cancel() -> None:
    """Llama 3 8B at 2,005 tokens: the embedding is as much too much as attention is missing."""
    shape = preset("llama-3-8b")
    assert six_n(shape.num_params, 2005) == pytest.approx(model_flops(shape, 2005), rel=1e-5)
    linear = 6 * shape.num_matmul_params
    assert six_n(shape.num_params, 1) / linear == pytest.approx(1.0700, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "tokens_per_s", "tera_per_s"),
    # Rows of the book's sweep with one stage: tokens a second and model TFLOP/s, both per GPU.
    [("book-1b", 40149.94, 388.0), ("book-1b", 39273.41, 379.53), ("book-1b", 39005.63, 376.94)],
)
def test_model_flops_are_those_of_the_books_runs(
    name: str, tokens_per_s: float, tera_per_s: float
) -> None:
    per_token = model_flops(preset(name), 4096) / 4096
    assert per_token * tokens_per_s == pytest.approx(tera_per_s * 1e12, rel=1e-4)


def test_the_books_mfu_of_its_best_1b_run() -> None:
    """(6 N + 12 L h s) / 989e12 with N = 1.34e9: 39.2 % of the peak at 40,150 tokens a second."""
    flops = book_flops(1_340_000_000, 16, 2048, 4096, tokens=40_150)
    assert mfu(flops, 1.0, 989e12) == pytest.approx(0.39178, abs=1e-5)


def test_utilisation() -> None:
    assert mfu(6e12, time_s=2.0, peak_flops_per_s=10e12) == 0.3
    assert hfu(8e12, time_s=2.0, peak_flops_per_s=10e12) == 0.4
    for bad in ((6e12, 0, 1e12), (6e12, 1, -1), (6e12, float("nan"), 1)):
        with pytest.raises(ValueError, match=r"found time_s=.*expected more than 0"):
            mfu(*bad)
    with pytest.raises(ValueError, match="hardware_flops is -1: expected a count"):
        hfu(-1, 1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: forward_flops(s, 0), "seq_len is 0: expected a whole number of at least 1"),
        (lambda s: forward_flops(s, 8, 1.5), "batch_size is 1.5"),
        (
            lambda s: recompute_flops(s, 8, recompute="some"),
            "recompute is 'some': expected one of none",
        ),
        (lambda s: backward_flops(s, 8, attention="fast"), "attention is 'fast': expected"),
        (
            lambda s: recompute_flops(
                s.with_changes(moe=MoEShape(2, 1, 8)), 8, recompute="full", early_stop=True
            ),
            "early_stop depends on how experts are run",
        ),
    ],
)
def test_bad_arguments(call: Callable[[ModelShape], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(preset("course-tiny"))


def test_short_formulas_take_counts() -> None:
    assert six_n(8e9, 10) == 480e9  # type: ignore[arg-type]
    for bad in (-5, float("nan"), "5", True, None):
        with pytest.raises(ValueError, match=f"num_params is {bad!r}: expected a count"):
            six_n(bad, 3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"seq_len is {bad!r}: expected a count"):
            book_flops(1, 2, 3, bad, 5)  # type: ignore[arg-type]
