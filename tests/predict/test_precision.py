"""Bytes per parameter, against the book's table and against what PyTorch stores."""

from __future__ import annotations

import pytest
import torch

from playbook_utils.predict.book import book_facts
from playbook_utils.predict.precision import RECIPES, PrecisionRecipe, recipe


def test_recipes_reproduce_the_books_table() -> None:
    table = book_facts()["bytes_table"]
    assert len(table["rows"]) == 4
    for _, num_params, plain_gb, with_fp32_grads_gb in table["rows"]:
        for name in ("fp32", "bf16", "fp16"):
            assert num_params * recipe(name).bytes_per_param == plain_gb * 10**9
        assert num_params * recipe("bf16-fp32-grads").bytes_per_param == with_fp32_grads_gb * 10**9


@pytest.mark.parametrize(
    ("name", "dtype", "master", "buffer"),
    [
        ("fp32", torch.float32, False, False),
        ("bf16", torch.bfloat16, True, False),
        ("fp16", torch.float16, True, False),
        ("bf16-fp32-grads", torch.bfloat16, True, True),
        ("bf16-no-master", torch.bfloat16, False, False),
    ],
)
def test_recipes_are_what_a_step_of_adamw_leaves_in_memory(
    name: str, dtype: torch.dtype, master: bool, buffer: bool
) -> None:
    weight = torch.nn.Parameter(torch.ones(1, 977, dtype=dtype))
    (weight * 2).sum().backward()
    assert weight.grad is not None
    wide = torch.nn.Parameter(weight.detach().float())
    wide.grad = weight.grad.float()
    optimizer = torch.optim.AdamW([wide])
    optimizer.step()
    moments = [v for v in optimizer.state[wide].values() if v.shape == wide.shape]
    kept = [weight, weight.grad, *moments, *([wide] * master), *([wide.grad] * buffer)]
    assert sum(tensor.nbytes for tensor in kept) == 977 * recipe(name).bytes_per_param
    assert recipe(name).activation_bytes == dtype.itemsize


def test_what_zero_shards_is_split_from_what_it_does_not() -> None:
    for found in RECIPES.values():
        parts = (found.params_bytes, found.all_grads_bytes, found.optimizer_states_bytes)
        assert sum(parts) == found.bytes_per_param
    assert recipe("bf16").optimizer_states_bytes == 12  # the k of the ZeRO paper
    assert recipe("bf16-fp32-grads").all_grads_bytes == 6
    assert recipe("megatron").bytes_per_param == 18


def test_a_recipe_of_ones_own_is_taken_as_it_is() -> None:
    eight_bit = PrecisionRecipe("8-bit Adam", 2, 2, 4, 0, 2, 2)
    assert recipe(eight_bit) is eight_bit
    assert eight_bit.bytes_per_param == 10
    assert recipe("BF16") is RECIPES["bf16"]


def test_wrong_recipes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="precision is 'fp8'; expected one of fp32, bf16"):
        recipe("fp8")
    with pytest.raises(ValueError, match="grads_bytes is -2"):
        PrecisionRecipe("x", 2, -2, 4, 0, 8, 2)
    with pytest.raises(ValueError, match="activation_bytes 0; both must be at least 1"):
        PrecisionRecipe("x", 2, 2, 4, 0, 8, 0)
