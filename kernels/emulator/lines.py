"""From an instruction's address to the line of the source it came from (addr2line)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kernels.errors import CompileError

__all__ = ["LineFinder"]


class LineFinder:
    """Lines of one library; each address is looked up once."""

    def __init__(self, library: Path, source: Path) -> None:
        self._library = library
        self._source = os.path.realpath(source)
        self._known: dict[int, int] = {}

    def find(self, addresses: Iterable[int]) -> dict[int, int]:
        """{address: line of the user's file}; 0 where the code is not from that file.

        An address is that of the instruction after a call, counted from the library's start.
        """
        wanted = sorted(set(addresses))
        missing = [address for address in wanted if address not in self._known]
        if missing:
            self._known.update(self._look_up(missing))
        return {address: self._known[address] for address in wanted}

    def _look_up(self, addresses: list[int]) -> dict[int, int]:
        tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
        if tool is None:
            raise CompileError(
                "addr2line is not installed; it comes with binutils, as g++'s ld does"
            )
        # The call itself lies before the address that it returns to.
        text = "\n".join(hex(address - 1) for address in addresses)
        done = subprocess.run(
            [tool, "-e", str(self._library), "-a", "-i"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        lines: dict[int, int] = {}
        current = -1
        for line in done.stdout.splitlines():
            if line.startswith("0x") and ":" not in line:
                current = int(line, 16) + 1
                lines[current] = 0
                continue
            # Where calls were inlined, the innermost comes first: the first of the user's file.
            file, _, number = re.sub(r" \(discriminator \d+\)$", "", line).rpartition(":")
            if lines[current] == 0 and number.isdigit() and os.path.realpath(file) == self._source:
                lines[current] = int(number)
        return lines
