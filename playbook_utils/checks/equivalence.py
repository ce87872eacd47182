"""Does a technique train like one process does? Loss, gradients, norm and parameters, each step.

    def train(config, batches):                            # runs on each rank
        rank, world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)                            # ranks start differently, on purpose
        model = NaiveDDP(Decoder(config).double())         # ... and this must repair it
        return record_training(model, [shard_batch(b, rank, world_size) for b in batches])

    torch.manual_seed(0)                                   # rank 0's start
    reference = record_training(Decoder(config).double(), batches)
    assert_same_training(reference, launch(train, config, batches, world_size=4))

A difference is relative to size: the largest |found - expected| in a tensor over the largest
|expected| in it, or over a thousandth of that of all tensors of its kind where this is more (a
gradient that is zero but for rounding has no size of its own). Left out: speed and memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from playbook_utils.checks.differences import Named, Quantity, compare, fail, some
from playbook_utils.checks.recording import Groups, StepRecord, TrainingRecord

__all__ = ["EquivalenceReport", "assert_same_training"]

_TOLERANCES = {
    torch.float64: 1e-10,  # sums in another order differ by some 1e-15, and this grows
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,  # one rounding is 4e-3
}


@dataclass(frozen=True, repr=False)
class EquivalenceReport:
    """What was compared and how well it agrees; its text is the same on every machine."""

    num_steps: int
    num_ranks: int
    num_params: int
    """Parameter tensors, a tied one counted once."""
    dtype: str
    tolerance: float
    largest: dict[str, float]
    """Largest relative difference found: "loss", "gradient", "gradient norm", "parameter"."""
    tied: Groups
    frozen: tuple[str, ...]

    def __str__(self) -> str:
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        lines = [f"trains like the reference: {steps}, {ranks}, {self.dtype}"]
        counted = {"gradient": f"{self.num_params - len(self.frozen)} gradients",
                   "parameter": f"{self.num_params} parameters"}  # fmt: skip
        for quantity in self.largest:
            label = counted.get(quantity, quantity)
            lines.append(f"  {label:<15} relative difference < {self.tolerance:.0e}")
        lines += [f"  {'tied':<15} {' = '.join(group)}" for group in self.tied]
        lines += [f"  {'frozen':<15} {name}" for name in self.frozen]
        return "\n".join(lines)

    __repr__ = __str__


def assert_same_training(
    reference: TrainingRecord,
    records: TrainingRecord | Sequence[TrainingRecord],
    *,
    loss: str = "mean",
    tolerance: float | None = None,
) -> EquivalenceReport:
    """Hold the ranks' `records` against the one-process `reference`, in the order of training.

    Args:
        reference: trained on the whole batches, from the same start.
        records: one for each rank, in rank order, as `launch` returns them.
        loss: "mean" where each rank has a slice of the batch: the mean of the ranks' losses,
            weighted by their tokens, is the reference's. "same" where each rank has it all.
        tolerance: largest relative difference allowed. By default by the reference's lowest
            dtype: 1e-10 in float64, 1e-4 in float32, 5e-2 in bfloat16.

    Raises:
        NotEquivalent: at the first difference, with step, name, rank, size and a hint.
        ValueError: nothing to compare, an unknown `loss`, or the reference did not train.
    """
    ranks = [records] if isinstance(records, TrainingRecord) else list(records)
    if loss not in ("mean", "same"):
        raise ValueError(f'loss is {loss!r}; use "mean" (slices) or "same" (whole batches)')
    if not ranks or not reference.steps:
        raise ValueError(f"found {len(ranks)} ranks and {len(reference.steps)} steps; need one")
    dtype = min((p.dtype for p in reference.initial.values()), key=lambda d: -torch.finfo(d).eps)
    allowed = _TOLERANCES.get(dtype, 5e-2) if tolerance is None else tolerance
    moved = _moved(reference)
    if not moved:
        raise ValueError(
            "no parameter of the reference moved in training, so that nothing would be proven; "
            "is the learning rate 0, or too small for the dtype?"
        )
    _check_setup(reference, ranks)
    names = _distinct(reference)
    starts = [_pick(record.initial, names) for record in (reference, *ranks)]
    compare(Quantity("initial value", -1, allowed), starts[0], starts[1:])
    largest: dict[str, float] = {}
    for step in range(len(reference.steps)):
        for quantity, worst in _check_step(reference, ranks, step, loss, allowed).items():
            largest[quantity] = max(largest.get(quantity, 0.0), worst)
    for rank, record in enumerate(ranks):
        still = [n for n in moved if torch.equal(record.initial[n], record.steps[-1].params[n])]
        if still:
            fail(f"{some(still)} did not move on rank {rank}", "left out of the optimizer?")
    return EquivalenceReport(
        len(reference.steps), len(ranks), len(names), str(dtype).removeprefix("torch."),
        allowed, largest, reference.tied, reference.frozen,
    )  # fmt: skip


def _check_setup(reference: TrainingRecord, ranks: Sequence[TrainingRecord]) -> None:
    """Names, shapes, frozen and tied parameters, number of steps."""
    for rank, record in enumerate(ranks):
        missing = [name for name in reference.initial if name not in record.initial]
        extra = [name for name in record.initial if name not in reference.initial]
        if missing or extra:
            fail(
                f"the parameters' names differ on rank {rank}: missing {some(missing)}, "
                f"not in the reference {some(extra)}",
                "a wrapper's prefix? Pass rename= to record_training",
            )
        for name, expected in reference.initial.items():
            found = tuple(record.initial[name].shape)
            if found != tuple(expected.shape):
                fail(
                    f"{name} has shape {found} on rank {rank}, expected {tuple(expected.shape)}",
                    "a shard? Pass gather= to record_training",
                )
        if set(record.frozen) != set(reference.frozen):
            differing = sorted(set(record.frozen) ^ set(reference.frozen))
            fail(
                f"{some(differing)}: frozen on rank {rank} or in the reference, not in both",
                "does the wrapper keep requires_grad?",
            )
        _check_tied(record.tied, reference.tied, f"on rank {rank}, before the first step")
        if len(record.steps) != len(reference.steps):
            fail(f"rank {rank} made {len(record.steps)} steps, expected {len(reference.steps)}")


def _check_step(
    reference: TrainingRecord, ranks: Sequence[TrainingRecord], step: int, loss: str, allowed: float
) -> dict[str, float]:
    """Compare one step of all ranks; the largest relative difference of each quantity."""
    expected, found = reference.steps[step], [record.steps[step] for record in ranks]
    _check_tokens(step, expected, found, loss)
    for rank, record in enumerate(found):
        _check_frozen_and_tied(reference, expected, record, rank, step)
    before = reference.steps[step - 1] if step else None
    names = _distinct(reference)
    trainable = [name for name in names if name not in reference.frozen]
    mean = loss == "mean" and len(ranks) > 1
    losses = [_mean_loss(found)] if loss == "mean" else [record.loss for record in found]
    records = (expected, *found)
    grads: list[Named] = [_grads(record, trainable, reference) for record in records]
    old_grads = _grads(before, trainable, reference) if before else None
    compared: dict[str, tuple[list[Named], Named | None]] = {
        "loss": (_scalars("loss", [expected.loss, *losses]), None),
        "gradient": (grads, old_grads),
        "gradient norm": (_scalars("gradient norm", [r.grad_norm for r in records]), None),
        "parameter": (
            [_pick(record.params, names) for record in records],
            before.params if before else reference.initial,
        ),
    }
    return {
        name: compare(Quantity(name, step, allowed, mean and name == "loss"), first, others, old)
        for name, ((first, *others), old) in compared.items()
    }


def _scalars(name: str, values: Sequence[float]) -> list[Named]:
    """In float64: the default dtype would round both sides before they are compared."""
    return [{name: torch.tensor(value, dtype=torch.float64)} for value in values]


def _grads(
    record: StepRecord, names: Sequence[str], reference: TrainingRecord
) -> dict[str, Tensor]:
    """Gradients of the trainable parameters; one that is absent counts as zero."""
    return {
        name: torch.zeros_like(reference.initial[name]) if grad is None else grad
        for name, grad in ((name, record.grads[name]) for name in names)
    }


def _check_tokens(step: int, expected: StepRecord, found: Sequence[StepRecord], loss: str) -> None:
    """Did the ranks together (or each, for "same") get the batch that the reference got?"""
    counts = [record.num_tokens for record in found]
    totals = {sum(counts)} if loss == "mean" else set(counts)
    if expected.num_tokens and sum(counts) and totals != {expected.num_tokens}:
        fail(
            f"the ranks were given {counts} tokens at step {step}, the reference "
            f"{expected.num_tokens}",
            'whole batches on each rank? Slice them with shard_batch, or pass loss="same"'
            if loss == "mean"
            else 'slices on each rank? Pass loss="mean"',
        )


def _mean_loss(found: Sequence[StepRecord]) -> float:
    """Mean over ranks, weighted by tokens; a rank without rows has NaN as its mean, and no say."""
    total = sum(record.num_tokens for record in found)
    if not total:
        return math.fsum(record.loss for record in found) / len(found)
    return math.fsum(r.num_tokens * r.loss for r in found if r.num_tokens) / total


def _check_frozen_and_tied(
    reference: TrainingRecord, expected: StepRecord, found: StepRecord, rank: int, step: int
) -> None:
    at = f"on rank {rank}, at step {step}"
    for name in reference.frozen:
        if found.grads[name] is not None:
            fail(f"frozen parameter {name} got a gradient {at}", "reduce only what requires_grad")
        if not torch.equal(found.params[name], reference.initial[name]):
            fail(f"frozen parameter {name} moved {at}", "weight decay, or in a flat buffer?")
    for name, grad in expected.grads.items():
        if grad is not None and found.grads[name] is None:
            fail(f"{name} has no gradient {at}", "not used in forward, or dropped by a hook?")
    _check_tied(found.tied, expected.tied, at)


def _check_tied(found: Groups, expected: Groups, at: str) -> None:
    if {frozenset(group) for group in found} != {frozenset(group) for group in expected}:
        words = (", ".join(map(" = ".join, groups)) or "none" for groups in (found, expected))
        fail(
            "tied parameters differ {}: found {}, expected {}".format(at, *words),
            "did the technique copy or shard a parameter that is used twice?",
        )


def _moved(record: TrainingRecord) -> list[str]:
    """Names of the parameters that moved by more than rounding."""
    last = record.steps[-1].params
    return [
        name
        for name, start in record.initial.items()
        if not torch.allclose(start, last[name], rtol=4 * torch.finfo(start.dtype).eps, atol=0.0)
    ]


def _distinct(record: TrainingRecord) -> list[str]:
    """Names of the parameters, of tied ones only the first."""
    again = {name for group in record.tied for name in group[1:]}
    return [name for name in record.initial if name not in again]


def _pick(tensors: Named, names: Sequence[str]) -> Named:
    return {name: tensors[name] for name in names}
