"""Lesson 18's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.notebooks.exercises import Lesson, ThreeWays, run_cell

LESSON = Lesson.read("18_gpus_and_cuda_kernels")

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="the checks run kernels on the emulator: needs g++"
)

_DIRECT = """\
    if (row < rows && col < cols) {
        y[col * rows + row] = x[row * cols + col];
    }
    return;
"""
_NO_TILE = """\
    return source.replace(
        "tile[t] + tile[t + 1] + tile[t + 2]",
        "(start + t > 0 ? x[start + t - 1] : 0.0f) + x[start + t]"
        " + (start + t + 1 < n ? x[start + t + 1] : 0.0f)",
    )
    source = source.replace(written"""

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "rounded down": ("add", "math.ceil(n / 256)", "n // 256", "grid.x must be 1"),
    "a block too many": (
        "add", "math.ceil(n / 256)", "n // 256 + 1", "256 elements: found 2, expected 1",
    ),
    "threads instead of elements": (
        "add", "(a, b, c, n)", "(a, b, c, 256 * math.ceil(n / 256))", "OutOfBoundsError",
    ),
    "one element a block": ("add", "math.ceil(n / 256), 256", "n, 1", "found 1, expected 256"),
    "one launch a block": (
        "add",
        "    kernel[math.ceil(n / 256), 256](a, b, c, n)\n",
        "    kernel[math.ceil(n / 256), 256](a, b, c, n)\n" * 2,
        "launches, a and b of 1 elements: found 2",
    ),
    "an input returned": ("add", "return c", "return a", "the kernel fills c"),
    "added without the kernel": (
        "add", "    kernel[math.ceil(n / 256), 256](a, b, c, n)\n", "    c = a + b\n",
        "launches, a and b of 1 elements: found 0",
    ),
    "the last element left out": (
        "add", "(a, b, c, n)", "(a, b, c, n - 1)", "result, a and b of 1 elements",
    ),
    "sectors of 32 floats": (
        "sectors", "index // 8", "index // 32", "sectors of neighbours",
    ),
    "a sector a thread": (
        "sectors", "len({index // 8 for index in indices if index >= 0})",
        "len(set(indices))", "found 32, expected 4",
    ),
    "no start in the middle": (
        "sectors", "len({index // 8 for index in indices if index >= 0})",
        "min(32, len({index - indices[0] for index in indices}) "
        "* max(1, abs(indices[1] - indices[0])) // 8)",
        "not from a sector's edge",
    ),
    "idle threads counted": (
        "sectors", " if index >= 0", "", "only 5 threads",
    ),
    "the same word takes turns": (
        "wavefronts", "set(words)", "words", "one word for all (counted by the emulator): found 32",
    ),
    "banks in a row": ("wavefronts", "word % 32", "word // 32", "wavefronts of neighbours"),
    "sixteen banks": ("wavefronts", "word % 32", "word % 16", "found 2, expected 1"),
    "banks used": ("wavefronts", "max(banks)", "sum(map(bool, banks))", "wavefronts of neighbours"),
    "no barrier": (
        "repaired", '"        __syncthreads();\\n"', '""', "RaceError",
    ),
    "first barrier alone": (
        "repaired", "return source.replace(read, read + wait)", "return source", "RaceError",
    ),
    "second barrier alone": (
        "repaired", "source.replace(written, wait + written)", "source", "RaceError",
    ),
    "barrier inside the if": (
        "repaired", "wait + written", "written + wait", "BarrierError",
    ),
    "halo forgotten": (
        "repaired", "return source.replace(read, read + wait)",
        'return source.replace(read, read + wait).replace("j < 130", "j < 129")', "1 block",
    ),
    "guard off by one": (
        "repaired", "return source.replace(read, read + wait)",
        'return source.replace(read, read + wait).replace("i < n ?", "i <= n ?")',
        "OutOfBoundsError",
    ),
    "without shared memory": (
        "repaired", "    source = source.replace(written", _NO_TILE,
        "fetched once, into shared memory",
    ),
    "not text": (
        "repaired", "return source.replace(read, read + wait)", "return None", "as text",
    ),
    "no barrier in the transpose": ("transpose_source", "    __syncthreads();\n", "", "RaceError"),
    "no padding": ("transpose_source", "[32][33]", "[32][32]", "make the tile's rows 33 wide"),
    "padding of two": ("transpose_source", "[32][33]", "[32][34]", "bank conflicts, 32 x 32"),
    "index not transposed": (
        "transpose_source", "tile[threadIdx.x][threadIdx.y]", "tile[threadIdx.y][threadIdx.x]",
        "result, 32 x 32",
    ),
    "block not transposed": (
        "transpose_source",
        "    const int y_row = blockIdx.x * 32 + threadIdx.y;\n"
        "    const int y_col = blockIdx.y * 32 + threadIdx.x;\n",
        "    const int y_row = blockIdx.y * 32 + threadIdx.y;\n"
        "    const int y_col = blockIdx.x * 32 + threadIdx.x;\n",
        "result, 64 x 96",
    ),
    "row length of x": (
        "transpose_source", "y[y_row * rows + y_col]", "y[y_row * cols + y_col]", "64 x 96",
    ),
    "guard of x for y": (
        "transpose_source", "y_row < cols && y_col < rows", "y_row < rows && y_col < cols",
        "result, 64 x 96",
    ),
    "guard off by one in the transpose": (
        "transpose_source", "row < rows && col < cols", "row <= rows && col < cols",
        "OutOfBoundsError",
    ),
    "another kernel": (
        "transpose_source", "void transpose(", "void flip(", "expected one called transpose",
    ),
    "sides instead of floats": (
        "smallest_tile", "side / element_bytes <", "side <", "2 side elements",
    ),
    "half the FLOPs": (
        "smallest_tile", "side / element_bytes <", "side / 2 / element_bytes <",
        "found 256, expected 128",
    ),
    "beyond the ridge": (
        "smallest_tile", "< peak / bandwidth", "<= peak / bandwidth", "found 2, expected 1",
    ),
    "any side": ("smallest_tile", "side *= 2", "side += 1", "found 80, expected 128"),
}  # fmt: skip
_COLUMN = "    const int col = blockIdx.x * 32 + threadIdx.x;\n"
BUGS["written without a tile"] = (
    "transpose_source", _COLUMN, _COLUMN + _DIRECT, "sectors a store request, 32 x 32: found 32.0",
)  # fmt: skip


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS


def test_a_kernel_that_does_not_compile_is_told_in_the_compilers_words() -> None:
    names = LESSON.setup()
    stub = LESSON.stub("add")
    exec(stub.split("def add")[0], names)
    broken = LESSON.solution("transpose_source").replace("__syncthreads();", "__syncthreads()")
    result = run_cell(broken, names)
    assert result.status == "failed"
    assert "CompileError" in result.text and "expected" in result.text


@pytest.mark.parametrize("function", ["add", "sectors", "wavefronts"])
def test_without_a_compiler_a_stub_is_a_stub_and_an_answer_is_not_blamed(
    function: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = LESSON.setup()
    exec(LESSON.stub("add").split("def add")[0], names)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_cell(LESSON.stub(function), names).status == "not solved yet"
    result = run_cell(LESSON.solution(function), names)
    assert "the answer was not checked" in result.text
