"""What a compiled library says of its kernels and variables (`emulator/include/describe.h`).

    entries(source, {"scale": "detail::scale<128>"})   # C++ lines, for the end of the unit
    resolved(library, signature)                       # the signature with the compiler's types

So typedefs, templates and macros in a declaration are the compiler's to understand, not ours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.source import KernelSignature, Source

__all__ = ["DESCRIBE", "Variable", "described_variable", "entries", "resolved"]

DESCRIBE = Path(__file__).parent / "emulator" / "include" / "describe.h"

_KERNEL = """
extern "C" {attributes} const kernels_loader::Described* kernels_describe_{name}() {{ \
return kernels_loader::Parameters<decltype(&{expression})>::described; }}"""
_SYMBOL = """
extern "C" {attributes} const kernels_loader::Described* kernels_variable_{number}() {{ \
return kernels_loader::Variable<decltype({name})>::described; }}"""


class _Described(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char_p),
        ("points", ctypes.c_int),
        ("constant", ctypes.c_int),
        ("bytes", ctypes.c_ulonglong),
        ("size", ctypes.c_ulonglong),
    )


@dataclass(frozen=True)
class Variable:
    """A variable of the file: `__constant__ float w[4]`."""

    type: str
    size_bytes: int


def entries(source: Source, expressions: Mapping[str, str], attributes: str) -> list[str]:
    """One line of C++ for each kernel of `expressions` and then for each variable."""
    lines = [
        _KERNEL.format(attributes=attributes, name=name, expression=expression)
        for name, expression in expressions.items()
    ]
    lines += [
        _SYMBOL.format(attributes=attributes, number=number, name=name)
        for number, name in enumerate(source.symbols)
    ]
    return [line.strip() for line in lines]


def resolved(library: ctypes.CDLL, signature: KernelSignature) -> KernelSignature:
    """With the types that the compiler gave its parameters."""
    array = _call(library, f"kernels_describe_{signature.name}")
    found = [array[i] for i in range(len(signature.parameters))]
    parameters = tuple(
        replace(
            parameter,
            type=entry.type.decode(),
            pointer=bool(entry.points),
            const=bool(entry.constant) and bool(entry.points),
            size_bytes=entry.size,
        )
        for parameter, entry in zip(signature.parameters, found, strict=True)
    )
    return replace(signature, parameters=parameters)


def described_variable(library: ctypes.CDLL, source: Source, name: str) -> Variable:
    """Type of its elements and its size."""
    entry = _call(library, f"kernels_variable_{source.symbols.index(name)}")[0]
    return Variable(entry.type.decode(), entry.size)


def _call(library: ctypes.CDLL, function: str) -> ctypes._Pointer[_Described]:
    describe = getattr(library, function)
    describe.restype = ctypes.POINTER(_Described)
    return describe()  # type: ignore[no-any-return]
