"""Exercises of lesson 18, GPUs and CUDA kernels: what is asked, and how an answer is checked.

    check(HOST, add)

Kernels are run by the emulator, which finds races, missed barriers and accesses out of bounds, and
counts: a right result by the wrong accesses does not pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from playbook_utils.checks import Exercise, expect_close, expect_equal
from playbook_utils.errors import CheckFailed

if TYPE_CHECKING:
    from kernels.report import Report

__all__ = ["HOST", "SECTORS", "SMOOTH", "SMOOTH_SOURCE", "TILE", "TRANSPOSE", "WAVEFRONTS"]

SMOOTH_SOURCE = """\
extern "C" __global__ void smooth(const float* x, float* y, int n) {
    __shared__ float tile[130];
    const int t = threadIdx.x;
    for (int start = blockIdx.x * 128; start < n; start += gridDim.x * 128) {
        for (int j = t; j < 130; j += 128) {
            const int i = start + j - 1;
            tile[j] = 0 <= i && i < n ? x[i] : 0.0f;
        }
        if (start + t < n) {
            y[start + t] = tile[t] + tile[t + 1] + tile[t + 2];
        }
    }
}
"""
"""Each element and its two neighbours, summed; its barriers are missing."""


_GATHER = """\
extern "C" __global__ void gather(const float* x, const int* index, float* y) {
    const int i = index[threadIdx.x];
    if (i >= 0) y[threadIdx.x] = x[i];
}
"""
_PICK = """\
extern "C" __global__ void pick(const int* word, float* y) {
    __shared__ float values[1024];
    for (int i = threadIdx.x; i < 1024; i += 32) values[i] = i;
    __syncthreads();
    y[threadIdx.x] = values[word[threadIdx.x]];
}
"""


def _load(source: object, name: str) -> Any:
    """The kernel `name` of CUDA source text, on the emulator."""
    from kernels import load

    if not isinstance(source, str):
        raise CheckFailed(
            f"found {type(source).__name__}, expected the kernel's source as text\n"
            "hint: return the string, with your changes in it"
        )
    module = load(source=source, device="cpu")
    if name not in module.kernels:
        raise CheckFailed(
            f"found the kernels {', '.join(module.kernels)}, expected one called {name}\n"
            "hint: keep the kernel's name and parameters"
        )
    return getattr(module, name)


def _own_kernel(kernel: str, name: str | None = None, source: str | None = None) -> Any:
    """A kernel of the check itself: if it does not compile, the answer is not to blame."""
    from kernels import CompileError, load

    try:
        return getattr(load(name, source=source, device="cpu"), kernel)
    except CompileError as error:
        raise CheckFailed(
            f"{error}\nhint: the answer was not checked, since the emulator cannot run here"
        ) from error


def _launch(launch: Callable[..., Report], where: str, hint: str, *arguments: object) -> Report:
    """Run it; what the emulator says against it fails the check."""
    from kernels import KernelError

    try:
        return launch(*arguments)
    except KernelError as error:
        raise CheckFailed(f"{where}: {type(error).__name__}: {error}\nhint: {hint}") from error


class _Recorder:
    """Stands for vector_add: notes the launches, and passes them on."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.filled: object = None
        """What was passed as c."""

    def __getitem__(self, index: Any) -> Callable[..., Report]:
        launch: Callable[..., Report] = _own_kernel("vector_add", name="01_vector_add")[index]

        def recorded(*arguments: object) -> Report:
            self.launches.append((_three(index[0]), _three(index[1])))
            self.filled = arguments[2] if len(arguments) > 2 else None
            return launch(*arguments)

        return recorded


def _three(size: int | tuple[int, ...]) -> tuple[int, ...]:
    """A grid or block in three dimensions, however it was written."""
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (*sizes, 1, 1)[:3]


def _verify_host(attempt: Callable[..., Any]) -> None:
    from kernels import KernelError

    for n in (1, 255, 256, 257, 1000, 4096):
        torch.manual_seed(n)
        a, b = torch.rand(n), torch.rand(n)
        recorder = _Recorder()
        where = f"a and b of {n} elements"
        try:
            c = attempt(recorder, a, b)
        except KernelError as error:
            hint = "the last argument is the number of elements, not of threads"
            text = f"{where}: {type(error).__name__}: {error}\nhint: {hint}"
            raise CheckFailed(text) from error
        hint = "the last block may be partly used: round the number of blocks up"
        expect_equal(len(recorder.launches), 1, f"launches, {where}", hint="one launch does it")
        grid, block = recorder.launches[0]
        threads = math.prod(block)
        expect_equal(threads, 256, f"threads of a block, {where}", hint="kernel[grid, block](...)")
        expect_equal(block, (256, 1, 1), f"block, {where}", hint="a vector has one dimension")
        expect_equal(math.prod(grid), math.ceil(n / 256), f"blocks, {where}", hint=hint)
        expect_equal(c, a + b, f"result, {where}", hint="the kernel fills c; return it")
        if c is not recorder.filled:
            raise CheckFailed(
                f"result, {where}: found another tensor than the one the kernel filled\n"
                "hint: the kernel fills c; return it"
            )


def _verify_sectors(attempt: Callable[[list[int]], int]) -> None:
    attempt(list(range(32)))  # a stub says so, emulator or not
    gather = _own_kernel("gather", source=_GATHER)
    generator = torch.Generator().manual_seed(0)
    lanes = torch.arange(32)
    patterns = {
        "neighbours": lanes,
        "neighbours, not from a sector's edge": lanes + 5,
        "every second float": 2 * lanes,
        "every eighth float": 8 * lanes,
        "one float for all": torch.full((32,), 77),
        "neighbours in reverse": 31 - lanes,
        "only 5 threads, the others pass -1": torch.where(lanes < 5, 10 * lanes, -1),
        "at random": torch.randint(0, 1024, (32,), generator=generator),
    }
    for name, indices in patterns.items():
        wanted = indices.int()
        report = gather[1, 32](torch.zeros(1024), wanted, torch.empty(32))
        (line,) = [line for line in report.by_line if line.array == "x"]
        hint = "a sector is 8 floats; count each once, and none for -1"
        found = attempt(indices.tolist())
        expect_equal(found, line.sectors, f"sectors of {name} (counted by the emulator)", hint=hint)


def _verify_wavefronts(attempt: Callable[[list[int]], int]) -> None:
    attempt(list(range(32)))
    pick = _own_kernel("pick", source=_PICK)
    generator = torch.Generator().manual_seed(0)
    lanes = torch.arange(32)
    patterns = {
        "neighbours": lanes,
        "every second word": 2 * lanes,
        "a column of a 32-wide tile": (32 * lanes),
        "a column of a 33-wide tile": (33 * lanes) % 1024,
        "one word for all": torch.full((32,), 5),
        "two words of one bank, by turns": 32 * (lanes % 2),
        "at random": torch.randint(0, 1024, (32,), generator=generator),
    }
    for name, words in patterns.items():
        report = pick[1, 32](words.int(), torch.empty(32))
        reads = [x for x in report.by_line if x.kind == "shared load"]
        hint = "word w lies in bank w % 32; a bank delivers one word at a time, to all who want it"
        what = f"wavefronts of {name} (counted by the emulator)"
        expect_equal(attempt(words.tolist()), reads[0].wavefronts, what, hint=hint)


def _verify_smooth(attempt: Callable[[str], str]) -> None:
    smooth = _load(attempt(SMOOTH_SOURCE), "smooth")
    for n, blocks in ((1, 1), (127, 1), (128, 1), (129, 2), (300, 1), (1000, 3)):
        torch.manual_seed(n)
        x, y = torch.rand(n), torch.full((n,), math.nan)
        where = f"{n} elements, {blocks} block{'s' if blocks > 1 else ''}"
        hint = (
            "all must have written before anyone reads, and all have read before anyone "
            "overwrites; every thread must come to each barrier"
        )
        report = _launch(smooth[blocks, 128], where, hint, x, y, n)
        padded = torch.nn.functional.pad(x.double(), (1, 1))
        expected = (padded[:-2] + padded[1:-1] + padded[2:]).float()
        hint = "y[i] = x[i-1] + x[i] + x[i+1], and zero beyond both ends"
        expect_close(y, expected, f"result, {where}", rtol=1e-6, hint=hint)
        halo = 2 * math.ceil(n / 128)
        if (report.global_loads or 0) > n + halo:
            raise CheckFailed(
                f"global loads, {where}: found {report.global_loads:,}, expected {n + halo:,} at "
                "most\nhint: each element is fetched once, into shared memory, and read there"
            )


def _verify_transpose(attempt: Callable[[], str]) -> None:
    transpose = _load(attempt(), "transpose")
    hint = "y has `cols` rows of `rows` elements; guard what you read by x, what you write by y"
    for rows, cols in ((32, 32), (64, 96), (1, 40), (33, 31), (70, 37)):
        torch.manual_seed(rows)
        x, y = torch.rand(rows, cols), torch.full((cols, rows), math.nan)
        where = f"{rows} x {cols}"
        grid = (math.ceil(cols / 32), math.ceil(rows / 32))
        report = _launch(transpose[grid, (32, 32)], where, hint, x, y, rows, cols)
        expect_equal(y, x.T.contiguous(), f"result, {where}", hint=hint)
        _expect_good_accesses(report, where, aligned=rows % 32 == cols % 32 == 0)


def _expect_good_accesses(report: Report, where: str, aligned: bool) -> None:
    coalesced = "neighbouring threads must read neighbours, and write neighbours"
    for what, found in (
        ("load", report.sectors_per_load_request),
        ("store", report.sectors_per_store_request),
    ):
        if aligned:
            expect_equal(found, 4.0, f"sectors a {what} request, {where}", hint=coalesced)
        elif (found or 0) > 5:  # 32 floats that start anywhere touch 5 sectors at most
            raise CheckFailed(
                f"sectors a {what} request, {where}: found {found:.3g}, expected 5 at most\n"
                f"hint: {coalesced}"
            )
    hint = "a column of a 32-wide tile lies in one bank: make the tile's rows 33 wide"
    expect_equal(report.bank_conflicts, 0, f"bank conflicts, {where}", hint=hint)


def _verify_tile(attempt: Callable[[float, float, int], int]) -> None:
    cases = (
        (66.9e12, 3.35e12, 4),
        (989.4e12, 3.35e12, 2),
        (19.5e12, 2.039e12, 4),
        (1e12, 1e12, 1),
        (64e12, 1e12, 4),
    )
    for peak, bandwidth, element_bytes in cases:
        # A side x side tile of C takes 2 side^2 FLOPs and 2 side elements a step of k.
        sides = (2**power for power in range(20))
        expected = next(s for s in sides if s / element_bytes >= peak / bandwidth)
        what = f"smallest_tile({peak:g}, {bandwidth:g}, {element_bytes})"
        hint = "a step of k: 2 side^2 FLOPs for 2 side elements; the ridge is peak / bandwidth"
        expect_equal(attempt(peak, bandwidth, element_bytes), expected, what, hint=hint)


HOST = Exercise(
    "add",
    "the host's part: allocate, choose grid and block, launch, return",
    _verify_host,
    ("-(-n // 256) rounds up",),
)
SECTORS = Exercise(
    "sectors",
    "how many sectors of 32 bytes one request of a warp moves",
    _verify_sectors,
    ("float i lies in sector i // 8",),
)
WAVEFRONTS = Exercise(
    "wavefronts",
    "how many passes shared memory needs for one request of a warp",
    _verify_wavefronts,
    ("the number of different words in the busiest bank",),
)
SMOOTH = Exercise(
    "repaired",
    "put the missing barriers in",
    _verify_smooth,
    ("__syncthreads() must be reached by all threads of the block, equally often",),
)
TRANSPOSE = Exercise(
    "transpose_source",
    "a transpose that reads and writes neighbours, without bank conflicts",
    _verify_transpose,
    ("read a tile row by row, wait, write it column by column",),
)
TILE = Exercise(
    "smallest_tile",
    "the smallest tile of C, a power of two, that reaches the ridge",
    _verify_tile,
    ("intensity of a tile: side / element_bytes",),
)
