"""What Triton's interpreter cannot do is named, with the kernel's line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="made for Linux")
from kernels.triton import INTERPRETED

if not INTERPRETED:
    pytest.skip("Triton compiles here", allow_module_level=True)

import triton
import triton.language as tl

from kernels.triton import private
from kernels.triton.interpreter import kernel_line


@triton.jit
def bfloat16_kernel(x_ptr, y_ptr, CASE: tl.constexpr):
    lanes = tl.arange(0, 8)
    x = tl.load(x_ptr + lanes)
    y = x
    if CASE == "sum of two":
        y = x + x
    elif CASE == "times a number":
        y = 2.0 * x
    elif CASE == "comparison":
        y = tl.where(x > 0, x, x)
    elif CASE == "negative":
        y = -x
    elif CASE == "reduction":
        y = tl.broadcast_to(tl.sum(x, axis=0), [8])
    elif CASE == "scan":
        y = tl.cumsum(x, axis=0)
    elif CASE == "product":
        tile = tl.broadcast_to(x[:, None], [8, 8])
        y = tl.sum(tl.dot(tile, tile), axis=0)
    elif CASE == "from whole numbers":
        y = lanes.to(tl.bfloat16)
    elif CASE == "atomic":
        tl.atomic_add(y_ptr + lanes, x)
    tl.store(y_ptr + lanes, y)


LINES = {
    "sum of two": "y = x + x",
    "times a number": "y = 2.0 * x",
    "comparison": "y = tl.where(x > 0, x, x)",
    "negative": "y = -x",
    "reduction": "y = tl.broadcast_to(tl.sum(x, axis=0), [8])",
    "scan": "y = tl.cumsum(x, axis=0)",
    "product": "y = tl.sum(tl.dot(tile, tile), axis=0)",
    "from whole numbers": "y = lanes.to(tl.bfloat16)",
    "atomic": "tl.atomic_add(y_ptr + lanes, x)",
}


@pytest.mark.parametrize("case", LINES)
def test_bfloat16_arithmetic_is_named(case: str) -> None:
    x, y = torch.ones(8).bfloat16(), torch.zeros(8).bfloat16()
    with pytest.raises(Exception, match=r"bfloat16 arithmetic \(.*tl.float32") as raised:
        bfloat16_kernel[(1,)](x, y, case)
    assert "test_triton_interpreter.py, line " in str(raised.value)
    assert f'"{LINES[case]}"' in str(raised.value)


@triton.jit
def moving_kernel(x_ptr, y_ptr):
    lanes = tl.arange(0, 8)
    x = tl.load(x_ptr + lanes, mask=lanes < 4, other=1.0)
    pair = tl.where(lanes < 2, x, tl.full([8], 3.0, tl.bfloat16))
    doubled = 2.0 * pair.to(tl.float32)
    tl.store(y_ptr + lanes, doubled.to(tl.bfloat16))


def test_bfloat16_may_be_moved_and_converted() -> None:
    x, y = torch.full((8,), 2.0).bfloat16(), torch.zeros(8).bfloat16()
    moving_kernel[(1,)](x, y)
    assert y.tolist() == [4.0] * 2 + [6.0] * 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_types_are_computed(dtype: torch.dtype) -> None:
    x, y = torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype)
    bfloat16_kernel[(1,)](x, y, "sum of two")
    assert y.tolist() == [2.0] * 8


def test_outside_of_a_kernel_there_is_no_line() -> None:
    found: Any = kernel_line()
    assert found == ""


def test_a_notebook_shows_our_message_and_not_triton_s_frames() -> None:
    x = torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(private.InterpreterError) as error:
        bfloat16_kernel[(1,)](x, x, CASE="sum of two")
    shown = error.value._render_traceback_()
    assert len(shown) == 1 and shown[0].startswith("TypeError: bfloat16 arithmetic")
    with pytest.raises(NotImplementedError):  # IPython then shows the traceback as ever
        private.InterpreterError("another's")._render_traceback_()
