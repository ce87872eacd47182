"""What a forward pass keeps: predicted tensor by tensor, measured in bytes by autograd's hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from playbook_utils.measure import saved_for_backward
from playbook_utils.model import Decoder, DecoderConfig, DecoderLayer, cross_entropy, rope_cos_sin
from playbook_utils.predict.activations import SavedTerm, layer_terms, output_terms
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.presets import preset
from playbook_utils.predict.shapes import LatentAttention, ModelShape, MoEShape
from tests.predict import reference_blocks as reference

DTYPES = (torch.float32, torch.bfloat16)
SIZES = dict(vocab_size=101, dim=48, num_layers=3, num_heads=6, ff_dim=40, max_seq_len=64)
CONFIGS = {
    "llama": DecoderConfig(**SIZES, num_kv_heads=2),
    "llama, all heads, tied": DecoderConfig(**SIZES, num_kv_heads=6, tied=True),
    "gpt": DecoderConfig.gpt_tiny(**(SIZES | dict(ff_dim=133))),
    "layernorm without bias, swiglu": DecoderConfig(**SIZES, num_kv_heads=3, norm="layernorm"),
    "rmsnorm, gelu, learned": DecoderConfig(
        **SIZES, num_kv_heads=1, mlp="gelu", position="learned", bias=True
    ),
}
LLAMA = ModelShape(**SIZES, num_kv_heads=2)


def gpt(dim: int, num_heads: int, **changes: Any) -> ModelShape:
    style = dict(norm="layernorm", mlp="gelu", position="learned", bias=True, dropout=True)
    sizes = dict(vocab_size=101, num_layers=2, num_kv_heads=num_heads, ff_dim=4 * dim)
    return ModelShape(**(sizes | style | changes), dim=dim, num_heads=num_heads)


def total(terms: Iterable[SavedTerm]) -> int:
    return sum(term.num_bytes for term in terms)


def measured(model: nn.Module, *inputs: Any) -> Any:
    with saved_for_backward(model) as saved:
        model(*inputs)
    return saved


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_courses_decoder_to_the_byte(name: str, dtype: torch.dtype) -> None:
    config, batch, seq_len = CONFIGS[name], 3, 13
    model = Decoder(config).to(dtype)
    tokens = torch.randint(0, config.vocab_size, (batch, seq_len))
    with saved_for_backward(model) as saved:
        cross_entropy(model(tokens), tokens.clone())

    sizes = (ModelShape.from_decoder(config), seq_len, batch, dtype.itemsize)
    layer = layer_terms(*sizes, kernels="eager", statistics=True)
    outside = output_terms(*sizes, kernels="eager", statistics=True)
    assert config.num_layers * total(layer) + total(outside) == saved.total_bytes


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_of_the_courses_layers_to_the_byte(name: str, dtype: torch.dtype) -> None:
    config, batch, seq_len = CONFIGS[name], 1, 29
    x = torch.randn(batch, seq_len, config.dim, dtype=dtype, requires_grad=True)
    rope = config.position == "rope"
    table = rope_cos_sin(torch.arange(seq_len), config.head_dim, 1e4, dtype) if rope else None
    saved = measured(DecoderLayer(config).to(dtype), x, table)

    sizes = (ModelShape.from_decoder(config), seq_len, batch, dtype.itemsize)
    terms = layer_terms(*sizes, kernels="eager", statistics=True)
    positions = [term for term in output_terms(*sizes) if term.part == "positions"]
    assert bool(positions) == rope
    assert total(terms) + total(positions) == saved.total_bytes
    # Tensor by tensor: every term is one storage, but for mean and 1 / std, which are two.
    split = sorted(term.num_bytes for term in [*terms, *positions] if "mean" not in term.name)
    stats = [term.num_bytes // 2 for term in terms if "mean" in term.name for _ in range(2)]
    assert sorted([*split, *stats]) == sorted(t.storage_bytes for t in saved.tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_below_a_thousandth_of_a_layer_at_llamas_width(dtype: torch.dtype) -> None:
    sizes = (preset("llama-3-8b"), 4096, 1, dtype.itemsize)
    for kernels in ("fused", "eager"):
        every = total(layer_terms(*sizes, kernels=kernels, statistics=True))
        assert 0.999 < total(layer_terms(*sizes, kernels=kernels)) / every < 1


@pytest.mark.parametrize(("batch", "seq_len", "dim", "num_heads"), [(3, 13, 48, 6), (1, 40, 32, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpt_block_with_unfused_attention_is_korthikantis_formula(
    batch: int, seq_len: int, dim: int, num_heads: int, dtype: torch.dtype
) -> None:
    model = reference.GPTLayer(dim, num_heads, 4 * dim).to(dtype)
    x = torch.randn(batch, seq_len, dim, dtype=dtype, requires_grad=True)
    saved = measured(model, x)

    shape = gpt(dim, num_heads)
    sbh, square = seq_len * batch * dim, num_heads * seq_len**2 * batch
    assert total(layer_terms(shape, seq_len, batch)) == 34 * sbh + 5 * square
    eager = layer_terms(shape, seq_len, batch, kernels="eager", statistics=True)
    assert total(eager) == saved.total_bytes


def test_gpt_block_part_by_part_as_in_section_4_1_of_the_paper() -> None:
    seq_len, batch, dim, heads = 7, 2, 24, 3
    sbh, square = seq_len * batch * dim, heads * seq_len**2 * batch
    parts: dict[str, int] = {}
    for term in layer_terms(gpt(dim, heads), seq_len, batch):
        parts[term.part] = parts.get(term.part, 0) + term.num_bytes
    assert parts == {"norms": 4 * sbh, "attention": 11 * sbh + 5 * square, "mlp": 19 * sbh}


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_and_sequence_parallelism_as_in_the_papers_table_2(tp: int) -> None:
    seq_len, batch, dim, heads = 64, 3, 128, 16
    sbh, square = seq_len * batch * dim, heads * seq_len**2 * batch
    shape = gpt(dim, heads)

    def on_rank(recompute: str, sequence_parallel: bool) -> int:
        layout = ParallelLayout(tp=tp, sequence_parallel=sequence_parallel)
        terms = layer_terms(shape, seq_len, batch, recompute=recompute)
        return sum(term.bytes_on_rank(layout) for term in terms)

    assert on_rank("none", False) == 10 * sbh + 24 * sbh // tp + 5 * square // tp
    assert on_rank("none", True) == 34 * sbh // tp + 5 * square // tp
    assert on_rank("selective", False) == 10 * sbh + 24 * sbh // tp
    assert on_rank("selective", True) == 34 * sbh // tp
    assert on_rank("full", False) == 2 * sbh
    assert on_rank("full", True) == 2 * sbh // tp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kernels", ["fused", "eager"])
def test_llama_layer_with_fused_kernels_and_without(
    kernels: str, qk_norm: bool, dtype: torch.dtype
) -> None:
    batch, seq_len = 2, 17
    shape = LLAMA.with_changes(qk_norm=qk_norm, head_dim=14)
    model = reference.LlamaLayer(shape, fused=kernels == "fused").to(dtype)
    x = torch.randn(batch, seq_len, shape.dim, dtype=dtype, requires_grad=True)
    table = rope_cos_sin(torch.arange(seq_len), shape.head_dim, 1e4, dtype)
    saved = measured(model, x, table)
    terms = layer_terms(shape, seq_len, batch, dtype.itemsize, kernels=kernels, statistics=True)
    assert total(terms) + table.nbytes == saved.total_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_keeps_one_tensor_where_gelu_keeps_two(dtype: torch.dtype) -> None:
    model = reference.GPTLayer(24, 3, 50, activation=F.relu).to(dtype)
    saved = measured(model, torch.randn(2, 11, 24, dtype=dtype, requires_grad=True))
    shape = gpt(24, 3, ff_dim=50, mlp="relu")
    terms = layer_terms(shape, 11, 2, dtype.itemsize, kernels="eager", statistics=True)
    assert total(terms) == saved.total_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [0, 2])
def test_experts_under_an_even_load(shared: int, dtype: torch.dtype) -> None:
    moe = MoEShape(num_experts=5, experts_per_token=2, expert_ff_dim=11, num_shared_experts=shared)
    shape = LLAMA.with_changes(moe=moe)
    tokens = 15
    x = torch.randn(tokens, shape.dim, dtype=dtype, requires_grad=True)
    saved = measured(reference.Experts(shape).to(dtype), x)
    per_choice = [t for t in saved.tensors if t.dtype == "int64" or t.shape == (tokens * 2, 1)]
    kept = saved.total_bytes - sum(tensor.storage_bytes for tensor in per_choice)
    assert len(per_choice) < len(saved.tensors) / 2

    terms = layer_terms(shape, tokens, 1, dtype.itemsize, kernels="eager")
    assert total(t for t in terms if t.part in ("router", "experts", "mlp")) == kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_rank", [None, 10])
def test_latent_attention(q_rank: int | None, dtype: torch.dtype) -> None:
    mla = LatentAttention(
        kv_rank=12, nope_head_dim=6, rope_head_dim=4, value_head_dim=10, q_rank=q_rank
    )
    shape = ModelShape(**(SIZES | dict(num_kv_heads=6)), mla=mla)
    batch, seq_len = 2, 9
    x = torch.randn(batch, seq_len, shape.dim, dtype=dtype, requires_grad=True)
    table = rope_cos_sin(torch.arange(seq_len), 4, 1e4, dtype)
    saved = measured(reference.LatentAttention(shape).to(dtype), x, table)
    terms = layer_terms(shape, seq_len, batch, dtype.itemsize, kernels="eager", statistics=True)
    predicted = total(term for term in terms if term.part == "attention")
    assert predicted + table.nbytes == saved.total_bytes
    (positions,) = (
        t for t in output_terms(shape, seq_len, 1, dtype.itemsize) if "rotary" in t.name
    )
    assert positions.num_bytes == table.nbytes


def test_dense_layers_come_before_those_with_experts() -> None:
    deepseek = preset("deepseek-v3")
    dense, experts = (layer_terms(deepseek, 128, index=index) for index in (2, 3))
    assert {term.part for term in dense} == {"norms", "attention", "mlp"}
    assert {term.part for term in experts} == {"norms", "attention", "mlp", "router", "experts"}


def test_recomputation_leaves_the_input_or_all_but_the_core() -> None:
    unfused = layer_terms(gpt(24, 3), 7)
    kept = layer_terms(gpt(24, 3), 7, recompute="selective")
    assert [t.name for t in unfused if t not in kept] == [
        "softmax output",
        "attention dropout mask",
        "attention dropout output",
    ]
    flash = layer_terms(LLAMA, 7)
    assert layer_terms(LLAMA, 7, recompute="selective") == flash
    (layer_input,) = layer_terms(LLAMA, 7, 5, element_bytes=4, recompute="full")
    assert layer_input.num_bytes == 7 * 5 * LLAMA.dim * 4


def test_flash_attention_keeps_nothing_that_grows_with_the_square() -> None:
    shape = gpt(24, 3)
    assert layer_terms(shape, 7, attention="flash") == layer_terms(shape, 7, recompute="selective")
    doubled = total(layer_terms(LLAMA, 14, statistics=True))
    assert doubled == 2 * total(layer_terms(LLAMA, 7, statistics=True))
    no_dropout = layer_terms(LLAMA, 7, attention="unfused")
    assert total(no_dropout) - total(layer_terms(LLAMA, 7)) == 2 * LLAMA.num_heads * 7 * 7


def test_key_value_heads_are_split_no_further_than_one_a_rank() -> None:
    shape = LLAMA.with_changes(num_heads=8, num_kv_heads=2, dim=64)
    layout = ParallelLayout(tp=8)
    sizes = {t.name: (t.num_bytes, t.bytes_on_rank(layout)) for t in layer_terms(shape, 16)}
    whole, on_rank = sizes["keys"]
    assert on_rank == whole // 2
    whole, on_rank = sizes["queries"]
    assert on_rank == whole // 8


def test_context_parallelism_splits_all_and_rounds_up() -> None:
    layout = ParallelLayout(cp=3)
    for term in [*layer_terms(LLAMA, 21), *output_terms(LLAMA, 21)]:
        assert term.bytes_on_rank(layout) == -(-term.num_bytes // 3)
    assert SavedTerm("mlp", "x", 7).bytes_on_rank(layout) == 3


def test_outside_the_layers_as_in_section_4_3_of_the_paper() -> None:
    shape, seq_len, batch = gpt(24, 3), 7, 2
    sbh = seq_len * batch * shape.dim
    terms = output_terms(shape, seq_len, batch)
    assert total(terms) == sbh + 4 * sbh + 4 * seq_len * batch * shape.vocab_size
    assert [term.part for term in terms] == ["embedding", "norms", "head", "logits"]
    assert total(output_terms(shape.with_changes(dropout=False), seq_len, batch)) == (
        4 * sbh + 4 * seq_len * batch * shape.vocab_size
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(seq_len=0), "seq_len is 0: expected a whole number"),
        (dict(seq_len=8, microbatch_size=1.5), "microbatch_size is 1.5"),
        (dict(seq_len=8, element_bytes=0), "element_bytes is 0"),
        (dict(seq_len=8, attention="paged"), "attention is 'paged'; expected \"flash\""),
        (dict(seq_len=8, kernels="triton"), "kernels is 'triton'; expected \"fused\""),
        (dict(seq_len=8, recompute="some"), "recompute is 'some'; expected one of none"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_terms(LLAMA, **arguments)
    with pytest.raises(IndexError, match="no layer 3"):
        layer_terms(LLAMA, 8, index=3)


def test_the_fused_layer_computes_what_the_eager_one_does() -> None:
    shape = LLAMA.with_changes(qk_norm=True)
    fused, eager = (reference.LlamaLayer(shape, fused=flag).double() for flag in (True, False))
    eager.load_state_dict(fused.state_dict())
    x = torch.randn(2, 9, shape.dim, dtype=torch.float64)
    table = rope_cos_sin(torch.arange(9), shape.head_dim, 1e4, torch.float64)
    for model in (fused, eager):
        model(x, table).square().sum().backward()
    for ours, theirs in zip(fused.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.float(), theirs.grad.float(), rtol=1e-4, atol=1e-4)
