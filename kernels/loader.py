"""Load a .cu file as a module of kernels that are launched from Python.

    module = load("06_matmul_tiled", defines={"TILE": 16})
    report = module.matmul_tiled[(gx, gy), (16, 16)](a, b, c, M, N, K)

On device "cpu" the emulator runs the kernel and counts (`report.load_sectors`, `report.table()`).
On "cuda" nvcc compiles the same file and the GPU runs it, on PyTorch's current stream, and the
counts are None. Left out: kernels that launch kernels, textures, by-value structures as parameters.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from kernels.arguments import Arguments, Configuration, check_arguments, check_configuration
from kernels.report import Report
from kernels.source import KernelSignature, Source, read_source

__all__ = ["Kernel", "Module", "load"]


class Library(Protocol):
    """A compiled file: by the emulator or by nvcc."""

    def launch(
        self, signature: KernelSignature, where: Configuration, arguments: Arguments
    ) -> Report:
        """Run one kernel to its end."""
        ...


def load(
    name: str | Path | None = None,
    *,
    source: str | None = None,
    device: str | None = None,
    defines: Mapping[str, int | float | str] | None = None,
    count: bool = True,
    timeout_s: float = 60.0,
    wait: bool = True,
    races: str = "raise",
) -> Module:
    """Compile a file of CUDA C++ (once; the result is cached) and give its kernels.

    Args:
        name: of a file in `kernels/cuda`, with or without ".cu", or the path of a .cu file.
        source: the text itself, instead of a file.
        device: "cpu" (the emulator) or "cuda"; None: "cuda" where there are a GPU and nvcc.
        defines: macros, as with the compiler's option -D.
        count: on the CPU, False compiles without counting, for speed: no counts in the report, and
            no check of bounds, races and alignment. Barriers are checked either way.
        timeout_s: on the CPU, how long a counted launch may take before it is stopped.
        wait: on the GPU, False lets a launch return before the kernel has ended; its errors then
            come from whatever waits next. On the CPU a launch always runs to its end.
        races: on the CPU, "raise" ends a launch at the first race; "list" goes on and puts all of
            them into the report (`report.findings`), as well as loads of unwritten shared memory
            and shuffles from lanes that are not there.

    Raises:
        FileNotFoundError: no such file.
        CompileError: there is no compiler, or it refuses the file.
    """
    if device is None:
        gpu = torch.cuda.is_available() and shutil.which("nvcc") is not None
        device = "cuda" if gpu else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu', 'cuda' or None; found {device!r}")
    if races not in ("raise", "list"):
        raise ValueError(f"races must be 'raise' or 'list'; found {races!r}")
    parsed = read_source(name, source)
    macros = {key: str(value) for key, value in (defines or {}).items()}
    for key in macros:
        if not key.isidentifier():
            raise ValueError(f"defines must name macros, such as 'TILE'; found {key!r}")
    return Module(parsed, device, _library(parsed, device, macros, count, timeout_s, wait, races))


def _library(
    source: Source,
    device: str,
    macros: Mapping[str, str],
    count: bool,
    timeout_s: float,
    wait: bool,
    races: str,
) -> Library:
    if device == "cuda":
        from kernels.nvcc import CudaLibrary

        return CudaLibrary(source, macros, wait)
    from kernels.emulator import EmulatedLibrary

    return EmulatedLibrary(source, macros, count=count, timeout_s=timeout_s, races=races)


class Module:
    """The kernels of one file, as attributes."""

    def __init__(self, source: Source, device: str, library: Library) -> None:
        self.source = source
        self.device = device
        self._library = library

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels, in the order of the file."""
        return tuple(self.source.kernels)

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        if name not in self.source.kernels:
            raise AttributeError(
                f"{self.source.display_name} has no kernel {name!r}; it has "
                + ", ".join(self.kernels)
            )
        return Kernel(self.source.kernels[name], self.device, self._library)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.kernels]

    def __repr__(self) -> str:
        kernels = "; ".join(str(signature) for signature in self.source.kernels.values())
        return f"<{self.source.display_name} on {self.device}: {kernels}>"


class Kernel:
    """A kernel, to be launched: `kernel[grid, block](*arguments)`."""

    def __init__(self, signature: KernelSignature, device: str, library: Library) -> None:
        self.signature = signature
        self._device = device
        self._library = library

    def __getitem__(self, index: object) -> Callable[..., Report]:
        where = check_configuration(index)

        def launch(*arguments: object) -> Report:
            checked = check_arguments(self.signature, arguments, self._device)
            return self._library.launch(self.signature, where, checked)

        return launch

    def __call__(self, *_: object) -> Report:
        raise TypeError(
            f"{self.signature.name} needs a grid and a block: "
            f"{self.signature.name}[grid, block](...)"
        )

    def __repr__(self) -> str:
        return f"<kernel {self.signature} on {self._device}>"
