"""Checks of what the kernels' functions are given: each error says found, expected, remedy.

    check_float("x", x)
    check_vector("weight", weight, length=x.shape[-1], like=x)

What has no backward refuses a tensor that wants a gradient (`check_no_gradient`), and a backward of
kernels refuses to be differentiated (`no_second_derivative`): a part of the gradient would be lost
without a word.

Left out: values. A target outside the vocabulary is the operation's own business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from kernels.triton import INTERPRETED

__all__ = [
    "FLOATS",
    "check_float",
    "check_like",
    "check_no_gradient",
    "check_tensor",
    "check_vector",
    "no_second_derivative",
]

_Result = TypeVar("_Result")

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


def check_no_gradient(operation: str, instead: str, **tensors: torch.Tensor) -> None:
    """None of the tensors wants a gradient, which `operation` could not give."""
    for name, x in tensors.items():
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, and {operation} has no backward: expected {name}"
                f".detach(), or the call under torch.no_grad(). With a gradient: {instead}"
            )


def no_second_derivative(
    operation: str, instead: str
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Decorates the `backward` of an autograd function: RuntimeError under create_graph=True.

    PyTorch's once_differentiable lets it pass where the gradient that comes in is a constant, as
    that of a sum is: the second derivative is then zero, and nothing says so.
    """

    def decorate(backward: Callable[..., _Result]) -> Callable[..., _Result]:
        @functools.wraps(backward)
        def once(ctx: Any, *grads: Any) -> _Result:
            if torch.is_grad_enabled():  # so it is in a backward under create_graph=True alone
                raise RuntimeError(
                    f"{operation}: create_graph=True asks for second derivatives, and its backward "
                    f"is a Triton kernel, which has none: leave it out, or take {instead}"
                )
            return backward(ctx, *grads)

        return once

    return decorate
