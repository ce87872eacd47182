"""Checking a launch's grid, block and arguments against the kernel's declaration.

The C values are the same for the emulator and for a GPU: an array of pointers to arguments, as
`cudaLaunchKernel` takes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.source import KernelSignature, Parameter

__all__ = [
    "Arguments",
    "Configuration",
    "check_arguments",
    "check_configuration",
    "element_bytes",
    "tensor_dtypes",
]

# Limits of every GPU of compute capability 8.0 to 10.0 (CUDA C++ Programming Guide, "Compute
# Capabilities").
MAX_THREADS = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_SHARED_BYTES = 227 * 1024
"""Of a block, on an H100 or B200: an A100 has 163 KiB."""
MAX_STATIC_SHARED_BYTES = 48 * 1024

_SCALARS: dict[str, Any] = {
    "int": ctypes.c_int32,
    "unsigned int": ctypes.c_uint32,
    "long long": ctypes.c_int64,
    "unsigned long long": ctypes.c_uint64,
    "short": ctypes.c_int16,
    "unsigned short": ctypes.c_uint16,
    "signed char": ctypes.c_int8,
    "unsigned char": ctypes.c_uint8,
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "float": (torch.float32,),
    "double": (torch.float64,),
    "half": (torch.float16,),
    "bfloat16": (torch.bfloat16,),
    "int": (torch.int32,),
    "unsigned int": (torch.uint32, torch.int32),
    "long long": (torch.int64,),
    "unsigned long long": (torch.uint64, torch.int64),
    "short": (torch.int16,),
    "unsigned short": (torch.uint16, torch.int16),
    "signed char": (torch.int8, torch.uint8),
    "unsigned char": (torch.uint8, torch.int8),
    "bool": (torch.bool,),
}
_VECTOR_BASES = {
    "char": "signed char",
    "uchar": "unsigned char",
    "ushort": "unsigned short",
    "uint": "unsigned int",
    "longlong": "long long",
    "ulonglong": "unsigned long long",
}
# What a tensor of any dtype may be passed for.
_OPAQUE = ("void", "struct")


@dataclass(frozen=True)
class Configuration:
    """Grid and block in three dimensions, and the bytes of `extern __shared__` memory."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0


@dataclass(frozen=True)
class Arguments:
    """What is passed to a kernel, in C and as it was given."""

    values: tuple[Any, ...]
    """One ctypes value each: keeps alive what `pointers` points to."""
    pointers: Any
    """void*[]: the address of each value."""
    tensors: tuple[torch.Tensor | None, ...]
    """The tensor of each parameter; None for a scalar or a null pointer."""


def check_configuration(index: object) -> Configuration:
    """What stands in the brackets of `kernel[grid, block]` or `[grid, block, shared_bytes]`."""
    if not isinstance(index, tuple) or len(index) not in (2, 3):
        raise TypeError(
            "a launch is written kernel[grid, block](...) or "
            f"kernel[grid, block, shared_bytes](...); found kernel[{index!r}]"
        )
    grid = _dimensions("grid", index[0], MAX_GRID)
    block = _dimensions("block", index[1], MAX_BLOCK)
    threads = block[0] * block[1] * block[2]
    if threads > MAX_THREADS:
        raise ValueError(
            f"a block of {' x '.join(map(str, block))} has {threads} threads; a GPU takes at most "
            f"{MAX_THREADS}"
        )
    shared = index[2] if len(index) == 3 else 0
    if not isinstance(shared, int) or not 0 <= shared <= MAX_SHARED_BYTES:
        raise ValueError(
            f"dynamic shared memory is given in bytes, 0 to {MAX_SHARED_BYTES}; found {shared!r}"
        )
    return Configuration(grid, block, shared)


def check_arguments(
    signature: KernelSignature, arguments: Sequence[object], device: str
) -> Arguments:
    """C values for `arguments`.

    Raises:
        TypeError: their number, or the type of one, is not that of the declaration.
        ValueError: a tensor has another dtype, lies on another device or is not contiguous.
    """
    needed = signature.parameters[len(arguments) :]
    if len(arguments) > len(signature.parameters) or any(p.default is None for p in needed):
        raise TypeError(
            f"{signature} takes {len(signature.parameters)} arguments; found {len(arguments)}"
        )
    arguments = [*arguments, *(_default(parameter, signature) for parameter in needed)]
    pairs = list(zip(signature.parameters, arguments, strict=True))
    values = tuple(
        _pointer(parameter, value, signature, device)
        if parameter.pointer
        else _scalar(parameter, value, signature)
        for parameter, value in pairs
    )
    pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
    tensors = tuple(value if isinstance(value, torch.Tensor) else None for _, value in pairs)
    return Arguments(values, pointers, tensors)


def _dimensions(name: str, value: object, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    given = (value,) if isinstance(value, int) else value
    if (
        not isinstance(given, (tuple, list))
        or not 1 <= len(given) <= 3
        or any(not isinstance(n, int) or isinstance(n, bool) for n in given)
    ):
        raise TypeError(f"{name} is an int or a tuple of up to three; found {value!r}")
    full = (*given, 1, 1)[:3]
    for axis, size, limit in zip("xyz", full, limits, strict=True):
        if not 1 <= size <= limit:
            raise ValueError(f"{name}.{axis} must be 1 to {limit}; found {size}")
    return full[0], full[1], full[2]


def _pointer(
    parameter: Parameter, value: object, signature: KernelSignature, device: str
) -> ctypes.c_void_p:
    where = f"argument '{parameter.declaration}' of {signature.name}"
    if value is None:
        return ctypes.c_void_p(None)
    if parameter.type == "pointer":
        raise TypeError(f"{where}: pointers to pointers are not supported, except None")
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{where}: expected a tensor, or None for a null pointer; found "
            f"{type(value).__name__} {value!r:.60}"
        )
    allowed = tensor_dtypes(parameter.type)
    if value.dtype not in allowed and parameter.type not in _OPAQUE:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{where}: expected {names}; found {value.dtype}; convert it with .to()")
    if value.device.type != device:
        raise ValueError(
            f"{where}: the kernel was loaded for {device}, and the tensor is on {value.device}; "
            f"move it with .to({device!r}) or load for device={value.device.type!r}"
        )
    if not value.is_contiguous():
        raise ValueError(
            f"{where}: the tensor's strides {value.stride()} are not those of a contiguous one of "
            f"shape {tuple(value.shape)}; pass .contiguous()"
        )
    if value.is_neg():
        raise ValueError(
            f"{where}: the tensor is negated lazily (its memory holds the other sign); pass "
            ".resolve_neg()"
        )
    return ctypes.c_void_p(value.data_ptr())


def _scalar(parameter: Parameter, value: object, signature: KernelSignature) -> Any:
    where = f"argument '{parameter.declaration}' of {signature.name}"
    if parameter.type not in _SCALARS:
        return _structure(parameter, value, where)
    convert = _SCALARS[parameter.type]
    floating = parameter.type in ("float", "double")
    if not isinstance(value, (int, float) if floating else int):
        expected = "a number" if floating else "an int"
        raise TypeError(f"{where}: expected {expected}; found {type(value).__name__} {value!r:.60}")
    converted = convert(value)
    if not floating and converted.value != value:
        raise ValueError(f"{where}: {value} does not fit into {parameter.type}")
    return converted


def _structure(parameter: Parameter, value: object, where: str) -> Any:
    """Bytes for what is no number of C: a vector, a half, a structure."""
    vector = _vector(parameter.type)
    if vector and isinstance(value, (tuple, list)) and len(value) == vector[1]:
        array = _SCALARS[vector[0]] * vector[1]
        return array(*value)
    if parameter.type in ("half", "bfloat16") and isinstance(value, (int, float)):
        bits = torch.tensor(value, dtype=_DTYPES[parameter.type][0]).view(torch.int16)
        return ctypes.c_int16(int(bits))
    if isinstance(value, (bytes, ctypes.Structure)):
        given = bytes(value)
        if len(given) == parameter.size_bytes:
            return ctypes.create_string_buffer(given, len(given))
        raise ValueError(f"{where}: expected {parameter.size_bytes} bytes; found {len(given)}")
    expected = (
        f"{vector[1]} numbers"
        if vector
        else "a number"
        if parameter.type in ("half", "bfloat16")
        else f"a ctypes.Structure or bytes, of {parameter.size_bytes} bytes"
    )
    raise TypeError(f"{where}: expected {expected}; found {type(value).__name__} {value!r:.60}")


def _default(parameter: Parameter, signature: KernelSignature) -> object:
    """The value of a default argument that is a plain literal."""
    text = parameter.default or ""
    if text in ("nullptr", "NULL") or (parameter.pointer and text == "0"):
        return None
    if text in ("true", "false"):
        return text == "true"
    try:
        number = (
            float(text.rstrip("fF")) if "x" not in text else float(int(text.rstrip("uUlL"), 16))
        )
        return number if parameter.type in ("float", "double", "half", "bfloat16") else int(number)
    except ValueError:
        raise TypeError(
            f"argument '{parameter.declaration}' of {signature.name}: its default {text!r} is no "
            "plain number; pass it"
        ) from None


def _vector(name: str) -> tuple[str, int] | None:
    """("float", 4) for "float4"."""
    base, count = name[:-1], name[-1:]
    base = _VECTOR_BASES.get(base, base)
    return (base, int(count)) if count in "1234" and base in _DTYPES else None


def tensor_dtypes(name: str) -> tuple[torch.dtype, ...]:
    """Of a tensor that a pointer to this type may point to; a structure's are bytes."""
    vector = _vector(name)
    return _DTYPES.get(vector[0] if vector else name, (torch.uint8,))


def element_bytes(name: str) -> int:
    """Size of a type, for messages; 4 where it is not known."""
    vector = _vector(name)
    known = _DTYPES.get(vector[0] if vector else name)
    return known[0].itemsize * (vector[1] if vector else 1) if known else 4
