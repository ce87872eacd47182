"""What each CUDA kernel takes of a GPU: registers, shared memory, spills, as ptxas reports them.

    for usage in resources("06_matmul_tiled", architectures=("sm_80", "sm_90", "sm_100")):
        usage.kernel, usage.architecture, usage.registers, usage.shared_bytes
    python -m kernels.resources        # a table of every file in kernels/cuda; 1 if one fails

Below the table stand the shared loads of the matrix products, as the emulator counts them and as
nvcc makes them (`kernels.sass`).

It needs nvcc and no GPU. What nvcc said of a file is kept beside compiled kernels. Shared memory
is what the kernel declares; what a launch asks for on top (`extern __shared__`) the compiler does
not know. Left out: occupancy, which follows from these numbers, the block and the GPU's limits.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.build import build, compiler_version
from kernels.source import read_source

__all__ = ["ARCHITECTURES", "Resources", "cuda_files", "resources"]

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""A100, H100 and B200."""

_FOLDER = Path(__file__).parent / "cuda"
# Files whose blocks of 16 x 16 threads compute 64 x 64 elements.
_WIDE = ("07", "08", "09")
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """One kernel on one architecture."""

    file: str
    kernel: str
    architecture: str
    registers: int
    """For each thread."""
    shared_bytes: int
    """For each block."""
    stack_bytes: int
    """Local memory of a thread, in global memory: arrays that could not be kept in registers."""
    spill_bytes: int
    """Bytes a thread stores to and loads from local memory because registers ran out."""


def cuda_files() -> list[Path]:
    """The course's kernels, in the order of their numbers."""
    return sorted(_FOLDER.glob("*.cu"))


def resources(
    file: str | Path,
    *,
    architectures: Sequence[str] = ARCHITECTURES,
    defines: Mapping[str, int] | None = None,
) -> list[Resources]:
    """Compile a file, by its name in kernels/cuda or its path; one entry a kernel and architecture.

    Raises FileNotFoundError without nvcc or the file, ValueError with nvcc's words if it refuses.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise FileNotFoundError("nvcc was not found on PATH: install the CUDA toolkit")
    path = Path(file) if Path(file).suffix == ".cu" else _FOLDER / f"{file}.cu"
    if not path.exists():
        known = ", ".join(known.stem for known in cuda_files())
        raise FileNotFoundError(f"there is no {path}; kernels/cuda has {known}")
    command = [nvcc, "-fatbin", "-Xptxas", "-v", str(path)]
    for name in architectures:
        command.append(f"-gencode=arch={name.replace('sm', 'compute')},code={name}")
    command += [f"-D{name}={value}" for name, value in (defines or {}).items()]

    def compile_into(folder: Path) -> None:
        out = [*command, "-o", str(folder / "out.fatbin")]
        done = subprocess.run(out, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise ValueError(f"nvcc does not compile {path.name}:\n{done.stderr.strip()}")
        (folder / "log").write_text(done.stderr)

    source = read_source(path, None)
    parts = [source.text, source.included_text(), *command, compiler_version(nvcc)]
    log = build(parts, ("log",), compile_into) / "log"
    return list(_parsed(path.name, log.read_text()))


def _parsed(file: str, log: str) -> Iterator[Resources]:
    """The entries of ptxas' log, which names a kernel and then, on lines below, what it uses."""
    kernel = architecture = ""
    stack, spills = 0, 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel, architecture = entry.groups()
        elif frame := _STACK.search(line):
            stack, spills = int(frame[1]), int(frame[2]) + int(frame[3])
        elif used := _USED.search(line):
            shared = _SHARED.search(line)
            yield Resources(
                file=file,
                kernel=kernel,
                architecture=architecture,
                registers=int(used[1]),
                shared_bytes=int(shared[1]) if shared else 0,
                stack_bytes=stack,
                spill_bytes=spills,
            )


def _main() -> int:
    header = f"{'kernel':22}" + "".join(f"{name:>22}" for name in ARCHITECTURES)
    if shutil.which("nvcc") is None:  # not an error: the kernels run without it
        print("nvcc was not found on PATH: no registers are shown")
        return 0
    print("registers / bytes of shared memory / bytes of stack / bytes of spills")
    print(header)
    failed = 0
    for path in cuda_files():
        try:
            found = resources(path)
        except (FileNotFoundError, ValueError) as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            failed = 1
            continue
        for kernel in dict.fromkeys(usage.kernel for usage in found):
            cells = {
                usage.architecture: f"{usage.registers} / {usage.shared_bytes} / "
                f"{usage.stack_bytes} / {usage.spill_bytes}"
                for usage in found
                if usage.kernel == kernel
            }
            print(f"{kernel:22}" + "".join(f"{cells[name]:>22}" for name in ARCHITECTURES))
    _print_shared_loads()
    return failed


def _print_shared_loads() -> None:
    """Of one thread for one tile along K: accesses of the source, and instructions of the GPU."""
    import torch

    from kernels import CompileError, load
    from kernels.sass import disassembler, shared_loads

    if disassembler() is None:
        print("cuobjdump was not found: no counts of machine code are shown")
        return
    print("shared loads of a thread for a tile of 16: counted in the source / made by nvcc (sm_90)")
    for file in ("06_matmul_tiled", *(f.stem for f in cuda_files() if f.stem[:2] in _WIDE)):
        side = 16 if file == "06_matmul_tiled" else 64
        a, b, c = torch.ones(side, 16), torch.ones(16, side), torch.empty(side, side)
        try:
            kernel = getattr(load(file, device="cpu"), file[3:])
        except CompileError as error:
            print(error)
            return
        report = kernel[1, (16, 16)](a, b, c, side, side, 16)
        counted, made = shared_loads(_FOLDER / f"{file}.cu", report)
        print(f"{file[3:]:22}{f'{counted // 256} / {made // 256}':>22}")


if __name__ == "__main__":
    sys.exit(_main())
