"""Exercises of lesson 03, gradient accumulation: what is asked, and how an answer is checked.

    check(ACCUMULATE, accumulate)

Every check holds gradients or parameters against those of the whole batch, with padding, uneven
parts and frozen parameters, and watches how the answer got there: rows in each forward, parts taken
before they are needed, activations that wait for a backward, calls of the scaler, gradients that
exist at one time. What is wrong in a likely way is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from playbook_utils.checks import Exercise, expect_close, expect_equal
from playbook_utils.data import Batch
from playbook_utils.errors import CheckFailed
from playbook_utils.exercises.accumulation_watch import (
    ROWS,
    SEQ_LEN,
    VOCAB,
    PartGradients,
    WatchedModel,
    WatchedScaler,
    cut,
    flat_grads,
    padded_batch,
    told,
    watch_grads,
)
from playbook_utils.model import cross_entropy

__all__ = [
    "ACCUMULATE", "BATCHES", "FP32_SUMS", "PLAN", "SCALED_STEP", "STEP", "STREAM", "TOKENS",
]  # fmt: skip

_FULL = (SEQ_LEN,) * ROWS
_UNEVEN = (5, 5, 4, 3, 2, 1, 1)
_WITH_EMPTY = (5, 5, 4, 3, 0, 0, 1)
"""Rows 4 and 5 are all padding: in parts of two rows, a part without a token."""
_NO_MEAN = "a part that is all padding has no mean, 0/0 = nan: take its sum, which is 0"
_FROZEN = "a frozen parameter has no gradient: its .grad is None"
_CAUSES = {
    "NoneType": _FROZEN,
    "has no len()": "the parts come one by one: count their tokens as they pass",
    "doesn't require gradient": "only trainable parameters take a hook: skip the frozen ones",
    "must match the size": "a name in a hook is looked up when the hook runs, after the loop: "
    "bind it, as in def add(param, total=sums[name])",
    "not broadcastable": "a name in a hook is looked up when the hook runs, after the loop: "
    "bind it, as in def add(param, total=sums[name])",
}
"""What stands in an error, and why it was raised."""


def _run(attempt: Callable[..., Any], *arguments: Any, causes: Mapping[str, str] = _CAUSES) -> Any:
    """What the answer returns; an error whose cause is known is explained."""
    try:
        return attempt(*arguments)
    except (AttributeError, RuntimeError, TypeError) as error:
        known = (why for fragment, why in causes.items() if fragment in str(error))
        if (why := next(known, None)) is None:
            raise
        raise CheckFailed(f"{type(error).__name__}: {error}\nhint: {why}") from error


def _whole_batch(model: nn.Module, batch: Batch) -> float:
    """Gradients of the whole batch in `.grad`; its loss."""
    model.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def _expect_grads(
    found: nn.Module, expected: nn.Module, likely: Mapping[str, Any], hint: str
) -> None:
    grads = flat_grads(found)
    hint = _NO_MEAN if bool(grads.isnan().any()) else told(grads, likely, hint)
    for (name, param), right in zip(found.named_parameters(), expected.parameters(), strict=True):
        what = f"gradient of {name}"
        if right.grad is None:
            expect_equal(param.grad, None, what, hint="a frozen parameter has none")
        elif param.grad is None:
            raise CheckFailed(
                f"{what}: found None, expected a tensor\n"
                "hint: no backward reached it, or it was cleared afterwards"
            )
        else:
            expect_close(param.grad, right.grad, what, rtol=1e-9, atol=1e-12, hint=hint)


def _expect_backward_each(model: WatchedModel) -> None:
    # Two are allowed: who skips the backward of a part that is all padding is right, and may
    # still hold its loss in a variable during the next forward. No case here has only two parts.
    hint = "call backward for each part: one backward at the end holds the activations of all parts"
    waiting = 1 if model.most_waiting <= 2 else model.most_waiting
    expect_equal(waiting, 1, "forward passes that waited for a backward", hint=hint)


def _expect_loss(found: object, expected: float, likely: Mapping[str, float], hint: str) -> None:
    if isinstance(found, Tensor) and found.requires_grad:
        raise CheckFailed(
            "loss: found a tensor that requires grad, expected one that does not\n"
            "hint: it holds the graph of the step: return loss.detach(), or a float"
        )
    number = _number(found)
    if isinstance(number, float):
        hint = _NO_MEAN if math.isnan(number) else told(number, likely, hint)
    expect_close(number, expected, "loss", rtol=1e-9, hint=hint)


def _number(found: object) -> object:
    """A tensor with one element as a number."""
    return found.item() if isinstance(found, Tensor) and found.numel() == 1 else found


def _expect_rows(found: list[int], parts: list[Batch], hint: str) -> None:
    """A part without a token may be passed by."""
    with_tokens = [len(tokens) for tokens, targets in parts if bool((targets != -100).any())]
    if found != with_tokens:
        expect_equal(found, [len(tokens) for tokens, _ in parts], "rows in each forward", hint=hint)


def _verify_parts(attempt: Callable[[nn.Module, Any], Any], batch: Batch, rows: int) -> None:
    """Loss and gradients of the parts are those of the whole batch."""
    expected, model, parts = WatchedModel(), WatchedModel(), cut(batch, rows)
    loss, num_parts = _whole_batch(expected, batch), len(parts)
    found = _run(attempt, model, parts)
    _expect_rows(model.rows, parts, "one forward for each part, and no part twice")
    _expect_backward_each(model)
    gradients = PartGradients(parts)
    likely = gradients.likely() if all(gradients.counts) else {}
    hint = "every token that is no padding weighs 1 / T, T counted over all parts"
    _expect_grads(model, expected, likely, hint)
    sums = {
        "the losses of the parts were added up and not divided": num_parts * loss,
        "the loss is divided twice": loss / num_parts,
        f"this is a sum over tokens: divide by T = {sum(gradients.counts)}": loss
        * sum(gradients.counts),
    }
    _expect_loss(found, loss, sums, "the loss of the whole batch, with the weights of its gradient")


def _verify_accumulate(attempt: Callable[[nn.Module, list[Batch]], Any]) -> None:
    tokens, targets = padded_batch(_FULL)
    for num_rows, rows in ((6, 2), (6, 1), (7, 1)):
        _verify_parts(attempt, (tokens[:num_rows], targets[:num_rows]), rows)


def _verify_tokens(attempt: Callable[[nn.Module, list[Batch]], Any]) -> None:
    for lengths in (_UNEVEN, _WITH_EMPTY):
        for rows in (2, 3, 1):
            _verify_parts(attempt, padded_batch(lengths), rows)


def _verify_stream(attempt: Callable[[nn.Module, Iterator[Batch]], float]) -> None:
    def as_they_come(model: nn.Module, parts: list[Batch]) -> float:
        assert isinstance(model, WatchedModel)
        rows = model.rows

        def one_by_one() -> Iterator[Batch]:
            due = 0
            for number, part in enumerate(parts, start=1):
                if len(rows) < due:
                    raise CheckFailed(
                        f"part {number} was taken after {len(rows)} forward passes, expected "
                        f"{number - 1}\nhint: a list of the parts holds the whole batch; use each "
                        "part as it comes"
                    )
                due += bool((part[1] != -100).any())
                yield part

        return attempt(model, one_by_one())

    _verify_tokens(as_they_come)


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


class _Reference:
    """Steps on whole batches, clipped once."""

    def __init__(self, max_norm: float) -> None:
        self.model, self.max_norm, self.num_steps = WatchedModel(), max_norm, 0
        self.optimizer = _sgd(self.model)

    def step(self, batch: Batch) -> tuple[float, float]:
        """The loss, and the norm before clipping."""
        loss = _whole_batch(self.model, batch)
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm))
        self.optimizer.step()
        self.num_steps += 1
        return loss, norm

    def expect_norm(self, found: object, norm: float, likely: Mapping[str, float]) -> None:
        """Of the step just taken."""
        which = "first" if self.num_steps == 1 else "second"
        hint = "the norm of the whole batch's gradient: clip once, after the last part"
        if self.num_steps == 2:
            hint = "the first step was right: clear its gradients before the first part of this one"
        number = _number(found)
        if number is None or (isinstance(number, float) and not math.isfinite(number)):
            hint = _NO_MEAN
        elif isinstance(number, float):
            after = {
                "this is the norm after clipping": min(norm, self.max_norm),
                "there was no gradient: clear before the first part, clip after the last": 0.0,
            }
            hint = told(number, {**likely, **after}, hint, rtol=1e-4)
        expect_close(number, norm, f"norm, {which} step", rtol=1e-6, hint=hint)

    def expect_params(self, model: nn.Module, hint: str) -> None:
        """Equal to those of the model that took these steps."""
        right = dict(self.model.named_parameters())
        for name, param in model.named_parameters():
            what = f"{name} after step {self.num_steps}"
            expect_close(param, right[name], what, rtol=1e-6, atol=1e-9, hint=hint)


def _verify_step(attempt: Callable[..., tuple[Any, Any]]) -> None:
    for rows, max_norm in ((2, 0.05), (3, 1e3)):
        model, reference = WatchedModel(), _Reference(max_norm)
        optimizer, counts = _sgd(model), {"optimizer": 0}
        optimizer.register_step_post_hook(
            lambda *_, counts=counts: counts.update(optimizer=counts["optimizer"] + 1)
        )
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        slower = torch.optim.lr_scheduler.ExponentialLR(reference.optimizer, 0.5)
        for lengths in (_WITH_EMPTY, (1, 5, 5, 2, 4, 4, 4)):
            batch = padded_batch(lengths)
            loss, norm = reference.step(batch)
            slower.step()
            counts["optimizer"], passed = 0, decay.last_epoch
            model.rows.clear()
            found = _run(attempt, model, optimizer, cut(batch, rows), max_norm, decay)
            once = "the optimizer and the schedule step once a batch, after its last part"
            expect_equal(counts["optimizer"], 1, "steps of the optimizer", hint=once)
            expect_equal(decay.last_epoch - passed, 1, "steps of the schedule", hint=once)
            hint = "return two things: the loss, and the norm before clipping"
            returned = len(found) if isinstance(found, (tuple, list)) else 1
            expect_equal(returned, 2, "values returned", hint=hint)
            reference.expect_norm(found[1], norm, {"this is the loss: return loss, norm": loss})
            _expect_loss(found[0], loss, {}, "as accumulate_tokens returned it")
            reference.expect_params(
                model, "the norm is right and the step is not: clip once, after the last part"
            )


def _verify_scaled_step(attempt: Callable[..., float | None]) -> None:
    for rows, max_norm in ((2, 0.05), (3, 1e3)):
        model, reference = WatchedModel(), _Reference(max_norm)
        optimizer, scaler = _sgd(model), WatchedScaler(init_scale=2.0**10)
        for lengths in (_UNEVEN, _WITH_EMPTY, (1, 5, 5, 2, 4, 4, 4)):
            batch = padded_batch(lengths)
            parts = cut(batch, rows)
            _, norm = reference.step(batch)
            model.rows.clear()
            scaler.calls.clear()
            found = _run(attempt, model, optimizer, scaler, batch, rows, max_norm)
            _expect_rows(model.rows, parts, "the last part holds the rows that are left")
            _expect_backward_each(model)
            hint = "each part is scaled; unscale_, step and update come once, after the last"
            calls = {"scale": len(model.rows), "unscale_": 1, "step": 1, "update": 1}
            expect_equal(dict(scaler.calls), calls, "calls of the scaler", hint=hint)
            likely = {
                "the gradient is still scaled, by 1024: unscale_ before clipping": 1024 * norm
            }
            if lengths == _UNEVEN:
                gradients = PartGradients(parts).likely()
                likely |= {why: float(wrong.norm()) for why, wrong in gradients.items()}
            reference.expect_norm(found, norm, likely)
            hint = "the norm is right and the step is not: clip in place, and let the scaler step"
            reference.expect_params(model, hint)
    _verify_overflow(attempt)


def _verify_overflow(attempt: Callable[..., float | None]) -> None:
    model = WatchedModel(torch.float32)
    with torch.no_grad():
        model.head.weight.mul_(1000)  # so that the embedding's gradients are far above 2
    start = model.head.weight.detach().clone()
    scaler = WatchedScaler(init_scale=2.0**127)
    found = attempt(model, _sgd(model), scaler, padded_batch(_WITH_EMPTY), 2, 1.0)
    hint = "scaler.step leaves the step out where a gradient is not finite"
    expect_equal(torch.equal(model.head.weight, start), True, "unmoved by an overflow", hint=hint)
    expect_equal(scaler.get_scale(), 2.0**126, "scale after an overflow", hint="scaler.update()")
    expect_equal(
        found,
        None,
        "returned after an overflow",
        hint="the norm was not finite, so the step was skipped: say None",
    )


def _verify_fp32_sums(attempt: Callable[[nn.Module, list[Batch]], dict[str, Tensor]]) -> None:
    model, num_parts = WatchedModel(torch.bfloat16), 64
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(VOCAB, (2, num_parts, SEQ_LEN), generator=generator)
    parts = cut((rows[0], rows[1]), 1)
    expected, likely = _bf16_sums(model, parts)
    model.rows.clear()
    most = watch_grads(model)
    hooked = "`register_hook` passes a gradient; the one named above passes the parameter"
    found = _run(attempt, model, parts, causes={**_CAUSES, "NoneType": hooked})
    expect_equal(model.rows, [1] * num_parts, "rows in each forward", hint="one forward a part")
    _expect_backward_each(model)
    keys = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
    hint = "a dictionary {name: sum}, with the names of the trainable parameters"
    expect_equal(keys, sorted(expected), "names", hint=hint)
    for name, right in expected.items():
        wrong = {why: sums[name] for why, sums in likely.items()}
        hint = "the mean over the parts, in FP32 from the first addition on"
        if isinstance(found[name], Tensor):
            hint = told(found[name].detach(), wrong, hint, rtol=1e-3)
        expect_close(found[name], right, f"sum of {name}", rtol=1e-5, atol=1e-7, hint=hint)
    hint = "drop a gradient in the hook that adds it: param.grad = None"
    expect_equal(max(most), 1, "BF16 gradients at one time", hint=hint)
    left = [name for name, param in model.named_parameters() if param.grad is not None]
    expect_equal(left, [], "BF16 gradients left at the end", hint=hint)
    _whole_batch(model, parts[0])
    kept = sorted(name for name, param in model.named_parameters() if param.grad is not None)
    hint = "your hooks still take them: remove the hooks at the end"
    expect_equal(kept, sorted(expected), "gradients of a later backward", hint=hint)


def _bf16_sums(
    model: nn.Module, parts: list[Batch]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The mean of the parts' BF16 gradients by name, and {hint: what a likely mistake makes}."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    right = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in trainable.items()}
    rounded = {n: torch.zeros_like(p) for n, p in trainable.items()}
    for tokens, targets in parts:
        model.zero_grad()
        (cross_entropy(model(tokens), targets) / len(parts)).backward()  # type: ignore[no-untyped-call]
        last = {n: p.grad.float() for n, p in trainable.items() if p.grad is not None}
        for name, grad in last.items():
            right[name] += grad
            rounded[name] += grad
    model.zero_grad()
    likely = {
        f"this is the sum over {len(parts)} parts, and the mean is asked for: divide by their "
        "number": {name: len(parts) * total for name, total in right.items()},
        "only the last part's gradient is there: add it to the sum, do not replace it": last,
        "rounded to BF16 each time: the sum must be FP32 from the first addition on": rounded,
    }
    return right, likely


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


ACCUMULATE = Exercise(
    "accumulate",
    "forward and backward for each part, so that the gradients add up to the batch's",
    _verify_accumulate,
    hints=("for each part: the loss over the number of parts, and its backward",),
)
TOKENS = Exercise(
    "accumulate_tokens",
    "gradient of the mean over all tokens of all parts",
    _verify_tokens,
    hints=('reduction="sum" gives a part\'s sum; T is counted before the first backward',),
)
STEP = Exercise(
    "train_step",
    "accumulate, clip, step: what happens once happens after the last part",
    _verify_step,
    hints=("clear, accumulate_tokens, clip_grad_norm_, optimizer.step, scheduler.step",),
)
STREAM = Exercise(
    "accumulate_stream",
    "gradient of the mean over all tokens of parts that come one by one",
    _verify_stream,
    hints=(
        "a forward and a backward for each part as it comes; after the last, one division",
        _FROZEN,
    ),
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
