"""Exercises of lesson 00: one on memory, one on ranks, one on communication.

    check(SUM_OVER_RANKS, sum_over_ranks)

The ranks' numbers are no whole numbers and no half-precision ones, and the ways to be right by
accident (numbers known beforehand, another GPU's memory assumed) are cases of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from playbook_utils.checks import Exercise, expect_calls, expect_close, expect_equal
from playbook_utils.errors import CheckFailed, LaunchTimeout
from playbook_utils.events import CollectiveEvent
from playbook_utils.measure import record_communication
from playbook_utils.predict.communication import wire_bytes
from playbook_utils.workers import launch

__all__ = ["EXCHANGE_SECONDS", "GPUS_NEEDED", "SUM_OVER_RANKS"]


def _verify_gpus_needed(attempt: Callable[[int, int], Any]) -> None:
    """16 bytes a parameter, the book's section "Memory Usage in Transformers"."""
    sizes: dict[tuple[int, int], str] = {
        (8_030_261_248, 80 * 10**9): "16 bytes a parameter (2 weight, 2 gradient, 12 optimizer "
        "states), in whole GPUs",
        (10 * 10**9, 80 * 10**9): "160 GB fill two GPUs exactly: no third one is needed",
        (70_553_706_496, 80 * 10**9): "all 16 bytes of each parameter; what is left over needs a "
        "GPU too: round up",
        (5_000_000_001, 80 * 10**9): "80 GB and 16 bytes do not fit in one GPU: round up, in whole "
        "numbers",
        (8_030_261_248, 24 * 10**9): "these GPUs hold 24 GB: divide by gpu_bytes",
    }
    for (num_params, gpu_bytes), hint in sizes.items():
        expected = -(-16 * num_params // gpu_bytes)
        what = f"gpus_needed({num_params:,}, {gpu_bytes:,})"
        expect_equal(attempt(num_params, gpu_bytes), expected, what, hint=hint)


def _verify_exchange_seconds(attempt: Callable[[int, int, float], Any]) -> None:
    """Ring all-reduce of BF16 gradients: 2 (N-1)/N K bytes a rank, the book's appendix A0."""
    for num_params, world_size, bytes_per_s, hint in (
        (
            10**9,
            2,
            1e9,
            "2 bytes a gradient, times the ring's 2 (N-1)/N, divided by bytes per second",
        ),
        (10**9, 8, 1e9, "a rank sends 2 (N-1)/N times the bytes of all gradients"),
        (3 * 10**6, 3, 50e9, "bytes divided by bytes per second"),
        (10**9, 1, 50e9, "one rank alone has nobody to talk to"),
    ):
        expected = wire_bytes("all_reduce", 2 * num_params, world_size) / bytes_per_s
        what = f"exchange_seconds({num_params:,}, {world_size}, {bytes_per_s:g})"
        found = attempt(num_params, world_size, bytes_per_s)
        expect_close(found, expected, what, rtol=1e-6, hint=hint)


def _verify_sum_over_ranks(attempt: Callable[[float], Any]) -> None:
    """The right sum on every rank, by one all_reduce of one number and nothing else."""
    for world_size in (2, 3):
        numbers = [700.0 * rank * rank + 3.125 for rank in range(world_size)]
        results = _launched(attempt, numbers)
        for rank, (found, events) in enumerate(results):
            kind = "number" if isinstance(found, (int, float)) else type(found).__name__
            hint = "return the sum itself; .item() takes it out of the tensor"
            expect_equal(kind, "number", "type of what it returned", rank=rank, hint=hint)
            hint = f"the ranks hold {numbers}; every rank needs their sum"
            expect_close(found, sum(numbers), "the sum", rank=rank, hint=hint)
            hint = "dist.all_reduce adds up on all ranks at once; call it exactly once"
            expect_calls(events, {"all_reduce": 1}, rank=rank, hint=hint)
            sent = sum(math.prod(event.shape) for event in events)
            hint = "torch.tensor([number]) has one element; send no more than that"
            expect_equal(sent, 1, "elements passed to all_reduce", rank=rank, hint=hint)


def _launched(
    attempt: Callable[[float], Any], numbers: list[float]
) -> list[tuple[Any, tuple[CollectiveEvent, ...]]]:
    """One rank a number; where some ranks wait for those that left the call out, says just that."""
    try:
        return launch(
            _recorded,
            attempt,
            numbers,
            world_size=len(numbers),
            timeout_s=30,
            collective_timeout_s=5,
        )
    except LaunchTimeout as error:
        there = [r for r, where in error.positions.items() if where.startswith("all_reduce")]
        if not 0 < len(there) < len(numbers):
            raise
        who = f"rank{'s' * (len(there) > 1)} {', '.join(map(str, there))} of {len(numbers)}"
        raise CheckFailed(
            f"only {who} called all_reduce, and waited there for the others in vain\n"
            "hint: every rank must make the call, so it stands under no `if` that asks for the rank"
        ) from error


def _recorded(
    attempt: Callable[[float], Any], numbers: list[float]
) -> tuple[Any, tuple[CollectiveEvent, ...]]:
    """On each rank: its own number in, what came out and what was sent."""
    with record_communication() as log:
        found = attempt(numbers[dist.get_rank()])
    return found, log.events


GPUS_NEEDED = Exercise(
    name="gpus_needed",
    task="how many GPUs hold 16 bytes for each parameter, spread evenly?",
    verify=_verify_gpus_needed,
)

EXCHANGE_SECONDS = Exercise(
    name="exchange_seconds",
    task="seconds of a ring all-reduce of 2-byte gradients, from bytes and bandwidth",
    verify=_verify_exchange_seconds,
)

SUM_OVER_RANKS = Exercise(
    name="sum_over_ranks",
    task="add the ranks' numbers up with one all_reduce, on every rank",
    verify=_verify_sum_over_ranks,
    hints=("put the number into a tensor; all_reduce works in place, then take it out again",),
)
