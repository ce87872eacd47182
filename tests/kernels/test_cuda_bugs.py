"""Mistakes a learner makes in these kernels, and what the emulator says to each.

Each bug is planted in the file's own text, so that the tests hold for what the lessons show.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import BarrierError, OutOfBoundsError, RaceError
from kernels.errors import MisalignedError, WarpError
from tests.kernels.cuda_cases import (
    COARSENED,
    CONFLICT_FREE,
    CUDA_FOLDER,
    TILED,
    VECTORISED,
    Rung,
    broken,
    ceil_div,
    line_of,
)


def launch_broken(rung: Rung, old: str, new: str, m: int, n: int, k: int, **places: int) -> None:
    kernel = getattr(broken(rung.file, old, new, **places), rung.kernel)
    a, b, c = torch.rand(m, k), torch.rand(k, n), torch.empty(m, n)
    kernel[rung.grid(m, n), rung.block](a, b, c, m, n, k)


def assert_names(error: pytest.ExceptionInfo[Exception], *parts: str | int) -> None:
    """Every text, and every number as a line of the file, is in the message."""
    message = str(error.value)
    for part in parts:
        expected = f".cu:{part}" if isinstance(part, int) else part
        assert expected in message, f"{expected!r} is missing in: {message}"


@pytest.mark.parametrize(
    "barrier",
    [
        "__syncthreads();  // all have written before anyone reads",
        "__syncthreads();  // all have read before anyone overwrites",
    ],
    ids=["before-reading", "before-overwriting"],
)
def test_a_missing_barrier_is_a_race_between_two_lines(barrier: str) -> None:
    with pytest.raises(RaceError) as error:
        launch_broken(TILED, barrier, "", 32, 32, 48)
    reads = line_of(TILED.file, "sum += a_tile[ty][k]")
    writes = [line_of(TILED.file, f"{name}_tile[ty][tx] =") for name in "ab"]
    assert_names(error, "matmul_tiled", "_tile[", "block (", "thread (", reads)
    assert any(f".cu:{line} " in str(error.value) for line in writes), error.value


@pytest.mark.parametrize("rung", [COARSENED, VECTORISED, CONFLICT_FREE], ids=lambda r: r.kernel)
def test_without_any_barrier_every_tiled_rung_is_a_race(rung: Rung) -> None:
    with pytest.raises(RaceError, match=rung.kernel):
        launch_broken(rung, "__syncthreads();", "", 64, 64, 32, count=2)


@pytest.mark.parametrize("name", ["11_softmax", "12_layernorm"])
def test_shared_slots_used_again_without_a_barrier_are_a_race(name: str) -> None:
    """The values are right on most runs, which is what makes this bug hard to find otherwise."""
    module = broken(name, "__syncthreads();  // slots may be used again", "")
    x, y = torch.rand(1, 200), torch.empty(1, 200)
    with pytest.raises(RaceError) as error:
        if name == "11_softmax":
            module.softmax_three_pass[1, 64](x, y, 1, 200)
        else:
            module.layernorm_fused[1, 64](x, x[0].clone(), x[0].clone(), y, 1e-5, 1, 200)
    writes = "slots[threadIdx.x / 32] = v"
    text = (CUDA_FOLDER / f"{name}.cu").read_text().splitlines()
    lines = [number for number, line in enumerate(text, start=1) if writes in line]
    assert_names(error, "slots[")
    assert any(f".cu:{line} " in str(error.value) for line in lines), error.value


def test_a_missing_barrier_in_the_tree_is_a_race() -> None:
    module = broken(
        "10_reduction", "        live = half;\n        __syncthreads();", "live = half;"
    )
    x, out = torch.rand(500), torch.empty(1)
    with pytest.raises(RaceError) as error:
        module.sum_shared[1, 128](x, out, 500)
    assert_names(error, "values[", line_of("10_reduction", "values[t] += values[t + half]"))


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("if (i < n)", "if (i <= n)", "100]"),
        ("if (i < n)", "", "100]"),
        ("c[i] = ", "c[i + 1] = ", "writes c[100], but the tensor c has 100 elements"),
    ],
    ids=["off-by-one", "no-guard", "shifted-store"],
)
def test_one_thread_too_many_is_out_of_bounds(old: str, new: str, place: str) -> None:
    module = broken("01_vector_add", old, new)
    a, b, c = torch.rand(100), torch.rand(100), torch.empty(100)
    with pytest.raises(OutOfBoundsError) as error:
        module.vector_add[ceil_div(100, 32), 32](a, b, c, 100)
    line = line_of("01_vector_add", "c[i] = a[i] + b[i]")
    assert_names(error, "vector_add", "block (3, 0, 0)", line, place)


@pytest.mark.parametrize(
    ("rung", "old", "new", "array"),
    [
        (TILED, "k0 + ty < K && col < N ? b", "col < N ? b", "b["),
        (TILED, "row < M && k0 + tx < K ? a", "k0 + tx < K ? a", "a["),
        (TILED, "if (row < M && col < N)", "if (col < N)", "c["),
        (COARSENED, "b_k < K && col < N ? b", "col < N ? b", "b["),
        (CONFLICT_FREE, "row0 + a_row < M ? K - (k0 + a_k) : 0", "K - (k0 + a_k)", "a["),
    ],
)
def test_a_missing_guard_reads_or_writes_out_of_bounds(
    rung: Rung, old: str, new: str, array: str
) -> None:
    with pytest.raises(OutOfBoundsError) as error:
        launch_broken(rung, old, new, 30, 30, 20)
    assert_names(error, rung.kernel, array)


def test_a_tile_that_is_too_small_is_out_of_bounds() -> None:
    with pytest.raises(OutOfBoundsError) as error:
        launch_broken(TILED, "b_tile[TILE][TILE];", "b_tile[TILE - 1][TILE];", 32, 32, 32)
    assert_names(error, "b_tile[")


def test_float4_at_an_odd_row_length_is_misaligned() -> None:
    check = "row_length % 4 == 0 && (size_t)matrix % 16 == 0"
    with pytest.raises(MisalignedError) as error:
        launch_broken(VECTORISED, check, "true", 64, 64, 31)
    assert_names(error, line_of(VECTORISED.file, "return *(const float4*)p"))


def test_leaving_before_a_barrier_is_found() -> None:
    old = "    float sum = 0.0f;\n"
    with pytest.raises(BarrierError) as error:
        launch_broken(TILED, old, f"    if (row >= M || col >= N) return;{old}", 20, 20, 20)
    assert_names(error, "matmul_tiled", line_of(TILED.file, "all have written before"))


def test_a_barrier_within_a_branch_is_found() -> None:
    old = "        live = half;\n        __syncthreads();\n"
    new = "        live = half;\n        if (t < half) __syncthreads();\n"
    module = broken("10_reduction", old, new)
    with pytest.raises(BarrierError) as error:
        module.sum_shared[1, 128](torch.rand(500), torch.empty(1), 500)
    barrier = line_of("10_reduction", "        live = half;") + 1
    assert_names(error, "sum_shared", barrier)


def test_an_early_return_that_is_not_of_the_whole_warp_stops_the_shuffle() -> None:
    module: Any = broken(
        "10_reduction",
        "    float sum = sum_of_share(x, n);\n",
        "    if (threadIdx.x >= n) return; float sum = sum_of_share(x, n);\n",
    )
    with pytest.raises(WarpError) as error:
        module.sum_shuffle[1, 64](torch.rand(50), torch.empty(1), 50)
    assert_names(error, "sum_shuffle", "takes a value from lane 18, whose thread has ended")


@pytest.mark.parametrize(("tile", "degree"), [(16, 8), (32, 32)])
def test_a_transposed_store_costs_bank_conflicts(tile: int, degree: int) -> None:
    """Lanes that write down a column of the tile are TILE floats apart, and few banks serve them.

    TILE 32: all 32 in one bank. TILE 16: a warp has 16 rows, in 2 banks, of 2 columns: 8 a bank.
    """
    module = broken(TILED.file, "a_tile[ty][tx] = row", "a_tile[tx][ty] = row", tile=tile)
    a, c = torch.rand(32, 32), torch.empty(32, 32)
    grid = ceil_div(32, tile)
    report = module.matmul_tiled[(grid, grid), (tile, tile)](a, a.clone(), c, 32, 32, 32)
    line = next(x for x in report.by_line if x.kind == "shared store" and x.array == "a_tile")
    assert line.conflict_degree == degree
    assert line.bank_conflicts == (degree - 1) * line.requests
