"""Exercises of lesson 06, data parallelism: what is asked, and how an answer is checked.

    check(AVERAGE, average_gradients)

Every check runs the answer on real ranks where ranks matter, at sizes that do not divide, lets one
rank skip a layer, and counts calls where the method is the point.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from playbook_utils.checks import Exercise, expect_calls, expect_close, expect_equal
from playbook_utils.data import Batch, GeneratedLanguage, shard_batch
from playbook_utils.errors import CheckFailed, LaunchError, LaunchTimeout
from playbook_utils.measure import record_communication
from playbook_utils.model import Decoder, DecoderConfig, cross_entropy
from playbook_utils.workers import launch

__all__ = [
    "ACCUMULATE", "ACCUMULATION_STEPS", "AVERAGE", "CLIP", "FILL_BUCKETS", "LOSS_FACTOR",
    "ONE_CALL", "SEND_EARLY",
]  # fmt: skip

_Grads = dict[str, Tensor | None]
_STAYS_OUT = "a rank that skipped a layer still makes the call: send zeros"


class _Skipping(nn.Module):
    """Odd sizes, a frozen layer, and a layer that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen = nn.Linear(3, 5), nn.Linear(5, 7).requires_grad_(False)
        self.skipped, self.last = nn.Linear(7, 7), nn.Linear(7, 1)
        self.double()

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        """(B, 3) -> (B, 1)."""
        x = self.frozen(self.first(x))
        out: Tensor = self.last(x if skip else self.skipped(x))
        return out


def _after_backward() -> nn.Module:
    """The module with this rank's own gradients."""
    module = _Skipping()
    _backward(module)
    return module


def _backward(module: nn.Module, skip: bool = True) -> None:
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    module(torch.randn(4, 3, dtype=torch.float64), skip and rank > 0).sum().backward()


def _grads(module: nn.Module) -> _Grads:
    return {name: p.grad for name, p in module.named_parameters()}


def _means(each: Sequence[_Grads], module: nn.Module) -> _Grads:
    """What one process would have; a rank without a gradient counts as zeros."""
    params = dict(module.named_parameters())
    found: _Grads = {}
    for name, param in params.items():
        there = [grads[name] for grads in each]
        filled = [torch.zeros_like(param) if grad is None else grad for grad in there]
        found[name] = torch.stack(filled).mean(0).detach() if param.requires_grad else None
    return found


def _expect_grads(
    found: _Grads, expected: _Grads, rank: int, *, rtol: float = 1e-9, hint: str = ""
) -> None:
    for name, grad in expected.items():
        what = f"gradient of {name}"
        if grad is None:
            frozen = "a frozen parameter has none before, and none after"
            expect_equal(found[name], None, what, rank=rank, hint=frozen)
        else:
            expect_close(found[name], grad, what, rtol=rtol, atol=1e-12, rank=rank, hint=hint)


def _launched(fn: Callable[..., Any], *args: Any, world_size: int, hint: str) -> list[Any]:
    """Run on real ranks; ranks that wait for each other for ever get the hint."""
    try:
        return launch(fn, *args, world_size=world_size, collective_timeout_s=5)
    except LaunchError as error:
        # gloo ends a process that receives another size than it expects.
        aborted = any("killed by SIGABRT" in failure.summary for failure in error.failures)
        if not aborted and not isinstance(error, LaunchTimeout):
            raise
        raise CheckFailed(f"not all ranks make the same calls\n{error}\nhint: {hint}") from error


def _average_case(attempt: Callable[..., object]) -> tuple[_Grads, _Grads, float]:
    """One rank's own and averaged gradients, in groups {0, 2} and {1}, and one that overflows."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    module = _after_backward()
    own = {name: None if g is None else g.clone() for name, g in _grads(module).items()}
    params = [p for p in module.parameters() if p.requires_grad]
    attempt(params, groups[dist.get_rank() % 2])
    large = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    large.grad = torch.full((1,), 40_000.0, dtype=torch.float16)
    attempt([large])
    return own, _grads(module), float(large.grad)


def _untouched(own: _Grads, found: _Grads, world_size: int) -> bool:
    """Whether nothing arrived from other ranks: each gradient is the rank's own, or its part."""
    pairs = [(mine, found[name]) for name, mine in own.items() if mine is not None]
    parts = (1, world_size)
    return all(g is not None and any(torch.allclose(g, m / n) for n in parts) for m, g in pairs)


def _verify_average(attempt: Callable[..., object]) -> None:
    runs = _launched(_average_case, attempt, world_size=3, hint=_STAYS_OUT)
    for rank, (own, found, large) in enumerate(runs):
        group = [0, 2] if rank in (0, 2) else [1]
        expected = _means([runs[r][0] for r in group], _Skipping())
        hint = f"the mean over the {len(group)} ranks of `group`: a sum, divided by their number"
        if len(group) > 1 and _untouched(own, found, len(group)):
            hint = "these are still the rank's own gradients: the mean must end up in param.grad"
        _expect_grads(found, expected, rank, hint=hint)
        hint = "the sum of float16 numbers overflows beyond 65,504: divide before the sum"
        expect_close(large, 40_000.0, "float16 gradient", rank=rank, rtol=1e-3, hint=hint)


class _Noted:
    """A handle that knows whether backward was still running when it was waited for."""

    def __init__(self, work: Any, running: Callable[[], bool], early: list[bool]) -> None:
        self.work, self.running, self.early = work, running, early

    def wait(self) -> None:
        """As the real one."""
        self.early.append(self.running())
        self.work.wait()


@dataclass
class _Sent:
    """What one rank did with its gradients."""

    own: _Grads
    found: _Grads
    handles: int
    started: int
    """Asynchronous calls."""
    before_last: int
    """Calls while gradients were missing."""
    waited: int
    """Handles waited for during backward."""
    large: float
    """The mean of float16 gradients of 40,000."""


def _send_case(attempt: Callable[..., Any]) -> _Sent:
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    plain, module = _Skipping(), _Skipping()
    _backward(plain, skip=False)
    params = [p for p in module.parameters() if p.requires_grad]
    ready, running, calls, waits = [0], [True], [], list[bool]()

    def count(_: Tensor) -> None:
        ready[0] += 1

    for param in params:  # before the answer hangs its own hooks
        param.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
    real = dist.all_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append((ready[0], bool(kwargs.get("async_op", args[3:4] == (True,)))))
        work = real(*args, **kwargs)
        return None if work is None else _Noted(work, lambda: running[0], waits)

    with mock.patch.object(dist, "all_reduce", noted):
        works = attempt(params, groups[dist.get_rank() % 2])
        _backward(module, skip=False)
        running[0] = False
        handles = [work for work in (works or ()) if hasattr(work, "wait")]
        for work in handles:
            work.wait()
    large = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    works = attempt([large])
    (large * 40_000).sum().backward()  # type: ignore[no-untyped-call]
    for work in works or ():
        getattr(work, "wait", lambda: None)()
    early = sum(number < len(params) for number, _ in calls)
    started = sum(is_async for _, is_async in calls)
    value = float("nan") if large.grad is None else float(large.grad)
    return _Sent(_grads(plain), _grads(module), len(handles), started, early, sum(waits), value)


def _verify_send_early(attempt: Callable[..., Any]) -> None:
    hint = "start the call with async_op=True, and wait for it only after backward"
    runs: list[_Sent] = _launched(_send_case, attempt, world_size=3, hint=hint)
    num_params = sum(p.requires_grad for p in _Skipping().parameters())
    for rank, run in enumerate(runs):
        group = [0, 2] if rank in (0, 2) else [1]
        say = "call dist.all_reduce(param.grad, async_op=True) in the hook of each parameter"
        expect_equal(run.started, num_params, "asynchronous all_reduces", rank=rank, hint=say)
        say = "return the list to which the hook appends what all_reduce returns"
        expect_equal(run.handles, num_params, "handles in the list", rank=rank, hint=say)
        say = "do not wait in the hook: that stops backward until the gradient has been sent"
        expect_equal(run.waited, 0, "handles waited for during backward", rank=rank, hint=say)
        say = "a call belongs into the hook, which runs while backward goes on"
        what = "calls before the last gradient"
        expect_equal(run.before_last, num_params - 1, what, rank=rank, hint=say)
        say = f"the mean over the {len(group)} ranks of `group`: divide before it is sent"
        expected = _means([runs[r].own for r in group], _Skipping())
        _expect_grads(run.found, expected, rank, hint=say)
        say = "the sum of float16 numbers overflows beyond 65,504: divide before you send"
        if run.large < float("inf"):
            say = "the number of ranks is dist.get_world_size(group)"
        expect_close(run.large, 40_000.0, "float16 gradient", rank=rank, rtol=1e-3, hint=say)


def _verify_fill_buckets(attempt: Callable[[Sequence[int], int], list[list[int]]]) -> None:
    cases: dict[tuple[tuple[int, ...], int], list[list[int]]] = {
        ((4, 4, 4, 4), 8): [[3, 2], [1, 0]],
        ((1, 2, 3, 4, 5), 6): [[4], [3], [2, 1, 0]],
        ((1,) * 9, 7): [[8, 7, 6, 5, 4, 3, 2], [1, 0]],
        ((3, 20, 3), 10): [[2], [1], [0]],
        ((3, 20), 10): [[1], [0]],
        ((7,), 10): [[0]],
        ((10, 10), 10): [[1], [0]],
        ((), 10): [],
    }
    rng = random.Random(0)
    for limit in (5, 23):
        drawn = tuple(rng.randint(1, 9) for _ in range(30))
        cases[drawn, limit] = _filled(drawn, limit)
    for (sizes, limit), expected in cases.items():
        found = [list(bucket) for bucket in attempt(sizes, limit)]
        hint = _bucket_hint(found, sizes, limit)
        expect_equal(found, expected, f"buckets of {list(sizes)}, limit {limit}", hint=hint)


def _filled(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """From each bucket's first parameter on, as many as fit."""
    left, buckets = list(range(len(sizes)))[::-1], []
    while left:
        fits = [n for n in range(1, len(left) + 1) if sum(sizes[i] for i in left[:n]) <= limit]
        number = max(fits, default=1)
        buckets.append(left[:number])
        left = left[number:]
    return buckets


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
    return "backward finishes the last parameter first; a bucket is closed only when it is full"


_TINY = DecoderConfig.tiny(dim=8, num_layers=1, num_heads=2, num_kv_heads=1, ff_dim=12)


def _tiny() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(_TINY).double()


def _accumulate_case(
    attempt: Callable[..., Any], batch: Batch, parts: int
) -> tuple[_Grads, float, int, list[int]]:
    """Gradients, returned loss, all-reduces, and rows of each forward pass."""
    rows: list[int] = []  # of each forward; 0 for a backward
    model = nn.parallel.DistributedDataParallel(_tiny())
    model.module.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    model.module.register_full_backward_hook(lambda *_: rows.append(0))
    with record_communication() as log:
        loss = attempt(model, shard_batch(batch, dist.get_rank(), dist.get_world_size()), parts)
    value = float(loss.detach() if isinstance(loss, Tensor) else loss)
    return _grads(model.module), value, log.calls("all_reduce"), rows


class _Counting(nn.Module):
    """A wrapper that counts what is asked of it, in place of the lesson's own."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.finished = _tiny(), 0

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, V)."""
        logits: Tensor = self.module(tokens)
        return logits

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing to keep silent here."""
        yield

    def finish_gradients(self) -> None:
        """Counts the calls."""
        self.finished += 1


def _verify_accumulate(attempt: Callable[..., Any]) -> None:
    batch = GeneratedLanguage().batch(0, batch_size=12, seq_len=5)
    for parts in (3, 1):
        runs = _launched(_accumulate_case, attempt, batch, parts, world_size=2, hint="see no_sync")
        for rank, (grads, loss, calls, rows) in enumerate(runs):
            model, (tokens, targets) = _tiny(), shard_batch(batch, rank, 2)
            own = float(cross_entropy(model(tokens), targets).detach())
            cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
            say = "forward, then backward, for each of `microbatches(batch, num_microbatches)`"
            what = "rows of each forward, 0 for a backward"
            expect_equal(rows, [6 // parts, 0] * parts, what, rank=rank, hint=say)
            say = "all but the last backward stay inside `with model.no_sync():`, forward included"
            expect_equal(calls, 1, f"all_reduces in {parts} parts", rank=rank, hint=say)
            say = "divide each part's loss by the number of parts before backward"
            _expect_grads(grads, _grads(model), rank, hint=say)
            say = "return the mean of the parts' losses"
            expect_close(loss, own, "loss", rank=rank, hint=say)
    counting = _Counting()
    attempt(counting, batch, 3)
    say = "after the last backward, once, where the model has the method"
    expect_equal(counting.finished, 1, "calls of finish_gradients", hint=say)


def _one_call_case(attempt: Callable[..., object]) -> tuple[_Grads, _Grads, tuple[Any, ...]]:
    module = _after_backward()
    own = {name: None if g is None else g.clone() for name, g in _grads(module).items()}
    with record_communication() as log:
        attempt(module)
    return own, _grads(module), log.events


def _verify_one_call(attempt: Callable[[nn.Module], object]) -> None:
    for world_size in (2, 3):
        runs = _launched(_one_call_case, attempt, world_size=world_size, hint=_STAYS_OUT)
        expected = _means([own for own, *_ in runs], _Skipping())
        for rank, (_, found, events) in enumerate(runs):
            hint = "put all gradients into one flat tensor before the call"
            expect_calls(events, {"all_reduce": 1}, rank=rank, hint=hint)
            hint = "is it the mean, with zeros for what a rank did not use, each back in its place?"
            _expect_grads(found, expected, rank, hint=hint)


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
    # 4,099 is no float16, and 70,000 beyond its range.
    for counts in ((64, 64, 32, 32), (96, 64, 0), (4099, 3), (70_000, 30_000)):

        def run(counts: tuple[int, ...] = counts) -> float:
            return float(attempt(counts[dist.get_rank()]))

        hint = "a rank without tokens takes part too"
        for rank, found in enumerate(_launched(run, world_size=len(counts), hint=hint)):
            expected = len(counts) * counts[rank] / sum(counts)
            what = f"factor for {counts[rank]} of the tokens {counts}"
            say = "averaging over ranks divides by the world size: multiply by it"
            expect_close(found, expected, what, rank=rank, hint=say)


def _clip_case(attempt: Callable[..., Any], max_norm: float) -> tuple[_Grads, _Grads, Any]:
    module = _after_backward()
    own = {name: None if g is None else g.clone() for name, g in _grads(module).items()}
    returned = attempt(module, max_norm)
    return own, _grads(module), returned


def _verify_clip(attempt: Callable[[nn.Module, float], object]) -> None:
    for world_size, max_norm in ((3, 0.5), (2, 1e6)):
        runs = _launched(_clip_case, attempt, max_norm, world_size=world_size, hint=_STAYS_OUT)
        grads = _means([own for own, *_ in runs], _Skipping())
        squares = [float(g.square().sum()) for g in grads.values() if g is not None]
        norm = sum(squares) ** 0.5
        scale = min(1.0, max_norm / (norm + 1e-6))
        expected = {name: None if g is None else g * scale for name, g in grads.items()}
        for rank, (_, found, returned) in enumerate(runs):
            hint = "return the norm of the averaged gradient, before clipping"
            value = returned.item() if isinstance(returned, Tensor) else returned
            expect_close(value, norm, "norm", rtol=1e-6, rank=rank, hint=hint)
            # PyTorch divides by norm + 1e-6; without that it is right too.
            hint = "max_norm / norm where the norm is larger, untouched where it is not"
            _expect_grads(found, expected, rank, rtol=1e-5, hint=f"the norm is right: {hint}")


AVERAGE = Exercise(
    "average_gradients",
    "replace each gradient by its mean over the ranks",
    _verify_average,
    hints=("a rank that skipped a layer has `param.grad` None there: give it zeros",),
)
SEND_EARLY = Exercise(
    "send_early",
    "start each gradient's all-reduce as soon as it is complete",
    _verify_send_early,
    hints=("param.register_post_accumulate_grad_hook(function) calls function(param)",),
)
FILL_BUCKETS = Exercise(
    "fill_buckets",
    "parameter indices by bucket, in the order of sending",
    _verify_fill_buckets,
)
ACCUMULATE = Exercise(
    "accumulate",
    "forward and backward in parts, one synchronisation",
    _verify_accumulate,
)
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
CLIP = Exercise(
    "average_and_clip",
    "average, clip to a norm, return the norm before clipping",
    _verify_clip,
)
