"""The kernels and counters of lesson 19, imported from its cells, at odd sizes against fp64.

The lesson runs them on 60 rows of 1,000; here sizes around the block's, other alphas, rows of one
number, large means, and whatever torch.compile writes for other functions.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="the lesson's kernels need Triton")
from kernels.triton import INTERPRETED

if not INTERPRETED:
    pytest.skip("Triton compiles here: CPU tensors need its interpreter", allow_module_level=True)

import triton

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from kernels.generated import triton_code
from kernels.triton.programs import watch_programs
from notebooks.fused_kernels_and_triton import (
    book_elu,
    interpret,
    layer_norm_kernel,
    layer_norm_steps,
    plain_elu,
    plain_elu_kernel,
    softmax_steps,
)

# PyTorch's compiler warns about itself.
compiles = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize("alpha", [1.0, 0.3, 2.0])
def test_elu_at_sizes_around_the_block(size: int, alpha: float) -> None:
    torch.manual_seed(size)
    x = 3 * torch.randn(size)
    expected = F.elu(x.double(), alpha).float()
    # exp(x) - 1 is wrong by a rounding of 1: 6e-8 times alpha.
    for found in (plain_elu(x, alpha), book_elu(x, alpha)):
        torch.testing.assert_close(found, expected, rtol=2e-7, atol=2e-7 * alpha)


@pytest.mark.parametrize("block", [16, 128, 4096])
def test_elu_moves_eight_bytes_a_number_whatever_the_block(block: int) -> None:
    x, y = torch.randn(1001), torch.empty(1001)
    with watch_programs(x=x, y=y) as log:
        plain_elu_kernel[(triton.cdiv(1001, block),)](x, y, 1001, 1.0, BLOCK=block)
    assert log.bytes == 8 * 1001
    assert log.lanes == 2 * block * -(-1001 // block)
    assert log.lanes - log.masked_lanes == 2 * 1001


@pytest.mark.parametrize("columns", [1, 2, 33, 64, 100])
@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_layer_norm_at_odd_widths(columns: int, mean: float) -> None:
    torch.manual_seed(columns)
    x, weight, bias = torch.randn(3, columns) + mean, torch.randn(columns), torch.randn(columns)
    y = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    layer_norm_kernel[(3,)](x, weight, bias, y, columns, 1e-5, BLOCK=block)
    exact = F.layer_norm(x.double(), (columns,), weight.double(), bias.double()).float()
    # The mean is rounded by up to 300 * 2^-24; two close columns have a deviation of 0.1 or so.
    atol = 1e-6 + mean * 2e-6
    torch.testing.assert_close(y, exact, rtol=1e-5, atol=atol)
    torch.testing.assert_close(layer_norm_steps(x, weight, bias), exact, rtol=1e-5, atol=atol)


def test_softmax_steps() -> None:
    x = 100 * torch.randn(5, 37)
    torch.testing.assert_close(softmax_steps(x), x.double().softmax(-1).float())


def square_and_more(x: Tensor) -> Tensor:
    return torch.exp(-x.square()) * x + 1


@compiles
@pytest.mark.parametrize("fn", [book_elu, square_and_more, torch.exp])
def test_what_compile_writes_runs_and_moves_the_least(fn: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(13, 11)
    y = torch.empty_like(x)
    (kernel,) = triton_code(fn, x).kernels
    with watch_programs(x=x, y=y) as log:
        interpret(kernel)[(triton.cdiv(143, 32),)](x, y, 143, XBLOCK=32)
    torch.testing.assert_close(y, fn(x))
    assert log.bytes == 8 * 143


@compiles
def test_what_compile_writes_for_layer_norm_runs() -> None:
    x, weight, bias = torch.randn(5, 37), torch.randn(37), torch.randn(37)
    y = torch.empty_like(x)
    (kernel,) = triton_code(layer_norm_steps, x, weight, bias).kernels
    interpret(kernel)[(3,)](x, weight, bias, y, 5, 37, XBLOCK=2)  # two rows a program
    torch.testing.assert_close(y, F.layer_norm(x, (37,), weight, bias))
