"""The same .cu file on a GPU: compiled by nvcc, launched by cudaLaunchKernel through ctypes.

    library = CudaLibrary(source, {"TILE": "16"})
    report = library.launch(signature, configuration, arguments)

nvcc makes a shared library of the file and of a few lines (`_HOST`) that call the CUDA runtime, as
one unit: since CUDA 13.0 a kernel's address is not to be had from outside of its own. They use the
device's primary context, which is PyTorch's too, and its current stream. A launch waits for the
kernel to end, so that an error comes from the launch that made it, unless it is told not to
(`wait=False`), as where launches are timed. Not yet run on a GPU; compiling is tested wherever nvcc
is.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from kernels.arguments import Arguments, Configuration, tensor_dtypes
from kernels.build import build, compiler_version, run_compiler
from kernels.described import DESCRIBE, described_variable, entries, resolved
from kernels.errors import CompileError, LaunchFailed
from kernels.report import Report
from kernels.source import KernelSignature, Source

__all__ = ["CudaLibrary", "compile_for_gpu"]

_HOST = """
#include <cuda_runtime.h>
extern "C" const char* kernels_launch(const void* kernel, int device, const unsigned* grid,
                                      const unsigned* block, void** arguments,
                                      unsigned shared_bytes, void* stream, int wait) {
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess && shared_bytes > 0)  // 48 KiB by default, static arrays included
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(shared_bytes));
    if (error == cudaSuccess)
        error = cudaLaunchKernel(kernel, dim3(grid[0], grid[1], grid[2]),
                                 dim3(block[0], block[1], block[2]), arguments, shared_bytes,
                                 static_cast<cudaStream_t>(stream));
    if (error == cudaSuccess && wait)
        error = cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
"""
_ADDRESS = """
extern "C" __attribute__((visibility("default"))) const void* kernels_address_%s() {
    return reinterpret_cast<const void*>(%s);
}
"""
_VARIABLE = """
extern "C" __attribute__((visibility("default"))) void* kernels_place_%s() {
    void* place = nullptr;
    return cudaGetSymbolAddress(&place, %s) == cudaSuccess ? place : nullptr;
}
"""


def compile_for_gpu(
    source: Source, expressions: Mapping[str, str], macros: Mapping[str, str], architecture: str
) -> Path:
    """The shared library for one architecture ("sm_90"), compiled now or before.

    Raises:
        CompileError: there is no nvcc, or it refuses the file; with its message.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CompileError(
            "a kernel for the GPU needs nvcc, which was not found; install the CUDA toolkit and "
            "put its bin folder into PATH, or load(..., device='cpu')"
        )
    flags = ["-std=c++17", "-O3", f"-arch={architecture}", "-shared", "-Xcompiler", "-fPIC"]
    flags += [f"-D{name}={value}" for name, value in macros.items()]
    visible = '__attribute__((visibility("default")))'
    unit = (
        f'#include "@SOURCE@"\n#include "{DESCRIBE}"\n{_HOST}'
        + "".join(_ADDRESS % entry for entry in expressions.items())
        + "".join(_VARIABLE % entry for entry in enumerate(source.symbols))
        + "\n".join(entries(source, expressions, visible))
    )
    parts = [str(source.path), source.text, source.included_text(), unit, *flags]

    def compile_into(folder: Path) -> None:
        path = source.path
        if path is None:
            path = folder / "source.cu"
            path.write_text(source.text, encoding="utf-8")
        host = folder / "host.cu"
        host.write_text(unit.replace("@SOURCE@", str(path)), encoding="utf-8")
        run_compiler(
            [nvcc, *flags, "-o", str(folder / "kernel.so"), str(host)],
            {str(path): source.display_name, str(host): "the loader's host code"},
            source.display_name,
        )

    return build([*parts, compiler_version(nvcc)], ("kernel.so",), compile_into) / "kernel.so"


def kernel_address(library: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    """What cudaLaunchKernel takes for a kernel of a library made by `compile_for_gpu`."""
    function = getattr(library, f"kernels_address_{name}")
    function.restype = ctypes.c_void_p
    return ctypes.c_void_p(function())


class _Memory:
    """Bytes on a GPU that PyTorch may take as a tensor, without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class CudaLibrary:
    """A .cu file compiled for the current GPU."""

    def __init__(
        self,
        source: Source,
        expressions: Mapping[str, str],
        macros: Mapping[str, str],
        wait: bool = True,
    ) -> None:
        if not torch.cuda.is_available():
            raise CompileError("device='cuda' needs a GPU that PyTorch can use; found none")
        major, minor = torch.cuda.get_device_capability()
        path = compile_for_gpu(source, expressions, macros, f"sm_{major}{minor}")
        self._source = source
        self._library = ctypes.CDLL(str(path))
        self.refused: dict[str, str] = {}
        self.signatures = {
            name: resolved(self._library, source.kernels[name]) for name in expressions
        }
        self._library.kernels_launch.restype = ctypes.c_char_p
        self._wait = wait

    def variable(self, name: str) -> torch.Tensor:
        """A variable as a tensor of one dimension, in its own memory on the current GPU."""
        found = described_variable(self._library, self._source, name)
        place = getattr(self._library, f"kernels_place_{self._source.symbols.index(name)}")
        place.restype = ctypes.c_void_p
        if (address := place()) is None:
            raise LaunchFailed(f"CUDA gives no address of the variable {name}")
        return torch.as_tensor(_Memory(address, found.size_bytes), device="cuda").view(
            tensor_dtypes(found.type)[0]
        )

    def launch(
        self, signature: KernelSignature, where: Configuration, arguments: Arguments
    ) -> Report:
        """Run the kernel, to its end if this library waits; nothing is counted.

        Raises:
            LaunchFailed: CUDA reported an error.
        """
        devices = {tensor.device.index for tensor in arguments.tensors if tensor is not None}
        if len(devices) > 1:
            raise ValueError(f"tensors of one launch must be on one GPU; found {sorted(devices)}")
        device = devices.pop() if devices else torch.cuda.current_device()
        with torch.cuda.device(device):  # kernels_launch sets the device; this sets it back
            error = self._library.kernels_launch(
                kernel_address(self._library, signature.name),
                device,
                (ctypes.c_uint32 * 3)(*where.grid),
                (ctypes.c_uint32 * 3)(*where.block),
                arguments.pointers,
                where.shared_bytes,
                ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream),
                int(self._wait),
            )
        if error is not None:
            raise LaunchFailed(f"kernel {signature.name}: {error.decode()}")
        return Report(signature.name, "cuda", where.grid, where.block)
