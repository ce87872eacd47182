"""The Triton kernels by Triton's real compiler and ptxas, for A100 and H100: no GPU needed."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import cache

import pytest

from kernels.triton.ptx import MODULES, CompiledKernel, KernelCompileError, compile_kernels

pytestmark = [
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64"),
        reason="Triton's wheel brings its compiler and ptxas for Linux on x86-64",
    ),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

# Shared memory of a block, at most: CUDA C++ Programming Guide, technical specifications.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
WITH_TENSOR_CORES = ("matmul", "flash_attention", "flash_attention_backward", "fp8_matmul")
# Everything for the H100; for the A100 one of each kind, because compiling attention takes long
# (in fp32 it is compiled for the A100 below).
COMPILED = {80: ("vector_add", "softmax", "layer_norm", "matmul"), 90: tuple(MODULES)}


@cache
def compiled(capability: int) -> dict[str, CompiledKernel]:
    return {kernel.name: kernel for kernel in compile_kernels(capability, COMPILED[capability])}


@pytest.mark.parametrize("capability", [80, 90])
class TestEveryKernel:
    def test_compiles_and_fits(self, capability: int) -> None:
        kernels = compiled(capability)
        expected = {name for module in COMPILED[capability] for name in MODULES[module]}
        assert set(kernels) == expected
        for kernel in kernels.values():
            print(kernel.name, kernel.registers, kernel.spilled_bytes, kernel.shared_bytes)
            assert f".target sm_{capability}" in kernel.ptx
            assert f".entry {kernel.name}(" in kernel.ptx
            assert 8 <= kernel.registers <= 255
            assert kernel.shared_bytes <= SHARED_BYTES[capability]
            assert kernel.spilled_bytes == 0

    def test_products_use_the_tensor_cores(self, capability: int) -> None:
        """In bf16: mma on A100, wgmma (a warp group, operands in shared memory) on H100."""
        instruction = {80: "mma.sync.aligned.m16n8k16", 90: "wgmma.mma_async.sync.aligned"}
        for kernel in compiled(capability).values():
            products = kernel.module in WITH_TENSOR_CORES and kernel.name not in (
                "delta_kernel",
                "quantize_kernel",
            )
            assert (instruction[capability] in kernel.ptx) == products, kernel.name

    def test_rows_are_read_once_and_in_wide_pieces(self, capability: int) -> None:
        """4096 numbers of bf16 by 512 threads: one load of 16 bytes each, and none other."""
        ptx = compiled(capability)["softmax_kernel"].ptx
        assert ptx.count("ld.global") == 1 and ptx.count("ld.global.v4.b32") == 1
        assert ptx.count("st.global") == 1


class TestFp8:
    def test_h100_multiplies_fp8(self) -> None:
        assert "e4m3.e4m3" in compiled(90)["fp8_matmul_kernel"].ptx

    def test_a100_has_none_and_the_error_says_so(self) -> None:
        with pytest.raises(KernelCompileError, match="fp8e4nv not supported in this architecture"):
            compile_kernels(80, ("fp8_matmul",))


@cache
def compiled_in_fp32() -> tuple[CompiledKernel, ...]:
    return compile_kernels(80, WITH_TENSOR_CORES[:3], dtype="float32")


class TestCompileKernels:
    @pytest.mark.parametrize("module", WITH_TENSOR_CORES[:3])
    def test_fp32_products_stay_fp32(self, module: str) -> None:
        """No tensor cores: their TF32 has 10 bits of mantissa."""
        kernels = [kernel for kernel in compiled_in_fp32() if kernel.module == module]
        assert {kernel.name for kernel in kernels} == set(MODULES[module])
        for kernel in kernels:
            assert "mma" not in kernel.ptx and "fma.rn.f32" in kernel.ptx, kernel.name
            assert kernel.shared_bytes <= SHARED_BYTES[80]

    def test_refuses_unknown_names(self) -> None:
        with pytest.raises(ValueError, match=r"modules names \['gelu'\]: expected some of"):
            compile_kernels(90, ("gelu",))
        with pytest.raises(ValueError, match="dtype is 'fp8'"):
            compile_kernels(90, dtype="fp8")

    def test_all_configs_as_a_command(self) -> None:
        """Each that autotuning tries fits an H100, and they do differ."""
        command = [sys.executable, "-m", "kernels.triton.ptx", "matmul", "--capability", "90"]
        command.append("--all-configs")
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        header, *rows = (line.split(maxsplit=5) for line in done.stdout.splitlines())
        assert header[:3] == ["kernel", "sm", "registers"]
        assert [row[:2] for row in rows] == [["matmul_kernel", "90"]] * 5
        assert len({config for *_, config in rows}) == 5
        assert all(int(shared_bytes) <= SHARED_BYTES[90] for *_, shared_bytes, _ in rows)
