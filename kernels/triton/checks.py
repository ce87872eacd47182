"""Checks of what the kernels' plain functions are given: each error says found, expected, remedy.

    check_float("x", x)
    check_vector("weight", weight, length=x.shape[-1], like=x)

Left out: values. A target outside the vocabulary is the operation's own business.
"""

from __future__ import annotations

import torch

from kernels.triton import INTERPRETED

__all__ = ["FLOATS", "check_float", "check_like", "check_tensor", "check_vector"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_tensor(name: str, x: object, dtypes: tuple[torch.dtype, ...], ndim: int | None) -> None:
    """A tensor of one of `dtypes`, of `ndim` dimensions (None: at least one), where kernels run."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
    if x.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {x.dtype}: expected {wanted}; convert it: {name}.to(...)")
    if x.ndim != ndim if ndim is not None else x.ndim == 0:
        wanted = "at least 1 dimension" if ndim is None else f"{ndim} dimension(s)"
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected {wanted}")
    if not INTERPRETED and x.device.type != "cuda":
        raise ValueError(
            f"{name} is on {x.device}: this process compiles Triton kernels for a GPU; expected a "
            f"CUDA tensor: {name}.cuda(). To interpret kernels on the CPU instead, set "
            "TRITON_INTERPRET=1 before Python starts"
        )
    if x.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{name} is on {x.device}: expected a CUDA or a CPU tensor")


def check_float(name: str, x: object, ndim: int | None = None) -> None:
    """A tensor of fp32, fp16 or bf16."""
    check_tensor(name, x, FLOATS, ndim)


def check_like(name: str, x: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """`x` on the device and of the dtype of `other`."""
    if x.device != other.device:
        raise ValueError(
            f"{name} is on {x.device}, {other_name} on {other.device}: expected one device"
        )
    if x.dtype != other.dtype:
        raise ValueError(
            f"{name} is {x.dtype}, {other_name} {other.dtype}: expected one dtype; "
            f"convert one: {name}.to({other.dtype})"
        )


def check_vector(name: str, x: object, length: int, like: torch.Tensor) -> None:
    """A vector of `length` numbers, fp32, fp16 or bf16, on the device of `like`."""
    check_float(name, x, ndim=1)
    assert isinstance(x, torch.Tensor)
    if x.shape[0] != length:
        raise ValueError(
            f"{name} has {x.shape[0]} elements: expected {length}, the last dimension of x"
        )
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, x on {like.device}: expected one device")
