"""The largest difference between tensors by name on several ranks, and what it looks like.

    largest = compare(Quantity("gradient", step=0, allowed=1e-10), expected, found_by_rank)

returns the largest relative difference or raises with name, rank, size, and a guess at the cause:
a factor of the world size, a missing average, stale or swapped values. What "relative" means is
said in `checks.equivalence`, which decides what is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from playbook_utils.errors import NotEquivalent

__all__ = ["Named", "Quantity", "compare", "fail", "some"]

Named = Mapping[str, Tensor]
"""Tensors by parameter name."""


@dataclass(frozen=True)
class Quantity:
    """What is compared: "initial value", "loss", "gradient", "gradient norm", "parameter"."""

    name: str
    step: int
    """-1 for before the first step."""
    allowed: float
    """Largest relative difference."""
    mean: bool = False
    """Whether `found` is one mean over the ranks, so that no rank is to be named."""

    @property
    def when(self) -> str:
        """For messages: "at step 3"."""
        return f"at step {self.step}" if self.step >= 0 else "before the first step"


def fail(message: str, hint: str = "") -> NoReturn:
    """Raise `NotEquivalent`, the hint on a line of its own."""
    raise NotEquivalent(message + (f"\n  hint: {hint}" if hint else ""))


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def compare(
    quantity: Quantity, expected: Named, found: Sequence[Named], before: Named | None = None
) -> float:
    """The largest relative difference over all names and ranks.

    Args:
        quantity: what it is, and how large a difference may be.
        expected: the reference's tensors.
        found: each rank's tensors, by the same names.
        before: the reference's tensors one step earlier, by which stale values are recognised.

    Raises:
        NotEquivalent: a difference is larger than allowed, or not a number.
    """
    scales = _scales(expected)
    differences = [
        (_relative(tensors[name], value, scales[name]), name, rank)
        for rank, tensors in enumerate(found)
        for name, value in expected.items()
    ]
    relative, name, rank = max(differences, key=lambda difference: difference[0])
    if relative <= quantity.allowed:
        return relative
    wrong = [(name, rank) for relative, name, rank in differences if relative > quantity.allowed]
    value, reference = found[rank][name].double(), expected[name].double()
    at = int((value - reference).abs().nan_to_num(math.inf).argmax())
    names, ranks = {name for name, _ in wrong}, sorted({rank for _, rank in wrong})
    what, on_rank, count = quantity.name, f" on rank {rank}", ""
    if quantity.mean:
        what, on_rank = f"the ranks' mean {what}", ""
    if name != quantity.name:  # the loss and the norm have no parameter's name
        all_ranks = len(ranks) == len(found) > 1
        where = "on all ranks" if all_ranks else f"on rank {some([*map(str, ranks)])}"
        what = f"{what} of {name}"
        count = f"\n  wrong: {len(names)} of {len(expected)} {quantity.name}s, {where}"
    fail(
        f"{what} differs{on_rank}, {quantity.when}\n"
        f"  found {value.flatten()[at]:.6g}, expected {reference.flatten()[at]:.6g}, where it "
        f"differs most\n  largest relative difference {relative:.2g}, "
        f"allowed {quantity.allowed:.0e}{count}",
        _hint(quantity, name, rank, expected, found, before, ranks),
    )


def _scales(expected: Named) -> dict[str, float]:
    sizes = {name: _size(value) for name, value in expected.items()}
    floor = 1e-3 * max(sizes.values())
    return {name: max(size, floor) or 1.0 for name, size in sizes.items()}


def _size(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _relative(found: Tensor, expected: Tensor, scale: float) -> float:
    largest = _size(found.double() - expected.double()) / scale
    return math.inf if math.isnan(largest) else largest


def _hint(
    quantity: Quantity,
    name: str,
    rank: int,
    expected: Named,
    found: Sequence[Named],
    before: Named | None,
    ranks: list[int],
) -> str:
    world_size = len(found)
    value, reference = found[rank][name].double(), expected[name].double()
    everyone = torch.stack([tensors[name].double() for tensors in found])
    allowed = max(quantity.allowed, 1e-6) * _scales(expected)[name]

    def same(one: Tensor, other: Tensor) -> bool:
        return one.shape == other.shape and _size(one - other) <= allowed

    if not bool(value.isfinite().all()):
        return "not a number: a division by zero, or memory that was never written?"
    if quantity.step < 0:
        return "did all ranks start equal? Broadcast rank 0's parameters"
    if before is not None and same(value, before[name].double()):
        what = "it did not move" if quantity.name == "parameter" else "these are the last step's"
        return f"{what}: left out of the optimizer, or of the communication?"
    if quantity.name == "parameter":
        only = f"only on rank {some([*map(str, ranks)])}; " if len(ranks) < world_size else ""
        swapped = _name_of(value, name, expected, same)
        return swapped or f"{only}the gradients agree, so look at clipping and the optimizer"
    if _size(value) == 0:
        return "all zero: cleared after backward, or a buffer that was never filled?"
    if before is not None and same(value, reference + before[name].double()):
        return "the last step's is still in it: cleared by zero_grad()?"
    apart = not all(same(tensor, value) for tensor in everyone)
    if apart and same(everyone.mean(0), reference):
        return "each rank has that of its own slice, and their mean is right: never averaged?"
    if apart and same(everyone.sum(0), reference):
        return "each rank has a part, and their sum is right: never summed?"
    swapped = _name_of(value, name, expected, same)
    only = f"only rank {some([*map(str, ranks)])} differs: did it skip a call?"
    factor = _factor(value, reference, world_size, same)
    return swapped or factor or (only if len(ranks) < world_size else "")


def _name_of(
    value: Tensor, name: str, expected: Named, same: Callable[[Tensor, Tensor], bool]
) -> str:
    for other, tensor in expected.items():
        if other != name and _size(tensor) > 0 and same(value, tensor.double()):
            return f"these are the values of {other}: swapped, or a wrong offset in a buffer?"
    return ""


def _factor(
    value: Tensor, reference: Tensor, world_size: int, same: Callable[[Tensor, Tensor], bool]
) -> str:
    """Words for value = factor * reference, where one factor fits."""
    factor = float((value * reference).sum() / reference.square().sum().clamp(min=1e-300))
    if not same(value / (factor or 1.0), reference):
        return ""
    if math.isclose(factor, -1, rel_tol=1e-3):
        return "the sign is flipped"
    if world_size > 1 and math.isclose(factor, world_size, rel_tol=1e-3):
        return f"{world_size} times too large with {world_size} ranks: summed, not averaged?"
    if world_size > 1 and math.isclose(factor, 1 / world_size, rel_tol=1e-3):
        return f"1/{world_size} of it with {world_size} ranks: averaged twice, or never summed?"
    return f"{factor:.4g} times what was expected, throughout"
