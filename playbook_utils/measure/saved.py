"""Bytes that a forward pass keeps for backward: the activation memory of the book's formulas.

    with saved_for_backward(model) as saved:
        loss = model(x).sum()
    saved.total_bytes, saved.tensors

Counted by storage, once each, whatever was saved of it: two views of one tensor cost its bytes
once, and a saved slice keeps the whole tensor alive. Parameters and buffers are excluded, since
they are there anyway; inputs are counted. Left out: what a custom autograd function keeps as
plain attributes, and what is only held while the forward runs (`measure.memory`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["SavedTensor", "SavedTensors", "saved_for_backward"]


@dataclass(frozen=True)
class SavedTensor:
    """One storage that is kept for backward."""

    shape: tuple[int, ...]
    """Shape of the tensor that was saved first from it."""
    dtype: str
    """Element type without the "torch." prefix: "float32"."""
    storage_bytes: int
    """Bytes that stay in memory: of the whole storage, also where a part of it was saved."""


@dataclass
class SavedTensors:
    """What was saved so far, in the order of the forward pass."""

    _tensors: list[SavedTensor] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[SavedTensor, ...]:
        """One entry a distinct storage."""
        return tuple(self._tensors)

    @property
    def total_bytes(self) -> int:
        """Sum over the distinct storages."""
        return sum(tensor.storage_bytes for tensor in self._tensors)


@contextmanager
def saved_for_backward(model: nn.Module | None = None) -> Iterator[SavedTensors]:
    """Record what autograd saves inside the block.

    Args:
        model: its parameters and buffers are excluded; None excludes nothing.

    A part of the forward with saved-tensor hooks of its own (a checkpoint) counts as what it
    keeps: a checkpoint's inputs.
    """
    saved = SavedTensors()
    # A weak reference keeps a freed storage's address from being used again, and no memory.
    known: dict[int, StorageWeakRef] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        # Detached: an operator's output that holds itself through its graph is never freed.
        packed = tensor.detach()
        if storage._cdata in known:
            return packed
        known[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        # Asked for each time: FSDP2 swaps parameters for their unsharded ones while it runs.
        if model is None or storage._cdata not in _storages(model):
            dtype = str(tensor.dtype).removeprefix("torch.")
            saved._tensors.append(SavedTensor(tuple(tensor.shape), dtype, storage.nbytes()))
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _storages(model: nn.Module) -> set[int]:
    own = [*model.parameters(), *model.buffers()]
    return {_local(tensor).untyped_storage()._cdata for tensor in own}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
