"""What the ranks print, shown in the notebook with the rank before each line.

By default in rank order: the lines of the lowest rank that still runs appear as they come, those
of the others when their turn comes, so that a saved notebook is the same on every run. With
`order="arrival"` each line appears at once.

A progress bar (text after a carriage return) leaves its last state. Of a flood the beginning and
the end are shown, and how much was left out. Partial lines wait for their end.

    output = RankedOutput(world_size=2, order="rank")
    output.feed(rank=1, stream="stdout", data=b"hello\n")
    output.finish(rank=0); output.finish(rank=1); output.close()
"""

from __future__ import annotations

import re
import sys
from collections import deque
from typing import Literal

__all__ = ["Order", "RankedOutput"]

Order = Literal["rank", "arrival"]

HEAD_BYTES = 100_000
TAIL_LINES = 10
MAX_LINE_BYTES = 10_000
# Printed by gloo's C++ on every connection; says nothing to a learner.
_NOISE = re.compile(rb"^\[Gloo\] Rank \d+ is connected to \d+ peer ranks")


class _Rank:
    """One rank's share: its budget, the lines that wait, the beginning of a line."""

    def __init__(self) -> None:
        self.partial = {"stdout": bytearray(), "stderr": bytearray()}
        self.waiting: list[tuple[str, str]] = []
        self.shown_bytes = 0
        self.left_out_bytes = 0
        self.tail: deque[tuple[str, str, int]] = deque(maxlen=TAIL_LINES)
        self.finished = False


class RankedOutput:
    """Collects the output of all ranks and prints it, labelled, to this process's streams."""

    def __init__(self, world_size: int, order: Order = "rank") -> None:
        self._ranks = [_Rank() for _ in range(world_size)]
        self._order = order
        self._turn = 0

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take bytes that `rank` wrote to "stdout" or "stderr"."""
        state = self._ranks[rank]
        partial = state.partial[stream]
        partial += data
        if b"\n" not in data:
            if len(partial) > 10 * MAX_LINE_BYTES:  # a line without end must not fill the memory
                self._line(rank, stream, bytes(partial))
                partial.clear()
            return
        *lines, rest = bytes(partial).split(b"\n")
        partial[:] = rest
        for line in lines:
            self._line(rank, stream, line)

    def finish(self, rank: int) -> None:
        """`rank` writes no more: show what is left of it, and go on to the next ranks."""
        state = self._ranks[rank]
        if state.finished and not any(state.partial.values()):
            return
        for stream, partial in state.partial.items():
            if partial:
                self._line(rank, stream, bytes(partial))
                partial.clear()
        if state.left_out_bytes:
            self._emit(rank, "stdout", f"... {state.left_out_bytes:,} bytes left out ...")
        for stream, text, _ in state.tail:
            self._emit(rank, stream, text)
        state.tail.clear()
        state.left_out_bytes = 0
        state.finished = True
        while self._turn < len(self._ranks) and self._ranks[self._turn].finished:
            self._turn += 1
            if self._turn < len(self._ranks):
                waiting, self._ranks[self._turn].waiting = self._ranks[self._turn].waiting, []
                for stream, text in waiting:
                    _show(self._turn, stream, text)

    def close(self) -> None:
        """Show everything collected."""
        for rank, state in enumerate(self._ranks):
            if not state.finished:
                self.finish(rank)

    def _line(self, rank: int, stream: str, line: bytes) -> None:
        if _NOISE.match(line):
            return
        line = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
        text = line[:MAX_LINE_BYTES].decode("utf-8", "replace")
        if len(line) > MAX_LINE_BYTES:
            text += f" ... {len(line) - MAX_LINE_BYTES:,} bytes of this line left out"
        state = self._ranks[rank]
        if state.shown_bytes < HEAD_BYTES:
            state.shown_bytes += len(text) + 1
            self._emit(rank, stream, text)
            return
        if len(state.tail) == TAIL_LINES:
            state.left_out_bytes += state.tail[0][2]
        state.tail.append((stream, text, len(line) + 1))

    def _emit(self, rank: int, stream: str, text: str) -> None:
        if self._order == "rank" and rank != self._turn:
            self._ranks[rank].waiting.append((stream, text))
        else:
            _show(rank, stream, text)


def _show(rank: int, stream: str, text: str) -> None:
    print(f"[rank {rank}] {text}", file=sys.stderr if stream == "stderr" else sys.stdout)
