"""Triton's vector add and ELU, and the conversions that every kernel uses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton import INTERPRETED
from kernels.triton.elu import elu
from kernels.triton.storage import fp8_bits, fp8_for_dot, stored
from kernels.triton.vector_add import vector_add
from tests.kernels.triton_reference import DTYPES, agree, assert_near, randn

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU, `make gpu` checks the kernels")


@triton.jit
def _store_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < size)
    tl.store(y_ptr + offsets, stored(x, y_ptr.dtype.element_ty), mask=offsets < size)


@triton.jit
def _decode_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, fp8_for_dot(tl.load(x_ptr + offsets)).to(tl.float32))


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, timeout=100
    )


class TestDecision:
    def test_triton_may_be_imported_before(self) -> None:
        """As PyTorch does when it compiles: tl.max and the like are made interpreted then."""
        done = _python(
            "import torch, triton, triton.language\n"
            "from kernels.triton.softmax import softmax\n"
            "assert torch.allclose(softmax(torch.ones(1, 4)), torch.full((1, 4), 0.25))"
        )
        assert done.returncode == 0, done.stderr

    def test_a_variable_that_is_set_decides(self) -> None:
        """0 means compile; then a CPU tensor is refused before Triton looks for a driver."""
        done = _python(
            "import torch\nfrom kernels.triton.softmax import softmax\nsoftmax(torch.ones(3))",
            TRITON_INTERPRET="0",
        )
        assert "ValueError: x is on cpu: this process compiles Triton kernels" in done.stderr


class TestStorage:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_rounds_as_pytorch_does(self, dtype: torch.dtype) -> None:
        """To nearest, ties to even, over all exponents that the type has."""
        x = randn(torch.float32, 4000) * torch.logspace(-5, 4, 4000)
        ties = (2 * torch.arange(128) + 1) * 2.0**-8 + 1  # half-way between bf16 numbers
        x = torch.cat([x, ties, -ties, torch.tensor([0.0, -0.0, float("inf"), -float("inf")])])
        y = torch.empty_like(x, dtype=dtype)
        _store_kernel[(triton.cdiv(len(x), 1024),)](x, y, len(x), BLOCK=1024)
        assert torch.equal(y, x.to(dtype))

    def test_bf16_keeps_nan_and_its_whole_range(self) -> None:
        """1e-39 is a subnormal number."""
        x = torch.tensor([float("nan"), 3e38, -3e38, 1e-39, 1.2345e-30])
        y = torch.empty(5, dtype=torch.bfloat16)
        _store_kernel[(1,)](x, y, 5, BLOCK=8)
        assert y[0].isnan() and torch.equal(y[1:], x[1:].bfloat16())

    def test_e4m3_rounds_as_pytorch_does(self) -> None:
        """The whole range, subnormal numbers (steps of 2^-9 below 2^-6), NaN and infinities."""
        x = torch.cat([torch.linspace(-448, 448, 3001), torch.linspace(-0.04, 0.04, 1001)])
        x = torch.cat([x, torch.tensor([31.97, 0.0009765625, 0.0029296875])])  # a carry, two ties
        x = torch.cat([x, torch.tensor([float("nan"), float("inf"), -float("inf"), 1e38])])
        y = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        _store_kernel[(triton.cdiv(len(x), 1024),)](x, y, len(x), BLOCK=1024)
        expected = x.to(torch.float8_e4m3fn).float()
        torch.testing.assert_close(y.float(), expected, rtol=0, atol=0, equal_nan=True)
        assert int(y.float().isnan().sum()) == 1

    def test_decodes_every_e4m3_number(self) -> None:
        every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
        y = torch.empty(256)
        _decode_kernel[(1,)](fp8_bits(every), y, BLOCK=256)
        torch.testing.assert_close(y, every.float(), rtol=0, atol=0, equal_nan=True)


class TestVectorAdd:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(1,), (1024,), (7, 333)])
    def test_is_the_rounded_sum(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        x, y = randn(dtype, *shape), randn(dtype, *shape, seed=1)
        assert torch.equal(vector_add(x, y), (x.double() + y.double()).to(dtype))

    def test_takes_views_and_nothing(self) -> None:
        x = randn(torch.float32, 6, 10)
        assert torch.equal(vector_add(x.t(), x.t()), 2 * x.t())
        assert vector_add(x[:0], x[:0]).shape == (0, 10)

    def test_refuses_what_does_not_fit(self) -> None:
        x = torch.ones(3)
        with pytest.raises(ValueError, match=r"x has shape \(3,\), y \(1,\): expected one shape"):
            vector_add(x, torch.ones(1))
        with pytest.raises(ValueError, match=r"y is torch.float16, x torch.float32"):
            vector_add(x, x.half())
        with pytest.raises(ValueError, match=r"x is torch.int64: expected torch.float32 or"):
            vector_add(torch.arange(3), torch.arange(3))
        with pytest.raises(TypeError, match=r"y is a float: expected a torch.Tensor"):
            vector_add(x, 1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="y is on meta: expected a CUDA or a CPU tensor"):
            vector_add(x, x.to("meta"))


class TestElu:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_agrees_with_fp64(self, dtype: torch.dtype) -> None:
        """Relative to each element, so that the small ones count: 2 steps of fp32, then storage.

        Where the series ends, at -1/2, its missing terms and the subtraction cost most.
        """
        x = torch.cat([randn(dtype, 1500), -torch.logspace(-30, 2, 541).to(dtype)])
        x = torch.cat([x, torch.linspace(-0.55, -0.45, 1001).to(dtype)])
        exact = torch.where(x > 0, x.double(), 1.3 * torch.expm1(x.double()))
        found = elu(x, 1.3).double()
        info = torch.finfo(dtype)
        step = 2 * torch.finfo(torch.float32).eps + info.eps / 2
        allowed = exact.abs() * step + info.tiny * info.eps  # the last: subnormal numbers
        assert bool(((found - exact).abs() <= allowed).all())

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_gradients(self, dtype: torch.dtype) -> None:
        def reference(x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 0, x, 0.7 * torch.expm1(x))

        agree(lambda x: elu(x, 0.7), reference, randn(dtype, 3, 411), roundings=2)

    def test_ends(self) -> None:
        x = torch.tensor([-float("inf"), float("inf"), float("nan"), 0.0, 100.0, -1e-8])
        y = elu(x)
        assert y[:2].tolist() == [-1.0, float("inf")] and y[2].isnan()
        assert y[3:].tolist() == torch.tensor([0.0, 100.0, -1e-8]).tolist()

    def test_views(self) -> None:
        x = randn(torch.float32, 5, 8).t()
        assert_near(elu(x), torch.nn.functional.elu(x.double()), 2, "elu of a view")
