"""Presets against published counts, config files and real decoders on the meta device."""

from __future__ import annotations

import doctest

import pytest
import torch

from playbook_utils.model import Decoder, DecoderConfig, num_params
from playbook_utils.predict import flops, hardware, layers, presets, shapes
from playbook_utils.predict.hf_config import read_config
from playbook_utils.predict.presets import ALIASES, PRESETS, gpt_style, preset
from playbook_utils.predict.shapes import ModelShape
from tests.predict.configs import CONFIGS, NUM_PARAMS


@pytest.mark.parametrize("name", NUM_PARAMS)
def test_parameters_are_the_published_number(name: str) -> None:
    assert preset(name).num_params == NUM_PARAMS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_presets_are_their_config_files(name: str) -> None:
    assert preset(name) == read_config(CONFIGS[name])[0]


def test_gpt_3_is_a_formula() -> None:
    """Brown et al. 2020 print no exact count; 174.6e9 is that of its table of sizes."""
    h, layers = 12288, 96
    expected = 50257 * h + 2048 * h + layers * (12 * h * h + 13 * h) + 2 * h
    assert preset("gpt-3-175b").num_params == expected == 174_604_259_328


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("book-1b", 1_342_177_280),
        ("book-3b", 3_573_547_008),
        ("book-8b", 8_858_370_048),
        ("book-80b", 79_993_765_888),
    ],
)
def test_book_models_have_the_books_sizes_but_for_norms(name: str, weights: int) -> None:
    parts = preset(name).params_by_part()
    assert sum(parts.values()) - parts["norms"] == weights
    assert parts["norms"] == (2 * preset(name).num_layers + 1) * preset(name).dim


@pytest.mark.parametrize(
    ("name", "active"),
    [("mixtral-8x7b", 12_879_925_248), ("deepseek-v3", 37_552_297_472)],
)
def test_active_parameters(name: str, active: int) -> None:
    """Published as 12.9B and 37B."""
    assert preset(name).num_active_params == active


@pytest.mark.parametrize(
    "name", [name for name, shape in PRESETS.items() if name.startswith(("gpt", "llama", "book"))]
)
def test_a_decoder_of_the_real_size_has_as_many(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_shape(preset(name)))
    assert num_params(model) == preset(name).num_params


def test_the_courses_models_are_the_courses_models() -> None:
    assert ModelShape.from_decoder(DecoderConfig.tiny()) == preset("course-tiny")
    assert ModelShape.from_decoder(DecoderConfig.gpt_tiny()) == preset("course-gpt-tiny")


def test_names_in_any_case_and_aliases() -> None:
    assert preset(" Llama-3-8B ") is PRESETS["llama-3-8b"]
    assert preset("llama-3.1-8b") is PRESETS["llama-3-8b"]
    assert all(target in PRESETS for target in ALIASES.values())
    assert all(shape.name == name for name, shape in PRESETS.items())


def test_unknown_names_list_the_near_ones() -> None:
    with pytest.raises(ValueError, match=r"'lama-3-8b': did you mean llama-3-8b or"):
        preset("lama-3-8b")
    with pytest.raises(ValueError, match=r"'zzz': expected one of gpt2, gpt-3-175b"):
        preset("zzz")


@pytest.mark.parametrize("module", [flops, hardware, layers, presets, shapes], ids=str)
def test_examples_in_docstrings(module: object) -> None:
    found = doctest.testmod(module)  # type: ignore[arg-type]
    assert (found.failed, found.attempted > 0) == (0, True)


def test_a_name_is_text() -> None:
    with pytest.raises(TypeError, match="the name of a preset is None, a NoneType: expected str"):
        preset(None)  # type: ignore[arg-type]


def test_gpt_style_is_the_block_of_gpt_2() -> None:
    sizes = dict(dim=768, num_layers=12, num_heads=12, max_seq_len=1024, vocab_size=50257)
    assert gpt_style(**sizes) == gpt_style(**sizes, ff_dim=3072) == preset("gpt2")
    relu = gpt_style(**sizes, ff_dim=100, mlp="relu")
    assert (relu.ff_dim, relu.mlp) == (100, "relu")
