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

__all__ = ["Arguments", "Configuration", "check_arguments", "check_configuration"]

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
    "float2": (torch.float32,),
    "float4": (torch.float32,),
    "double": (torch.float64,),
    "double2": (torch.float64,),
    "int": (torch.int32,),
    "int2": (torch.int32,),
    "int4": (torch.int32,),
    "unsigned int": (torch.uint32, torch.int32),
    "long long": (torch.int64,),
    "unsigned long long": (torch.uint64, torch.int64),
    "short": (torch.int16,),
    "unsigned short": (torch.uint16, torch.int16),
    "signed char": (torch.int8,),
    "unsigned char": (torch.uint8,),
    "bool": (torch.bool,),
}


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
    """The tensor of each parameter; None for a scalar."""


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
    if len(arguments) != len(signature.parameters):
        raise TypeError(
            f"{signature} takes {len(signature.parameters)} arguments; found {len(arguments)}"
        )
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
    if parameter.type not in _DTYPES:
        raise TypeError(
            f"{where}: pointers to {parameter.type} are not supported; expected one of "
            + ", ".join(_DTYPES)
        )
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: expected a tensor; found {type(value).__name__} {value!r:.60}")
    allowed = _DTYPES[parameter.type]
    if value.dtype not in allowed:
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
        raise TypeError(
            f"{where}: type {parameter.type} is not supported; expected one of "
            + ", ".join(_SCALARS)
        )
    convert = _SCALARS[parameter.type]
    floating = parameter.type in ("float", "double")
    if not isinstance(value, (int, float) if floating else int):
        expected = "a number" if floating else "an int"
        raise TypeError(f"{where}: expected {expected}; found {type(value).__name__} {value!r:.60}")
    converted = convert(value)
    if not floating and converted.value != value:
        raise ValueError(f"{where}: {value} does not fit into {parameter.type}")
    return converted
