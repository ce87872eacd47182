"""Exercises of lesson 03, gradient accumulation: what is asked, and how an answer is checked.

    check(STREAM, accumulate_stream)

Every check holds gradients or parameters against those of the whole batch, with padding, uneven
parts and frozen parameters, and watches how the answer got there: rows in each forward, parts taken
before they are needed, activations that wait for a backward, calls of the scaler, gradients that
exist at one time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from playbook_utils.checks import Exercise, expect_close, expect_equal
from playbook_utils.data import Batch
from playbook_utils.errors import CheckFailed
from playbook_utils.exercises.accumulation_watch import (
    ROWS,
    SEQ_LEN,
    VOCAB,
    WatchedModel,
    WatchedScaler,
    watch_grads,
)
from playbook_utils.model import cross_entropy

__all__ = ["BATCHES", "FP32_SUMS", "PLAN", "SCALED_STEP", "STREAM"]


def _padded_batch(lengths: Iterable[int] = (5, 5, 4, 3, 0, 0, 1)) -> Batch:
    """Rows of these lengths; what follows is padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)
    targets = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator)
    hidden = torch.arange(SEQ_LEN) >= torch.tensor(list(lengths))[:, None]
    return tokens, targets.masked_fill(hidden, -100)


def _parts(batch: Batch, rows: int) -> list[Batch]:
    starts = range(0, len(batch[0]), rows)
    return [(batch[0][i : i + rows], batch[1][i : i + rows]) for i in starts]


def _whole_batch(model: nn.Module, batch: Batch) -> float:
    """Gradients of the whole batch in `.grad`; its loss."""
    model.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def _expect_grads(found: nn.Module, expected: nn.Module, *, rtol: float = 1e-9, hint: str) -> None:
    for (name, param), right in zip(found.named_parameters(), expected.parameters(), strict=True):
        what = f"gradient of {name}"
        if right.grad is None:
            expect_equal(param.grad, None, what, hint="a frozen parameter has none")
        else:
            expect_close(param.grad, right.grad, what, rtol=rtol, atol=1e-12, hint=hint)


def _expect_backward_each(model: WatchedModel) -> None:
    # Two are allowed: who skips the backward of a part that is all padding is right, and may
    # still hold its loss in a variable during the next forward. No case here has only two parts.
    hint = "call backward for each part: one backward at the end holds the activations of all parts"
    waiting = 1 if model.most_waiting <= 2 else model.most_waiting
    expect_equal(waiting, 1, "forward passes that waited for a backward", hint=hint)


def _number(found: object) -> object:
    """A tensor with one element as a number."""
    return found.item() if isinstance(found, Tensor) and found.numel() == 1 else found


def _verify_stream(attempt: Callable[[nn.Module, Iterator[Batch]], float]) -> None:
    batch, expected = _padded_batch(), WatchedModel()
    loss = _whole_batch(expected, batch)
    for rows in (2, 3, 1):
        model = WatchedModel()

        def one_by_one(model: WatchedModel = model, rows: int = rows) -> Iterator[Batch]:
            for number, part in enumerate(_parts(batch, rows)):
                if number > len(model.rows):
                    raise CheckFailed(
                        f"part {number} was taken after {len(model.rows)} forward passes, expected "
                        f"{number}\nhint: a list of the parts holds the whole batch; use each part "
                        "as it comes"
                    )
                yield part

        found = attempt(model, one_by_one())
        expect_equal(
            model.rows,
            [len(part[0]) for part in _parts(batch, rows)],
            "rows in each forward",
            hint="one forward for each part, and no part twice",
        )
        _expect_backward_each(model)
        hint = "every token that is no padding weighs 1 / T, T counted over all parts"
        _expect_grads(model, expected, hint=hint)
        expect_close(_number(found), loss, "loss", rtol=1e-9, hint=hint)


def _verify_batches(attempt: Callable[[Iterable[int], int], Iterable[list[int]]]) -> None:
    cases = {
        (10, 4): [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]],
        (6, 3): [[0, 1, 2], [3, 4, 5]],
        (2, 5): [[0, 1]],
        (3, 1): [[0], [1], [2]],
        (0, 3): [],
    }
    for (num_parts, size), expected in cases.items():
        for make in (iter, list):
            parts: Iterable[int] = make(range(num_parts))
            found = []
            for batch in attempt(parts, size):
                found.append(list(batch))
                if len(found) > len(expected):
                    break
            what = f"batches of {size} from {num_parts} parts ({type(parts).__name__})"
            hint = "the last batch may be shorter, no part is lost, and none comes twice"
            expect_equal(found, expected, what, hint=hint)
    taken: list[int] = []

    def watched() -> Iterator[int]:
        for part in range(9):
            taken.append(part)
            yield part

    first = next(iter(attempt(watched(), 3)))
    hint = "use yield; a data loader may be endless, and its parts large"
    expect_equal(list(first), [0, 1, 2], "first batch", hint=hint)
    expect_equal(taken, [0, 1, 2], "parts taken for the first batch", hint=hint)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Momentum, so that a scale of one step shows in the next one; no Adam, which hides scales.
    trainable = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(trainable, lr=0.5, momentum=0.9)


def _verify_scaled_step(attempt: Callable[..., float | None]) -> None:
    for microbatch_size, max_norm in ((2, 0.05), (3, 1e3)):
        model, reference = WatchedModel(), WatchedModel()
        optimizer, stepper = _sgd(model), _sgd(reference)
        scaler = WatchedScaler(init_scale=2.0**10)
        num_parts = -(-ROWS // microbatch_size)
        for step, lengths in enumerate(((5, 5, 4, 3, 0, 0, 1), (1, 5, 5, 2, 4, 4, 4))):
            batch = _padded_batch(lengths)
            _whole_batch(reference, batch)
            norm = float(nn.utils.clip_grad_norm_(reference.parameters(), max_norm))
            stepper.step()
            model.rows.clear()
            scaler.calls.clear()
            found = attempt(model, optimizer, scaler, batch, microbatch_size, max_norm)
            _expect_rows(model.rows, microbatch_size)
            _expect_backward_each(model)
            hint = "each part is scaled; unscale_, step and update come once, after the last"
            calls = {"scale": num_parts, "unscale_": 1, "step": 1, "update": 1}
            expect_equal(dict(scaler.calls), calls, "calls of the scaler", hint=hint)
            what = f"norm before clipping, step {step}"
            expect_close(_number(found), norm, what, rtol=1e-6, hint="unscaled, of the whole batch")
            _expect_params(model, reference, step)
    _verify_overflow(attempt)


def _expect_rows(rows: list[int], microbatch_size: int) -> None:
    full, left = divmod(ROWS, microbatch_size)
    expected = [microbatch_size] * full + ([left] if left else [])
    hint = "the last part holds the rows that are left"
    expect_equal(rows, expected, "rows in each forward", hint=hint)


def _expect_params(model: nn.Module, reference: nn.Module, step: int) -> None:
    hint = "clip after unscale_, clear gradients first, let the scaler step"
    for (name, param), right in zip(model.named_parameters(), reference.parameters(), strict=True):
        what = f"{name} after step {step}"
        expect_close(param, right, what, rtol=1e-6, atol=1e-9, hint=hint)


def _verify_overflow(attempt: Callable[..., float | None]) -> None:
    model = WatchedModel(torch.float32)
    with torch.no_grad():
        model.head.weight.mul_(1000)  # so that the embedding's gradients are far above 2
    start = model.head.weight.detach().clone()
    scaler = WatchedScaler(init_scale=2.0**127)
    found = attempt(model, _sgd(model), scaler, _padded_batch(), 2, 1.0)
    hint = "scaler.step leaves the step out where a gradient is not finite"
    expect_equal(torch.equal(model.head.weight, start), True, "unmoved by an overflow", hint=hint)
    expect_equal(scaler.get_scale(), 2.0**126, "scale after an overflow", hint="scaler.update()")
    expect_equal(found, None, "returned after an overflow", hint="a norm that is not finite")


def _verify_fp32_sums(attempt: Callable[[nn.Module, list[Batch]], dict[str, Tensor]]) -> None:
    model, num_parts = WatchedModel(torch.bfloat16), 64
    expected: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(VOCAB, (2, num_parts, SEQ_LEN), generator=generator)
    parts = _parts((rows[0], rows[1]), 1)
    for tokens, targets in parts:
        model.zero_grad()
        (cross_entropy(model(tokens), targets) / num_parts).backward()  # type: ignore[no-untyped-call]
        for name, param in model.named_parameters():
            if param.grad is not None:
                zero = torch.zeros_like(param, dtype=torch.float32)
                expected[name] = expected.get(name, zero) + param.grad.float()
    model.zero_grad()
    model.rows.clear()
    most = watch_grads(model)
    found = attempt(model, parts)
    expect_equal(model.rows, [1] * num_parts, "rows in each forward", hint="one forward a part")
    _expect_backward_each(model)
    expect_equal(sorted(found), sorted(expected), "names", hint="those of trainable parameters")
    for name, right in expected.items():
        hint = (
            "the mean over the parts (divide by their number), in FP32 from the first addition on"
        )
        expect_close(found[name], right, f"sum of {name}", rtol=1e-5, atol=1e-7, hint=hint)
    hint = "drop a gradient in the hook that adds it: param.grad = None"
    expect_equal(max(most), 1, "BF16 gradients at one time", hint=hint)
    left = [name for name, param in model.named_parameters() if param.grad is not None]
    expect_equal(left, [], "BF16 gradients left at the end", hint=hint)
    _whole_batch(model, parts[0])
    kept = sorted(name for name, param in model.named_parameters() if param.grad is not None)
    expect_equal(kept, sorted(expected), "gradients of a later backward", hint="remove the hooks")


def _verify_plan(attempt: Callable[..., tuple[int, int]]) -> None:
    # batch_tokens, seq_len, memory, model, grads, one sequence
    right = {
        (64, 8, 100, 20, 10, 10): ((8, 1), "the whole batch fits, as it needs no gradients"),
        (64, 8, 99, 20, 45, 10): ((2, 4), "one byte less, and the gradients count too"),
        (96, 8, 100, 20, 10, 10): ((6, 2), "seven sequences fit, but 12 divide by 6"),
        (56, 8, 60, 20, 10, 10): ((1, 7), "three sequences fit, but 7 is a prime"),
        (8, 8, 35, 20, 10, 10): ((1, 1), "one sequence is a whole batch"),
        (64, 8, 40, 20, 10, 10): ((1, 8), "exactly full is full enough"),
    }
    names = "batch_tokens, seq_len, memory, model, grads, sequence"
    for arguments, (expected, hint) in right.items():
        found = attempt(*arguments)
        found = tuple(found) if isinstance(found, list) else found
        expect_equal(found, expected, f"plan_step{arguments} ({names})", hint=hint)
    impossible = {
        (64, 8, 39, 20, 10, 10): "one sequence and the gradients do not fit",
        (60, 8, 100, 20, 10, 10): "60 tokens are no whole number of sequences",
        (0, 8, 100, 20, 10, 10): "there are no tokens",
    }
    for arguments, why in impossible.items():
        try:
            found = attempt(*arguments)
        except ValueError:
            continue
        raise CheckFailed(
            f"plan_step{arguments}: found {found}, expected a ValueError\nhint: {why}"
        )


STREAM = Exercise(
    "accumulate_stream",
    "gradient of the mean over all tokens of parts that come one by one",
    _verify_stream,
    hints=("a forward and a backward for each part as it comes, one division at the end",),
)
BATCHES = Exercise(
    "batches_of",
    "lists of parts, the last one perhaps shorter",
    _verify_batches,
    hints=("a generator: yield lists, the last one perhaps shorter",),
)
SCALED_STEP = Exercise(
    "scaled_step",
    "accumulate, unscale, clip, step, update: one step with a gradient scaler",
    _verify_scaled_step,
    hints=("scale each part; then, once: unscale_, clip, step, update",),
)
FP32_SUMS = Exercise(
    "fp32_sums",
    "FP32 sums of a BF16 model's gradients, one BF16 gradient at a time",
    _verify_fp32_sums,
    hints=("skip frozen parameters; a hook gets the parameter, whose .grad is ready",),
)
PLAN = Exercise(
    "plan_step",
    "microbatch and accumulation steps for a batch and a memory",
    _verify_plan,
    hints=("count the gradients for all but the whole batch",),
)
