"""Lesson 19's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.notebooks.exercises import Lesson, ThreeWays

pytest.importorskip("triton", reason="the lesson's kernels need Triton")


class GuardedLesson(Lesson):
    """Its imports stand in two cells: Triton's may fail, and have one of their own."""

    def setup(self) -> dict[str, Any]:
        names = super().setup()
        exec(compile(self.cells[1].source, f"<{self.name}, guard>", "exec"), names)
        return names


LESSON = GuardedLesson.read("19_fused_kernels_and_triton")

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "no mask at the first load": (
        "silu_gate",
        "a = tl.load(a_ptr + offsets, mask=inside)",
        "a = tl.load(a_ptr + offsets)",
        "load outside of a, b, out: program (3, 0, 0) reaches a[1000]",
    ),
    "no mask at the store": (
        "silu_gate",
        "a / (1.0 + tl.exp(-a)) * b, mask=inside)",
        "a / (1.0 + tl.exp(-a)) * b)",
        "store outside of a, b, out",
    ),
    "mask one too wide": ("silu_gate", "offsets < size", "offsets <= size", "outside of a, b, out"),
    "mask one too narrow": ("silu_gate", "offsets < size", "offsets < size - 1", "shape (1000,)"),
    "one program": ("silu_gate", "grid = (triton.cdiv(a.numel(), 256),)", "grid = (1,)", "shape"),
    "every program the first block": (
        "silu_gate",
        "tl.program_id(0) * BLOCK + tl.arange",
        "tl.arange",
        "race at out[0] (both write the same value)",
    ),
    "programs rounded down": (
        "silu_gate",
        "triton.cdiv(a.numel(), 256)",
        "max(1, a.numel() // 256)",
        "loads of an element of a, shape (1000,): found 0, expected 1",
    ),
    "sigmoid alone": ("silu_gate", "a / (1.0", "1.0 / (1.0", "out, shape (1000,)"),
    "PyTorch's operators": (
        "silu_gate",
        "    silu_gate_kernel[grid](a, b, out, a.numel(), BLOCK=256)\n",
        "    out.copy_(F.silu(a) * b)\n",
        "launches, shape (1000,): found 0, expected 1",
    ),
    "launched twice": (
        "silu_gate",
        "    silu_gate_kernel[grid](a, b, out, a.numel(), BLOCK=256)\n",
        "    for _ in range(2):\n        silu_gate_kernel[grid](a, b, out, a.numel(), BLOCK=256)\n",
        "found 2, expected 1",
    ),
    "rows taken for contiguous": (
        "row_softmax",
        "x.stride(0), columns",
        "columns, columns",
        "columns 7 to 43 of a matrix of 61",
    ),
    "stride of the result too": (
        "row_softmax",
        "out_ptr + row * columns",
        "out_ptr + row * stride",
        "columns 7 to 43 of a matrix of 61: store outside of x, out",
    ),
    "no maximum subtracted": (
        "row_softmax",
        "tl.exp(x - tl.max(x, axis=0))",
        "tl.exp(x)",
        "out, scores near 1000",
    ),
    "masked lanes count as zero": (
        "row_softmax",
        'other=float("-inf")',
        "other=0.0",
        "out, 3 rows of 37",
    ),
    "no mask": (
        "row_softmax",
        'lanes, mask=inside, other=float("-inf"))',
        "lanes)",
        "load outside of x, out",
    ),
    "row read twice": (
        "row_softmax",
        "exps = tl.exp(x - tl.max(x, axis=0))",
        'again = tl.load(x_ptr + row * stride + lanes, mask=inside, other=float("-inf"))\n'
        "    exps = tl.exp(x - tl.max(again, axis=0))",
        "loads of an element of x, 3 rows of 37: found 2, expected 1",
    ),
    "mean over the block": (
        "add_layer_norm",
        "tl.sum(x, axis=0) / columns, 0.0)",
        "tl.sum(x, axis=0) / BLOCK, 0.0)",
        "out, 4 rows of 100 around 0",
    ),
    "variance over the block": (
        "add_layer_norm",
        "tl.sum(centred * centred, axis=0) / columns",
        "tl.sum(centred * centred, axis=0) / BLOCK",
        "divide by the number of columns, not by the block",
    ),
    "padding counts in the variance": (
        "add_layer_norm",
        "tl.where(inside, x - tl.sum(x, axis=0) / columns, 0.0)",
        "x - tl.sum(x, axis=0) / columns",
        "out, 4 rows of 100 around 0",
    ),
    "mean of squares less square of mean": (
        "add_layer_norm",
        "tl.sum(centred * centred, axis=0) / columns + eps",
        "tl.sum(x * x, axis=0) / columns - (tl.sum(x, axis=0) / columns)"
        " * (tl.sum(x, axis=0) / columns) + eps",
        "around 1000",
    ),
    "no other": (
        "add_layer_norm",
        "x = tl.load(x_ptr + at, mask=inside, other=0.0)",
        "x = tl.load(x_ptr + at, mask=inside)",
        "found nan",
    ),
    "eps forgotten": ("add_layer_norm", "/ columns + eps)", "/ columns)", "eps 0.5"),
    "sum not stored": (
        "add_layer_norm",
        "    tl.store(added_ptr + at, x, mask=inside)\n",
        "",
        "added, 4 rows of 100",
    ),
    "residual forgotten in the norm": (
        "add_layer_norm",
        "    x += tl.load(r_ptr + at, mask=inside, other=0.0)\n",
        "",
        "loads of an element of residual",
    ),
    "a tensor given twice read twice": ("fused_bytes", "in set(inputs)", "in inputs", "one input"),
    "intermediates read": ("fused_bytes", " - made", "", "fused bytes, two operators in a row"),
    "intermediates written": (
        "fused_bytes",
        "read | set(results)",
        "read | made",
        "fused bytes",
    ),
    "only the last result written": (
        "fused_bytes",
        "read | set(results)",
        "read | {output}",
        "an intermediate that is kept for backward",
    ),
    "writes forgotten": ("fused_bytes", " + sizes[output]", "", "eager bytes"),
    "all logits": (
        "chunked_loss",
        "pairs = zip(hidden.chunk(num_chunks), target.chunk(num_chunks))",
        "pairs = [(hidden, target)]",
        "bytes at the peak, 64 tokens in 8 chunks",
    ),
    "log-probabilities kept": (
        "chunked_loss",
        "checkpoint(one, h, t, use_reentrant=False)",
        "one(h, t)",
        "bytes at the peak",
    ),
    "mean of means": (
        "chunked_loss",
        'h @ weight.T, t, reduction="sum")',
        "h @ weight.T, t) * target.numel() / num_chunks",
        "loss, 50 tokens in 8 chunks",
    ),
    "no gradient": (
        "chunked_loss",
        "return torch.stack(losses).sum()",
        "return torch.stack(losses).sum().detach()",
        "it has no gradient",
    ),
    "a chunk's gradient lost": (
        "chunked_loss",
        "checkpoint(one, h, t, use_reentrant=False)",
        "checkpoint(one, h.detach(), t, use_reentrant=False)",
        "gradient of hidden",
    ),
}


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for source in (sys.argv[1], "import triton", "unknown", "1 / 0"):
    print("error:", shell.run_cell(source).error_in_exec)
"""


def test_without_triton_cells_are_skipped() -> None:
    command = [sys.executable, "-c", WITHOUT_TRITON, LESSON.cells[1].source]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lines = [line for line in run.stdout.splitlines() if line.startswith(("skip", "No", "error"))]
    missing = "import of triton halted; None in sys.modules"
    assert lines == [
        f"No Triton here, cells that need it say so: {missing}",
        "error: None",
        f"skipped, no Triton here: {missing}",
        "error: None",
        "skipped, no Triton here: name 'unknown' is not defined",
        "error: None",
        "error: division by zero",
    ]


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS
