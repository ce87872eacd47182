"""Matrices and their two counts; sizes that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from playbook_utils.predict.layers import LatentAttention, Linear, MoEShape, mlp_linears


def test_a_linear_counts_copies_and_biases_but_multiplies_by_active_weights() -> None:
    matrix = Linear("experts", "up_proj", inputs=3, outputs=5, bias=True, copies=7, active=2)
    assert matrix.num_params == 7 * (3 * 5 + 5)
    assert matrix.num_matmul_params == 2 * 3 * 5


@pytest.mark.parametrize(("mlp", "count"), [("swiglu", 3), ("gelu", 2), ("relu", 2)])
def test_mlps(mlp: str, count: int) -> None:
    found = mlp_linears(4, 6, mlp, bias=False)
    assert sum(matrix.num_params for matrix in found) == count * 4 * 6
    assert [(m.inputs, m.outputs) for m in found[-2:]] == [(4, 6), (6, 4)]


def test_latent_attention_expands_what_it_compresses() -> None:
    mla = LatentAttention(q_rank=6, kv_rank=5, nope_head_dim=3, rope_head_dim=2, value_head_dim=4)
    sizes = {m.name: (m.inputs, m.outputs) for m in mla.linears(dim=10, num_heads=7)}
    assert sizes == {
        "q_a_proj": (10, 6),
        "q_b_proj": (6, 7 * 5),
        "kv_a_proj": (10, 5 + 2),
        "kv_b_proj": (5, 7 * (3 + 4)),
        "o_proj": (7 * 4, 10),
    }
    assert mla.num_norm_params == 6 + 5


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1), "moe.num_experts is 0"),
        ((4, 5, 1), "moe.experts_per_token is 5: expected at most num_experts=4"),
        ((4, 2, 1.5), "moe.expert_ff_dim is 1.5"),
        ((4, 2, 1, -1), "moe.num_shared_experts is -1: expected a whole number of at least 0"),
        ((4, 2, 1, 0, -1), "moe.num_dense_layers is -1"),
    ],
)
def test_bad_experts(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEShape(*sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((0, 1, 2, 1), "mla.kv_rank is 0"), ((1, 1, 2, 1, 0), "mla.q_rank is 0")],
)
def test_bad_latent_attention(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatentAttention(*sizes)


@pytest.mark.parametrize("bias", ["yes", 1, None])
def test_a_switch_is_true_or_false(bias: Any) -> None:
    with pytest.raises(ValueError, match=f"moe.router_bias is {bias!r}: expected True or False"):
        MoEShape(4, 2, 8, router_bias=bias)
