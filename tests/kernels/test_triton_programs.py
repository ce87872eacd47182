"""What `watch_programs` counts, and what it stops, on kernels whose traffic is known."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="made for Linux")
from kernels.triton import INTERPRETED

if not INTERPRETED:
    pytest.skip("Triton compiles here: nothing to watch", allow_module_level=True)

import triton
import triton.language as tl

from kernels.triton.programs import watch_programs


@triton.jit
def scale_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    if MASKED:
        tl.store(y_ptr + offsets, 2.0 * tl.load(x_ptr + offsets, mask=inside), mask=inside)
    else:
        tl.store(y_ptr + offsets, 2.0 * tl.load(x_ptr + offsets))


@triton.jit
def row_sum_kernel(x_ptr, y_ptr, stride, columns, BLOCK: tl.constexpr):
    row, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + lanes, mask=lanes < columns, other=0.0)
    tl.store(y_ptr + row, tl.sum(x, axis=0))


@triton.jit
def histogram_kernel(x_ptr, count_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.atomic_add(count_ptr + x, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_counts_of_an_elementwise_kernel(dtype: torch.dtype) -> None:
    x, y = torch.randn(100, dtype=dtype), torch.empty(100, dtype=dtype)
    with watch_programs(x=x, y=y) as log:
        for _ in range(2):
            scale_kernel[(4,)](x, y, 100, BLOCK=32, MASKED=True)
    assert torch.equal(y, 2 * x)
    assert (log.launches, log.programs) == (2, 8)
    assert (log.lanes, log.masked_lanes) == (2 * 2 * 128, 2 * 2 * 28)
    assert log.loaded_bytes == log.stored_bytes == 200 * x.element_size()
    assert log.bytes == 400 * x.element_size()
    assert set(log["x"].load_counts) == {2} and set(log["x"].store_counts) == {0}
    assert set(log["y"].store_counts) == {2} and set(log["y"].load_counts) == {0}


def test_an_access_outside_is_stopped_before_it_happens() -> None:
    store = torch.zeros(64)
    x, y = torch.ones(100), store[:20]
    with (
        pytest.raises(Exception, match=r"store outside of x, y: program \(0, 0, 0\) .* y\[20\]"),
        watch_programs(x=x, y=y),
    ):
        scale_kernel[(1,)](x, y, 20, BLOCK=32, MASKED=False)
    assert not store.any()
    y = torch.empty(128)
    with (
        pytest.raises(Exception, match=r"load outside of x, y: program \(3, 0, 0\) .* x\[100\]"),
        watch_programs(x=x, y=y),
    ):
        scale_kernel[(4,)](x, y, 100, BLOCK=32, MASKED=False)


def test_between_the_rows_of_a_view_is_outside() -> None:
    x, y = torch.randn(5, 40)[:, 3:20], torch.empty(5)
    with watch_programs(x=x, y=y) as log:
        row_sum_kernel[(5,)](x, y, 40, 17, BLOCK=32)
    torch.testing.assert_close(y, x.sum(1))
    assert set(log["x"].load_counts) == {1} and log["x"].load_counts.size == 85
    assert (log.loaded_bytes, log.stored_bytes, log.bytes) == (340, 20, 360)
    with pytest.raises(Exception, match="load outside of x, y"), watch_programs(x=x, y=y):
        row_sum_kernel[(5,)](x, y, 40, 18, BLOCK=32)


def test_counts_stand_in_the_tensors_order() -> None:
    x, y = torch.randn(4, 6).t(), torch.empty(1)  # (6, 4), column by column in memory
    with watch_programs(x=x, y=y) as log:
        row_sum_kernel[(1,)](x, y, 1, 6, BLOCK=8)  # memory's first six: column 0
    assert log["x"].load_counts.reshape(6, 4)[:, 0].tolist() == [1] * 6
    assert log["x"].load_counts.sum() == 6


def test_atomics_load_and_store() -> None:
    x, count = torch.tensor([0, 2, 2, 1]), torch.zeros(3, dtype=torch.int64)
    with watch_programs(x=x, count=count) as log:
        histogram_kernel[(1,)](x, count, BLOCK=4)
    assert count.tolist() == [1, 1, 2]
    assert log["count"].load_counts.tolist() == log["count"].store_counts.tolist() == [1, 1, 2]


@triton.jit
def masked_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes, mask=lanes < size, other=OTHER)
    tl.store(y_ptr + lanes, x)


@pytest.mark.parametrize(
    ("dtype", "undefined"),
    [
        (torch.float32, float("nan")),
        (torch.float16, float("nan")),
        (torch.bfloat16, float("nan")),
        (torch.int32, 2**31 - 1),
        (torch.int64, 2**63 - 1),
    ],
)
def test_a_masked_lane_without_other_is_undefined(dtype: torch.dtype, undefined: float) -> None:
    x, y = torch.arange(1, 4).to(dtype), torch.zeros(8, dtype=dtype)
    with watch_programs(x=x, y=y):
        masked_kernel[(1,)](x, y, 3, BLOCK=8, OTHER=None)
    assert torch.equal(y[:3], x)
    expected = torch.full((5,), undefined, dtype=dtype)
    torch.testing.assert_close(y[3:], expected, rtol=0, atol=0, equal_nan=True)
    with watch_programs(x=x, y=y):
        masked_kernel[(1,)](x, y, 3, BLOCK=8, OTHER=7.0)
    assert y.tolist() == [1, 2, 3, 7, 7, 7, 7, 7]


def test_nothing_is_watched_afterwards() -> None:
    x, y = torch.randn(32), torch.empty(64)
    with watch_programs(x=x) as log:
        pass
    scale_kernel[(1,)](x, y, 32, BLOCK=32, MASKED=True)
    assert (log.launches, log.bytes) == (0, 0)


@pytest.mark.parametrize(
    ("tensors", "match"),
    [({}, "no tensors"), ({"x": torch.empty(0)}, "x is"), ({"x": 3.0}, "x is float")],
)
def test_what_cannot_be_watched(tensors: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match), watch_programs(**tensors):
        pass


def test_compiled_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), watch_programs(x=torch.ones(1)):
        pass
