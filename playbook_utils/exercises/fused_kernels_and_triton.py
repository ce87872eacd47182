"""Exercises of lesson 19, fused kernels and Triton: what is asked, and how an answer is checked.

    check(SILU_GATE, silu_gate)

Kernels run in Triton's interpreter, watched: a load or store outside of the tensors fails with the
program and the offset, and each element must be read once and written once, by one launch. So the
right numbers from two kernels, or from PyTorch, do not pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from playbook_utils.checks import Exercise, expect_close, expect_equal
from playbook_utils.errors import CheckFailed
from playbook_utils.measure import step_cost

if TYPE_CHECKING:  # it needs Triton, and exercises 4 and 5 do not
    from kernels.triton.programs import ProgramLog

__all__ = ["ADD_LAYER_NORM", "CHUNKED_LOSS", "FUSED_BYTES", "ROW_SOFTMAX", "SILU_GATE"]

_SIZES = ((1000,), (1,), (3, 5, 70), (2048,))
_STOPPED = {  # kind of error: hint
    "IndexError": "lanes beyond the end have no element: load and store them with mask=",
    "RaceError": "a program for each part of out, and no part twice",
}


@contextmanager
def _watched(where: str, **tensors: Tensor) -> Iterator[ProgramLog]:
    """The log of what the attempt's kernels do; what the watch stops becomes a failed check."""
    from kernels.triton.programs import watch_programs

    try:
        # An exponential that overflows shows in the result: NumPy need not warn of it as well.
        with np.errstate(all="ignore"), watch_programs(**tensors) as log:
            yield log
    except Exception as error:
        for cause in _causes(error):
            kind = type(cause).__name__
            if kind in _STOPPED and re.search("race at|outside of", str(cause)):
                raise CheckFailed(f"{where}: {cause}\nhint: {_STOPPED[kind]}") from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _expect_fused(log: ProgramLog, once: tuple[str, ...], where: str) -> None:
    """One launch that reads each element of `once` once, and writes each of `out` once."""
    hint = "one kernel, launched once, does all of it; PyTorch's operators do not count"
    expect_equal(log.launches, 1, f"launches, {where}", hint=hint)
    for name in once:
        counts = log[name].load_counts
        hint = f"load each element of {name} once, and keep it in the program"
        for count in (counts.max(), counts.min()):
            expect_equal(int(count), 1, f"loads of an element of {name}, {where}", hint=hint)
    stores = log["out"].store_counts
    hint = "a program for each part of out, and no part twice"
    for count in (stores.min(), stores.max()):
        expect_equal(int(count), 1, f"stores to an element of out, {where}", hint=hint)


def _verify_silu_gate(attempt: Callable[[Tensor, Tensor, Tensor], object]) -> None:
    torch.manual_seed(0)
    for shape in _SIZES:
        a, b = 3 * torch.randn(shape), torch.randn(shape)
        out = torch.full(shape, float("nan"))
        where = f"shape {shape}"
        with _watched(where, a=a, b=b, out=out) as log:
            attempt(a, b, out)
        _expect_fused(log, ("a", "b"), where)
        expected = (F.silu(a.double()) * b).float()
        hint = "a / (1 + exp(-a)) * b, element by element"
        expect_close(out, expected, f"out, {where}", rtol=1e-5, atol=1e-6, hint=hint)


def _verify_row_softmax(attempt: Callable[[Tensor, Tensor], object]) -> None:
    torch.manual_seed(1)
    wide = torch.randn(5, 61)
    cases = {
        "3 rows of 37": torch.randn(3, 37),
        "columns 7 to 43 of a matrix of 61": wide[:, 7:44],
        "every second row": torch.randn(8, 20)[::2],
        "scores near 1000": torch.randn(4, 33) + 1000,
        "negative scores": torch.randn(2, 17) - 50,
        "one column": torch.randn(6, 1),
    }
    for where, x in cases.items():
        out = torch.full(x.shape, float("nan"))
        with _watched(where, x=x, out=out) as log:
            attempt(x, out)
        _expect_fused(log, ("x",), where)
        hint = "subtract the row's maximum before exp; a masked lane must not count: other=-inf"
        expected = x.double().softmax(-1).float()
        expect_close(out, expected, f"out, {where}", rtol=1e-5, atol=1e-7, hint=hint)


def _verify_add_layer_norm(attempt: Callable[..., object]) -> None:
    torch.manual_seed(2)
    cases = ((4, 100, 0.0, 1e-5), (3, 33, 5.0, 1e-5), (2, 64, -1.0, 0.5), (3, 100, 1000.0, 1e-5))
    for rows, columns, mean, eps in cases:
        x, residual = torch.randn(rows, columns) + mean, torch.randn(rows, columns)
        weight, bias = torch.randn(columns), torch.randn(columns)
        added, out = (torch.full(x.shape, float("nan")) for _ in range(2))
        where = f"{rows} rows of {columns} around {mean:g}, eps {eps:g}"
        tensors = dict(x=x, residual=residual, weight=weight, bias=bias, added=added, out=out)
        with _watched(where, **tensors) as log:
            attempt(x, residual, weight, bias, added, out, eps)
        _expect_fused(log, ("x", "residual"), where)
        expect_close(added, x + residual, f"added, {where}", hint="store x + residual in added")
        wide = (added.double(), (columns,), weight.double(), bias.double())
        expected = F.layer_norm(*wide, eps=eps).float()
        hint = (
            "`other=0.0` at loads that are summed: without it a masked lane holds anything; divide "
            "by the number of columns, not by the block; x - mean must be 0 in lanes without an "
            "element; take the mean of (x - mean)^2"
        )
        expect_close(out, expected, f"out, {where}", rtol=1e-3, atol=2e-3, hint=hint)


_OPERATORS = {
    "two operators in a row": (
        [(("x",), "e"), (("e", "one"), "y")], {"x": 40, "e": 40, "one": 4, "y": 40}, {"y"},
        (164, 84),
    ),
    "x used three times": (
        [(("x",), "c"), (("x",), "e"), (("c", "e", "x"), "y")],
        {"x": 400, "c": 100, "e": 400, "y": 400}, {"y"},
        (100 + 400 + 400 + 400 + 100 + 400 + 400 + 400, 800),
    ),
    "a square: one input, twice": (
        [(("x", "x"), "s"), (("s",), "m")], {"x": 80, "s": 80, "m": 4}, {"m"}, (244, 84),
    ),
    "an intermediate that is kept for backward": (
        [(("x", "w"), "h"), (("h",), "y")], {"x": 64, "w": 8, "h": 64, "y": 64}, {"h", "y"},
        (64 + 8 + 64 + 64 + 64, 64 + 8 + 64 + 64),
    ),
}  # fmt: skip


def _verify_fused_bytes(attempt: Callable[..., Any]) -> None:
    for where, (operators, sizes, results, (eager, fused)) in _OPERATORS.items():
        found = attempt(operators, sizes, results)
        if not isinstance(found, tuple) or len(found) != 2:
            raise CheckFailed(
                f"{where}: found {found!r}, expected two numbers\nhint: return eager_bytes, "
                "fused_bytes"
            )
        hint = "each operator reads its inputs, a tensor given twice once, and writes its output"
        expect_equal(found[0], eager, f"eager bytes, {where}", hint=hint)
        hint = "read what no operator made, once; write what is among the results, nothing else"
        expect_equal(found[1], fused, f"fused bytes, {where}", hint=hint)


class _Loss:
    """The loss of hidden and weight: from logits, or by an attempt that takes `num_chunks`."""

    def __init__(
        self, fn: Callable[..., Tensor], target: Tensor, num_chunks: int | None = None
    ) -> None:
        self.fn, self.target, self.num_chunks = fn, target, num_chunks

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if self.num_chunks is None:
            return self.fn(hidden @ weight.t(), self.target)
        return self.fn(hidden, weight, self.target, self.num_chunks)


class _Head(nn.Module):
    """An output head and its loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], vocab_size: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(vocab_size, 4))
        self.loss = loss

    def forward(self, hidden: Tensor) -> Tensor:
        return self.loss(hidden, self.weight)


def _verify_chunked_loss(attempt: Callable[..., Tensor]) -> None:
    torch.manual_seed(4)
    for num_tokens, num_chunks, vocab_size in ((64, 8, 1001), (50, 8, 1001), (7, 1, 65)):
        target = torch.randint(vocab_size, (num_tokens,))
        where = f"{num_tokens} tokens in {num_chunks} chunks"
        plain = _Head(_Loss(F.cross_entropy, target), vocab_size)
        head = _Head(_Loss(attempt, target, num_chunks), vocab_size)
        found = torch.randn(num_tokens, 4).requires_grad_()
        expected = found.detach().clone().requires_grad_()
        one, other = plain(expected), head(found)
        hint = "add up the losses of all tokens, and divide once, by the number of tokens"
        expect_close(other, one.detach(), f"loss, {where}", rtol=1e-5, hint=hint)
        if not other.requires_grad:
            raise CheckFailed(f"loss, {where}: it has no gradient\nhint: keep the graph of the sum")
        one.backward()
        other.backward()
        pairs = (("hidden", found, expected), ("weight", head.weight, plain.weight))
        for name, mine, theirs in pairs:
            assert theirs.grad is not None
            what, hint = f"gradient of {name}, {where}", "gradients flow through every chunk"
            expect_close(mine.grad, theirs.grad, what, rtol=1e-4, atol=1e-6, hint=hint)
        if num_chunks > 1:
            _expect_small(head, found, num_tokens * vocab_size * 4, where)


def _expect_small(head: _Head, hidden: Tensor, logits_bytes: int, where: str) -> None:
    peak = step_cost(head, hidden).peak_bytes
    if peak > 0.75 * logits_bytes:
        raise CheckFailed(
            f"bytes at the peak, {where}: found {peak:,}, expected less than three quarters of "
            f"all logits, {logits_bytes:,}\nhint: run each chunk through "
            "torch.utils.checkpoint.checkpoint (lesson 02), which keeps its inputs alone"
        )


SILU_GATE = Exercise(
    "silu_gate",
    "a Triton kernel: out = silu(a) * b, any size",
    _verify_silu_gate,
    ("offsets = program_id * BLOCK + arange; mask = offsets < size",),
)
ROW_SOFTMAX = Exercise(
    "row_softmax",
    "a Triton kernel: the softmax of each row of a matrix whose rows may lie apart",
    _verify_row_softmax,
    ("one program a row: its first element is row * x.stride(0)",),
)
ADD_LAYER_NORM = Exercise(
    "add_layer_norm",
    "a Triton kernel: added = x + residual, and the LayerNorm of it, row by row",
    _verify_add_layer_norm,
    ("one program a row; the block is a power of two, the row is not",),
)
FUSED_BYTES = Exercise(
    "fused_bytes",
    "bytes moved by operators one after the other, and by one kernel for all",
    _verify_fused_bytes,
    ("a set of the names that operators wrote tells inputs from intermediates",),
)
CHUNKED_LOSS = Exercise(
    "chunked_loss",
    "cross-entropy of hidden @ weight.T that never holds all logits",
    _verify_chunked_loss,
    ("zip(hidden.chunk(n), target.chunk(n)), and a checkpoint for each",),
)
