"""Exercises of lesson 07, ZeRO: what is asked, and how an answer is checked.

    check(REDUCE, reduce_and_free)

Every check runs the answer on real ranks where ranks matter, at sizes that do not divide, counts
calls where the method is the point, and looks into memory where freeing is.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from playbook_utils.checks import Exercise, expect_calls, expect_close, expect_equal
from playbook_utils.errors import CheckFailed
from playbook_utils.measure import record_communication
from playbook_utils.workers import launch

__all__ = ["CLIP", "GATHER", "RANKS_NEEDED", "REDUCE", "SHARD"]

_SHAPES = ((3, 5), (7,), (2, 3))  # 28 numbers, which do not divide by 3
_WEIGHT = (5, 3)


def _verify_ranks_needed(attempt: Callable[[int, int, int], int | None]) -> None:
    gb, b8 = 10**9, 8 * 10**9
    cases = {
        (b8, 80 * gb, 0): (None, "16 x 8 = 128 GB on each rank, whatever N is"),
        (10**9, 80 * gb, 0): (1, "16 GB fit one rank"),
        (10**9, 80 * gb, 3): (1, "16 GB fit one rank"),
        (b8, 80 * gb, 1): (2, "32 GB stay, and 96 GB are divided"),
        (b8, 33 * gb, 1): (96, "32 GB stay, and 96 GB are divided"),
        (b8, 32 * gb, 1): (None, "params and grads stay: they fill the budget by themselves"),
        (b8, 30 * gb, 2): (8, "16 GB of params stay; grads are divided from stage 2 on"),
        (b8, 10 * gb, 2): (None, "the params stay whole in stage 2"),
        (b8, 10 * gb, 3): (13, "everything is divided in stage 3: round up"),
        (70 * gb, 10 * gb, 3): (112, "everything is divided in stage 3"),
        (70 * gb, gb, 3): (1120, "there is no largest cluster: compute N, do not search for it"),
        (b8, b8 * 4 + 10**6, 1): (96_000, "what is left beside 32 GB is 1 MB, for 96 GB / N"),
    }
    for arguments, (expected, hint) in cases.items():
        expect_equal(attempt(*arguments), expected, f"ranks_needed{arguments}", hint=hint)


def _verify_shard(attempt: Callable[[Tensor, int, int], Tensor]) -> None:
    for numel, world_size in ((12, 4), (10, 4), (9, 4), (2, 4), (7, 1)):
        _verify_shards(attempt, torch.arange(1.0, numel + 1), world_size)
    for dtype in (torch.bfloat16, torch.float64):
        _verify_shards(attempt, torch.arange(1, 11, dtype=dtype), 4)
    shard = attempt(torch.arange(12.0), 1, 4)
    hint = "a slice is a view and keeps the whole in memory: copy it"
    expect_equal(shard.untyped_storage().nbytes(), 12, "bytes behind the shard", hint=hint)


def _verify_shards(
    attempt: Callable[[Tensor, int, int], Tensor], flat: Tensor, world_size: int
) -> None:
    length = -(-flat.numel() // world_size)
    padded = torch.cat([flat, flat.new_zeros(world_size * length - flat.numel())])
    for rank, expected in enumerate(padded.chunk(world_size)):
        what = f"shard of {flat.numel()} numbers on {world_size} ranks"
        hint = "rank r has the elements from r x length on, zeros where there are none left"
        found = attempt(flat, rank, world_size)
        if isinstance(found, Tensor) and found.dtype != flat.dtype:
            hint = "a shard has the dtype of what it is cut from: flat.new_zeros(length)"
        expect_close(found, expected, what, rank=rank, hint=hint)


def _params(dtype: torch.dtype) -> list[nn.Parameter]:
    """Of odd sizes, with gradients that differ from rank to rank."""
    torch.manual_seed(1 + dist.get_rank())
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in _SHAPES]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def _flat_grads(params: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([p.grad.flatten() for p in params if p.grad is not None])


def _halves() -> Any:
    """The group of this rank, of two: ranks 0, 2, ... and ranks 1, 3, ..."""
    world_size = dist.get_world_size()
    groups = [dist.new_group(list(range(first, world_size, 2))) for first in (0, 1)]
    return groups[dist.get_rank() % 2]


def _expect_parts(scatter: Callable[..., Any], mine: Tensor, whole: Tensor, **options: Any) -> Any:
    """The call itself, if its sizes fit; the backend's own words are hard to read."""
    world_size, numel = dist.get_world_size(options.get("group")), whole.numel()
    said = f"reduce_scatter_single(mine, whole): found {mine.numel()} and {numel} numbers"
    if mine.numel() > numel:
        raise CheckFailed(f"{said}\nhint: the output, the shard, comes first")
    if numel % world_size:
        hint = f"{numel} numbers do not divide by {world_size} ranks: pad the flat tensor first"
        raise CheckFailed(f"{said}\nhint: {hint}")
    if mine.numel() * world_size != numel:
        raise CheckFailed(f"{said}\nhint: `mine` has room for whole.numel() // world_size")
    return scatter(mine, whole, **options)


def _run_reduce(attempt: Callable[..., Tensor], dtype: torch.dtype, grouped: bool) -> Any:
    options, params = {"group": _halves()} if grouped else {}, _params(dtype)
    grads = _flat_grads(params)
    numel = grads.numel()
    before, large = {id(p.grad) for p in params}, _num_large(numel)
    with record_communication() as log:
        guarded = partial(_expect_parts, dist.reduce_scatter_single)
        with patch.object(dist, "reduce_scatter_single", guarded):
            shard = attempt(params, **options)
    left = sum(p.grad is not None for p in params)
    # A gradient may have been hidden elsewhere rather than freed, or kept as a part of a flat copy.
    kept = 0 if left else _num_kept(numel, large)
    alive = [t for t in gc.get_objects() if isinstance(t, Tensor) and id(t) in before]
    shapes = {tuple(t.shape) for t in alive if t is not shard} & set(_SHAPES)
    return grads, shard, left, len(shapes) + kept, log.events


_RTOL = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _verify_reduce(attempt: Callable[..., Tensor]) -> None:
    cases = [(3, torch.float64), (2, torch.float32), (2, torch.bfloat16)]
    for world_size, dtype in cases:
        results = launch(_run_reduce, attempt, dtype, False, world_size=world_size)
        _verify_shards_of_mean(list(enumerate(results)), dtype)
    results = launch(_run_reduce, attempt, torch.float32, True, world_size=4)
    for first in (0, 1):
        members = [(rank, results[rank]) for rank in (first, first + 2)]
        _verify_shards_of_mean(members, torch.float32, "`group` has two of the four ranks: use it")


def _verify_shards_of_mean(
    results: Sequence[tuple[int, Any]], dtype: torch.dtype, group_hint: str = ""
) -> None:
    """Each (global rank, result) of one group."""
    grads = [result[0] for _, result in results]
    length = -(-grads[0].numel() // len(results))
    mean = torch.zeros(length * len(results), dtype=dtype)
    mean[: grads[0].numel()] = torch.stack(grads).double().mean(0).to(dtype)
    rtol = _RTOL[dtype]
    for place, (rank, (_, shard, left, hidden, events)) in enumerate(results):
        hint = "an all-reduce would send twice as much; one flat tensor needs one call"
        expect_calls(events, {"reduce_scatter": 1}, rank=rank, hint=hint)
        hint = (
            "flatten each `param.grad`; a reduce-scatter adds up: "
            "divide by the number of ranks, and pad at the end"
        )
        if isinstance(shard, Tensor) and shard.dtype != dtype:
            hint = "the gradients' own dtype: new_zeros and new_empty keep it"
        expected = mean[place * length :][:length]
        what, hint = "shard of the average", group_hint or hint
        expect_close(shard, expected, what, rtol=rtol, atol=rtol, rank=rank, hint=hint)
        payload, size = events[0].payload_bytes, mean.numel() * mean.element_size()
        hint = "send the gradients in their own dtype"
        expect_equal(payload, size, "bytes to reduce-scatter", rank=rank, hint=hint)
        hint = "set param.grad = None once it is copied"
        expect_equal(left, 0, "parameters with a full gradient left", rank=rank, hint=hint)
        hint = "something still refers to them: a list that outlives the call, or a view?"
        expect_equal(hidden, 0, "full gradients still in memory", rank=rank, hint=hint)


def _padded_weight(step: int, world_size: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(step)
    numel = _WEIGHT[0] * _WEIGHT[1]
    length = -(-numel // world_size)
    whole = torch.zeros(length * world_size, dtype=dtype)
    whole[:numel] = torch.randn(numel, dtype=dtype)
    return whole


def _num_large(numel: int) -> int:
    """How many pieces of memory for at least `numel` elements tensors refer to, views too."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, Tensor)]
    pieces = [(t.untyped_storage(), t.element_size()) for t in tensors]
    return len({piece._cdata for piece, size in pieces if piece.nbytes() // size >= numel})


def _num_kept(numel: int, before: int) -> int:
    """How many such pieces there are more than `before`, and stay."""
    for _ in range(100):  # gloo's thread lets go of a message a moment later
        if (kept := _num_large(numel) - before) <= 0:
            return 0
        time.sleep(0.01)
    return kept


def _run_gather(attempt: Callable[..., Any], dtype: torch.dtype) -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = _padded_weight(0, world_size, dtype).chunk(world_size)[rank].clone()
    x = torch.arange(6.0, dtype=dtype).view(2, 3)
    before = _num_large(_WEIGHT[0] * _WEIGHT[1])
    outputs, events, kept = [], [], 0
    linear = attempt(shard, _WEIGHT)
    for step in range(2):
        shard.copy_(_padded_weight(step, world_size, dtype).chunk(world_size)[rank])
        with record_communication() as log:
            outputs.append(_output(linear, x))
        events.append(log.events)
        kept = kept or _num_kept(_WEIGHT[0] * _WEIGHT[1], before)
    return outputs, events, kept


def _output(linear: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return linear(x)
    except RuntimeError as error:
        if "invalid for input of size" not in str(error):
            raise
        numel = _WEIGHT[0] * _WEIGHT[1]
        hint = f"drop the padding before you reshape: the weight is the first {numel} numbers"
        raise CheckFailed(f"{error}\nhint: {hint}") from None


def _verify_gather(attempt: Callable[..., Any]) -> None:
    numel = _WEIGHT[0] * _WEIGHT[1]
    for world_size, dtype in ((2, torch.float64), (4, torch.float32)):
        x = torch.arange(6.0, dtype=dtype).view(2, 3)
        for rank, (outputs, events, kept) in enumerate(
            launch(_run_gather, attempt, dtype, world_size=world_size)
        ):
            for step, output in enumerate(outputs):
                weight = _padded_weight(step, world_size, dtype)[:numel].view(_WEIGHT)
                after = " after the shards have changed" if step else ""
                hint = "gather in every call; drop the padding before you reshape"
                if step:
                    hint = "a weight gathered before the optimizer's step is stale"
                if isinstance(output, Tensor) and output.dtype != dtype:
                    hint = "gather into a tensor of the shard's own dtype: shard.new_empty"
                what, rtol = f"output{after}", 1e-9 if dtype == torch.float64 else 1e-4
                expect_close(output, x @ weight.T, what, rtol=rtol, rank=rank, hint=hint)
                hint = "one all-gather a call"
                if not events[step]:
                    hint = "gather inside the function that you return"
                expect_calls(events[step], {"all_gather": 1}, rank=rank, hint=hint)
            hint = "the whole weight must be a local variable of the call"
            expect_equal(kept, 0, "whole weights in memory after a call", rank=rank, hint=hint)


def _run_clip(
    attempt: Callable[..., Any], max_norm: float, dtype: torch.dtype, grouped: bool
) -> Any:
    torch.manual_seed(10 + dist.get_rank())
    before = [torch.randn(size, dtype=dtype) for size in (5, 2)]
    if dtype == torch.bfloat16:  # beside 1,024, a BF16 sum does not see another 4
        before = [torch.randn(4).sign().to(dtype) for _ in range(400)]
    shards, options = [shard.clone() for shard in before], {"group": _halves()} if grouped else {}
    with record_communication() as log:
        norm = attempt(shards, max_norm, **options)
    return before, shards, norm, log.events


def _verify_clip(attempt: Callable[..., Any]) -> None:
    cases = [
        (3, 0.5, torch.float64, False),
        (2, 1e6, torch.float32, False),
        (2, 0.5, torch.bfloat16, False),
        (4, 0.5, torch.float32, True),
    ]
    for world_size, max_norm, dtype, grouped in cases:
        results = launch(_run_clip, attempt, max_norm, dtype, grouped, world_size=world_size)
        for first in (0, 1) if grouped else (0,):
            ranks = range(first, world_size, 2 if grouped else 1)
            _verify_clipped([(rank, results[rank]) for rank in ranks], max_norm, dtype, grouped)


def _verify_clipped(
    results: Sequence[tuple[int, Any]], max_norm: float, dtype: torch.dtype, grouped: bool
) -> None:
    """Each (global rank, result) of one group."""
    every = [shard.double() for _, (before, *_) in results for shard in before]
    norm = sum(float(shard.square().sum()) for shard in every) ** 0.5
    scale = min(1.0, max_norm / (norm + 1e-6))
    low = dtype == torch.bfloat16
    for rank, (before, shards, found, events) in results:
        value = found.item() if isinstance(found, Tensor) else found
        if not isinstance(value, (int, float)):
            raise CheckFailed(f"norm: found {found!r}, expected a number\nhint: return it")
        hint = "of the whole gradient, before clipping: add up the squares of all ranks"
        if low:
            hint = "BF16 loses small terms: add the squares up in float32"
        if grouped:
            hint = "`group` has two of the four ranks: use it"
        expect_close(value, norm, "norm", rtol=2e-3 if low else 1e-5, rank=rank, hint=hint)
        for shard, original in zip(shards, before, strict=True):
            hint = "max_norm / norm where the norm is larger, untouched where it is not"
            if scale < 1 and torch.equal(shard, original):
                hint = "change the shards in place: `shard *= ...`"
            expected, rtol = (original.double() * scale).to(dtype), 2e-2 if low else 1e-5
            expect_close(shard, expected, "shard", rtol=rtol, rank=rank, hint=hint)
        hint = "one number is enough: add the squares of all shards up first"
        expect_calls(events, {"all_reduce": 1}, rank=rank, hint=hint)


RANKS_NEEDED = Exercise(
    "ranks_needed",
    "the smallest number of ranks on which a stage fits",
    _verify_ranks_needed,
)
SHARD = Exercise("my_shard", "this rank's padded part of a flat tensor", _verify_shard)
REDUCE = Exercise(
    "reduce_and_free",
    "this rank's shard of the average gradient, and no full gradient left",
    _verify_reduce,
)
GATHER = Exercise(
    "gathered_linear",
    "a linear layer whose weight is whole only while it is used",
    _verify_gather,
)
CLIP = Exercise("clip_shards", "clip by the norm of a gradient that is in shards", _verify_clip)
