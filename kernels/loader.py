"""Load a .cu file as a module of kernels that are launched from Python.

    module = load("06_matmul_tiled", defines={"TILE": 16})
    report = module.matmul_tiled[(gx, gy), (16, 16)](a, b, c, M, N, K)

On device "cpu" the emulator runs the kernel and counts (`report.load_sectors`, `report.table()`).
On "cuda" nvcc compiles the same file and the GPU runs it, on PyTorch's current stream, and the
counts are None. A file may be one from elsewhere: its host code is skipped, and a kernel that needs
what the emulator does not have (tensor cores, inline PTX, textures) says so when it is asked for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from kernels.arguments import Arguments, Configuration, check_arguments, check_configuration
from kernels.errors import CompileError, message_alone
from kernels.report import Report
from kernels.source import KernelSignature, Source, read_source

__all__ = ["Kernel", "Module", "load"]


class Library(Protocol):
    """A compiled file: by the emulator or by nvcc."""

    @property
    def signatures(self) -> Mapping[str, KernelSignature]:
        """Of its kernels, with the compiler's types."""
        ...

    @property
    def refused(self) -> Mapping[str, str]:
        """Why a kernel is not there."""
        ...

    def variable(self, name: str) -> torch.Tensor:
        """The memory of a variable of the file."""
        ...

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
    instantiate: Mapping[str, int | str] | None = None,
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
        instantiate: for kernels that are templates, a value or a type for each parameter:
            {"BM": 128, "T": "float"}.
        count: on the CPU, False compiles without counting, for speed: no counts in the report, and
            no check of bounds, races and alignment. Barriers are checked either way.
        timeout_s: on the CPU, how long a counted launch may take before it is stopped.
        wait: on the GPU, False lets a launch return before the kernel has ended; its errors then
            come from whatever waits next. On the CPU a launch always runs to its end.
        races: on the CPU, "raise" ends a launch at the first race; "list" goes on and puts all of
            them into the report, as well as loads of unwritten shared memory and shuffles from
            lanes that are not there: `for finding in report.findings: print(finding.text)`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no kernel can be had: every one is a template that lacks a parameter.
        CompileError: there is no compiler, or it refuses every kernel of the file; of one among
            several it is raised when that kernel is asked for.
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
    values = {key: _template_value(value) for key, value in (instantiate or {}).items()}
    known = {name for signature in parsed.kernels.values() for name, _ in signature.template}
    if unknown := sorted(set(values) - known):
        raise ValueError(
            f"instantiate names {unknown[0]!r}, which is no template parameter of a kernel in "
            f"{parsed.display_name}; there are {', '.join(sorted(known)) or 'none'}"
        )
    expressions, refused = {}, {}
    for signature in parsed.kernels.values():
        try:
            expressions[signature.name] = signature.expression(values)
        except ValueError as error:
            refused[signature.name] = str(error)
    if not expressions:
        raise message_alone(ValueError(next(iter(refused.values()))))
    library: Library
    if device == "cuda":
        from kernels.nvcc import CudaLibrary

        library = CudaLibrary(parsed, expressions, macros, wait)
    else:
        from kernels.emulator import EmulatedLibrary

        library = EmulatedLibrary(
            parsed, expressions, macros, count=count, timeout_s=timeout_s, races=races
        )
    return Module(parsed, device, library, refused)


def _template_value(value: int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Module:
    """The kernels of one file, as attributes."""

    def __init__(
        self, source: Source, device: str, library: Library, refused: Mapping[str, str]
    ) -> None:
        self.source = source
        self.device = device
        self._library = library
        self._refused = {**library.refused, **refused}

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that can be launched, in the order of the file."""
        return tuple(self._library.signatures)

    @property
    def refused(self) -> Mapping[str, str]:
        """Why each of the file's other kernels cannot; {} if all can."""
        return self._refused

    def variable(self, name: str) -> torch.Tensor:
        """A `__constant__` or `__device__` variable of the file, as a tensor in its own memory.

            module.variable("w").copy_(torch.tensor([1.0, 2.0, 1.0]))

        It has one dimension, and bytes (uint8) where the variable is a structure.
        """
        names = {symbol.rpartition("::")[2]: symbol for symbol in self.source.symbols}
        if name not in names:
            raise AttributeError(
                f"{self.source.display_name} has no __constant__ or __device__ variable {name!r}; "
                f"it has {', '.join(names) or 'none'}"
            )
        return self._library.variable(names[name])

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        if name in self._refused:
            if name in self._library.refused:
                raise CompileError(self._refused[name])
            raise message_alone(ValueError(self._refused[name]))
        if name not in self._library.signatures:
            raise AttributeError(
                f"{self.source.display_name} has no kernel {name!r}; it has "
                + ", ".join((*self.kernels, *self._refused))
            )
        return Kernel(self._library.signatures[name], self.device, self._library)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.kernels]

    def __repr__(self) -> str:
        kernels = "; ".join(str(signature) for signature in self._library.signatures.values())
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
            try:
                checked = check_arguments(self.signature, arguments, self._device)
                return self._library.launch(self.signature, where, checked)
            except (TypeError, ValueError) as error:
                raise message_alone(error) from None

        return launch

    def __call__(self, *_: object) -> Report:
        raise TypeError(
            f"{self.signature.name} needs a grid and a block: "
            f"{self.signature.name}[grid, block](...)"
        )

    def __repr__(self) -> str:
        return f"<kernel {self.signature} on {self._device}>"
