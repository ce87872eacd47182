"""Parameters on a rank, against the course's Decoder cut up by hand, parameter by parameter."""

from __future__ import annotations

import math

import pytest
import torch

from playbook_utils.model import Decoder, DecoderConfig
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.presets import PRESETS, preset
from playbook_utils.predict.shapes import ModelShape
from playbook_utils.predict.stages import layers_of
from playbook_utils.predict.weights import PARTS, kinds_in, params_on_rank

CONFIGS = (
    DecoderConfig(vocab_size=103, dim=48, num_layers=7, num_heads=12, num_kv_heads=2, ff_dim=36),
    DecoderConfig(
        vocab_size=96, dim=24, num_layers=5, num_heads=12, num_kv_heads=12, ff_dim=60,
        norm="layernorm", mlp="gelu", position="learned", bias=True, tied=True, max_seq_len=17,
    ),
)  # fmt: skip
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def cut_by_hand(config: DecoderConfig, tp: int, stage: int, layout: ParallelLayout) -> int:
    """Numbers that a rank of `stage` holds, from the names and shapes of real parameters."""
    with torch.device("meta"):
        model = Decoder(config)
    mine = {layer for chunk in layers_of(config.num_layers, layout, stage) for layer in chunk}
    first, last = stage == 0, stage == layout.pp - 1
    count = 0
    for name, param in model.named_parameters(remove_duplicate=False):
        rows, *columns = param.shape
        pieces = name.split(".")
        if pieces[0] == "layers":
            here = int(pieces[1]) in mine
        elif pieces[0] == "head" and config.tied and layout.pp == 1:
            here = False
        else:
            here = {"embedding": first, "positions": first, "norm": last, "head": last}[pieces[0]]
        if not here:
            continue
        if pieces[0] in ("embedding", "head"):
            rows = math.ceil(rows / tp)
        elif pieces[-2] in ("k_proj", "v_proj"):
            heads = max(1, config.num_kv_heads // tp)
            rows = heads * config.head_dim
        elif pieces[-2] in COLUMNS:
            rows //= tp
        elif pieces[-2] in ("o_proj", "down_proj") and pieces[-1] == "weight":
            columns[0] //= tp
        count += rows * math.prod(columns)
    return count


@pytest.mark.parametrize("config", CONFIGS, ids=["llama", "gpt"])
@pytest.mark.parametrize("tp", [1, 2, 4, 12])
@pytest.mark.parametrize("pp", [1, 2, 5])
def test_equal_to_the_courses_decoder_cut_by_hand(config: DecoderConfig, tp: int, pp: int) -> None:
    layout, shape = ParallelLayout(tp=tp, pp=pp), ModelShape.from_decoder(config)
    layout.check(shape)
    for stage in range(pp):
        parts = params_on_rank(shape, layout, stage)
        assert tuple(parts) == PARTS
        assert sum(parts.values()) == cut_by_hand(config, tp, stage, layout)


@pytest.mark.parametrize("name", PRESETS)
def test_one_rank_holds_every_part_of_the_model(name: str) -> None:
    assert params_on_rank(preset(name), ParallelLayout(), 0) == preset(name).params_by_part()


@pytest.mark.parametrize("name", ["llama-3-70b", "deepseek-v3", "mixtral-8x7b", "llama-3.2-1b"])
def test_stages_hold_the_model_once_and_a_tied_matrix_twice(name: str) -> None:
    shape = preset(name)
    layout = ParallelLayout(pp=4, virtual_stages=3, schedule="interleaved_1f1b", num_microbatches=8)
    held = sum(sum(params_on_rank(shape, layout, stage).values()) for stage in range(4))
    assert held == shape.num_params + (shape.vocab_size * shape.dim if shape.tied else 0)


def test_experts_are_spread_and_each_is_split() -> None:
    shape = preset("mixtral-8x7b")
    plain = params_on_rank(shape, ParallelLayout(), 0)
    spread = params_on_rank(shape, ParallelLayout(dp=8, ep=4, tp=2), 0)
    assert spread["experts"] == plain["experts"] // 8 == 32 * 8 * 3 * 4096 * 14336 // 8
    assert spread["router"] == plain["router"]
    assert spread["attention"] == plain["attention"] // 2


def test_matrices_down_to_a_latent_are_whole_on_each_rank() -> None:
    shape = preset("deepseek-v3")
    assert shape.mla is not None and shape.mla.q_rank is not None
    whole = shape.num_layers * shape.dim * (shape.mla.q_rank + shape.mla.kv_rank + 64)
    plain = params_on_rank(shape, ParallelLayout(), 0)["attention"]
    split = params_on_rank(shape, ParallelLayout(tp=8), 0)["attention"]
    assert split == whole + (plain - whole) // 8


def test_kinds_of_layers_within_chunks() -> None:
    shape = preset("deepseek-v3")  # 3 dense layers, then 58 with experts
    assert kinds_in(shape, (range(0, 61),)) == [(0, 3), (3, 58)]
    assert kinds_in(shape, (range(1, 5), range(20, 22))) == [(0, 2), (3, 4)]
    assert kinds_in(shape, (range(30, 40),)) == [(3, 10)]
