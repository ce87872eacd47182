"""Races between the programs of a Triton launch: elements that one writes and another touches.

The interpreter runs programs one after the other, a GPU runs them at the same time. So two of them
that touch one element, one of the two with a write, race unless both do it atomically or something
orders them. `programs` tells each access to `ProgramOrder`, which knows two orders: a
launch ends before the next begins, and atomics on a single word. What a program did before its
atomic on a word (a lock, a counter, a flag) comes before what another does after a later atomic on
that word, unless `sem` is relaxed: one has to release, the other to acquire.

Left out: a race that shows in another order of the programs alone, atomics on a block (they order
nothing), and within a program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.errors import RaceError

__all__ = ["ProgramOrder"]

_NEVER = -1


class _Touched:
    """Who touched each element of one tensor last, and when: the number of the access."""

    def __init__(self, size: int) -> None:
        # Two readers, of different programs: a write by one of them races with the other.
        self.programs = {who: np.full(size, _NEVER) for who in ("writer", "reader", "other")}
        self.times = {who: np.full(size, _NEVER) for who in self.programs}
        self.atomic = np.zeros(size, dtype=bool)
        """Whether the last write was atomic."""

    def write(self, elements: Any, program: int, time: int, atomic: bool) -> None:
        """Reads before it are forgotten: who comes after this write comes after them."""
        self.programs["writer"][elements], self.times["writer"][elements] = program, time
        self.times["reader"][elements] = self.times["other"][elements] = _NEVER
        self.atomic[elements] = atomic

    def read(self, elements: Any, program: int, time: int) -> None:
        before = elements[self.programs["reader"][elements] != program]
        for table in (self.programs, self.times):
            table["other"][before] = table["reader"][before]
        self.programs["reader"][elements], self.times["reader"][elements] = program, time


class ProgramOrder:
    """The accesses of one launch, in the interpreter's order.

    Args:
        sizes: elements of each tensor, by its name.
        line: says where in its source the running kernel is.
    """

    def __init__(self, sizes: dict[str, int], line: Callable[[], str]) -> None:
        self._sizes, self._line = sizes, line
        self.launch(1)

    def launch(self, *grid: int) -> None:
        """All that was done before is ordered before what comes now."""
        self._grid = grid
        self._touched = {name: _Touched(size) for name, size in self._sizes.items()}
        self._accesses: list[tuple[str, str]] = []  # kind, line
        self._released: dict[int, Any] = {}
        self.program(*[0] * len(grid))

    def program(self, *position: int) -> None:
        """This program runs from now on. Of the others it knows nothing."""
        self._program = int(np.ravel_multi_index(position, self._grid))
        # Up to which access each program's doings are ordered before what this one does next.
        self._known = np.full(int(np.prod(self._grid)), _NEVER)
        self._known[self._program] = np.iinfo(np.int64).max

    def touch(
        self, name: str, elements: Any, kind: str, same_value: Callable[[int], bool] | None = None
    ) -> None:
        """Note an access; RaceError if it races with an earlier one.

        Args:
            kind: "load" or "store"; with "atomic " before it, an atomic one.
            same_value: whether what is stored at `elements[i]` is there already.
        """
        touched, atomic, writes = self._touched[name], "atomic" in kind, "store" in kind
        for who in ("writer", "reader", "other") if writes else ("writer",):
            times, programs = (t[who][elements] for t in (touched.times, touched.programs))
            races = times > self._known[programs]
            if atomic and who == "writer":
                races &= ~touched.atomic[elements]
            if races.any():
                i = int(races.argmax())
                same = who == "writer" and same_value is not None and same_value(i)
                earlier = (int(programs[i]), *self._accesses[times[i]])
                raise RaceError(self._message(f"{name}[{elements[i]}]", kind, earlier, same))
        self._accesses.append((kind, self._line()))
        time = len(self._accesses) - 1
        if writes:
            touched.write(elements, self._program, time, atomic)
        elif not atomic:
            touched.read(elements, self._program, time)

    def synchronise(self, address: int, sem: str) -> None:
        """An atomic on one word, after its own `touch`. sem: a name of Triton's MEM_SEMANTIC."""
        released = self._released.get(address, np.full_like(self._known, _NEVER))
        if "ACQUIRE" in sem:
            self._known = np.maximum(self._known, released)
        if "RELEASE" in sem:
            mine = self._known.copy()
            mine[self._program] = len(self._accesses)
            self._released[address] = np.maximum(released, mine)

    def _message(self, element: str, kind: str, earlier: tuple[int, str, str], same: bool) -> str:
        def place(program: int, kind: str, line: str) -> str:
            at = ", ".join(str(int(i)) for i in np.unravel_index(program, self._grid))
            return f"program ({at}), {kind} at {line or 'a line unknown'}"

        value = " (both write the same value)" if same else ""
        return (
            f"race at {element}{value}: {place(*earlier)}; "
            f"{place(self._program, kind, self._line())}. Nothing orders the two, and a GPU runs "
            "programs at the same time: give each its own elements, or use tl.atomic_add and its "
            "like. Orders known: one launch after another, and atomics on one word, not relaxed, "
            "after the first access and before the second"
        )
