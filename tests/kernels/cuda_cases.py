"""What the tests of kernels/cuda share: devices, the matmul ladder, rounding, broken copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from kernels import load

CUDA_FOLDER = Path(kernels.__file__).parent / "cuda"

UNIT_ROUNDOFF = 2.0**-24
"""Largest relative error of one float32 operation, rounded to nearest."""

_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []
DEVICES = ["cpu", *_GPU]
"""The emulator, and the GPU where there is one."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@cache
def loaded(name: str, device: str = "cpu", defines: tuple[tuple[str, int], ...] = ()) -> Any:
    """`load`, once for each argument."""
    return load(name, device=device, defines=dict(defines))


def broken(name: str, old: str, new: str, *, count: int = 1, tile: int | None = None) -> Any:
    """The kernel file on the emulator with `old` replaced by `new`, at each of `count` places."""
    text = (CUDA_FOLDER / f"{name}.cu").read_text()
    assert text.count(old) == count, f"{old!r} stands {text.count(old)} times in {name}.cu"
    defines = {} if tile is None else {"TILE": tile}
    return load(source=text.replace(old, new), device="cpu", defines=defines)


def line_of(name: str, text: str) -> int:
    """Number of the one line of the kernel file that contains the text."""
    lines = (CUDA_FOLDER / f"{name}.cu").read_text().splitlines()
    numbers = [number for number, line in enumerate(lines, start=1) if text in line]
    assert len(numbers) == 1, f"{text!r} stands on lines {numbers} of {name}.cu"
    return numbers[0]


@dataclass(frozen=True)
class Rung:
    """One file of the matmul ladder."""

    file: str
    kernel: str
    block: tuple[int, int]
    side: int
    """Rows and columns of C that a block computes."""
    defines: dict[str, int] = field(default_factory=dict)

    def grid(self, m: int, n: int) -> tuple[int, int]:
        return ceil_div(n, self.side), ceil_div(m, self.side)

    def launch(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        """C = A B in place; the report."""
        (m, k), n = a.shape, b.shape[1]
        module = loaded(self.file, a.device.type, tuple(sorted(self.defines.items())))
        return getattr(module, self.kernel)[self.grid(m, n), self.block](a, b, c, m, n, k)

    def count(self, m: int, n: int, k: int) -> Any:
        """The report of a launch on random matrices."""
        a, b = torch.rand(m, k), torch.rand(k, n)
        return self.launch(a, b, torch.empty(m, n))


NAIVE = Rung("04_matmul_naive", "matmul_naive", (32, 32), 32)
COALESCED = Rung("05_matmul_coalesced", "matmul_coalesced", (32, 32), 32)
TILED = Rung("06_matmul_tiled", "matmul_tiled", (16, 16), 16)
COARSENED = Rung("07_matmul_coarsened", "matmul_coarsened", (16, 16), 64)
VECTORISED = Rung("08_matmul_vectorised", "matmul_vectorised", (16, 16), 64)
CONFLICT_FREE = Rung("09_matmul_conflict_free", "matmul_conflict_free", (16, 16), 64)
LADDER = [NAIVE, COALESCED, TILED, COARSENED, VECTORISED, CONFLICT_FREE]


def matmul_error_bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Largest error of each element of a float32 product, whatever the order of additions.

    K u / (1 - K u) times |A| |B|: Higham, "Accuracy and Stability of Numerical Algorithms",
    2nd edition, equation 3.13; a fused multiply-add only rounds less often.
    """
    k_u = a.shape[1] * UNIT_ROUNDOFF
    return k_u / (1 - k_u) * (a.double().abs() @ b.double().abs())
