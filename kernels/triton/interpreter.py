"""Triton's interpreter, made fit for readers' kernels: what is wrong in it says so.

    mend()                  # once, by the package, where kernels are interpreted
    kernel_line()           # inside of a kernel: 'kernel.py, line 7: "y = x + 1"'

- tl.max, tl.sum, tl.cdiv and their like are `@triton.jit` functions. Where Triton was imported
  before TRITON_INTERPRET was set they are made for the compiler, and fail inside an interpreted
  kernel ("Cannot call @triton.jit'd outside of the scope of a kernel"): they are made again.
- Arithmetic on bfloat16 is done on its bits, taken for whole numbers: 1.0 + 1.0 is 1.7e38. It
  raises TypeError with the kernel's line.

Left out: fp32 to bfloat16, which truncates instead of rounding (`storage.stored` rounds).
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from kernels.errors import message_alone
from kernels.triton import private

__all__ = ["kernel_line", "mend"]

# What computes: by name in InterpreterBuilder. Loads, stores, selects and reshapes move bits.
_ARITHMETIC = (
    "binary_op", "unary_op", "create_fma", "create_dot", "create_clampf", "create_idiv",
    "create_erf", "create_rsqrt", "create_histogram", "create_atomic_rmw",
)  # fmt: skip


def mend() -> None:
    """Change Triton's interpreter in this process."""
    _interpret_library()
    private.InterpreterError._render_traceback_ = _message_of_ours
    for name in _ARITHMETIC:
        method = getattr(private.InterpreterBuilder, name)
        setattr(private.InterpreterBuilder, name, _without_bfloat16(method))
    private.ReduceScan.apply = _without_bfloat16(private.ReduceScan.apply)
    private.InterpreterBuilder.cast_impl = _cast(private.InterpreterBuilder.cast_impl)


def kernel_line() -> str:
    """The innermost line of a kernel that is running: file, number and text; "" outside of one."""
    frame: FrameType | None = sys._getframe(1)
    inside = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        inside = inside or name.startswith("triton.")
        # Between the kernel and here: Triton, who watches Triton, and this module.
        if inside and not name.startswith(("triton.", "kernels.triton.program", __name__)):
            file, line = frame.f_code.co_filename, frame.f_lineno
            return f'{Path(file).name}, line {line}: "{linecache.getline(file, line).strip()}"'
        frame = frame.f_back
    return ""


def _interpret_library() -> None:
    import triton.language as tl

    def method(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*args, **kwargs)

    made: dict[int, Any] = {}
    names = [name for name in sys.modules if name.split(".")[:2] == ["triton", "language"]]
    for owner in (*(sys.modules[name] for name in names), tl.tensor):
        for name, value in list(vars(owner).items()):
            if isinstance(value, private.JITFunction):
                function = made.setdefault(id(value), private.InterpretedFunction(value.fn))
                setattr(owner, name, method(function) if owner is tl.tensor else function)


def _without_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(_is_bfloat16(arg) for arg in args):
            raise _refusal()
        return function(*args, **kwargs)

    return call


def _cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Casts to and from bfloat16 are right where the other side is fp32."""
    import triton.language as tl

    def call(builder: Any, src: Any, dst_type: Any) -> Any:
        kinds = {src.dtype.scalar, dst_type.scalar}
        if tl.bfloat16 in kinds and not kinds <= {tl.bfloat16, tl.float32}:
            raise _refusal()
        return cast(builder, src, dst_type)

    return call


def _is_bfloat16(value: Any) -> bool:
    import triton.language as tl

    if isinstance(value, tuple):
        return any(_is_bfloat16(part) for part in value)
    return bool(
        isinstance(value, private.TensorHandle | tl.tensor) and value.dtype.scalar == tl.bfloat16
    )


def _refusal() -> TypeError:
    return message_alone(
        TypeError(
            f"bfloat16 arithmetic ({kernel_line()}): Triton's interpreter would compute with its "
            "bits as if they were whole numbers; a GPU is right. Convert what was loaded: "
            "x = tl.load(...).to(tl.float32)"
        )
    )


def _message_of_ours(error: Any) -> list[str]:
    """What a notebook shows of Triton's error: ours alone where one of ours led to it.

    Otherwise this raises, and IPython shows the traceback as ever.
    """
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is error:
        raise NotImplementedError
    lines: list[str] = cause._render_traceback_()
    return lines
