"""Triton's matrix products: grouped ordering, and FP8 with block scales."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton import INTERPRETED
from kernels.triton import matmul as matmul_module
from kernels.triton.fp8_matmul import (
    dequantize,
    fp8_matmul,
    quantize_activations,
    quantize_weights,
)
from kernels.triton.matmul import matmul, tile_of
from tests.kernels.triton_reference import DTYPES, agree, assert_near, randn, strided

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU, `make gpu` checks the kernels")


@triton.jit
def _order_kernel(order_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    tile_m, tile_n = tile_of(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    tl.store(order_ptr + 2 * tl.program_id(0), tile_m)
    tl.store(order_ptr + 2 * tl.program_id(0) + 1, tile_n)


def _order(tiles_m: int, tiles_n: int, group_m: int) -> list[tuple[int, int]]:
    order = torch.empty(tiles_m * tiles_n, 2, dtype=torch.int32)
    _order_kernel[(tiles_m * tiles_n,)](order, tiles_m, tiles_n, GROUP_M=group_m)
    return [(int(m), int(n)) for m, n in order]


class TestOrder:
    @pytest.mark.parametrize("tiles", [(1, 1), (5, 3), (8, 4), (9, 2)])
    def test_every_tile_once(self, tiles: tuple[int, int]) -> None:
        assert sorted(_order(*tiles, 4)) == [
            (m, n) for m in range(tiles[0]) for n in range(tiles[1])
        ]

    def test_down_a_group_then_right(self) -> None:
        """Two rows of tiles, then the one that is left."""
        assert _order(3, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]

    def test_fewer_tiles_to_read(self) -> None:
        """8 programs of an 8 x 8 grid at once: 1 + 8 strips in rows, 4 + 2 in groups of 4."""

        def strips(order: list[tuple[int, int]]) -> int:
            return len({m for m, _ in order[:8]}) + len({n for _, n in order[:8]})

        assert strips(_order(8, 8, 1)) == 9
        assert strips(_order(8, 8, 4)) == 6


class TestMatmul:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", [(1, 1, 1), (70, 65, 130), (64, 128, 96)])
    def test_agrees_with_fp64(self, size: tuple[int, int, int], dtype: torch.dtype) -> None:
        """Errors of K additions grow like sqrt(K) steps at most of the largest sum: 130 -> 11."""
        M, N, K = size
        a, b = randn(dtype, M, K), randn(dtype, K, N, seed=1)
        agree(matmul, torch.matmul, a, b, roundings=12)

    def test_transposed_views_are_not_copied_but_right(self) -> None:
        a, b = randn(torch.float32, 50, 30).t(), randn(torch.float32, 70, 50).t()
        agree(matmul, torch.matmul, a, b, roundings=12)

    def test_only_the_gradients_that_are_wanted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        products: list[tuple[int, ...]] = []
        multiply = matmul_module._multiply

        def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            products.append((*a.shape, b.shape[1]))
            return multiply(a, b)

        monkeypatch.setattr(matmul_module, "_multiply", counted)
        a, b = randn(torch.float32, 2, 3), randn(torch.float32, 3, 4).requires_grad_()
        matmul(a, b).sum().backward()
        assert products == [(2, 3, 4), (3, 2, 4)]
        matmul(a.requires_grad_(), b.detach()).sum().backward()
        assert products[2:] == [(2, 3, 4), (2, 4, 3)]

    def test_empty(self) -> None:
        assert matmul(torch.ones(0, 3), torch.ones(3, 2)).shape == (0, 2)
        assert torch.equal(matmul(torch.ones(2, 0), torch.ones(0, 2)), torch.zeros(2, 2))

    def test_refuses_what_does_not_fit(self) -> None:
        a = torch.ones(2, 3)
        with pytest.raises(ValueError, match=r"a's columns \(3\) equal to b's rows \(2\)"):
            matmul(a, a)
        with pytest.raises(ValueError, match=r"b is torch.float16, a torch.float32"):
            matmul(a, a.t().half())
        with pytest.raises(ValueError, match=r"b has shape \(3,\): expected 2 dimension"):
            matmul(a, torch.ones(3))
        with pytest.raises(ValueError, match=r"a is torch.float64"):
            matmul(a.double(), a.double().t())


def _reference_quantize(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block, in PyTorch."""
    scales = torch.ones(-(-x.shape[0] // rows), -(-x.shape[1] // 128))
    y = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = slice(i * rows, (i + 1) * rows), slice(j * 128, (j + 1) * 128)
            block = x[where].float()
            if block.abs().max() > 0:
                tiny = torch.finfo(torch.float32).tiny
                scales[i, j] = (block.abs().max() / 448).clamp_min(tiny)
            y[where] = (block / scales[i, j]).to(torch.float8_e4m3fn)
    return y, scales


def _strided(x: torch.Tensor) -> torch.Tensor:
    """`strided`, of e4m3 too, which PyTorch moves only as bytes."""
    if x.dtype == torch.float8_e4m3fn:
        return strided(x.view(torch.uint8)).view(torch.float8_e4m3fn)
    return strided(x)


class TestQuantize:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("quantize", "rows"), [(quantize_activations, 1), (quantize_weights, 128)]
    )
    def test_is_the_reference(
        self,
        quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        rows: int,
        dtype: torch.dtype,
    ) -> None:
        """Bit for bit; the last blocks are cut off, one block is zero, one has an outlier."""
        x = randn(dtype, 131, 300)
        x[:, :128] = 0
        x[3, 200] = 1000
        y, scales = quantize(strided(x))
        expected_y, expected_scales = _reference_quantize(x, rows)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(y.view(torch.uint8), expected_y.view(torch.uint8))

    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
    def test_tiny_blocks_and_infinities(self) -> None:
        """A scale of 0 would make infinities of tiny blocks; an infinity spoils its own block."""
        x = torch.ones(3, 256)
        x[0, :128] = 1e-44
        x[1, 5], x[2, 5] = float("inf"), float("nan")
        y, scales = quantize_activations(x)
        assert bool((scales > 0).all()) and float(scales[0, 0]) == torch.finfo(torch.float32).tiny
        assert not y[0, :128].float().any()
        assert bool(y.float()[1:, 5].isnan().all())
        torch.testing.assert_close(dequantize(y, scales)[:, 128:], x[:, 128:].double())

    def test_error_of_a_number(self) -> None:
        """At most half a step of three bits, 1/16; or half of 2^-9 scales where steps are even."""
        x = randn(torch.float32, 40, 256)
        y, scales = quantize_activations(x)
        spread = scales.double().repeat_interleave(128, 1)
        error = (dequantize(y, scales) - x).abs()
        assert bool((error <= 1.001 * torch.maximum(x.abs() / 16, spread * 2**-10)).all())

    def test_an_outlier_spoils_its_own_block_alone(self) -> None:
        x = 1e-3 * randn(torch.float32, 1, 256)
        x[0, 0] = 1e4
        y, scales = quantize_activations(x)
        back = dequantize(y, scales)
        assert int((back[0, 1:128] == 0).sum()) == 127  # all flushed, beside the outlier
        assert float((back[0, 128:] - x[0, 128:]).abs().max()) < 2e-4

    def test_refuses_what_does_not_fit(self) -> None:
        with pytest.raises(ValueError, match=r"weight has shape \(3,\): expected 2 dimension"):
            quantize_weights(torch.ones(3))


class TestFp8Matmul:
    @pytest.mark.parametrize("out_dtype", DTYPES)
    @pytest.mark.parametrize("size", [(5, 9, 40), (70, 200, 300)])
    def test_agrees_with_the_dequantised_product(
        self, size: tuple[int, int, int], out_dtype: torch.dtype
    ) -> None:
        """Products of e4m3 numbers are exact in fp32; sums of 300 lose about sqrt(300) steps."""
        M, N, K = size
        a, a_scales = quantize_activations(randn(torch.float32, M, K))
        weight = randn(torch.float32, N, K, seed=1)
        weight[: N // 2] *= 30  # blocks of weights whose scales differ
        b, b_scales = quantize_weights(weight)
        exact = dequantize(a, a_scales) @ dequantize(b, b_scales).T
        found = fp8_matmul(*map(_strided, (a, a_scales, b, b_scales)), out_dtype)
        row_scale = exact.abs().amax(0, keepdim=True)
        assert found.dtype == out_dtype
        assert_near(found, exact, 17, "the FP8 product", scale=row_scale)

    def test_error_against_the_unquantised_product(self) -> None:
        """Two rounded factors of relative error e = 2^-4 / sqrt(3) at worst on average: e sqrt(2).

        Half a step is 2^-4 for a mantissa of 1.0 and 2^-5 for one near 2.0, and an error is
        anywhere between -half and half, which makes about 0.026 for a factor, 0.037 for a product.
        """
        x, weight = randn(torch.float32, 64, 512), randn(torch.float32, 96, 512, seed=1)
        found = fp8_matmul(*quantize_activations(x), *quantize_weights(weight), torch.float32)
        exact = x.double() @ weight.double().T
        assert 0.03 < float((found - exact).norm() / exact.norm()) < 0.045

    def test_refuses_what_does_not_fit(self) -> None:
        a, a_scales = quantize_activations(torch.ones(4, 256))
        b, b_scales = quantize_weights(torch.ones(130, 256))
        with pytest.raises(ValueError, match=r"a is torch.float32: expected torch.float8_e4m3fn"):
            fp8_matmul(torch.ones(4, 256), a_scales, b, b_scales)
        with pytest.raises(ValueError, match=r"a_scales has shape \(4, 1\).*expected \(4, 2\)"):
            fp8_matmul(a, a_scales[:, :1], b, b_scales)
        with pytest.raises(ValueError, match=r"b_scales has shape \(1, 2\).*expected \(2, 2\)"):
            fp8_matmul(a, a_scales, b, b_scales[:1])
        with pytest.raises(ValueError, match=r"\(M, K\) and \(N, K\)"):
            fp8_matmul(a, a_scales, b[:, :128], b_scales)
        with pytest.raises(ValueError, match=r"out_dtype is torch.float64"):
            fp8_matmul(a, a_scales, b, b_scales, torch.float64)
