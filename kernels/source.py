"""A .cu file as text: its pieces, and which of them are kernels.

    source = read_source("06_matmul_tiled", None)
    source.kernels["matmul_tiled"].parameters

The file and the files beside it that it includes are cut, by braces, into the items of their
namespaces. Kernels, `__device__` functions and variables, types and constants are kept; host code
is not. What a name means is left to the compiler (`include/describe.h`): here types are as written.
Conditions are not judged, except that what stands under `#if 0` is not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernels.scan import Piece, blank_comments, items_of, split_arguments

__all__ = [
    "CUDA_FOLDER",
    "KernelSignature",
    "Parameter",
    "Source",
    "read_source",
    "without_attributes",
]

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

_TYPE_WORDS = (
    *("int", "long", "short", "char", "unsigned", "signed"),
    *("float", "double", "bool", "const", "void"),
)
_ATTRIBUTE = re.compile(r"\b(?:__launch_bounds__|__align__|alignas|__attribute__)\s*\(")
_SHARED = re.compile(r"__shared__\s+([\w\s:]+?)\s*\b(\w+)\s*\[")
_DYNAMIC = re.compile(
    r"\b(?:extern\s+__shared__|__shared__\s+extern)\s+([\w\s:<>]+?)\s*\b(\w+)\s*\[\s*\]"
)
_INCLUDE = re.compile(r"\s*#\s*include\s*([\"<])([^\">]+)[\">]")
_VARIABLE = re.compile(r"((?:\w+::)*\w+)\s*(?:\[|=|\{|;|,)")
_BODY = re.compile(r"\b(?:struct|class|union|enum)\b[^={]*\{.*\}", re.DOTALL)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel."""

    name: str
    type: str
    """In C, without const and the star: "float", "unsigned int"."""
    pointer: bool
    const: bool
    """What it points to is const: the kernel only reads it."""
    default: str | None = None
    """As written."""
    size_bytes: int = 0
    """Of a structure passed by value, once it is compiled."""

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
    scope: str = ""
    """Its namespaces: "detail::"."""
    template: tuple[tuple[str, bool], ...] = ()
    """(name, whether it has a default) of each template parameter."""

    def expression(self, values: Mapping[str, str]) -> str:
        """The kernel in C++: "detail::scale<128>".

        Raises:
            ValueError: it is a template, and `values` lacks one of its parameters.
        """
        given = [values.get(name) for name, _ in self.template]
        needed = [name for name, has_default in self.template if not has_default]
        if missing := [name for name in needed if name not in values]:
            names = ", ".join(name for name, _ in self.template)
            raise ValueError(
                f"kernel {self.name} is a template of {names}"
                f": load(..., instantiate={{{', '.join(f'{name!r}: ...' for name in missing)}}})"
            )
        while given and given[-1] is None:
            given.pop()
        if None in given:
            raise ValueError(
                f"kernel {self.name}: instantiate also needs the template's parameters before the "
                f"last one given, of {', '.join(name for name, _ in self.template)}"
            )
        arguments = f"<{', '.join(str(value) for value in given)}>" if self.template else ""
        return f"{self.scope}{self.name}{arguments}"

    def __str__(self) -> str:
        return f"{self.name}({', '.join(p.declaration for p in self.parameters)})"


@dataclass(frozen=True)
class Source:
    """A .cu file and what it declares."""

    path: Path | None
    """None for text that is in no file."""
    text: str
    pieces: tuple[Piece, ...]
    """Of the file and of the files that it includes, in the order of the compiler."""
    kernels: Mapping[str, KernelSignature]
    dynamic_arrays: tuple[tuple[str, str], ...]
    """(element type, name) of each `extern __shared__` array."""
    shared_types: Mapping[str, str]
    """{name of a shared array: its element type}."""
    symbols: tuple[str, ...]
    """Variables of the file itself, `__constant__` and `__device__`, with their namespaces."""

    @property
    def missing_headers(self) -> tuple[str, ...]:
        """Those of the project's own that were not found."""
        found = (_INCLUDE.match(p.text) for p in self.pieces if p.kind == "directive")
        return tuple(match[2] for match in found if match and match[1] == '"')

    @property
    def display_name(self) -> str:
        """The file's name, for messages."""
        return self.path.name if self.path else "source.cu"

    def dynamic_array(self, kernel: str) -> tuple[str, str]:
        """(element type, name) of the kernel's `extern __shared__` array, or of another's."""
        texts = [p.text for p in self.pieces if p.kind == "kernel" and p.name == kernel]
        found = _DYNAMIC.findall(without_attributes("".join(texts)))
        known = [(_type(kind), name) for kind, name in found] or list(self.dynamic_arrays)
        return known[0] if known else ("unsigned char", "dynamic shared memory")

    def included_text(self) -> str:
        """Text of the files beside it that it includes, for telling whether anything changed."""
        return "".join(piece.text for piece in self.pieces if piece.path != self.path)


@dataclass
class _Reader:
    """Collects the pieces of a file and of what it includes, each file once."""

    macros: dict[str, bool] = field(default_factory=dict)
    """Those that stand for __device__ or, if True, for __global__."""
    seen: set[Path] = field(default_factory=set)

    def pieces(self, path: Path | None, text: str) -> Iterator[Piece]:
        for piece in items_of(path, blank_comments(text), self.macros):
            found = _INCLUDE.match(piece.text) if piece.kind == "directive" else None
            beside = _beside(path, found[2]) if path and found and found[1] == '"' else None
            if beside is None:
                yield piece
            elif beside not in self.seen:
                self.seen.add(beside)
                yield from self.pieces(beside, beside.read_text(encoding="utf-8", errors="replace"))


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
    text = path.read_text(encoding="utf-8", errors="replace") if path else str(source)
    pieces = tuple(_Reader(seen={path} if path else set()).pieces(path, text))
    code = [piece for piece in pieces if piece.kind in ("kernel", "device")]
    kernels = {}
    for piece in code:
        if piece.kind == "kernel":
            signature = _signature(piece)
            kernels[signature.name] = signature
    if not kernels:
        where = path.name if path else "the source"
        raise ValueError(f"no kernel in {where}: expected __global__ void name(...) {{ ... }}")
    dynamic = tuple(
        (_type(t), n) for piece in code for t, n in _DYNAMIC.findall(without_attributes(piece.text))
    )
    shared = {
        n: _type(t) for piece in code for t, n in _SHARED.findall(without_attributes(piece.text))
    }
    return Source(
        path=path,
        text=text,
        pieces=pieces,
        kernels=kernels,
        dynamic_arrays=tuple(dict.fromkeys(dynamic)),
        shared_types={**shared, **{n: t for t, n in dynamic}},
        symbols=tuple(dict.fromkeys(_symbols(pieces))),
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


def _beside(path: Path, name: str) -> Path | None:
    """The file that `#include "name"` means: beside this one, or in a project's folder above it."""
    for folder in path.parents[:6]:
        for candidate in (folder / name, folder / "include" / name):
            if candidate.is_file():
                return candidate.resolve()
    return None


def _signature(piece: Piece) -> KernelSignature:
    template, _, parameters = piece.head()
    parts = [part for part in split_arguments(parameters) if part.strip() != "void"]
    return KernelSignature(
        piece.name,
        tuple(_parameter(part, number) for number, part in enumerate(parts)),
        piece.scope,
        tuple(_template_parameter(part) for part in split_arguments(template)),
    )


def _template_parameter(text: str) -> tuple[str, bool]:
    declared, has_default, _ = text.partition("=")
    names = re.findall(r"\w+", declared)
    return (names[-1] if names else "", bool(has_default))


def _parameter(text: str, number: int) -> Parameter:
    declared, _, default = text.partition("=")
    stripped = re.sub(r"__restrict__|__restrict|\bvolatile\b|__grid_constant__", " ", declared)
    match = re.fullmatch(
        r"(.+?)\s*([*&\s]*)(?:\bconst\s+)?(?<!\w)(\w+)\s*((?:\[[^\]]*\]\s*)*)", stripped.strip()
    )
    name, kind, stars = (match[3], match[1], match[2] + match[4]) if match else ("", stripped, "")
    if not match or name in _TYPE_WORDS:  # no name
        name, kind = f"argument_{number + 1}", stripped.replace("*", "").strip()
        stars = "*" if "*" in stripped else ""
    words = re.split(r"\s+", kind.replace("*", " * "))
    return Parameter(
        name=name,
        type=_type(" ".join(word for word in words if word != "const")),
        pointer="*" in stars or "[" in stars,
        const="const" in words,
        default=default.strip() or None,
    )


def _type(text: str) -> str:
    name = " ".join(text.split())
    return _SPELLINGS.get(name, name)


def without_attributes(text: str) -> str:
    """Without attributes that have arguments: `__align__(16)`."""
    while found := _ATTRIBUTE.search(text):
        depth, end = 1, found.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        text = text[: found.start()] + text[end:]
    return text


def _symbols(pieces: tuple[Piece, ...]) -> Iterator[str]:
    for piece in pieces:
        if (
            piece.kind != "device"
            or "(" in without_attributes(piece.text).partition("=")[0].partition("{")[0]
        ):
            continue
        if "__shared__" in piece.text or "extern" in piece.text or "constexpr" in piece.text:
            continue
        if piece.text.lstrip().startswith("template"):
            continue
        for part in split_arguments(_BODY.sub("", without_attributes(piece.text))):
            if found := _VARIABLE.search(part + ";"):
                yield piece.scope + found[1]
