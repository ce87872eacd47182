"""The matmul ladder: every rung equals float64 at any size and alignment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.cuda_cases import (
    COARSENED,
    CONFLICT_FREE,
    DEVICES,
    LADDER,
    TILED,
    VECTORISED,
    Rung,
    broken,
    matmul_error_bound,
)

SHAPES = [
    (1, 1, 1),
    (64, 64, 32),  # whole tiles everywhere
    (33, 31, 29),  # one beyond, one short, no multiple of 4
    (5, 132, 20),  # float4 applies, tiles do not fit
    (70, 6, 36),  # float4 for A only
    (17, 68, 3),  # float4 for B and C only
    (130, 1, 65),
]


def rung_name(rung: Rung) -> str:
    return rung.kernel + "".join(f"-{name}{value}" for name, value in rung.defines.items())


def assert_product(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    a, b, c = a.cpu(), b.cpu(), c.cpu()
    error = (c.double() - a.double() @ b.double()).abs()
    assert (error <= matmul_error_bound(a, b)).all(), f"largest error {error.max():.3g}"


def matrices(m: int, n: int, k: int, device: str) -> tuple[torch.Tensor, ...]:
    """A, B and a C full of nan, so that an element nobody writes is seen."""
    generator = torch.Generator().manual_seed(m * 10_000 + n * 100 + k)
    a, b = (torch.randn(shape, generator=generator) for shape in ((m, k), (k, n)))
    return a.to(device), b.to(device), torch.full((m, n), torch.nan, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rung", LADDER, ids=rung_name)
def test_product(rung: Rung, shape: tuple[int, int, int], device: str) -> None:
    a, b, c = matrices(*shape, device)
    rung.launch(a, b, c)
    assert_product(c, a, b)


@pytest.mark.parametrize(
    "rung",
    [
        replace(TILED, block=(8, 8), side=8, defines={"TILE": 8}),
        replace(TILED, block=(32, 32), side=32, defines={"TILE": 32}),
        replace(COARSENED, block=(8, 8), side=16, defines={"TILE": 8, "COARSEN": 2}),
        replace(VECTORISED, block=(8, 8), side=32, defines={"TILE": 8}),
        replace(VECTORISED, defines={"PAD": 4}),
        replace(CONFLICT_FREE, block=(8, 8), side=32, defines={"TILE": 8}),
        replace(CONFLICT_FREE, block=(32, 32), side=128, defines={"TILE": 32}),
    ],
    ids=rung_name,
)
def test_product_with_other_constants(rung: Rung) -> None:
    a, b, c = matrices(37, 44, 28, "cpu")
    rung.launch(a, b, c)
    assert_product(c, a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rung", LADDER, ids=rung_name)
def test_an_empty_sum_is_zero(rung: Rung, device: str) -> None:
    a, b, c = matrices(3, 5, 0, device)
    rung.launch(a, b, c)
    assert c.cpu().equal(torch.zeros(3, 5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shifted", ["a", "b", "c"])
@pytest.mark.parametrize("rung", [VECTORISED, CONFLICT_FREE], ids=rung_name)
def test_a_tensor_that_starts_off_the_grid_of_16_bytes(
    rung: Rung, shifted: str, device: str
) -> None:
    tensors = dict(zip("abc", matrices(20, 24, 36, device), strict=True))
    shape = tensors[shifted].shape
    moved = torch.zeros(shape.numel() + 1, device=device)[1:].view(shape)
    moved.copy_(tensors[shifted])
    assert moved.data_ptr() % 16 == 4
    tensors[shifted] = moved
    rung.launch(**tensors)
    assert_product(tensors["c"], tensors["a"], tensors["b"])


@pytest.mark.parametrize(
    ("rung", "old", "new"),
    [
        (TILED, "a_tile[ty][k] * b_tile[k][tx]", "a_tile[k][ty] * b_tile[k][tx]"),
        (TILED, "k < TILE; ++k", "k < TILE - 1; ++k"),
        (COARSENED, "sum[i][j] += a_regs[i] * b_regs[j]", "sum[j][i] += a_regs[i] * b_regs[j]"),
        (CONFLICT_FREE, "4 * ty ^ swizzle(k)", "4 * ty"),
    ],
    ids=["transposed", "one-short", "outer-product-transposed", "read-without-swizzle"],
)
def test_the_bound_sees_a_wrong_index(rung: Rung, old: str, new: str) -> None:
    a, b, c = matrices(40, 40, 40, "cpu")
    kernel = getattr(broken(rung.file, old, new), rung.kernel)
    kernel[rung.grid(40, 40), rung.block](a, b, c, 40, 40, 40)
    with pytest.raises(AssertionError, match="largest error"):
        assert_product(c, a, b)
