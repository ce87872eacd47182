"""A .cu file as text: which kernels it has, and with which parameters.

    source = read_source("06_matmul_tiled", None)
    source.kernels["matmul_tiled"].parameters

Reads declarations by pattern, as far as the rules for files in `kernels/cuda` go: kernels are
`extern "C" __global__ void`, and parameters are scalars or pointers to them. Templates, typedefs of
parameters and host code are left out, and so are conditions: a kernel under `#if 0` is not there,
and one under any other `#if` is taken to be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CUDA_FOLDER", "KernelSignature", "Parameter", "Source", "read_source"]

CUDA_FOLDER = Path(__file__).parent / "cuda"

# One spelling for each type: those of stdint.h and the short ones of CUDA become C's own.
_SPELLINGS = {
    "signed": "int",
    "signed int": "int",
    "int32_t": "int",
    "unsigned": "unsigned int",
    "uint": "unsigned int",
    "uint32_t": "unsigned int",
    "long": "long long",
    "long long int": "long long",
    "int64_t": "long long",
    "ptrdiff_t": "long long",
    "unsigned long": "unsigned long long",
    "uint64_t": "unsigned long long",
    "size_t": "unsigned long long",
    "int8_t": "signed char",
    "char": "signed char",
    "uint8_t": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
_BOUNDS = re.compile(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)")
_KERNEL = re.compile(r"(extern\s*\"C\"\s*)?\b__global__\s+(?:static\s+)?void\s+(\w+)\s*\(([^)]*)\)")
_DYNAMIC = re.compile(
    r"\bextern\s+__shared__\s+(?:__align__\s*\([^)]*\)\s*|alignas\s*\([^)]*\)\s*)?"
    r"([\w\s:]+?)\s*\b(\w+)\s*\[\s*\]"
)
_SHARED = re.compile(
    r"(?<!extern )__shared__\s+(?:__align__\s*\([^)]*\)\s*|alignas\s*\([^)]*\)\s*)?"
    r"([\w\s:]+?)\s*\b(\w+)\s*((?:\[[^\]]+\]\s*)*);"
)
_CONDITION = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b\s*(.*)")
_INCLUDE = re.compile(r"^\s*#\s*include\s*\"([^\"]+)\"", re.MULTILINE)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel."""

    name: str
    type: str
    """In C, without const and the star: "float", "unsigned int"."""
    pointer: bool
    const: bool
    """What it points to is const: the kernel only reads it."""

    @property
    def declaration(self) -> str:
        """As written in C: "const float* a"."""
        return (
            f"{'const ' if self.const else ''}{self.type}{'*' if self.pointer else ''} {self.name}"
        )


@dataclass(frozen=True)
class KernelSignature:
    """A kernel as it is declared."""

    name: str
    parameters: tuple[Parameter, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(p.declaration for p in self.parameters)})"


@dataclass(frozen=True)
class Source:
    """A .cu file and what it declares."""

    path: Path | None
    """None for text that is in no file."""
    text: str
    kernels: Mapping[str, KernelSignature]
    dynamic_arrays: tuple[tuple[str, str], ...]
    """(element type, name) of each `extern __shared__` array."""
    shared_types: Mapping[str, str]
    """{name of a shared array: its element type}."""

    @property
    def display_name(self) -> str:
        """The file's name, for messages."""
        return self.path.name if self.path else "source.cu"

    def included_text(self) -> str:
        """Text of the files beside it that it includes, for telling whether anything changed."""
        return "" if self.path is None else _included(self.path.parent, self.text, set())


def read_source(name: str | Path | None, source: str | None) -> Source:
    """The file `name` (of `kernels/cuda`, or a path), or the text `source`.

    Raises:
        FileNotFoundError: no such file; the message lists those there are.
        ValueError: both or neither are given, or no kernel is declared as it has to be.
    """
    if (name is None) == (source is None):
        raise ValueError(
            "load() needs the name of a .cu file or source='...', and not both; found "
            + ("neither" if name is None else f"name {str(name)!r} and a source")
        )
    path = None if name is None else _find(name)
    text = path.read_text(encoding="utf-8") if path else str(source)
    plain = _BOUNDS.sub("", _enabled(_COMMENT.sub(_blank, text)))
    dynamic = tuple(dict.fromkeys((_type(t), n) for t, n in _DYNAMIC.findall(plain)))
    shared = {n: _type(t) for t, n, _ in _SHARED.findall(plain)}
    return Source(
        path=path,
        text=text,
        kernels=_kernels(plain, path.name if path else "the source"),
        dynamic_arrays=dynamic,
        shared_types={**shared, **{n: t for t, n in dynamic}},
    )


def _find(name: str | Path) -> Path:
    given = Path(name)
    candidates = [given, CUDA_FOLDER / f"{given.name}.cu", CUDA_FOLDER / given.name]
    if given.suffix != ".cu":
        candidates = candidates[1:2]
    elif given.parent != Path("."):
        candidates = candidates[:1]
    for path in candidates:
        if path.is_file():
            return path.resolve()
    known = ", ".join(sorted(path.stem for path in CUDA_FOLDER.glob("*.cu"))) or "none"
    raise FileNotFoundError(
        f"there is no CUDA file {str(name)!r}; expected a path that ends in .cu, or one of: {known}"
    )


def _kernels(plain: str, where: str) -> dict[str, KernelSignature]:
    kernels = {}
    for external, name, parameters in _KERNEL.findall(plain):
        if not external:
            raise ValueError(
                f'kernel {name!r} in {where} is declared without extern "C"; write '
                f'extern "C" __global__ void {name}(...), so that the loader finds it by name'
            )
        parts = [part for part in parameters.split(",") if part.strip()]
        kernels[name] = KernelSignature(name, tuple(_parameter(part, name) for part in parts))
    if not kernels:
        raise ValueError(f'no kernel in {where}: expected extern "C" __global__ void name(...)')
    return kernels


def _parameter(text: str, kernel: str) -> Parameter:
    stripped = re.sub(r"__restrict__|__restrict|\bvolatile\b", " ", text).strip()
    match = re.fullmatch(r"([\w\s]+?)\s*(\*?)\s*(?:const\s+)?(\w+)", stripped)
    if match is None:
        raise ValueError(
            f"parameter {text.strip()!r} of kernel {kernel!r} is not understood; expected a scalar "
            "or a pointer, such as 'int n' or 'const float* a'"
        )
    words = match[1].split()
    return Parameter(
        name=match[3],
        type=_type(" ".join(word for word in words if word != "const")),
        pointer=bool(match[2]),
        const="const" in words,
    )


def _type(text: str) -> str:
    name = " ".join(text.split())
    return _SPELLINGS.get(name, name)


def _blank(match: re.Match[str]) -> str:
    found = match[0]
    return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)


def _enabled(text: str) -> str:
    """Without what stands under `#if 0`; other conditions are not judged."""
    kept, depth = [], 0
    for line in text.splitlines():
        found = _CONDITION.match(line)
        word = found[1] if found else ""
        if depth == 0 and found and word == "if" and found[2].strip() == "0":
            depth = 1
        elif depth == 0:
            kept.append(line)
        elif word.startswith("if"):
            depth += 1
        elif word == "endif" or (word in ("else", "elif") and depth == 1):
            depth -= 1
    return "\n".join(kept)


def _included(folder: Path, text: str, seen: set[Path]) -> str:
    parts = []
    for name in _INCLUDE.findall(text):
        path = (folder / name).resolve()
        if path.is_file() and path not in seen:
            seen.add(path)
            found = path.read_text(encoding="utf-8")
            parts += [found, _included(path.parent, found, seen)]
    return "".join(parts)
