"""Bytes that a forward pass keeps for backward: the activation memory of the book's formulas.

    with saved_for_backward(model) as saved:
        loss = model(x).sum()
    saved.total_bytes, saved.tensors
    saved.bytes_by_place()      # {("mlp.up_proj", "linear"): 131072, ...}: which term costs what

Counted by storage, once each, whatever was saved of it: two views of one tensor cost its bytes
once, and a saved slice keeps the whole tensor alive. Parameters and buffers are excluded, since
they are there anyway; inputs are counted. Left out: what a custom autograd function keeps as
plain attributes, and what is only held while the forward runs (`measure.memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from playbook_utils.measure.private import local_part, storage_id

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
    module: str = ""
    """Name within the model of the module whose forward saved it; "" for the model itself, for
    code outside of it, and where no model was given."""
    operator: str = ""
    """Name of the PyTorch function that saved it first: "linear", "softmax", "mul"; "" for a
    custom autograd function."""


@dataclass
class SavedTensors:
    """What was saved so far, in the order of the forward pass."""

    tensors: list[SavedTensor] = field(default_factory=list)
    """One entry a distinct storage."""

    @property
    def total_bytes(self) -> int:
        """Sum over the distinct storages."""
        return sum(tensor.storage_bytes for tensor in self.tensors)

    def bytes_by_place(self) -> dict[tuple[str, str], int]:
        """{(module, operator): bytes}, in the order of the forward pass; sums to the total.

        A tensor that several operators save stands with the first of them.
        """
        places: dict[tuple[str, str], int] = {}
        for tensor in self.tensors:
            place = (tensor.module, tensor.operator)
            places[place] = places.get(place, 0) + tensor.storage_bytes
        return places


@contextmanager
def saved_for_backward(model: nn.Module | None = None) -> Iterator[SavedTensors]:
    """Record what autograd saves inside the block.

    Args:
        model: its parameters and buffers are excluded; None excludes nothing.

    A part of the forward with saved-tensor hooks of its own (a checkpoint) counts as what it
    keeps: a checkpoint's inputs.
    """
    saved = SavedTensors()
    operators = _Operators()
    # A weak reference keeps a freed storage's address from being used again, and no memory.
    known: dict[int, StorageWeakRef] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        local = local_part(tensor)
        storage, place = local.untyped_storage(), storage_id(local)
        # Detached: an operator's output that holds itself through its graph is never freed.
        packed = tensor.detach()
        if place in known:
            return packed
        known[place] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        # Asked for each time: FSDP2 swaps parameters for their unsharded ones while it runs.
        if model is None or place not in _storages(model):
            saved.tensors.append(
                SavedTensor(
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    storage_bytes=storage.nbytes(),
                    module=modules[-1] if modules else "",
                    operator=operators.running[-1] if operators.running else "",
                )
            )
        return packed

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with _modules_watched(model) as modules, operators, hooks:
        yield saved


class _Operators(TorchFunctionMode):
    """Knows which PyTorch functions are running; those that they call in turn are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.running.append(getattr(func, "__name__", "").strip("_"))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.running.pop()


@contextmanager
def _modules_watched(model: nn.Module | None) -> Iterator[list[str]]:
    """Names of the modules whose forward is running, the innermost last."""
    running: list[str] = []
    handles = []
    for name, module in [] if model is None else model.named_modules():

        def enter(*_: Any, name: str = name) -> None:
            running.append(name)

        def leave(*_: Any) -> None:
            running.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _storages(model: nn.Module) -> set[int]:
    own = [*model.parameters(), *model.buffers()]
    return {storage_id(local_part(tensor)) for tensor in own}
