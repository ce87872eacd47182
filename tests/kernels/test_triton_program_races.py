"""Races that `watch_programs` finds between programs, and orders that it knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="made for Linux")
from kernels.triton import INTERPRETED

if not INTERPRETED:
    pytest.skip("Triton compiles here: nothing to watch", allow_module_level=True)

import triton
import triton.language as tl

from kernels.errors import RaceError
from kernels.triton.programs import watch_programs


def race(kernel: Any, grid: tuple[int, ...], *args: Any, **tensors: torch.Tensor) -> str:
    """The message of the race in `kernel[grid](*tensors, *args)`."""
    with pytest.raises(Exception, match="race at") as raised, watch_programs(**tensors):
        kernel[grid](*tensors.values(), *args)
    assert isinstance(raised.value.__cause__, RaceError)
    return str(raised.value.__cause__)


def runs(kernel: Any, grid: tuple[int, ...], *args: Any, **tensors: torch.Tensor) -> None:
    with watch_programs(**tensors):
        kernel[grid](*tensors.values(), *args)


@triton.jit
def plain_sum_kernel(x_ptr, y_ptr):
    part = tl.sum(tl.load(x_ptr + tl.program_id(0) * 4 + tl.arange(0, 4)), axis=0)
    y = tl.load(y_ptr)
    tl.store(y_ptr, y + part)


@triton.jit
def atomic_sum_kernel(x_ptr, y_ptr):
    part = tl.sum(tl.load(x_ptr + tl.program_id(0) * 4 + tl.arange(0, 4)), axis=0)
    tl.atomic_add(y_ptr, part)


def test_a_plain_sum_into_one_word() -> None:
    x, y = torch.ones(16), torch.zeros(1)
    message = race(plain_sum_kernel, (4,), x=x, y=y)
    assert message.startswith(
        "race at y[0]: program (0, 0, 0), store at test_triton_program_races.py, line "
    )
    assert '"tl.store(y_ptr, y + part)"; program (1, 0, 0), load at ' in message
    assert '"y = tl.load(y_ptr)". Nothing orders the two' in message
    runs(plain_sum_kernel, (1,), x=x, y=torch.zeros(1))  # one program


def test_atomics_and_launches_are_in_order() -> None:
    x, y = torch.ones(16), torch.zeros(1)
    runs(atomic_sum_kernel, (4,), x=x, y=y)
    assert y.item() == 16
    with watch_programs(x=x, y=y):
        for _ in range(2):
            plain_sum_kernel[(1,)](x, y)
        atomic_sum_kernel[(4,)](x, y)
    assert y.item() == 16 + 8 + 16


@triton.jit
def read_later_kernel(x_ptr, y_ptr):
    program = tl.program_id(0)
    tl.atomic_add(y_ptr, 1.0)
    tl.store(x_ptr + program, tl.load(y_ptr))


def test_a_plain_read_of_what_others_update() -> None:
    message = race(read_later_kernel, (2,), x=torch.zeros(2), y=torch.zeros(1))
    assert (
        "program (0, 0, 0), load at" in message
        and "program (1, 0, 0), atomic load and store at" in message
    )


@triton.jit
def flag_kernel(x_ptr, y_ptr, VALUE: tl.constexpr):
    tl.store(y_ptr, VALUE + 0 * tl.program_id(0))


@triton.jit
def number_kernel(x_ptr, y_ptr):
    tl.store(y_ptr, tl.program_id(0))


def test_two_stores_and_whether_the_value_is_the_same() -> None:
    x, y = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    assert "race at y[0] (both write the same value): " in race(flag_kernel, (2,), 7, x=x, y=y)
    assert "same value" not in race(number_kernel, (2,), x=x, y=y)


@triton.jit
def shift_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets + 1))


def test_a_store_to_what_another_program_reads_and_the_place_in_the_grid() -> None:
    message = race(shift_kernel, (1, 2), 4, x=torch.arange(9.0), y=torch.zeros(1))
    assert message.startswith("race at x[4]: program (0, 0, 0), load at ")
    assert "; program (0, 1, 0), store at " in message


@triton.jit
def locked_sum_kernel(x_ptr, lock_ptr, y_ptr, LOCKED: tl.constexpr, SEM: tl.constexpr):
    part = tl.sum(tl.load(x_ptr + tl.program_id(0) * 4 + tl.arange(0, 4)), axis=0)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    y = tl.load(y_ptr)
    tl.store(y_ptr, y + part)
    if LOCKED:
        tl.atomic_xchg(lock_ptr, 0, sem=SEM)


def test_a_lock_orders_and_a_relaxed_one_does_not() -> None:
    x, lock = torch.ones(16), torch.zeros(1, dtype=torch.int32)
    for sem in ("acq_rel", "release"):
        y = torch.zeros(1)
        runs(locked_sum_kernel, (4,), True, sem, x=x, lock=lock, y=y)
        assert y.item() == 16
    assert "race at y[0]" in race(
        locked_sum_kernel, (4,), True, "relaxed", x=x, lock=lock, y=torch.zeros(1)
    )


@triton.jit
def last_one_kernel(x_ptr, parts_ptr, count_ptr, y_ptr, SEM: tl.constexpr, EARLY: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    if EARLY:
        before = tl.atomic_add(count_ptr, 1, sem=SEM)
    part = tl.sum(tl.load(x_ptr + program * 4 + tl.arange(0, 4)), axis=0)
    tl.store(parts_ptr + program, part)
    if not EARLY:
        before = tl.atomic_add(count_ptr, 1, sem=SEM)
    if before == programs - 1:
        tl.store(y_ptr, tl.sum(tl.load(parts_ptr + tl.arange(0, 4)), axis=0))


def test_the_last_program_may_read_what_all_released() -> None:
    def tensors() -> dict[str, torch.Tensor]:
        count = torch.zeros(1, dtype=torch.int32)
        return dict(x=torch.ones(16), parts=torch.zeros(4), count=count, y=torch.zeros(1))

    right = tensors()
    runs(last_one_kernel, (4,), "acq_rel", False, **right)
    assert right["y"].item() == 16
    assert "race at parts[0]" in race(last_one_kernel, (4,), "relaxed", False, **tensors())
    assert "race at parts[0]" in race(last_one_kernel, (4,), "acq_rel", True, **tensors())


@triton.jit
def helper(y_ptr):
    tl.store(y_ptr, tl.load(y_ptr) + 1.0)


@triton.jit
def calling_kernel(y_ptr):
    helper(y_ptr)


def test_the_line_is_that_of_a_function_that_the_kernel_calls() -> None:
    y = torch.zeros(1)
    with pytest.raises(Exception, match="race at y") as raised, watch_programs(y=y):
        calling_kernel[(2,)](y)
    assert "tl.store(y_ptr, tl.load(y_ptr) + 1.0)" in str(raised.value)
