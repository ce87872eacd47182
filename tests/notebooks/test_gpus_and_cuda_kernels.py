"""What lesson 18's cells export: the ladder at odd sizes, occupancy, a machine without g++."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from kernels import CompileError
from notebooks import gpus_and_cuda_kernels as lesson
from notebooks.gpus_and_cuda_kernels import (
    LADDER,
    NotCounted,
    emulator_runs,
    kernel_code,
    ladder_times,
    matmul,
    resident_warps,
    run,
)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@needs_compiler
@pytest.mark.parametrize("rung", LADDER)
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 45, 29), (70, 33, 65)], ids=str)
def test_every_rung_is_the_product_at_odd_sizes(rung: str, shape: tuple[int, int, int]) -> None:
    M, N, K = shape
    torch.manual_seed(0)
    a, b = torch.rand(M, K), torch.rand(K, N)
    c, report = matmul(rung, a, b)
    exact = a.double() @ b.double()
    # K u |A| |B|, and these numbers are positive (Higham, equation 3.13)
    assert torch.all((c.double() - exact).abs() <= 2 * K * 2**-24 * exact)
    stored_bytes = 4 * M * N
    assert report.bytes_stored == stored_bytes


@needs_compiler
def test_the_predictions_of_the_lesson_hold_at_another_size() -> None:
    M, N, K = 64, 192, 80
    a, b = torch.rand(M, K), torch.rand(K, N)
    reports = {rung: matmul(rung, a, b)[1] for rung in LADDER}
    products = M * N * K
    per_product = {"naive": 2, "coalesced": 2, "tiled": 2 / 16, "coarsened": 2 / 64}
    per_product |= {"vectorised": 2 / 256, "conflict-free": 2 / 256}
    for rung, loads in per_product.items():
        assert reports[rung].global_loads == loads * products, rung
    assert reports["naive"].sectors_per_load_request == 16.5
    assert reports["coalesced"].sectors_per_load_request == 2.5
    tile_stores = (M // 64) * (N // 64) * (K // 16) * 8 * 4
    assert reports["vectorised"].bank_conflicts == 3 * tile_stores
    assert reports["conflict-free"].bank_conflicts == 0


def test_code_without_its_comment_and_from_a_line_on() -> None:
    whole = kernel_code("05_matmul_coalesced")
    assert whole.startswith('extern "C" __global__ void matmul_coalesced(')
    assert "/*" not in whole and whole.endswith("}")
    two = kernel_code("05_matmul_coalesced", "const int row", 2)
    assert [line[:14] for line in two.splitlines()] == ["    const int ", "    const int "]
    assert two in whole
    with pytest.raises(ValueError, match="substring not found"):
        kernel_code("05_matmul_coalesced", "no such line")


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "threads", "warps"),
    [
        (32, 0, 1024, 64),  # 2 blocks of 32 warps; 65,536 registers are just enough
        (33, 0, 1024, 32),  # 40 registers after rounding: 48 warps, one whole block
        (255, 0, 256, 8),  # 2 warps on each part of the SM
        (16, 0, 32, 32),  # no more than 32 blocks
        (16, 100 * 1024, 128, 8),  # shared memory for 2 blocks
        (72, 8192, 256, 24),  # 7 warps on each part, 3 blocks
        (16, 0, 33, 64),  # 33 threads are 2 warps
        (36, 0, 256, 48),  # registers come in pieces of 256 a warp: 40, not 36
        (80, 0, 160, 20),  # 6 warps on each part, not 25 on the four together
        (16, 76 * 1024, 128, 8),  # 1 KiB more a block: 2 fit, not 3
        (16, 113 * 1024, 128, 8),  # 228 KiB, just enough for 2
    ],
)
def test_occupancy(registers: int, shared_bytes: int, threads: int, warps: int) -> None:
    assert resident_warps(registers, shared_bytes, threads) == warps


def test_without_a_compiler_counts_are_nan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    a = torch.ones(4)
    emulator_runs.cache_clear()
    report = run("01_vector_add", "vector_add", 1, 32, a, a, a, 4)
    assert isinstance(report, NotCounted)
    assert math.isnan(report.global_loads) and report.by_line == ()
    assert report.table() == "not counted"
    assert capsys.readouterr().out.count("\n") == 1
    c, _ = matmul("tiled", torch.ones(3, 3), torch.ones(3, 3))
    assert c.isnan().all()
    assert capsys.readouterr().out == ""  # said once
    assert not hasattr(report, "_repr_html_")  # what IPython asks of every value
    emulator_runs.cache_clear()


@needs_compiler
def test_a_kernel_that_does_not_compile_is_not_taken_for_a_missing_compiler() -> None:
    with pytest.raises(CompileError, match="nonsense"):
        run(None, "k", 1, 1, source='extern "C" __global__ void k(int n) { nonsense; }')


@needs_compiler
def test_run_asks_for_the_emulator_and_passes_what_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator_runs()
    asked = {}

    def load(name: str, **how: object) -> SimpleNamespace:
        asked.update(how, name=name)
        return SimpleNamespace(kernel={(2, 32): lambda *arguments: arguments})

    monkeypatch.setattr(lesson, "load", load)
    assert run("file", "kernel", 2, 32, 5, 6, source="text", defines={"TILE": 8}) == (5, 6)
    expected = {"name": "file", "source": "text", "device": "cpu", "defines": {"TILE": 8}}
    assert asked == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_times_on_a_gpu() -> None:
    times = ladder_times(256)
    assert list(times) == ["cuBLAS", *LADDER]
    assert all(seconds > 0 for seconds in times.values())
