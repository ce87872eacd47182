"""Seconds that a function takes: warmed up, synchronised, many times, as a median.

    timing = measure_time(lambda: a @ b)
    timing.median_s, timing.quartiles_s, timing.min_s

Left out: where the time goes (`measure.traces`, torch.profiler).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Timing", "measure_time"]


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, in order."""

    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle sample: what a run usually takes. A few slow outliers do not move it."""
        return statistics.median(self.samples_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """First and third, as `numpy.percentile`: half of the samples lie between them."""
        if len(self.samples_s) == 1:
            return self.samples_s[0], self.samples_s[0]
        first, _, third = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return first, third

    @property
    def min_s(self) -> float:
        """The fastest sample: the least disturbed one."""
        return min(self.samples_s)


def measure_time(
    fn: Callable[[], Any],
    *,
    warmup: int = 3,
    repeats: int = 10,
    device: torch.device | str | None = None,
    setup: Callable[[], Any] | None = None,
    synchronize: Callable[[], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time `fn()`.

    Args:
        fn: called without arguments; its result is dropped.
        warmup: calls that are not timed, for caches, allocators and autotuners.
        repeats: calls that are timed, each on its own.
        device: a CUDA device is timed by events on its current stream (not run on a GPU yet);
            otherwise the host's clock is read, after waiting for CUDA where it is in use.
        setup: called before each call of `fn`, warm-up too, and not timed.
        synchronize: waits until the work that `fn` handed on is done (a handle's `wait`, another
            accelerator's `synchronize`); called before the clock is read, both times. Without it
            CUDA is waited for where it is in use. Not with a CUDA `device`.
        clock: seconds; for a simulated device, and for tests.

    Raises:
        ValueError: negative `warmup`, `repeats` below 1, `synchronize` with a CUDA `device`.
        TypeError: a count that is not an int, an `fn` that cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}: expected a function to call; wrap it: lambda: ...")
    for name, count, least in (("warmup", warmup, 0), ("repeats", repeats, 1)):
        if type(count) is not int:
            raise TypeError(f"{name} is {count!r} ({type(count).__name__}): expected an int")
        if count < least:
            raise ValueError(f"{name} is {count}: expected at least {least}")
    on_cuda = device is not None and torch.device(device).type == "cuda"
    if on_cuda and synchronize is not None:
        raise ValueError(f"device is {device}, which events time: expected no `synchronize`")
    wait = _wait_for_cuda if synchronize is None else synchronize
    samples_s = []
    for i in range(warmup + repeats):
        if setup is not None:
            setup()
        sample_s = _cuda_seconds(fn, device) if on_cuda else _host_seconds(fn, clock, wait)
        if i >= warmup:
            samples_s.append(sample_s)
    return Timing(tuple(samples_s))


def _host_seconds(
    fn: Callable[[], Any], clock: Callable[[], float], wait: Callable[[], Any]
) -> float:
    wait()
    start_s = clock()
    fn()
    wait()
    return clock() - start_s


def _cuda_seconds(fn: Callable[[], Any], device: torch.device | str | None) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3  # ms


def _wait_for_cuda() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
