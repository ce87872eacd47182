"""How many memory instructions nvcc makes of a kernel's accesses, read from its machine code, SASS.

    instructions(path, "sm_90")["matmul_tiled", "shared load"]    # 20, of 6.4 bytes on average
    shared_loads(path, report)          # (accesses counted, instructions that a GPU executes)

The emulator counts the accesses of the source. nvcc merges neighbouring ones into wider
instructions where it sees that they are neighbours: requests and instructions are then fewer on a
GPU, bytes are the same. Numbers here are of the code, where an instruction in a loop stands once,
or as often as the loop was unrolled, so they compare by the bytes that one moves.

It needs nvcc, and cuobjdump: of the CUDA toolkit, or the one that Triton brings along.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernels.report import Report

__all__ = ["Instructions", "disassembler", "instructions", "shared_loads"]

_FUNCTION = re.compile(r"Function : (\w+)")
_ACCESS = re.compile(r"\b(LDG|STG|LDS|STS)(\.[A-Z0-9_.]+)?\s")
_KINDS = {"LDG": "global load", "STG": "global store", "LDS": "shared load", "STS": "shared store"}
_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass(frozen=True)
class Instructions:
    """Those of one kind, in one kernel."""

    number: int
    bytes: int
    """That one thread moves if it does each of them once."""

    @property
    def bytes_each(self) -> float:
        """On average."""
        return self.bytes / self.number


def disassembler() -> str | None:
    """Path of cuobjdump; None where there is none."""
    if found := shutil.which("cuobjdump"):
        return found
    triton = importlib.util.find_spec("triton")
    for folder in triton.submodule_search_locations or () if triton else ():
        path = Path(folder, "backends", "nvidia", "bin", "cuobjdump")
        if path.exists():
            return str(path)
    return None


def instructions(
    path: Path, architecture: str, defines: Mapping[str, int] | None = None
) -> dict[tuple[str, str], Instructions]:
    """{(kernel, kind): its instructions}; a kind that a kernel does not have is not there.

    Raises FileNotFoundError without nvcc or cuobjdump, ValueError with nvcc's words if it refuses.
    """
    nvcc, tool = shutil.which("nvcc"), disassembler()
    if nvcc is None or tool is None:
        raise FileNotFoundError("nvcc or cuobjdump was not found: install the CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/out.cubin"
        command = [nvcc, "-cubin", f"-arch={architecture}", "-o", cubin, str(path)]
        command += [f"-D{name}={value}" for name, value in (defines or {}).items()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise ValueError(f"nvcc does not compile {path.name}:\n{done.stderr.strip()}")
        text = subprocess.run(
            [tool, "-sass", cubin], capture_output=True, text=True, timeout=300, check=True
        ).stdout
    return _counted(text)


def shared_loads(path: Path, report: Report, architecture: str = "sm_90") -> tuple[int, int]:
    """(accesses of the source that the emulator counted, instructions of a GPU that do the same).

    The second is what the bytes asked for take with the code's instructions, used evenly. That
    holds where all of them are in one loop, as in the matrix products of kernels/cuda.

    Raises as `instructions` does.
    """
    lines = [line for line in report.by_line if line.kind == "shared load"]
    accesses, asked = (sum(getattr(line, name) for line in lines) for name in ("accesses", "bytes"))
    made = instructions(path, architecture).get((report.kernel, "shared load"))
    return accesses, round(asked / made.bytes_each) if made else 0


def _counted(text: str) -> dict[tuple[str, str], Instructions]:
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    kernel = ""
    for line in text.splitlines():
        if function := _FUNCTION.search(line):
            kernel = function[1]
        elif access := _ACCESS.search(line):
            modifiers = (access[2] or "").split(".")
            size = next((_SIZES[part] for part in modifiers if part in _SIZES), 4)
            sizes[kernel, _KINDS[access[1]]].append(size)
    return {key: Instructions(len(found), sum(found)) for key, found in sizes.items()}
