"""What can go wrong with a kernel, in one place.

    KernelError
    ├── CompileError         the compiler is missing, or refused the file
    ├── LaunchFailed         the GPU reported an error
    ├── OutOfBoundsError     an access outside of every tensor and shared array
    ├── MisalignedError      an access whose address is no multiple of its size
    ├── RaceError            two threads, or programs, use one address, one writes, in no order
    ├── UnwrittenError       a load of shared memory that no thread of the block has written
    ├── BarrierError         a barrier or warp operation that not all threads reach
    ├── WarpError            a shuffle from a lane that is not there, a mask without its caller
    ├── AssertionFailed      assert() or __trap() in the kernel
    ├── KernelCrash          a signal: a division by zero, a stack that overflows
    └── KernelTimeout        the kernel did not end in time

A bad argument of a launch raises `ValueError` or `TypeError`. All but the first two come from the
emulator, and from `kernels.triton.programs` a RaceError; both name the line.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

__all__ = [
    "AssertionFailed",
    "BarrierError",
    "CompileError",
    "KernelCrash",
    "KernelError",
    "KernelTimeout",
    "LaunchFailed",
    "MisalignedError",
    "OutOfBoundsError",
    "RaceError",
    "UnwrittenError",
    "WarpError",
    "message_alone",
]

E = TypeVar("E", bound=BaseException)


def message_alone(error: E) -> E:
    """The error, of which a notebook shows the message and none of our frames."""
    error._render_traceback_ = partial(_lines, error)  # type: ignore[attr-defined]
    return error.with_traceback(None)


def _lines(error: BaseException) -> list[str]:  # IPython's protocol
    return f"{type(error).__name__}: {error}".splitlines()


class KernelError(Exception):
    """Base of the errors of a kernel."""

    def _render_traceback_(self) -> list[str]:  # the message is the report
        return _lines(self)


class CompileError(KernelError):
    """There is no compiler, or it did not accept the kernel."""


class LaunchFailed(KernelError):
    """CUDA reported an error on launching or running the kernel."""


class OutOfBoundsError(KernelError):
    """An access that no tensor and no shared array contains."""


class MisalignedError(KernelError):
    """An access of 4, 8 or 16 bytes at an address that is no multiple of it: a GPU stops there."""


class RaceError(KernelError):
    """Two threads, or programs of Triton, access one address, one writes, and nothing orders them.

    Within a block barriers do; between blocks, and within one, a fence and an atomic operation.
    """


class UnwrittenError(KernelError):
    """A load of shared memory that no thread of the block has written."""


class BarrierError(KernelError):
    """Some threads wait for others that will not come."""


class WarpError(KernelError):
    """A shuffle takes from a lane that is not there, or a mask leaves out the lane that calls."""


class AssertionFailed(KernelError):
    """The kernel ended itself."""


class KernelCrash(KernelError):
    """The kernel's code was stopped by a signal; the process goes on."""


class KernelTimeout(KernelError):
    """The kernel ran longer than allowed."""
