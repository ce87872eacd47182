"""A model, changes of it and of its layout, and the memory that follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import predict_memory
from playbook_utils.predict.precision import recipe
from playbook_utils.predict.presets import PRESETS, preset
from playbook_utils.predict.training import MOE_FIELDS, SHAPE_FIELDS, train

LLAMA = preset("llama-3-8b")


def test_is_the_prediction_for_these_settings() -> None:
    found = train(
        LLAMA,
        **{"num_layers": 40, "mlp": "gelu", "tied": True},
        **{"tp": 4, "dp": 2, "zero_stage": 1, "sequence_parallel": True},
        seq_len=8192,
        microbatch_size=3,
        precision="bf16-fp32-grads",
        optimizer_bytes=4,
        recompute="full",
        attention="unfused",
    )
    assert found.estimate == predict_memory(
        LLAMA.with_changes(num_layers=40, mlp="gelu", tied=True),
        seq_len=8192,
        microbatch_size=3,
        layout=ParallelLayout(dp=2, tp=4, zero_stage=1, sequence_parallel=True),
        precision=replace(recipe("bf16-fp32-grads"), moments_bytes=4),
        recompute="full",
        attention="unfused",
    )


@pytest.mark.parametrize("name", PRESETS)
def test_the_values_of_a_preset_are_that_preset(name: str) -> None:
    shape = preset(name)
    values = {name: getattr(shape, name) for name in SHAPE_FIELDS}
    values |= {name: getattr(shape.moe, name) for name in MOE_FIELDS if shape.moe}
    assert train(shape, seq_len=128, **values).shape == shape


def test_experts_and_latent_attention_follow_the_controls() -> None:
    mixtral = train(preset("mixtral-8x7b"), num_experts=16)
    assert mixtral.shape.moe == replace(preset("mixtral-8x7b").moe, num_experts=16)
    deepseek = train(preset("deepseek-v3"), num_heads=64, num_kv_heads=128)
    assert (deepseek.shape.num_heads, deepseek.shape.num_kv_heads) == (64, 64)


@pytest.mark.parametrize(
    ("base", "settings", "words"),
    [
        ("llama-3-8b", {"tp": 64}, ["num_heads, 32", "tp is 64"]),
        ("llama-3-8b", {"ep": 2, "dp": 2}, ["no experts"]),
        ("llama-3-8b", {"pp": 64}, ["num_layers", "pp 64"]),
        ("llama-3-8b", {"schedule": "interleaved_1f1b", "pp": 2}, ["virtual"]),
        ("llama-3-8b", {"num_heads": 30}, ["num_heads"]),
        ("llama-3-8b", {"num_kv_heads": 5}, ["num_kv_heads"]),
        ("mixtral-8x7b", {"experts_per_token": 9}, ["experts_per_token", "9"]),
        ("gpt2", {"seq_len": 2048}, ["2048", "use at most 1,024 tokens"]),
        ("llama-3-8b", {"num_layer": 3, "dim": 1024}, ["'num_layer'", "dim"]),
        ("llama-3-8b", {"num_experts": 8}, ["'num_experts'"]),
    ],
)
def test_what_is_impossible_gives_one_sentence(
    base: str, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        train(preset(base), **settings)
    sentence = str(caught.value)
    assert "\n" not in sentence and [word for word in words if word not in sentence] == []


def test_a_model_with_few_positions_starts_with_as_many_tokens() -> None:
    assert (train(LLAMA).seq_len, train(preset("gpt2")).seq_len) == (4096, 1024)
