"""Vector addition, ELU and the two ways through a branch, against float64."""

from __future__ import annotations

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

SIZES = [1, 31, 32, 33, 255, 1000, 4097]
BLOCK = 128


def run(kernel: Any, x: torch.Tensor, *scalars: float) -> tuple[torch.Tensor, Any]:
    """y of an elementwise kernel, and the report."""
    y = torch.full_like(x, torch.nan)
    n = len(x)
    return y, kernel[ceil_div(n, BLOCK), BLOCK](x, y, *scalars, n)


def samples(n: int, device: str = "cpu") -> torch.Tensor:
    """Values of both signs and of sizes from 1e-8 to 10."""
    generator = torch.Generator().manual_seed(n)
    sign = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
    return (sign * 10 ** (9 * torch.rand(n, generator=generator) - 8)).to(device)


def assert_relative(y: torch.Tensor, expected: torch.Tensor, roundings: float) -> None:
    """|y - expected| within that many unit roundoffs of |expected|."""
    error = (y.cpu().double() - expected).abs()
    allowed = roundings * UNIT_ROUNDOFF * expected.abs()
    assert (error <= allowed).all(), f"{(error / expected.abs() / UNIT_ROUNDOFF).max():.3g} u"


def gates_and_values(x: torch.Tensor) -> torch.Tensor:
    x = x.cpu().double()
    even = torch.arange(len(x)) % 2 == 0
    return torch.where(even, torch.sigmoid(x), torch.tanh(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", SIZES)
def test_vector_add_is_exact(n: int, device: str) -> None:
    a, b = samples(n, device), samples(n + 1, device)[:n]
    c = torch.full_like(a, torch.nan)
    loaded("01_vector_add", device).vector_add[ceil_div(n, BLOCK), BLOCK](a, b, c, n)
    assert c.equal(a + b)  # one rounding, the same everywhere


@pytest.mark.parametrize("n", SIZES)
def test_vector_add_counts(n: int) -> None:
    a = samples(n)
    module = loaded("01_vector_add")
    report = module.vector_add[ceil_div(n, BLOCK), BLOCK](a, a.clone(), torch.empty(n), n)
    assert (report.global_loads, report.global_stores) == (2 * n, n)
    assert (report.load_requests, report.store_requests) == (2 * ceil_div(n, 32), ceil_div(n, 32))
    # 8 floats a sector; a warp's 32 neighbours are 4 of them.
    assert (report.load_sectors, report.store_sectors) == (2 * ceil_div(n, 8), ceil_div(n, 8))
    assert (report.bytes_loaded, report.bytes_stored) == (8 * n, 4 * n)
    assert report.bytes_moved == 3 * 32 * ceil_div(n, 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize("n", SIZES)
def test_elu(n: int, alpha: float, device: str) -> None:
    x = samples(n, device)
    y, _ = run(loaded("02_elu", device).elu, x, alpha)
    wide = x.cpu().double()
    expected = torch.where(wide > 0, wide, alpha * torch.expm1(wide))
    assert_relative(y, expected, 3)  # expm1f: 1 ulp, at most 2 u; the product: 1 u


def test_elu_at_the_ends() -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, -200.0, 1e30])
    y, _ = run(loaded("02_elu").elu, x, 2.0)
    torch.testing.assert_close(y, torch.nn.functional.elu(x, 2.0), rtol=0, atol=0, equal_nan=True)


def test_elu_by_exp_minus_one_loses_its_digits_near_zero() -> None:
    naive = broken("02_elu", "expm1f(v)", "(expf(v) - 1.0f)").elu
    x = torch.tensor([-1e-6])
    expected = torch.expm1(x.double())
    y, _ = run(naive, x, 1.0)
    assert ((y.double() - expected) / expected).abs().item() > 0.01
    with pytest.raises(AssertionError, match=" u"):
        assert_relative(y, expected, 3)


@pytest.mark.parametrize("n", SIZES)
def test_elu_loads_and_stores_each_element_once(n: int) -> None:
    _, report = run(loaded("02_elu").elu, samples(n), 1.0)
    assert (report.bytes_loaded, report.bytes_stored) == (4 * n, 4 * n)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["divergence_bad", "divergence_good"])
@pytest.mark.parametrize("n", SIZES)
def test_both_ways_through_the_branch(n: int, name: str, device: str) -> None:
    x = samples(n, device)
    y, _ = run(getattr(loaded("03_divergence", device), name), x)
    # expf and tanhf: 2 ulp, at most 4 u each (CUDA C++ Programming Guide, "Mathematical
    # Functions"; the emulator's C library does better); the sum and the quotient: 1 u each.
    assert_relative(y, gates_and_values(x), 6)


def step_at(report: Any, text: str) -> Any:
    """The report on the basic blocks of the one line that contains the text."""
    (line,) = [x for x in report.by_line if x.kind == "step" and text in x.text]
    return line


def test_warps_of_one_kind_leave_no_lane_idle() -> None:
    n = 8 * BLOCK
    warps = n // 32
    _, bad = run(loaded("03_divergence").divergence_bad, samples(n))
    _, good = run(loaded("03_divergence").divergence_good, samples(n))
    assert (bad.divergent_branches, good.divergent_branches) == (warps, 0)
    for side in ("expf(-v)", "tanhf(v)"):
        in_bad, in_good = step_at(bad, side), step_at(good, side)
        assert in_bad.accesses == in_good.accesses == n // 2
        assert (in_bad.requests, in_good.requests) == (warps, warps // 2)
        assert (in_bad.inactive_lanes, in_good.inactive_lanes) == (16 * warps, 0)
    assert (bad.active_lanes < 32, good.active_lanes) == (True, 32)


def test_warps_of_one_kind_touch_every_second_float() -> None:
    n = 8 * BLOCK
    for name, sectors in (("divergence_bad", 4), ("divergence_good", 8)):
        _, report = run(getattr(loaded("03_divergence"), name), samples(n))
        assert (report.global_loads, report.global_stores) == (n, n)
        assert report.load_sectors == report.store_sectors == sectors * n // 32
