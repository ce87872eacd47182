"""Exercises of lesson 06, data parallelism: what is asked, and how an answer is checked.

    check(ONE_CALL, average_in_one_call)

Every check runs the answer on real ranks where ranks matter, at sizes that do not divide, and
counts calls where the method is the point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from playbook_utils.checks import Exercise, expect_calls, expect_close, expect_equal
from playbook_utils.errors import CheckFailed, LaunchTimeout
from playbook_utils.events import CollectiveEvent
from playbook_utils.measure import record_communication
from playbook_utils.workers import launch

__all__ = ["ACCUMULATION_STEPS", "CLIP", "FILL_BUCKETS", "LOSS_FACTOR", "ONE_CALL"]

_Run = tuple[dict[str, Tensor | None], Any, tuple[CollectiveEvent, ...]]


def _small_module() -> nn.Module:
    """Odd sizes, a frozen layer in the middle, and gradients that differ from rank to rank."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 1)).double()
    module[1].requires_grad_(False)
    torch.manual_seed(1 + dist.get_rank())
    module(torch.randn(4, 3, dtype=torch.float64)).sum().backward()
    return module


def _run(attempt: Callable[..., Any], *args: Any) -> _Run:
    module = _small_module()
    with record_communication() as log:
        value = attempt(module, *args)
    return {name: p.grad for name, p in module.named_parameters()}, value, log.events


def _expected_grads(world_size: int) -> dict[str, Tensor | None]:
    def grads() -> dict[str, Tensor | None]:
        return {name: p.grad for name, p in _small_module().named_parameters()}

    all_grads = launch(grads, world_size=world_size)
    return {
        name: None if grad is None else torch.stack([g[name] for g in all_grads]).mean(0)  # type: ignore[misc]
        for name, grad in all_grads[0].items()
    }


def _expect_grads(
    found: dict[str, Tensor | None],
    expected: dict[str, Any],
    rank: int,
    rtol: float = 1e-9,
    hint: str = "is it the mean, not the sum, and is each part back in its own place?",
) -> None:
    for name, grad in expected.items():
        what = f"gradient of {name}"
        if grad is None:
            frozen = "a frozen parameter has none before, and none after"
            expect_equal(found[name], None, what, rank=rank, hint=frozen)
        else:
            expect_close(found[name], grad, what, rtol=rtol, atol=1e-12, rank=rank, hint=hint)


def _verify_one_call(attempt: Callable[[nn.Module], object]) -> None:
    for world_size in (2, 3):
        expected = _expected_grads(world_size)
        for rank, (grads, _, events) in enumerate(launch(_run, attempt, world_size=world_size)):
            _expect_grads(grads, expected, rank)
            hint = "put all gradients into one flat tensor before the call"
            expect_calls(events, {"all_reduce": 1}, rank=rank, hint=hint)


def _verify_accumulation_steps(attempt: Callable[[int, int, int, int], int]) -> None:
    right = {(4 * 2**20, 4096, 2, 128): 4, (4 * 2**20, 4096, 2, 512): 1, (5040, 10, 3, 7): 24}
    for arguments, expected in right.items():
        hint = "tokens = sequences x seq_len, sequences = mbs x grad_acc x dp"
        expect_equal(attempt(*arguments), expected, f"accumulation_steps{arguments}", hint=hint)
    impossible = {
        (4_000_000, 4096, 2, 128): "4,000,000 tokens are no whole number of sequences",
        (4 * 2**20, 4096, 3, 128): "1,024 sequences do not divide by 3 x 128",
        (4096, 4096, 1, 2): "two ranks have only one sequence",
        (0, 4096, 1, 2): "there are no tokens",
    }
    for arguments, why in impossible.items():
        try:
            found = attempt(*arguments)
        except ValueError:
            continue
        raise CheckFailed(
            f"accumulation_steps{arguments}: found {found}, expected a ValueError ({why})\n"
            "hint: look at the remainder before you trust the quotient"
        )


def _verify_loss_factor(attempt: Callable[[int], float]) -> None:
    for counts in ((64, 64, 32, 32), (96, 64, 0), (5, 5)):

        def run(counts: tuple[int, ...] = counts) -> float:
            return float(attempt(counts[dist.get_rank()]))

        try:
            factors = launch(run, world_size=len(counts), collective_timeout_s=5)
        except LaunchTimeout as error:
            raise CheckFailed(f"{error}\nhint: a rank without tokens takes part too") from error
        for rank, found in enumerate(factors):
            expected = len(counts) * counts[rank] / sum(counts)
            what = f"factor for {counts[rank]} of the tokens {counts}"
            hint = "averaging over ranks divides by the world size: multiply by it"
            expect_close(found, expected, what, rank=rank, hint=hint)


def _verify_fill_buckets(attempt: Callable[[Sequence[int], int], list[list[int]]]) -> None:
    cases = {
        ((4, 4, 4, 4), 8): [[3, 2], [1, 0]],
        ((1, 2, 3, 4, 5), 6): [[4], [3], [2, 1, 0]],
        ((3, 20, 3), 10): [[2], [1], [0]],
        ((3, 20), 10): [[1], [0]],
        ((7,), 10): [[0]],
        ((10, 10), 10): [[1], [0]],
        ((), 10): [],
    }
    for (sizes, limit), expected in cases.items():
        found = [list(bucket) for bucket in attempt(sizes, limit)]
        hint = _bucket_hint(found, sizes, limit)
        expect_equal(found, expected, f"buckets of {list(sizes)}, limit {limit}", hint=hint)


def _bucket_hint(found: list[list[int]], sizes: Sequence[int], limit: int) -> str:
    missing = sorted(set(range(len(sizes))) - {index for bucket in found for index in bucket})
    if [] in found:
        return "a bucket is empty"
    if missing:
        return f"parameters {missing} are in no bucket"
    for bucket in found:
        filled = sum(sizes[index] for index in bucket)
        if filled > limit and len(bucket) > 1:
            return f"a bucket of {filled} exceeds the limit of {limit}"
    return "backward finishes the last parameter first; a bucket may be exactly full"


def _verify_clip(attempt: Callable[[nn.Module, float], object]) -> None:
    for world_size, max_norm in ((3, 0.5), (2, 1e6)):
        grads = _expected_grads(world_size)
        squares = [float(g.square().sum()) for g in grads.values() if g is not None]
        norm = sum(squares) ** 0.5
        scale = min(1.0, max_norm / (norm + 1e-6))
        expected = {name: None if g is None else g * scale for name, g in grads.items()}
        runs = launch(_run, attempt, max_norm, world_size=world_size)
        for rank, (found, returned, _) in enumerate(runs):
            hint = "return the norm of the averaged gradient, before clipping"
            value = returned.item() if isinstance(returned, Tensor) else returned
            expect_close(value, norm, "norm", rtol=1e-6, rank=rank, hint=hint)
            # PyTorch divides by norm + 1e-6; without that it is right too.
            hint = "max_norm / norm where the norm is larger, untouched where it is not"
            _expect_grads(found, expected, rank, rtol=1e-5, hint=f"the norm is right: {hint}")


ONE_CALL = Exercise(
    "average_in_one_call",
    "average all gradients with exactly one all_reduce",
    _verify_one_call,
)
ACCUMULATION_STEPS = Exercise(
    "accumulation_steps",
    "gradient-accumulation steps that reach a batch exactly",
    _verify_accumulation_steps,
)
LOSS_FACTOR = Exercise(
    "loss_factor",
    "the factor for a rank's mean loss where slices differ in size",
    _verify_loss_factor,
)
FILL_BUCKETS = Exercise(
    "fill_buckets",
    "parameter indices by bucket, in the order of sending",
    _verify_fill_buckets,
)
CLIP = Exercise(
    "average_and_clip",
    "average, clip to a norm, return the norm before clipping",
    _verify_clip,
)
