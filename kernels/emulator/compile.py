"""Compile a .cu file for the CPU: kernel and runtime, linked into one library."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernels.build import build, compiler_version, run_compiler
from kernels.errors import CompileError
from kernels.source import Source

__all__ = ["Compiled", "compile_for_cpu"]

_HERE = Path(__file__).parent
_INCLUDE = _HERE / "include"
_RUNTIME = _HERE / "runtime"

# Version 4 of the debug information: addr2line of binutils 2.40 names wrong files in version 5.
_COMMON = ("-std=c++17", "-gdwarf-4", "-fPIC", "-fno-exceptions")
# What a building folder is called in the debug information, whatever its name at the time.
_BUILD_NAME = "/emulator-build"
# Type punning through float4* is common in CUDA.
_KERNEL = (
    *_COMMON,
    "-fno-strict-aliasing",
    "-Wno-unknown-pragmas",
    "-include",
    "cuda_runtime.h",
)
# Without optimisation each use of a variable would be an access; with more of it, they are merged.
_COUNTED = ("-O1", "-fsanitize=thread,bounds", "-fsanitize-coverage=trace-pc")
# A float4 stays one access; loops do not become calls of memcpy.
_COUNTED_GCC = (
    "-fno-tree-sra",
    "-fno-tree-loop-distribute-patterns",
    "--param=tsan-instrument-func-entry-exit=0",
)
# Since version 11: volatile accesses are told apart; shared arrays that nobody stores to are read.
_COUNTED_GCC_11 = ("--param=tsan-distinguish-volatile=1", "-fno-ipa-reference-addressable")
_PLAIN = ("-O2",)


@dataclass(frozen=True)
class Compiled:
    """Where the results lie."""

    library: Path
    kernel_object: Path
    """The kernel alone: says which variables are its own."""
    source: Path
    """The file that line numbers refer to."""


def compile_for_cpu(source: Source, macros: Mapping[str, str], counted: bool) -> Compiled:
    """Compile, or find what was compiled before.

    Raises:
        CompileError: there is no compiler, or it refuses the file; with its message.
    """
    compiler = _find_compiler()
    version = compiler_version(compiler)
    runtime = _runtime_object(compiler, version)
    flags = [*_KERNEL, *(_COUNTED if counted else _PLAIN)]
    if "clang" not in version:
        flags += ["-fno-extern-tls-init", *(_counted_by_gcc(version) if counted else ())]
    flags += [f"-D{name}={value}" for name, value in macros.items()]
    wrapper = _wrapper(source)
    headers = "".join(path.read_text() for path in sorted(_INCLUDE.iterdir()))
    parts = [
        str(source.path),
        source.text,
        source.included_text(),
        wrapper,
        headers,
        str(runtime),
        version,
        *flags,
    ]

    def compile_into(folder: Path) -> None:
        path = source.path
        if path is None:
            path = folder / "source.cu"
            path.write_text(source.text, encoding="utf-8")
        (folder / "wrapper.cpp").write_text(wrapper.replace("@SOURCE@", str(path)))
        run_compiler(
            [
                *(compiler, *flags, f"-I{_INCLUDE}"),
                *(f"-fdebug-prefix-map={folder}={_BUILD_NAME}", "-c", str(folder / "wrapper.cpp")),
                *("-o", str(folder / "kernel.o")),
            ],
            {str(path): source.display_name, str(folder / "wrapper.cpp"): "the emulator's wrapper"},
            source.display_name,
        )
        run_compiler(
            [
                *(compiler, "-shared", "-Wl,-Bsymbolic", "-Wl,--no-undefined"),
                *("-o", str(folder / "kernel.so"), str(folder / "kernel.o"), str(runtime)),
            ],
            {},
            source.display_name,
        )

    folder = build(parts, ("kernel.so", "kernel.o"), compile_into)
    return Compiled(
        folder / "kernel.so", folder / "kernel.o", source.path or Path(_BUILD_NAME, "source.cu")
    )


def _counted_by_gcc(version: str) -> tuple[str, ...]:
    major = re.search(r"\) (\d+)\.", version)
    recent = major is not None and int(major[1]) >= 11
    return (*_COUNTED_GCC, *(_COUNTED_GCC_11 if recent else ()))


def _find_compiler() -> str:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise CompileError(
            "the CUDA emulator works on Linux on x86-64 processors; found "
            f"{sys.platform} on {platform.machine()}"
        )
    for name in ("g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise CompileError(
        "the CUDA emulator needs a C++ compiler, and neither g++ nor clang++ was found; on Debian "
        "and Ubuntu: sudo apt install g++"
    )


def _runtime_object(compiler: str, version: str) -> Path:
    flags = [*_COMMON, "-O2", "-fvisibility=hidden"]
    texts = [path.read_text() for path in sorted(_RUNTIME.iterdir())]

    def compile_into(folder: Path) -> None:
        output = str(folder / "runtime.o")
        run_compiler(
            [compiler, *flags, "-c", str(_RUNTIME / "runtime.cpp"), "-o", output],
            {},
            "the emulator's runtime",
        )

    return build([*texts, version, *flags], ("runtime.o",), compile_into) / "runtime.o"


def _wrapper(source: Source) -> str:
    """C++ that includes the kernel's file and gives each kernel an entry for the runtime."""
    calls = "".join(
        f'extern "C" EMULATOR_UNCOUNTED void emulator_call_{name}(void** arguments) {{ '
        f"emulator::call({name}, arguments); }}\n"
        for name in source.kernels
    )
    # extern __shared__ arrays must be defined somewhere; the launch says how much of them is used.
    arrays = "".join(
        f"alignas(16) thread_local {kind} {name}[{227 * 1024} / sizeof({kind})];\n"
        for kind, name in source.dynamic_arrays
    )
    return f'#include "@SOURCE@"\n#include "call.h"\n{arrays}{calls}'
