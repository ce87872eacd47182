"""nvcc takes every kernel for A100, H100 and B200, and keeps all of it in registers.

`python -m kernels.resources` shows the table of registers and shared memory.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from kernels.resources import ARCHITECTURES, Resources, cuda_files, resources
from kernels.sass import Instructions, disassembler, instructions, shared_loads
from tests.kernels.cuda_cases import loaded

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")

FLOAT = 4
REGISTERS_OF_AN_SM = 65536
"""On all three: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""

LARGEST_BLOCK = {"matmul_coarsened": 256, "matmul_vectorised": 256, "matmul_conflict_free": 256}
"""Threads; TILE x TILE where a thread has many sums, 1,024 for the others."""

SHARED_BYTES = {
    "matmul_tiled": 2 * 16 * 16 * FLOAT,
    "matmul_coarsened": 2 * 64 * 16 * FLOAT,
    "matmul_vectorised": 2 * 64 * 16 * FLOAT,
    "matmul_conflict_free": 2 * 64 * 16 * FLOAT,  # the swizzle needs no memory of its own
    "sum_shared": 1024 * FLOAT,
    "sum_shuffle": 32 * FLOAT,
    "softmax_three_pass": 32 * FLOAT,
    "softmax_online": 32 * FLOAT,
    "layernorm_mean": 32 * FLOAT,
    "layernorm_rstd": 32 * FLOAT,
    "layernorm_fused": 32 * FLOAT,
}


@cache
def compiled(path: Path) -> list[Resources]:
    return resources(path)


@pytest.mark.parametrize("path", cuda_files(), ids=lambda path: path.stem)
def test_compiles_without_spills(path: Path) -> None:
    found = compiled(path)
    kernels = path.read_text().count("__global__")
    assert len(found) == kernels * len(ARCHITECTURES)
    assert {usage.architecture for usage in found} == set(ARCHITECTURES)
    for usage in found:
        assert usage.spill_bytes == usage.stack_bytes == 0, usage
        block = LARGEST_BLOCK.get(usage.kernel, 1024)
        assert 0 < usage.registers * block <= REGISTERS_OF_AN_SM, usage  # or it does not launch
        assert usage.shared_bytes == SHARED_BYTES.get(usage.kernel, 0), usage


@pytest.mark.parametrize(
    ("file", "defines", "shared_bytes"),
    [
        ("06_matmul_tiled", {"TILE": 32}, 2 * 32 * 32 * FLOAT),
        ("07_matmul_coarsened", {"TILE": 8, "COARSEN": 8}, 2 * 64 * 8 * FLOAT),
        ("08_matmul_vectorised", {"PAD": 4}, (16 * 68 + 16 * 64) * FLOAT),
        ("09_matmul_conflict_free", {"TILE": 32}, 2 * 128 * 32 * FLOAT),
    ],
)
def test_constants_can_be_overridden(file: str, defines: dict[str, int], shared_bytes: int) -> None:
    (usage,) = resources(file, architectures=("sm_90",), defines=defines)
    assert (usage.shared_bytes, usage.spill_bytes) == (shared_bytes, 0)


def test_sixteen_sums_a_thread_cost_registers() -> None:
    (one,), (sixteen,) = (
        resources("07_matmul_coarsened", architectures=("sm_90",), defines={"COARSEN": coarsen})
        for coarsen in (1, 4)
    )
    assert sixteen.registers >= one.registers + 8


def test_a_local_array_that_is_indexed_at_run_time_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "indexed.cu"
    path.write_text(
        'extern "C" __global__ void indexed(const int* where, float* out, int n) {\n'
        "    float values[64] = {};\n"
        "    for (int i = 0; i < n; ++i) values[where[i]] += out[i];\n"
        "    for (int i = 0; i < n; ++i) out[i] = values[where[n + i]];\n"
        "}\n"
    )
    assert resources(path, architectures=("sm_90",))[0].stack_bytes == 64 * FLOAT


@pytest.mark.skipif(disassembler() is None, reason="cuobjdump is not there")
def test_nvcc_merges_neighbours_that_the_emulator_counts() -> None:
    """A row of A's tile is read in fours; the elements of a column of B's are no neighbours."""
    path = next(path for path in cuda_files() if path.stem == "06_matmul_tiled")
    made = instructions(path, "sm_90")
    assert made["matmul_tiled", "shared load"] == Instructions(number=4 + 16, bytes=4 * 16 + 16 * 4)
    report = loaded("06_matmul_tiled").matmul_tiled[1, (16, 16)](
        torch.ones(16, 16), torch.ones(16, 16), torch.empty(16, 16), 16, 16, 16
    )
    assert shared_loads(path, report) == (256 * 2 * 16, 256 * 20)


def test_refusals_say_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="06_matmul_tiled"):
        resources("13_nothing")
    broken = tmp_path / "broken.cu"
    broken.write_text('extern "C" __global__ void f(float* x) { x[0] = y; }')
    with pytest.raises(ValueError, match='"y" is undefined'):
        resources(broken, architectures=("sm_90",))
    with pytest.raises(ValueError, match="PAD must be a multiple of 4"):
        resources("08_matmul_vectorised", architectures=("sm_90",), defines={"PAD": 2})
