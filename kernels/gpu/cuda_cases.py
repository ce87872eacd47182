"""The files of `kernels/cuda` as cases: fp32, launched as their docstrings say.

    cuda_cases("cuda", LARGE)         # to be timed
    cuda_cases("cuda", TIMED)         # to be checked: what is timed, aligned and in whole tiles
    cuda_cases("cpu", ODD)            # to be checked, here through the emulator

Each gives one iterator a group of files, so that a group that cannot be built hides no other; a
file is compiled when its first case runs. A launch does not wait for its kernel: the time is the
kernel's.

Left out: other block sizes, TILE and COARSEN than the files' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from kernels import load
from kernels.gpu.case import Case, Tensors
from kernels.loader import Kernel

__all__ = ["LARGE", "ODD", "TIMED", "CudaSizes", "cuda_cases"]

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class CudaSizes:
    """How large the cases are."""

    elements: int
    matmul: tuple[int, int, int]
    rows: int
    columns: int


LARGE = CudaSizes(elements=1 << 26, matmul=(4096, 4096, 4096), rows=16384, columns=4096)
TIMED = CudaSizes(elements=4096, matmul=(1024, 1024, 1088), rows=300, columns=4096)
"""The same paths through the kernels as LARGE; a check in fp64 is cheap, and sums are short."""
ODD = CudaSizes(elements=1001, matmul=(70, 65, 37), rows=5, columns=333)

# file: kernel, block, side of the tile of C that a block computes
_LADDER = {
    "04_matmul_naive": ("matmul_naive", (32, 32), 32),
    "05_matmul_coalesced": ("matmul_coalesced", (32, 32), 32),
    "06_matmul_tiled": ("matmul_tiled", (16, 16), 16),
    "07_matmul_coarsened": ("matmul_coarsened", (16, 16), 64),
    "08_matmul_vectorised": ("matmul_vectorised", (16, 16), 64),
    "09_matmul_conflict_free": ("matmul_conflict_free", (16, 16), 64),
}


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@cache
def _kernel(file: str, name: str, device: str) -> Kernel:
    kernel = getattr(load(file, device=device, wait=False), name)
    assert isinstance(kernel, Kernel)
    return kernel


def _case(
    name: str, launch: Any, output: torch.Tensor, reference: Any, rivals: dict[str, Any],
    *between: torch.Tensor, **work: int,
) -> Case:  # fmt: skip
    """`launch()` writes `output`, and on its way `between`; `reference()` gives one tensor."""

    def run() -> Tensors:
        launch()
        return (output,)

    return Case(
        name,
        torch.float32,
        run,
        lambda: (reference(),),
        rivals,
        outputs=(output, *between),
        **work,
    )


def cuda_cases(device: str, sizes: CudaSizes) -> tuple[Iterator[Case], ...]:
    """One case a kernel, in the order of the ladder."""
    return (
        _elementwise(device, sizes.elements),
        _matmuls(device, sizes.matmul),
        _sums(device, sizes.elements),
        _softmaxes(device, sizes.rows, sizes.columns),
        _layer_norms(device, sizes.rows, sizes.columns),
    )


def _elementwise(device: str, n: int) -> Iterator[Case]:
    torch.manual_seed(0)
    x, y = torch.randn(n, device=device), torch.randn(n, device=device)
    out = torch.empty_like(x)
    launch = _ceil_div(n, 256), 256
    yield _case(
        "cuda vector_add",
        lambda: _kernel("01_vector_add", "vector_add", device)[launch](x, y, out, n),
        out, lambda: x.double() + y.double(), {"eager": lambda: x + y},
        moved_bytes=3 * n * _FLOAT_BYTES,
    )  # fmt: skip
    yield _case(
        "cuda elu",
        lambda: _kernel("02_elu", "elu", device)[launch](x, out, 1.3, n),
        out, lambda: F.elu(x.double(), 1.3), {"eager": lambda: F.elu(x, 1.3)},
        moved_bytes=2 * n * _FLOAT_BYTES,
    )  # fmt: skip
    even = torch.arange(n, device=device) % 2 == 0
    for name in ("divergence_bad", "divergence_good"):
        yield _case(
            f"cuda {name}",
            lambda name=name: _kernel("03_divergence", name, device)[launch](x, out, n),
            out, lambda: torch.where(even, x.double().sigmoid(), x.double().tanh()),
            {"eager": lambda: torch.where(even, x.sigmoid(), x.tanh())},
            moved_bytes=2 * n * _FLOAT_BYTES,
        )  # fmt: skip


def _matmuls(device: str, size: tuple[int, int, int]) -> Iterator[Case]:
    torch.manual_seed(0)
    M, N, K = size
    a, b = torch.randn(M, K, device=device), torch.randn(K, N, device=device)
    c = torch.empty(M, N, device=device)
    for file, (name, block, side) in _LADDER.items():
        grid = (_ceil_div(N, side), _ceil_div(M, side))

        def launch(file: str = file, name: str = name, where: Any = (grid, block)) -> None:
            _kernel(file, name, device)[where](a, b, c, M, N, K)

        yield _case(
            f"cuda {name}", launch, c, lambda: a.double() @ b.double(), {"cuBLAS": lambda: a @ b},
            flops=2 * M * N * K,
        )  # fmt: skip


def _sums(device: str, n: int) -> Iterator[Case]:
    torch.manual_seed(0)
    x = torch.rand(n, device=device)
    total = torch.zeros(1, device=device)

    def kernel(name: str) -> Kernel:
        return _kernel("10_reduction", name, device)

    def atomic() -> None:
        total.zero_()
        kernel("sum_atomic")[_ceil_div(n, 256), 256](x, total, n)

    def exact() -> torch.Tensor:
        return x.double().sum()[None]

    rivals = {"eager": lambda: x.sum()}
    # Additions one after the other lose digits as n grows; checked where n is small.
    yield _case("cuda sum_atomic", atomic, total, exact, rivals, moved_bytes=4 * n)
    blocks = 1024 if device == "cuda" else 4
    partial = torch.empty(blocks, device=device)
    for name in ("sum_shared", "sum_shuffle"):

        def tree(name: str = name) -> None:
            kernel(name)[blocks, 256](x, partial, n)
            kernel(name)[1, 256](partial, total, blocks)

        yield _case(f"cuda {name}", tree, total, exact, rivals, partial, moved_bytes=4 * n)


def _softmaxes(device: str, rows: int, columns: int) -> Iterator[Case]:
    torch.manual_seed(0)
    x = torch.randn(rows, columns, device=device)
    y = torch.empty_like(x)
    for name in ("softmax_three_pass", "softmax_online"):

        def launch(name: str = name) -> None:
            _kernel("11_softmax", name, device)[rows, 128](x, y, rows, columns)

        yield _case(
            f"cuda {name}", launch, y, lambda: x.double().softmax(-1),
            {"eager": lambda: x.softmax(-1)}, moved_bytes=2 * x.numel() * _FLOAT_BYTES,
        )  # fmt: skip


def _layer_norms(device: str, rows: int, columns: int) -> Iterator[Case]:
    torch.manual_seed(0)
    x = torch.randn(rows, columns, device=device)
    weight, bias = torch.randn(columns, device=device), torch.randn(columns, device=device)
    mean, rstd = torch.empty(rows, device=device), torch.empty(rows, device=device)
    y = torch.empty_like(x)

    def launch(name: str, *arguments: object) -> None:
        _kernel("12_layernorm", f"layernorm_{name}", device)[rows, 256](*arguments)

    def three_kernels() -> None:
        launch("mean", x, mean, rows, columns)
        launch("rstd", x, mean, rstd, 1e-5, rows, columns)
        launch("apply", x, mean, rstd, weight, bias, y, rows, columns)

    def fused() -> None:
        launch("fused", x, weight, bias, y, 1e-5, rows, columns)

    for name, run in (("three kernels", three_kernels), ("fused", fused)):
        yield _case(
            f"cuda layernorm, {name}", run, y,
            lambda: F.layer_norm(x.double(), (columns,), weight.double(), bias.double()),
            {"eager": lambda: F.layer_norm(x, (columns,), weight, bias)}, mean, rstd,
            moved_bytes=2 * x.numel() * _FLOAT_BYTES,
        )  # fmt: skip
