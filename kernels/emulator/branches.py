"""The branch that ends a basic block, found in the disassembled library (objdump).

The runtime knows a block by the call at its start; the `if` that its lanes disagree about is a jump
further on, with a line of its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cached_property
from pathlib import Path

__all__ = ["BranchFinder"]

_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(\w+)\s*(.*)$", re.MULTILINE)
_MAX_INSTRUCTIONS = 1000
_HOOK = "__sanitizer_cov_trace_pc"


class BranchFinder:
    """Branches of one library, which is disassembled when the first is asked for."""

    def __init__(self, library: Path) -> None:
        self._library = library

    def after(self, address: int) -> int:
        """Address behind the jump that ends the block which goes on at `address`.

        `address` itself where there is none, or where there is no objdump to tell.
        """
        instructions, following = self._code
        at = address
        for _ in range(_MAX_INSTRUCTIONS):
            if at not in instructions:
                break
            name, operands = instructions[at]
            if name == "jmp" and (target := re.match(r"([0-9a-f]+)\b", operands)):
                at = int(target[1], 16)
                continue
            if name.startswith("j"):
                return at + 1
            if name.startswith("ret") or _HOOK in operands:
                break
            at = following[at]
        return address

    @cached_property
    def _code(self) -> tuple[dict[int, tuple[str, str]], dict[int, int]]:
        tool = shutil.which("objdump")
        if tool is None:
            return {}, {}
        command = [tool, "-d", "--no-show-raw-insn", str(self._library)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = [(int(at, 16), name, rest) for at, name, rest in _INSTRUCTION.findall(text)]
        instructions = {at: (name, rest) for at, name, rest in found}
        places = [at for at, _, _ in found]
        return instructions, dict(zip(places, [*places[1:], -1], strict=True))
