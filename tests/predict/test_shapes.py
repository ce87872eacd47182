"""Parameter counts against real modules on the meta device and against checkpoints, by tensor."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

from playbook_utils.model import Decoder, DecoderConfig, num_params
from playbook_utils.predict.presets import preset
from playbook_utils.predict.shapes import LatentAttention, ModelShape, MoEShape

TINY = ModelShape(
    vocab_size=37, dim=24, num_layers=3, num_heads=4, num_kv_heads=2, ff_dim=40, max_seq_len=11
)

CONFIGS = {
    "llama": DecoderConfig.tiny(vocab_size=37, dim=24, ff_dim=40),
    "llama tied": DecoderConfig.tiny(vocab_size=37, dim=24, ff_dim=40, tied=True),
    "llama biased": DecoderConfig.tiny(vocab_size=37, dim=24, ff_dim=40, bias=True),
    "one kv head": DecoderConfig.tiny(num_heads=8, num_kv_heads=1, num_layers=1),
    "layernorm, rope": DecoderConfig.tiny(norm="layernorm", position="rope", mlp="gelu"),
    "gpt": DecoderConfig.gpt_tiny(vocab_size=37, dim=24, num_layers=3, max_seq_len=13),
    "gpt untied": DecoderConfig.gpt_tiny(vocab_size=37, dim=24, tied=False, bias=False),
    "gpt swiglu": DecoderConfig.gpt_tiny(mlp="swiglu", ff_dim=77, dropout=0.1),
}


def on_meta(config: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


def decoder_parts(model: Decoder) -> dict[str, int]:
    """Parameters by where they sit in the module tree."""
    parts = dict.fromkeys(
        ("embedding", "positions", "attention", "mlp", "experts", "router", "norms", "head"), 0
    )
    for name, param in model.named_parameters():
        at = name.split(".")
        part = at[2] if at[0] == "layers" else at[0]
        parts["norms" if "norm" in part else part] += param.numel()
    return parts


def random_config(seed: int) -> DecoderConfig:
    draw = random.Random(seed)
    kv_heads, groups, half = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 5)
    return DecoderConfig(
        vocab_size=draw.randint(1, 99),
        dim=2 * half * kv_heads * groups,
        num_layers=draw.randint(1, 4),
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        ff_dim=draw.randint(1, 99),
        max_seq_len=draw.randint(1, 50),
        norm=draw.choice(["rmsnorm", "layernorm"]),
        mlp=draw.choice(["swiglu", "gelu"]),
        position=draw.choice(["rope", "learned"]),
        dropout=draw.choice([0.0, 0.1]),
        bias=draw.random() < 0.5,
        tied=draw.random() < 0.5,
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_parts_are_those_of_the_decoder(config: DecoderConfig) -> None:
    shape, model = ModelShape.from_decoder(config), on_meta(config)
    assert shape.params_by_part() == decoder_parts(model)
    assert shape.num_params == num_params(model)
    for index, layer in enumerate(model.layers):
        assert sum(shape.layer_params(index).values()) == num_params(layer)


@pytest.mark.parametrize("seed", range(40))
def test_parts_are_those_of_random_decoders(seed: int) -> None:
    config = random_config(seed)
    assert ModelShape.from_decoder(config).params_by_part() == decoder_parts(on_meta(config))


@pytest.mark.parametrize("seed", range(40))
def test_matmul_params_are_the_weights_of_linear_layers(seed: int) -> None:
    config = random_config(seed)
    linears = [m for m in on_meta(config).modules() if isinstance(m, nn.Linear)]
    expected = sum(linear.weight.numel() for linear in linears)  # a tied head is one of them
    assert ModelShape.from_decoder(config).num_matmul_params == expected


@pytest.mark.parametrize("seed", range(20))
def test_from_shape_takes_back_what_from_decoder_took(seed: int) -> None:
    config = random_config(seed)
    again = DecoderConfig.from_shape(ModelShape.from_decoder(config))
    assert again == config


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_the_books_formula_is_a_gpt_without_a_position_table(position: str) -> None:
    """N = h v + L (12 h^2 + 13 h) + 2 h: section 1.3."""
    h, v, layers, s = 768, 50257, 12, 1024
    shape = preset("gpt2").with_changes(position=position)
    table = s * h if position == "learned" else 0
    assert shape.num_params == h * v + layers * (12 * h * h + 13 * h) + 2 * h + table


def deepseek_v3_tensors() -> dict[str, tuple[int, ...]]:
    """Names and shapes in the published checkpoint, without layer 61 (multi-token prediction)."""
    h, heads = 7168, 128
    tensors = {"embed_tokens": (129280, h), "norm": (h,), "lm_head": (129280, h)}
    for layer in range(61):
        attention = {
            "q_a_proj": (1536, h), "q_a_layernorm": (1536,), "q_b_proj": (heads * 192, 1536),
            "kv_a_proj_with_mqa": (512 + 64, h), "kv_a_layernorm": (512,),
            "kv_b_proj": (heads * (128 + 128), 512), "o_proj": (h, heads * 128),
        }  # fmt: skip
        mlp = {"gate_proj": (18432, h), "up_proj": (18432, h), "down_proj": (h, 18432)}
        if layer >= 3:
            mlp = {"gate.weight": (256, h), "gate.e_score_correction_bias": (256,)}
            for expert in [*range(256), "shared"]:
                mlp |= {f"{expert}.{name}": (2048, h) for name in ("gate_proj", "up_proj")}
                mlp |= {f"{expert}.down_proj": (h, 2048)}
        norms = {"input_layernorm": (h,), "post_attention_layernorm": (h,)}
        tensors |= {f"{layer}.{k}": size for k, size in (attention | mlp | norms).items()}
    return tensors


def test_deepseek_v3_is_its_checkpoint_tensor_by_tensor() -> None:
    sizes = {name: torch.Size(size).numel() for name, size in deepseek_v3_tensors().items()}
    shape = preset("deepseek-v3")
    assert shape.num_params == sum(sizes.values()) == 671_026_419_200
    routed = sum(
        n for name, n in sizes.items() if name.split(".")[1:2] and name.split(".")[1].isdigit()
    )
    assert shape.params_by_part()["experts"] == routed
    # "37B activated": all but 248 of the 256 experts of each of the 58 layers.
    assert shape.num_active_params == sum(sizes.values()) - routed * 248 // 256 == 37_552_297_472
    # Gradients reach all but the correction bias, which transformers keeps as a buffer.
    buffers = sum(n for name, n in sizes.items() if name.endswith("correction_bias"))
    assert buffers == 58 * 256 == 14_848
    assert shape.num_params - buffers == 671_026_404_352


def test_deepseek_v3_layers_differ() -> None:
    shape = preset("deepseek-v3")
    assert shape.distinct_layers() == ((0, 3), (3, 58))
    assert [shape.is_moe_layer(i) for i in (0, 2, 3, 60)] == [False, False, True, True]
    assert shape.layer_params(2)["mlp"] == 3 * 7168 * 18432
    assert shape.layer_params(2)["experts"] == 0
    assert shape.layer_params(3)["mlp"] == 3 * 7168 * 2048  # the shared expert
    assert shape.layer_params(3)["router"] == 256 * 7168 + 256


def test_experts_by_hand() -> None:
    moe = MoEShape(num_experts=5, experts_per_token=2, expert_ff_dim=7)
    shape = TINY.with_changes(moe=moe)
    expert = 3 * 24 * 7
    dense = TINY.num_params - 3 * 3 * 24 * 40
    assert shape.num_params == dense + 3 * (5 * expert + 24 * 5)
    assert shape.num_active_params == dense + 3 * (2 * expert + 24 * 5)
    assert shape.num_matmul_params == TINY.num_matmul_params + 3 * (
        2 * expert + 24 * 5 - 3 * 24 * 40
    )
    assert TINY.num_active_params == TINY.num_params
    half = TINY.with_changes(moe=MoEShape(5, 2, 7, num_shared_experts=2, num_dense_layers=3))
    assert half.num_params == TINY.num_params  # no layer is left for experts
    shared = TINY.with_changes(moe=MoEShape(5, 2, 7, num_shared_experts=2))
    assert shared.num_params == shape.num_params + 3 * 2 * expert


def test_experts_without_a_gate_have_two_matrices() -> None:
    shape = TINY.with_changes(mlp="relu", moe=MoEShape(5, 2, 7))
    assert shape.layer_params()["experts"] == 5 * 2 * 24 * 7


def test_latent_attention_without_a_query_rank() -> None:
    """DeepSeek-V2-Lite: q_proj is one full matrix."""
    mla = LatentAttention(kv_rank=5, nope_head_dim=3, rope_head_dim=2, value_head_dim=4)
    shape = TINY.with_changes(mla=mla, num_kv_heads=4)
    assert shape.layer_params()["attention"] == (
        24 * 4 * 5 + 24 * (5 + 2) + 5 * 4 * (3 + 4) + 4 * 4 * 24
    )
    assert shape.layer_params()["norms"] == 2 * 24 + 5
    assert (shape.head_dim, shape.value_head_dim) == (5, 4)


def test_qwen_style_biases_and_norms() -> None:
    plain = TINY.num_params
    assert TINY.with_changes(qkv_bias=True).num_params == plain + 3 * (24 + 12 + 12)
    assert TINY.with_changes(qk_norm=True).num_params == plain + 3 * 2 * 6
    everywhere = TINY.with_changes(bias=True)
    assert everywhere.with_changes(qkv_bias=True).num_params == everywhere.num_params


def test_a_head_dim_of_its_own_changes_the_projections() -> None:
    wide = TINY.with_changes(head_dim=10)
    assert wide.layer_params()["attention"] == 24 * 10 * (4 + 2 + 2 + 4)
    assert wide.with_changes(dim=48).head_dim == 10
    assert TINY.with_changes(dim=48).head_dim == 12  # follows, as it did before
    assert TINY.with_changes(num_heads=2).head_dim == 12


def test_names_are_labels() -> None:
    named = TINY.with_changes(name="a")
    assert named.name == "a"
    assert named == TINY
    assert named.with_changes(num_layers=1).name == ""
    with pytest.raises(FrozenInstanceError):
        named.dim = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim is 0: expected a whole number of at least 1"),
        ({"vocab_size": 2.0}, "vocab_size is 2.0"),
        ({"num_layers": True}, "num_layers is True"),
        ({"max_seq_len": -1}, "max_seq_len is -1"),
        ({"head_dim": -6}, "head_dim is -6"),
        ({"head_dim": 5}, "rope rotates pairs: the rotated head size is 5, must be even"),
        ({"num_heads": 5, "num_kv_heads": 5}, "dim=24, num_heads=5: give head_dim"),
        ({"num_kv_heads": 3}, "num_heads=4, num_kv_heads=3"),
        ({"norm": "batchnorm"}, 'norm is \'batchnorm\': expected one of "rmsnorm", "layernorm"'),
        ({"mlp": "geglu"}, '"swiglu", "gelu", "relu"'),
        ({"position": "alibi"}, 'expected one of "rope", "learned"'),
        ({"tied": 1}, "tied is 1: expected True or False"),
        ({"dropout": 0.1}, "dropout is 0.1: expected True or False"),
        ({"moe": MoEShape(4, 2, 8, num_dense_layers=4)}, "moe.num_dense_layers=4"),
        ({"mla": LatentAttention(5, 3, 2, 4)}, "num_kv_heads=2"),
        ({"mla": LatentAttention(5, 3, 2, 4), "num_kv_heads": 4, "bias": True}, "bias=True"),
        (
            {"mla": LatentAttention(5, 3, 2, 4), "num_kv_heads": 4, "head_dim": 6},
            "head_dim is 6: leave it out, mla says 5",
        ),
    ],
)
def test_bad_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        TINY.with_changes(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("index", [-1, 3])
def test_a_layer_that_is_not_there(index: int) -> None:
    moe = TINY.with_changes(moe=MoEShape(5, 2, 7))
    with pytest.raises(IndexError, match=f"no layer {index}: the model has layers 0 to 2"):
        moe.layer_params(index)
    with pytest.raises(IndexError):
        TINY.layer_params(index)


@pytest.mark.parametrize(("part", "kind"), [("moe", "MoEShape"), ("mla", "LatentAttention")])
def test_parts_are_of_their_type(part: str, kind: str) -> None:
    with pytest.raises(TypeError, match=f"{part} is {{}}, a dict: expected {kind}"):
        preset("llama-3-8b").with_changes(**{part: {}})
