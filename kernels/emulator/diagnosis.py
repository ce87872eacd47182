"""From what the runtime says about a failed launch to an exception that a reader understands."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kernels.arguments import Configuration
from kernels.emulator.binding import Failure
from kernels.emulator.lines import LineFinder
from kernels.errors import (
    AssertionFailed,
    BarrierError,
    KernelCrash,
    KernelError,
    KernelTimeout,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    UnwrittenError,
    WarpError,
)
from kernels.source import Source

__all__ = ["LANE", "RACE", "Scene", "error_for"]

# FailureKind of runtime/interface.h.
_OUT_OF_BOUNDS, _MISALIGNED, RACE, _BARRIER, _INDEX, _TRAP, _SIGNAL = range(1, 8)
_TIMEOUT, _INTERRUPTED, _NO_MEMORY, _UNWRITTEN, LANE, _MASK, _SPIN = range(8, 15)
# Scope and Missing of the same file.
_BLOCKS = 0
_NOT_IN_MASK, _ENDED, _NO_THREAD = range(3)

# Operation of include/device_functions.h.
_WARP_OPERATIONS = (
    "__syncwarp",
    "__shfl_sync",
    "__shfl_up_sync",
    "__shfl_down_sync",
    "__shfl_xor_sync",
    "__ballot_sync",
    "__any_sync",
    "__all_sync",
    "__activemask",
    "__match_any_sync",
)


class Named(Protocol):
    """A region of memory with its name."""

    @property
    def name(self) -> str: ...
    @property
    def base(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def shared(self) -> bool: ...
    @property
    def element_bytes(self) -> int: ...


@dataclass(frozen=True)
class Scene:
    """Where it happened."""

    source: Source
    kernel: str
    where: Configuration
    regions: Sequence[Named]
    load_address: int
    finder: LineFinder

    def number_at(self, pc: int) -> int:
        """Number of the line that an address in the program comes from; 0: not known."""
        if not self.load_address or not pc:
            return 0
        return self.finder.find([pc - self.load_address])[pc - self.load_address]

    def line_at(self, pc: int) -> str:
        """ "06_matmul_tiled.cu:34 (sum += ...)" for an address in the program."""
        return self.line(self.number_at(pc))

    def line(self, number: int) -> str:
        """The same for a line number; 0: not known."""
        name = self.source.display_name
        lines = self.source.text.splitlines()
        if not 1 <= number <= len(lines):
            return name
        return f"{name}:{number} ({lines[number - 1].strip()})"

    def thread(self, index: int) -> str:
        """ "thread (3, 0, 0)"."""
        x, y, _ = self.where.block
        return f"thread ({index % x}, {index // x % y}, {index // (x * y)})"

    def place(self, region: int, address: int) -> str:
        """ "a[17]": an address in units of the array's elements."""
        array = self.regions[region]
        element = (address - array.base) // array.element_bytes
        return f"{array.name}[{element}]"


def error_for(failure: Failure, scene: Scene, timeout_s: float) -> BaseException:
    """The exception to raise."""
    block = _block(failure.block)
    kind = failure.kind
    if kind == _INTERRUPTED:
        return KeyboardInterrupt(f"kernel {scene.kernel} was interrupted")
    if kind == _NO_MEMORY:
        return KernelError(
            f"kernel {scene.kernel} is too large for the emulator: memory, or one of its limits of "
            "64 arrays and 4,096 places in the code that access memory, is used up"
        )
    if kind == _TIMEOUT:
        return KernelTimeout(
            f"kernel {scene.kernel} did not end within {timeout_s:g} s; it was in {block} at "
            f"{scene.line_at(failure.pc)}. An endless loop, or a wait for another block, which "
            "comes only after this one? If neither, load(..., timeout_s=...) allows more."
        )
    describe = {
        _OUT_OF_BOUNDS: _out_of_bounds,
        _MISALIGNED: _misaligned,
        RACE: _race,
        _BARRIER: _barrier,
        _INDEX: _index,
        _TRAP: _trap,
        _SIGNAL: _crash,
        _UNWRITTEN: _unwritten,
        LANE: _lane,
        _MASK: _mask,
        _SPIN: _spin,
    }[kind]
    return describe(failure, scene, block)


def _block(index: Sequence[int]) -> str:
    return f"block ({', '.join(str(n) for n in index)})"


def _verb(write: int) -> str:
    return "writes" if write else "reads"


def _out_of_bounds(failure: Failure, scene: Scene, block: str) -> KernelError:
    who = f"kernel {scene.kernel}, {block}, {scene.thread(failure.thread)}"
    place = scene.line_at(failure.pc)
    if failure.region < 0:
        return OutOfBoundsError(
            f"{who} {_verb(failure.write)} memory, of which it has none: {place}"
        )
    array = scene.regions[failure.region]
    count = array.size_bytes // array.element_bytes
    what = "shared array" if array.shared else "tensor"
    distance = failure.address - array.base
    if not -(2**32) < distance < 2**32:
        return OutOfBoundsError(
            f"{who} {_verb(failure.write)} at address {failure.address:#x}, which is in no tensor "
            f"and no shared array: {place}"
        )
    index = scene.place(failure.region, failure.address)
    return OutOfBoundsError(
        f"{who} {_verb(failure.write)} {index}, but the {what} {array.name} has {count} elements: "
        f"{place}"
    )


def _misaligned(failure: Failure, scene: Scene, block: str) -> KernelError:
    return MisalignedError(
        f"kernel {scene.kernel}, {block}, {scene.thread(failure.thread)} {_verb(failure.write)} "
        f"{failure.detail} bytes at {scene.place(failure.region, failure.address)}, an address "
        f"that is no multiple of {failure.detail}: a GPU stops here. {scene.line_at(failure.pc)}"
    )


def _race(failure: Failure, scene: Scene, block: str) -> KernelError:
    earlier = "wrote" if failure.other_write else "read"
    first, second = scene.thread(failure.other_thread), scene.thread(failure.thread)
    between = failure.scope == _BLOCKS
    if between:
        first, second = f"{_block(failure.other_block)}, {first}", f"{block}, {second}"
    head = f"kernel {scene.kernel}" if between else f"kernel {scene.kernel}, {block}"
    what = "blocks" if between else "threads"
    nothing = "nothing to order them" if between else "no barrier between"
    place = scene.place(failure.region, failure.address)
    text = (
        f"{head}: two {what} race on {place}, with {nothing}\n"
        f"  {first} {earlier} it at {scene.line_at(failure.other_pc)}\n"
        f"  {second} {_verb(failure.write)} it at {scene.line_at(failure.pc)}"
    )
    if failure.same_value:
        text += "\n  (both write the same value)"
    if between:
        text += (
            "\n  (give each block its own element, or use atomicAdd() and its like; else order the "
            "blocks: a __threadfence() after the first access, then an atomic or volatile write, "
            "which the other block reads in the same way before its access)"
        )
    return RaceError(text)


def _unwritten(failure: Failure, scene: Scene, block: str) -> KernelError:
    return UnwrittenError(
        f"kernel {scene.kernel}, {block}, {scene.thread(failure.thread)} reads "
        f"{scene.place(failure.region, failure.address)}, shared memory that no thread of the "
        f"block has written: {scene.line_at(failure.pc)}"
    )


def _lane(failure: Failure, scene: Scene, block: str) -> KernelError:
    why = {
        _NOT_IN_MASK: "which is not in its mask",
        _ENDED: "whose thread has ended",
        _NO_THREAD: "which has no thread: the block ends before it",
    }[failure.other_write]
    return WarpError(
        f"kernel {scene.kernel}, {block}, {scene.thread(failure.thread)}: "
        f"{_WARP_OPERATIONS[failure.write]} takes a value from lane {failure.detail}, {why}, so "
        f"that the result is undefined: {scene.line(failure.line)}"
    )


def _mask(failure: Failure, scene: Scene, block: str) -> KernelError:
    return WarpError(
        f"kernel {scene.kernel}, {block}, {scene.thread(failure.thread)} calls "
        f"{_WARP_OPERATIONS[failure.write]} with mask {failure.detail:#010x}, which leaves out its "
        f"own lane {failure.thread % 32}: {scene.line(failure.line)}"
    )


def _spin(failure: Failure, scene: Scene, block: str) -> KernelError:
    where = f"{block}, {scene.thread(failure.thread)}"
    what = "memory"
    if failure.region >= 0:
        what = scene.place(failure.region, failure.address)
    why = (
        "blocks run one after another here, so that none can wait for a later one, and a barrier "
        "of the whole grid cannot be passed"
        if failure.detail and not scene.regions[failure.region].shared
        else "no thread is left that could change it, on a GPU neither"
    )
    return KernelTimeout(
        f"kernel {scene.kernel}, {where} waits forever for {what} to change: {why}. "
        f"{scene.line_at(failure.pc)}"
    )


def _barrier(failure: Failure, scene: Scene, block: str) -> KernelError:
    operation = "__syncthreads" if failure.write < 0 else _WARP_OPERATIONS[failure.write]
    group = "block" if failure.write < 0 else "warp's mask"
    text = (
        f"kernel {scene.kernel}, {block}: {operation} is not reached by all threads of "
        f"the {group}\n"
        f"  {scene.thread(failure.thread)} waits at {scene.line(failure.line)}"
    )
    if failure.other_thread >= 0:
        other = scene.thread(failure.other_thread)
        text += (
            f"\n  {other} waits at {scene.line(failure.other_line)}"
            if failure.other_line
            else f"\n  {other} has ended"
        )
        if failure.write < 0 and not failure.other_line:
            text += (
                "\n  (a GPU of compute capability 7.0 or more does not wait for threads that have "
                "ended: the emulator is stricter)"
            )
    return BarrierError(text)


def _index(failure: Failure, scene: Scene, block: str) -> KernelError:
    file = os.fsdecode(failure.text or b"")
    place = scene.line(failure.line) if file.endswith(".cu") else f"{file}:{failure.line}"
    return OutOfBoundsError(
        f"kernel {scene.kernel}, {block}, {scene.thread(failure.thread)}: index {failure.detail} "
        f"is outside of an array's dimension: {place}"
    )


def _trap(failure: Failure, scene: Scene, block: str) -> KernelError:
    return AssertionFailed(
        f"kernel {scene.kernel}, {block}, {scene.thread(failure.thread)}: "
        f"{os.fsdecode(failure.text or b'')} failed: {scene.line(failure.line)}"
    )


def _crash(failure: Failure, scene: Scene, block: str) -> KernelError:
    number = signal.Signals(failure.detail)
    causes = {
        signal.SIGFPE: "an integer division by zero",
        signal.SIGSEGV: "a wild pointer, or an overflow of the stack (recursion, a large array)",
    }
    cause = causes.get(number, "an instruction that the processor refuses")
    return KernelCrash(
        f"kernel {scene.kernel}, {block}, {scene.thread(failure.thread)} was stopped by "
        f"{number.name}: {cause}. {scene.line_at(failure.pc)}"
    )
