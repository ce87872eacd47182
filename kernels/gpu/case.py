"""A kernel with its reference, its rivals, and what it has to move or compute.

    case.check()                        # largest error against fp64, as a share of what is allowed
    case.time_s()                       # {"kernel": 1.2e-3, "cuBLAS": 1.1e-3}, on a GPU

The time is the median of launches between CUDA events, the L2 cache overwritten before each
(`triton.testing.do_bench`). Left out: power, clocks, and whether something else uses the GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

__all__ = ["ALLOWED", "Case", "NotRunError", "WrongResultError"]

Tensors = tuple[torch.Tensor, ...]

ALLOWED = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error, as a share of the largest element.

bf16: 2^-8 is half a step of the largest element, and an input of a later product (the probabilities
in attention) has been rounded once before; allowed is four times that. fp16: four times 2^-11.
fp32: 2^-24 grows with the sums. A check adds up 1,096 products at most; added one after the other
they are off by 1.5e-6 of the largest of the sums (measured on the CPU, random numbers), a
thirteenth of what is allowed. The GPU's exponential adds 2^-22, and a gradient of attention goes
through three products.
"""


class WrongResultError(RuntimeError):
    """A kernel that ran and gave wrong numbers."""


class NotRunError(RuntimeError):
    """A kernel that cannot run on this GPU, by no fault of its own; says what it needs."""


@contextmanager
def _no_old_results() -> Iterator[None]:
    """New tensors are filled with NaN: memory given back may still hold the right numbers."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # torch.empty then fills
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*deterministic", UserWarning)
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    dtype: torch.dtype
    run: Callable[[], Tensors]
    """Launches the kernel, or the kernels, and gives what was computed."""
    reference: Callable[[], Tensors]
    """The same, by PyTorch in fp64."""
    rivals: dict[str, Callable[[], object]] = field(default_factory=dict)
    """What PyTorch has for it, by name; timed, not checked."""
    flops: int = 0
    """Multiplications and additions of a matrix product; 0 where memory is the limit."""
    moved_bytes: int = 0
    """Bytes that have to cross the memory bus: each input and each output once."""
    outputs: Tensors = ()
    """Tensors made before that `run` writes: filled with NaN before the check."""

    def check(self) -> float:
        """Largest error against the reference, as a share of what `ALLOWED` allows.

        Raises:
            WrongResultError: above 1, not a number, or another shape.
            NotRunError: this GPU cannot run it.
        """
        for x in self.outputs:
            x.fill_(float("nan"))
        with _no_old_results():
            results = self.run()
        worst = 0.0
        for i, (found, exact) in enumerate(zip(results, self.reference(), strict=True)):
            if found.shape != exact.shape:
                raise WrongResultError(
                    f"{self.name}: result {i} has shape {tuple(found.shape)}, expected "
                    f"{tuple(exact.shape)}"
                )
            # float(...) waits for the kernel.
            error = float((found.double() - exact).abs().max() / exact.abs().max())
            share = error / ALLOWED[self.dtype]
            if not share <= 1:
                raise WrongResultError(
                    f"{self.name}: result {i} differs from fp64 by {error:.1e} of its largest "
                    f"element, allowed is {ALLOWED[self.dtype]:.1e}"
                )
            worst = max(worst, share)
        return worst

    def time_s(self) -> dict[str, float]:
        """Seconds of "kernel" and of each rival."""
        from triton.testing import do_bench

        functions: dict[str, Callable[[], object]] = {"kernel": self.run, **self.rivals}
        return {
            name: do_bench(function, return_mode="median") / 1e3  # ms
            for name, function in functions.items()
        }

    def rate(self, kernel_s: float) -> str:
        """TFLOP/s where there are products to count, otherwise GB/s (10^9 bytes)."""
        if self.flops:
            return f"{self.flops / kernel_s / 1e12:.1f} TFLOP/s"
        return f"{self.moved_bytes / kernel_s / 1e9:.0f} GB/s"
