"""Configurations as published, defaults where fields are absent, and refusals by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from playbook_utils.predict.hf_config import MODEL_TYPES, load_shape, read_config
from playbook_utils.predict.presets import preset
from tests.predict.configs import CONFIGS, NUM_PARAMS

IGNORED = {
    "mistral-7b": ("sliding_window",),
    "deepseek-v3": ("num_nextn_predict_layers",),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configurations(name: str, tmp_path: Path) -> None:
    shape, ignored = read_config(CONFIGS[name])
    assert shape.num_params == NUM_PARAMS[name]
    assert ignored == IGNORED.get(name, ())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    assert read_config(path) == read_config(str(path)) == read_config(tmp_path) == (shape, ignored)
    assert load_shape(path) == load_shape(str(tmp_path)) == shape


def test_every_supported_type_is_tested() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(MODEL_TYPES)


def without(name: str, *fields: str, **changes: object) -> dict[str, Any]:
    kept = {field: value for field, value in CONFIGS[name].items() if field not in fields}
    return kept | changes


@pytest.mark.parametrize(
    ("name", "field", "attribute", "expected"),
    [
        # As the classes of transformers fill them in.
        ("llama-3-8b", "num_key_value_heads", "num_kv_heads", 32),
        ("mistral-7b", "num_key_value_heads", "num_kv_heads", 8),
        ("mixtral-8x7b", "num_key_value_heads", "num_kv_heads", 8),
        ("qwen3-8b", "num_key_value_heads", "num_kv_heads", 32),
        ("qwen3-8b", "head_dim", "head_dim", 128),
        ("llama-3.2-1b", "head_dim", "head_dim", 64),
        ("llama-3.2-1b", "tie_word_embeddings", "tied", False),
        ("qwen2.5-7b", "tie_word_embeddings", "tied", False),
        ("gpt2", "tie_word_embeddings", "tied", True),
        ("gpt2", "n_positions", "max_seq_len", 1024),
        ("gpt2", "n_inner", "ff_dim", 3072),
        ("gpt2", "activation_function", "mlp", "gelu"),
        ("llama-2-7b", "hidden_act", "mlp", "swiglu"),
        ("llama-2-7b", "max_position_embeddings", "max_seq_len", 2048),
        ("mistral-7b", "max_position_embeddings", "max_seq_len", 131072),
        ("qwen3-8b", "max_position_embeddings", "max_seq_len", 32768),
        ("deepseek-v3", "max_position_embeddings", "max_seq_len", 4096),
    ],
)
def test_defaults(name: str, field: str, attribute: str, expected: object) -> None:
    absent = read_config(without(name, field))[0]
    assert getattr(absent, attribute) == expected
    assert read_config(without(name, **{field: None}))[0] == absent


def test_qwen3_has_a_head_dim_of_its_own() -> None:
    """Qwen3-0.6B: 16 heads of 128 at a width of 1,024; 596,049,920 parameters."""
    sizes = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28)
    small = without("qwen3-8b", num_attention_heads=16, tie_word_embeddings=True, **sizes)
    for config in (small, small | {"head_dim": None}):
        shape = read_config(config)[0]
        assert shape.head_dim == 128
        assert shape.num_params == 596_049_920


def test_fields_of_one_type() -> None:
    gpt = read_config(without("gpt2", n_inner=100, activation_function="relu"))[0]
    assert (gpt.ff_dim, gpt.mlp, gpt.dropout) == (100, "relu", True)
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0)
    assert not read_config(without("gpt2", **rates))[0].dropout
    assert read_config(without("gpt2", **rates | {"embd_pdrop": 0.1}))[0].dropout
    assert read_config(without("gpt2", "n_embd", hidden_size=768))[0] == preset("gpt2")
    biased = read_config(without("llama-3-8b", attention_bias=True, mlp_bias=True))[0]
    assert biased.bias
    assert biased.norm_params == 4096  # RMSNorm has none
    full = read_config(without("deepseek-v3", q_lora_rank=None))[0]
    assert full.mla is not None
    assert full.mla.q_rank is None
    for field in ("first_k_dense_replace", "n_shared_experts", "q_lora_rank"):
        absent = read_config(without("deepseek-v3", field))[0]
        assert absent == preset("deepseek-v3"), field  # the class's defaults are V3's own
    whole = read_config(without("deepseek-v3", n_shared_experts=0))[0]
    assert whole.moe is not None and whole.moe.shared_ff_dim == 0
    named = without("deepseek-v3", qk_head_dim=192, is_encoder_decoder=False, pruned_heads={})
    assert read_config(named)[0] == preset("deepseek-v3")
    greedy = read_config(without("deepseek-v3", topk_method="greedy"))[0]
    assert greedy.num_params == preset("deepseek-v3").num_params - 58 * 256


def test_what_may_change_the_cost_is_named() -> None:
    odd = without(
        "qwen3-8b",
        use_sliding_window=True,
        sliding_window=4096,
        layer_types=["sliding_attention", "full_attention"],
        attention_dropout=0.1,
        num_lora_adapters=3,
        nothing=None,
        _private=1,
        torch_dtype="float32",
    )
    shape, ignored = read_config(odd)
    assert set(ignored) == {
        "sliding_window", "layer_types", "attention_dropout", "num_lora_adapters",
    }  # fmt: skip
    assert shape == preset("qwen3-8b")
    assert read_config(without("qwen3-8b", layer_types=["full_attention"] * 36))[1] == ()
    assert read_config(without("qwen3-8b", sliding_window=4096))[1] == ()  # switched off


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type is missing: expected one of deepseek_v3, gpt2, llama, mistral, mixtral"),
        (without("gpt2", model_type="bert"), "model_type is 'bert': expected one of"),
        (without("gpt2", model_type=["gpt2"]), r"model_type is \['gpt2'\]"),
        (without("llama-3-8b", "hidden_size"), "hidden_size is missing: expected a whole number"),
        (without("llama-3-8b", "vocab_size"), "vocab_size is missing"),
        (without("llama-3-8b", hidden_size="4096"), "hidden_size is '4096': expected a whole"),
        (without("llama-3-8b", hidden_size=4096.0), "hidden_size is 4096.0: expected a whole"),
        (without("llama-3-8b", hidden_size=-4096), "hidden_size is -4096: expected .* from 1 to"),
        (without("llama-3-8b", num_hidden_layers=True), "num_hidden_layers is True"),
        (without("llama-3-8b", intermediate_size=10**12), "intermediate_size is 1000000000000"),
        (without("llama-3-8b", num_key_value_heads=5), "num_attention_heads is 32: expected a mul"),
        (without("llama-3-8b", num_attention_heads=24), "hidden_size is 4096: expected a multiple"),
        (without("llama-3-8b", tie_word_embeddings="no"), "tie_word_embeddings is 'no': expected"),
        (without("llama-3-8b", hidden_act="relu"), "hidden_act is 'relu': expected one of silu"),
        (without("llama-3-8b", attention_bias=True), "attention_bias is True and mlp_bias is Fal"),
        (without("llama-3-8b", attention_dropout=1.5), "attention_dropout is 1.5: expected a numb"),
        (without("llama-3-8b", head_dim=63), "must be even"),
        (without("llama-3-8b", layer_types=3), "layer_types is 3: expected a list"),
        (without("qwen3-8b", attention_bias=True), "attention_bias is true: expected false"),
        (without("mixtral-8x7b", num_experts_per_tok=9), "num_experts_per_tok is 9: .* 1 to 8"),
        (without("mixtral-8x7b", "num_local_experts"), "num_local_experts is missing"),
        (without("gpt2", n_head=7), "n_embd is 768: expected a multiple of n_head=7"),
        (without("gpt2", hidden_size=64), "n_embd is 768 but hidden_size is 64"),
        (without("gpt2", attn_pdrop=float("nan")), "attn_pdrop is nan: expected a number"),
        (without("gpt2", activation_function="tanh"), "activation_function is 'tanh'"),
        (without("gpt2", add_cross_attention=True), "add_cross_attention is true"),
        (without("deepseek-v3", num_key_value_heads=1), "num_key_value_heads is 1: expected num_"),
        (without("deepseek-v3", moe_layer_freq=2), "moe_layer_freq is 2: expected 1"),
        (without("deepseek-v3", topk_method="best"), "topk_method is 'best'"),
        (without("deepseek-v3", first_k_dense_replace=62), "first_k_dense_replace is 62: .* to 61"),
        (without("deepseek-v3", "kv_lora_rank"), "kv_lora_rank is missing"),
        (without("deepseek-v3", qk_head_dim=128), r"qk_head_dim is 128: expected .* = 192"),
        (without("gpt2", is_encoder_decoder=True), "is_encoder_decoder is true: expected false"),
        (without("gpt2", pruned_heads={"1": [0, 2]}), r"pruned_heads is \{'1': .*expected none"),
    ],
)
def test_refusals_name_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(config)


JUNK = (
    0, -1, 2.5, 10**30, True, "", "x" * 500, [], {}, [1], {"a": 1}, float("nan"), float("inf"),
)  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_junk_is_read_or_refused_but_nothing_else(name: str) -> None:
    draw = random.Random(name)
    for field in CONFIGS[name]:
        for junk in JUNK:
            config = without(name, **{field: junk})
            if draw.random() < 0.3:
                config.pop(draw.choice(list(config)))
            try:
                shape, _ = read_config(config)
            except ValueError as error:
                assert "expected" in str(error) or "must" in str(error)
                assert len(str(error)) < 400
            else:
                assert shape.num_params > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"[1]", "holds a list: expected a JSON object"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_files_that_are_no_configuration(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_config(path)


def test_paths_and_names(tmp_path: Path) -> None:
    assert load_shape("Llama-3.1-8B") is preset("llama-3-8b")
    with pytest.raises(ValueError, match=r"no file '.*config.json': expected the path"):
        read_config(tmp_path)
    with pytest.raises(ValueError, match=r"no file 'nowhere/config.json'"):
        load_shape("nowhere/config.json")
    with pytest.raises(ValueError, match=r"'llama-9': did you mean .*; no file of that name"):
        load_shape("llama-9")


def test_names_of_shapes() -> None:
    assert read_config(CONFIGS["llama-2-7b"])[0].name == "Llama-2-7b-hf"
    assert read_config(CONFIGS["gpt2"])[0].name == "gpt2"
