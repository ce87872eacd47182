"""Reduction, softmax and LayerNorm: values against float64, and what they read and write."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.cuda_cases import (
    DEVICES,
    UNIT_ROUNDOFF,
    broken,
    ceil_div,
    loaded,
)

SIZES = [1, 2, 31, 33, 100, 1000, 5003]
ROWS = [(1, 1), (3, 31), (2, 32), (5, 100), (4, 129), (2, 1000)]
BLOCK = 64
EPS = 1e-5


def random(*shape: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=generator).to(device)


def additions(n: int, threads: int) -> int:
    """Most additions that one number goes through: a thread's share, then two trees of a block."""
    return ceil_div(n, threads) + 2 * 10


# --- 10_reduction ---


def partial_sums(kernel: Any, x: torch.Tensor, grid: int, block: int) -> tuple[torch.Tensor, Any]:
    out = torch.full((grid,), torch.nan, device=x.device)
    return out, kernel[grid, block](x, out, len(x))


def assert_sum(total: torch.Tensor, x: torch.Tensor, roundings: int) -> None:
    """Each number is rounded at most that often on its way (Higham, section 4.2)."""
    x = x.cpu().double()
    error = (total.cpu().double() - x.sum()).abs().item()
    assert error <= 1.001 * roundings * UNIT_ROUNDOFF * x.abs().sum().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", SIZES)
def test_sum_atomic(n: int, device: str) -> None:
    x, total = random(n, device=device), torch.zeros(1, device=device)
    loaded("10_reduction", device).sum_atomic[ceil_div(n, BLOCK), BLOCK](x, total, n)
    assert_sum(total, x, n)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "block"),
    [("sum_shared", b) for b in (1, 7, 32, 64, 100, 1024)]
    + [("sum_shuffle", b) for b in (32, 64, 96, 1024)],
)
@pytest.mark.parametrize("n", SIZES)
def test_sum_in_two_launches(name: str, block: int, n: int, device: str) -> None:
    kernel = getattr(loaded("10_reduction", device), name)
    x = random(n, device=device)
    partials, _ = partial_sums(kernel, x, 3, block)
    total, _ = partial_sums(kernel, partials, 1, block)
    assert_sum(total, x, additions(n, 3 * block) + additions(3, block))


def test_shuffles_leave_one_shared_value_a_warp() -> None:
    n, grid, block = 5003, 3, 256
    module = loaded("10_reduction")
    _, tree = partial_sums(module.sum_shared, random(n), grid, block)
    _, shuffle = partial_sums(module.sum_shuffle, random(n), grid, block)
    assert tree.shared_loads == grid * (2 * block - 1)  # 2 an addition, 1 for the result
    assert tree.shared_stores == grid * (2 * block - 1)  # 1 a thread, 1 an addition
    assert shuffle.shared_loads == shuffle.shared_stores == grid * block // 32
    for report in (tree, shuffle):
        assert (report.global_loads, report.global_stores) == (n, grid)
        assert report.bank_conflicts == 0


# --- 11_softmax ---


def softmax(name: str, x: torch.Tensor, module: Any = None) -> tuple[torch.Tensor, Any]:
    rows, cols = x.shape
    y = torch.full_like(x, torch.nan)
    kernel = getattr(module or loaded("11_softmax", x.device.type), name)
    return y, kernel[rows, BLOCK](x, y, rows, cols)


def assert_softmax(y: torch.Tensor, x: torch.Tensor) -> None:
    """Relative error: of two exponentials, of the sum, of the quotient.

    x - m is rounded once, which e^(...) turns into a relative error of u |x - m|; expf itself has
    2 ulp, at most 4 u. The online sum is corrected by one more exponential for each new maximum:
    at most as many as a thread has columns, whose arguments add up to at most the row's range.
    """
    x, y = x.cpu().double(), y.cpu().double()
    spread = (x.max(1).values - x.min(1).values).max().item()
    share = ceil_div(x.shape[1], BLOCK)
    one_exponential, corrections = spread + 4, spread + 5 * (share + 1)
    roundings = 2 * one_exponential + corrections + additions(x.shape[1], BLOCK) + 1
    torch.testing.assert_close(
        y, torch.softmax(x, 1), rtol=roundings * UNIT_ROUNDOFF, atol=2.0**-126, equal_nan=True
    )


SOFTMAXES = ["softmax_three_pass", "softmax_online"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax(name: str, shape: tuple[int, int], device: str) -> None:
    x = 3 * random(*shape, device=device)
    assert_softmax(softmax(name, x)[0], x)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax_of_rising_and_of_huge_values(name: str) -> None:
    rising = torch.arange(200.0).repeat(2, 1)  # a new maximum at every column
    assert_softmax(softmax(name, rising)[0], rising)
    huge = torch.tensor([[1e30, 1e30, -1e30], [200.0, 100.0, 0.0]])
    torch.testing.assert_close(softmax(name, huge)[0], torch.softmax(huge, 1))


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax_of_masked_values(name: str) -> None:
    inf = torch.inf
    x = torch.tensor([[-inf, 1.0, 2.0], [-inf, -inf, 5.0], [0.0, -inf, -inf], [-inf] * 3])
    y, _ = softmax(name, x)
    torch.testing.assert_close(y, torch.softmax(x, 1), equal_nan=True)
    wide = torch.full((2, 300), -inf)
    wide[:, 299] = 1.0  # most threads see nothing but -inf
    assert softmax(name, wide)[0].equal(torch.softmax(wide, 1))


@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_online_softmax_reads_twice_instead_of_three_times(shape: tuple[int, int]) -> None:
    elements = math.prod(shape)
    for name, reads in zip(SOFTMAXES, (3, 2), strict=True):
        _, report = softmax(name, random(*shape))
        assert (report.global_loads, report.global_stores) == (reads * elements, elements)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("softmax_online", "my_sum *= expf(my_max - v);", ""),
        ("softmax_online", "my_sum *= my_max == -INFINITY ? 0.0f : expf(my_max - row_max);", ""),
        ("softmax_three_pass", "row_max = block_max(row_max, slots);", "row_max = 0.0f;"),
    ],
    ids=["no-rescale", "no-rescale-between-threads", "no-maximum"],
)
def test_the_bound_sees_a_wrong_softmax(name: str, old: str, new: str) -> None:
    x = torch.linspace(0, 200, 130).repeat(2, 1)
    y, _ = softmax(name, x, broken("11_softmax", old, new))
    with pytest.raises(AssertionError):
        assert_softmax(y, x)


# --- 12_layernorm ---


def unfused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[Any, list[Any]]:
    rows, cols = x.shape
    module = loaded("12_layernorm", x.device.type)
    mean, rstd = (torch.full((rows,), torch.nan, device=x.device) for _ in range(2))
    y = torch.full_like(x, torch.nan)
    reports = [
        module.layernorm_mean[rows, BLOCK](x, mean, rows, cols),
        module.layernorm_rstd[rows, BLOCK](x, mean, rstd, EPS, rows, cols),
        module.layernorm_apply[rows, BLOCK](x, mean, rstd, weight, bias, y, rows, cols),
    ]
    return y, reports


def fused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, module: Any = None
) -> tuple[Any, list[Any]]:
    rows, cols = x.shape
    module = module or loaded("12_layernorm", x.device.type)
    y = torch.full_like(x, torch.nan)
    return y, [module.layernorm_fused[rows, BLOCK](x, weight, bias, y, EPS, rows, cols)]


def inputs(
    rows: int, cols: int, offset: float = 0.0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        random(rows, cols, device=device) + offset,
        random(cols, device=device) + 1,
        random(cols, 1, device=device).flatten() - 0.5,
    )


def assert_layernorm(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> None:
    """The error of the mean, of its subtraction, of rstd, and of the last three operations.

    The mean is wrong by s u mean|x|, with s the additions and the division; that shifts all of the
    row, and adds its square to the variance. rstd carries half the relative error of the
    variance, s + 3 roundings.
    """
    x, y, weight, bias = (t.cpu().double() for t in (x, y, weight, bias))
    u, s = UNIT_ROUNDOFF, additions(x.shape[1], BLOCK) + 1
    rstd = 1 / torch.sqrt(x.var(1, correction=0, keepdim=True) + EPS)
    mean = x.mean(1, keepdim=True)
    shift = s * u * x.abs().mean(1, keepdim=True)
    scaled = ((x - mean) * rstd).abs()
    error = (shift + u * (x - mean).abs()) * rstd
    error += scaled * ((s + 3) * u + (shift * rstd) ** 2)
    error = error * weight.abs() + 2 * u * (scaled * weight.abs() + bias.abs())
    error += u * (scaled * weight.abs() + bias.abs())
    expected = torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias, EPS)
    assert ((y - expected).abs() <= 1.001 * error).all(), (y - expected).abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("shape", [*ROWS, (2, 16 * BLOCK), (2, 16 * BLOCK + 70)], ids=str)
@pytest.mark.parametrize("form", [unfused, fused], ids=["unfused", "fused"])
def test_layernorm(form: Any, shape: tuple[int, int], offset: float, device: str) -> None:
    arguments = inputs(*shape, offset, device)
    y, _ = form(*arguments)
    assert_layernorm(y, *arguments)


def test_mean_of_squares_minus_squared_mean_fails_at_a_large_mean() -> None:
    shortcut = broken(
        "12_layernorm",
        "squares += i < cols ? centred * centred : 0.0f;",
        "squares += i < cols ? centred * (mine[item] + mean) : 0.0f;",  # sums to the same
    )
    close, far = inputs(3, 100), inputs(3, 100, 1000.0)
    assert_layernorm(fused(*close, module=shortcut)[0], *close)
    with pytest.raises(AssertionError):
        assert_layernorm(fused(*far, module=shortcut)[0], *far)


@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_fusing_reads_x_once(shape: tuple[int, int]) -> None:
    rows, cols = shape
    elements, threads = rows * cols, rows * BLOCK
    _, (mean, rstd, apply) = unfused(*inputs(*shape))
    _, (one,) = fused(*inputs(*shape))
    assert (mean.global_loads, mean.global_stores) == (elements, rows)
    assert (rstd.global_loads, rstd.global_stores) == (elements + threads, rows)
    assert (apply.global_loads, apply.global_stores) == (3 * elements + 2 * threads, elements)
    assert (one.global_loads, one.global_stores) == (3 * elements, elements)  # x, weight, bias
    assert one.bytes_moved < sum(report.bytes_moved for report in (mean, rstd, apply))


@pytest.mark.parametrize("cols", [16 * BLOCK - 1, 16 * BLOCK, 16 * BLOCK + 1, 16 * BLOCK + 70])
def test_columns_without_a_register_are_read_three_times(cols: int) -> None:
    beyond = max(0, cols - 16 * BLOCK)
    _, (report,) = fused(*inputs(2, cols))
    assert report.global_loads == 2 * (cols + 2 * beyond + 2 * cols)
