"""Compile a .cu file for the CPU: its kernels and the runtime, linked into one library.

What g++ refuses is left out and named (`refusals.py`), and the rest compiled again.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernels.build import build, compiler_version, run_compiler
from kernels.emulator.refusals import TEXT_NAME
from kernels.emulator.unit import Unit
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
# Each round leaves out what the last one refused.
_MAX_ROUNDS = 12


@dataclass(frozen=True)
class Compiled:
    """Where the results lie."""

    library: Path
    kernel_object: Path
    """The kernel alone: says which variables are its own."""
    source: Path
    """The file that line numbers refer to."""
    refused: Mapping[str, str]
    """Why a kernel is not in the library; by its name."""


def compile_for_cpu(
    source: Source, expressions: Mapping[str, str], macros: Mapping[str, str], counted: bool
) -> Compiled:
    """Compile, or find what was compiled before.

    Args:
        expressions: what each kernel is called in C++: {"scale": "detail::scale<128>"}.

    Raises:
        CompileError: there is no compiler, or it refuses every kernel; with one sentence for each.
    """
    compiler = _find_compiler()
    version = compiler_version(compiler)
    runtime = _runtime_object(compiler, version)
    flags = [*_KERNEL, *(_COUNTED if counted else _PLAIN)]
    if "clang" not in version:
        flags += ["-fno-extern-tls-init", *(_counted_by_gcc(version) if counted else ())]
    flags += [f"-D{name}={value}" for name, value in macros.items()]
    headers = "".join(path.read_text() for path in sorted(_INCLUDE.rglob("*.h")))
    # What is refused is kept with its reasons, which are these modules' words.
    reasons = "".join((_HERE / name).read_text() for name in ("unit.py", "refusals.py"))
    unit = Unit(source, expressions)
    parts = [
        *(str(source.path), source.text, source.included_text(), unit.text()),
        *(headers, reasons, str(runtime), version, *flags),
    ]

    def compile_into(folder: Path) -> None:
        for _ in range(_MAX_ROUNDS):
            (folder / "unit.cpp").write_text(unit.text(), encoding="utf-8")
            errors = _compile_and_link([compiler, *flags], runtime, folder)
            if not errors:
                break
            unit.leave_out(errors)
        else:
            raise CompileError(f"{Path(compiler).name} did not accept {source.display_name}")
        (folder / "refused.json").write_text(json.dumps(unit.refused()))

    folder = build(parts, ("kernel.so", "kernel.o", "refused.json"), compile_into)
    return Compiled(
        folder / "kernel.so",
        folder / "kernel.o",
        source.path or Path(TEXT_NAME),
        json.loads((folder / "refused.json").read_text()),
    )


def _counted_by_gcc(version: str) -> tuple[str, ...]:
    major = re.search(r"\) (\d+)\.", version)
    recent = major is not None and int(major[1]) >= 11
    return (*_COUNTED_GCC, *(_COUNTED_GCC_11 if recent else ()))


def _compile_and_link(compiler: list[str], runtime: Path, folder: Path) -> str:
    """What the compiler or the linker complains of; "" if they do not."""
    unit, made = str(folder / "unit.cpp"), str(folder / "kernel.o")
    mapping = f"-fdebug-prefix-map={folder}={_BUILD_NAME}"
    link = ["-shared", "-Wl,-Bsymbolic", "-Wl,--no-undefined", "-o", str(folder / "kernel.so")]
    for command in (
        [*compiler, f"-I{_INCLUDE}", mapping, "-w", "-c", unit, "-o", made],
        [compiler[0], *link, made, str(runtime)],
    ):
        # Messages in English, with plain quotes, whatever the user's language is.
        words = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=words)
        if done.returncode != 0:
            return done.stderr or done.stdout or "no reason was given"
    return ""


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
