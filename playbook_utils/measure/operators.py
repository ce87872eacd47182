"""What operators move: bytes read, bytes written and numbers handled, one row an operator.

    with record_operators() as log:
        loss = model(x).sum()
        loss.backward()
    log.moved_bytes, len(log.rows)
    log.rows[0].op, log.rows[0].read_bytes, log.rows[0].written_bytes, log.rows[0].numbers

The count is of what an operator must move if it were one kernel with nothing in a cache:

- It reads each element that it is given once: a tensor given twice once, an expanded one without
  its repetitions, a slice without what lies between. It writes each element of its results once,
  those that it keeps for backward (statistics, masks) and those of `out=` included.
- In place it reads and writes; but `copy_`, `zero_`, `fill_` and random numbers only write.
- What moves nothing is no row: views, also where a copy turned out to be needless, `empty`.
- What picks or places by index (`embedding`, `gather`, `index_add_`, ...) touches as many elements
  of the indexed tensor as it picks or places; a mask touches all.

Backward, optimizers and what a checkpoint computes again run as operators and are counted so.
A DTensor counts as this rank's part. `numbers` are the elements of the largest argument or result,
a list of tensors taken together. Left out: what happens inside an operator (a fused one shows its
inputs and outputs), Triton kernels (`kernels.triton.programs`), sparse, fake and meta tensors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from playbook_utils.measure.private import TorchDispatchMode, storage_id, tree_leaves

__all__ = ["OperatorLog", "OperatorRow", "OperatorWatch", "record_operators"]

# Of their first argument they take the shape, not the values; so do new_zeros, ones_like, ...
_ONLY_WRITE = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
    "_foreach_copy_", "_foreach_zero_", "index_copy_", "scatter_",
}  # fmt: skip
# Of their first argument they touch at most as many elements as the largest of the others has.
_BY_INDEX = {
    "embedding", "gather", "index", "index_add_", "index_copy_", "index_select",
    "nll_loss_forward", "scatter_", "scatter_add_", "take",
}  # fmt: skip


@dataclass(frozen=True)
class OperatorRow:
    """One operator that ran."""

    op: str
    """Its name in aten: "mul", "add_" (in place), "_softmax"; others with theirs, "c10d::send"."""
    read_bytes: int
    written_bytes: int
    numbers: int

    @property
    def moved_bytes(self) -> int:
        """Read and written."""
        return self.read_bytes + self.written_bytes


@dataclass
class OperatorLog:
    """All operators that ran inside the `with` and moved something, in order."""

    rows: list[OperatorRow] = field(default_factory=list)

    @property
    def read_bytes(self) -> int:
        """Of all rows."""
        return sum(row.read_bytes for row in self.rows)

    @property
    def written_bytes(self) -> int:
        """Of all rows."""
        return sum(row.written_bytes for row in self.rows)

    @property
    def moved_bytes(self) -> int:
        """Read and written, of all rows."""
        return self.read_bytes + self.written_bytes


@contextmanager
def record_operators() -> Iterator[OperatorLog]:
    """Count what the operators inside the `with` move, on any device.

    Gives a log: `moved_bytes`, `read_bytes` and `written_bytes` of all, and `rows`, one per
    operator in order, each with `op`, these bytes and `numbers` (elements of its largest tensor).
    """
    log = OperatorLog()
    with _Recorder(log):
        yield log


class OperatorWatch(TorchDispatchMode):  # type: ignore[misc]
    """Sees each operator below autograd: `before` it runs, and `after`, with what it returned.

    `passed` holds the arguments by the names of the operator's schema.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import torch._dynamo on the first operator: a second in every worker.
        return False

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        # A mode is off while it handles an operator, so a DTensor must be unwrapped outside
        # it: declining sends the operator to DTensor first, whose own operators then come here.
        # Looked up, not imported: a second saved in every worker that has no DTensor.
        module = sys.modules.get("torch.distributed.tensor")
        if module is not None and any(issubclass(kind, module.DTensor) for kind in types):
            return NotImplemented
        passed = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        passed.update(kwargs or {})
        self.before(func, passed)
        out = func(*args, **(kwargs or {}))
        self.after(func, passed, out)
        return out

    def before(self, op: Any, passed: dict[str, Any]) -> None:
        """Nothing, unless a subclass says so."""

    def after(self, op: Any, passed: dict[str, Any], out: Any) -> None:
        """Nothing, unless a subclass says so."""


class _Recorder(OperatorWatch):
    def __init__(self, log: OperatorLog) -> None:
        super().__init__()
        self.log = log

    def after(self, op: Any, passed: dict[str, Any], out: Any) -> None:
        """Add a row, unless nothing moved."""
        name = op._schema.name.removeprefix("aten::")
        if torch.Tag.inplace_view in op.tags:
            return
        results, given = _tensors(out), {key: _tensors(value) for key, value in passed.items()}
        read, written = _sides(op, passed, given)
        first = next((argument.name for argument in op._schema.arguments), "")
        if name in _ONLY_WRITE or name.startswith("new_") or name.endswith("_like"):
            read.pop(first, None)
        known = {storage_id(tensor) for tensors in given.values() for tensor in tensors}
        fresh = [tensor for tensor in results if storage_id(tensor) not in known]
        if results and not fresh and not written:
            return  # a view
        if not name.startswith(("empty", "new_empty")):
            written[""] = fresh
        most = math.inf
        if name in _BY_INDEX:
            others = [t for key, tensors in given.items() if key != first for t in tensors]
            most = max(t.numel() for t in [*others, *fresh])
        if name == "index_put_":  # `x[i] = y`
            most = _placed(passed["self"], passed["indices"])
            if not passed.get("accumulate"):
                read.pop(first)
        read_bytes, written_bytes = (_distinct_bytes(side, first, most) for side in (read, written))
        if read_bytes or written_bytes:
            numbers = max(sum(t.numel() for t in group) for group in [*given.values(), results])
            self.log.rows.append(OperatorRow(name, read_bytes, written_bytes, numbers))


_Sides = dict[str, list[Tensor]]
"""Tensors by the argument that brought them; "" for results."""


def _sides(op: Any, passed: dict[str, Any], given: _Sides) -> tuple[_Sides, _Sides]:
    """The arguments that are read, and those that are written."""
    read, written = {}, {}
    for argument in op._schema.arguments:
        name = argument.name
        if given.get(name):
            if not argument.is_out:
                read[name] = given[name]
            # A fused optimizer writes gradients only where it has to take a scale off them.
            unscales = name != "grads" or passed.get("grad_scale") is not None
            if argument.alias_info is not None and argument.alias_info.is_write and unscales:
                written[name] = given[name]
    return read, written


def _placed(target: Tensor, indices: list[Tensor | None]) -> float:
    """How many elements `target[indices]` has; all of the target's where a mask picks them."""
    given = [(i, n) for i, n in zip(indices, target.shape, strict=False) if i is not None]
    if any(i.dtype == torch.bool for i, _ in given):
        return math.inf
    shape = torch.broadcast_shapes(*(i.shape for i, _ in given))  # type: ignore[no-untyped-call]
    places: int = shape.numel()
    return places * (target.numel() // max(1, math.prod(n for _, n in given)))


def _distinct_bytes(sides: _Sides, first: str, most: float) -> int:
    """Bytes at which these tensors lie, each once; of argument `first`, `most` elements."""
    total, by_storage = 0, dict[int, set[tuple[int, int, int]]]()
    for name, tensors in sides.items():
        for tensor in tensors:
            steps = [
                (n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step
            ]
            span = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
            count = min(math.prod(n for n, _ in steps), span)
            if name == first and most < count:
                total += int(most) * tensor.itemsize
                continue
            begin = int(tensor.storage_offset()) * tensor.itemsize
            place = (begin, begin + span * tensor.itemsize, count * tensor.itemsize)
            by_storage.setdefault(storage_id(tensor), set()).add(place)
    for places in by_storage.values():
        begins, ends, sizes = zip(*places, strict=True)
        total += min(sum(sizes), max(ends) - min(begins))
    return total


def _tensors(value: Any) -> list[Tensor]:
    # DTensor tries an operator on fake tensors first, to learn the shape of its result.
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return [tensor for tensor in tensors if tensor.untyped_storage().device.type != "meta"]
