"""Bytes that a rank holds, by category, over several training steps.

    with track_memory(model, optimizer, rank=rank) as memory:
        for batch in batches:
            with memory.step():
                with memory.moment("forward"):
                    loss = model(batch).sum()
                with memory.moment("backward"):
                    loss.backward()
                with memory.moment("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
    memory.peak, memory.samples                   # the whole timeline, as MemorySample

    state_bytes(model, optimizer)                 # what is there now, without running anything

Counted are tensors, by storage, as operators make and drop them: the same numbers on every run
and every machine, on CPU too (`measure.tracker` says what is counted as what). On a GPU
`memory.allocator` adds what CUDA's caching allocator saw, which is more: blocks are rounded up,
and libraries have workspaces (that part has not been run on a GPU yet).

Left out: memory that is no tensor (Python, NCCL's buffers, the CUDA context), what an operator
uses only while it runs, and tensors that no operator makes (the 5 kB copy of the random
generator's state that a checkpoint keeps unless preserve_rng_state=False).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from playbook_utils.events import MemorySample
from playbook_utils.measure import private

__all__ = ["AllocatorPeak", "MemoryLog", "state_bytes", "track_memory"]


@dataclass(frozen=True)
class AllocatorPeak:
    """What CUDA's caching allocator reports for the tracked block."""

    allocated_bytes: int
    """Most bytes in use by tensors at one time (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: int
    """Most bytes taken from the device at one time (`torch.cuda.max_memory_reserved`)."""


@dataclass
class MemoryLog:
    """The timeline of one rank, filled while its `track_memory` block runs; plain data after."""

    rank: int = 0
    allocator: AllocatorPeak | None = None
    """On a GPU, once the block has ended; None on CPU."""
    _samples: list[MemorySample] = field(default_factory=list)
    _step: int = 0
    _moment: str = ""
    _tracker: Any = None

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        """One sample after each operator that changed what is held, and one at each step's
        start and end; `moment` is the innermost `moment` block, else what runs ("forward",
        "backward", "optimizer")."""
        return tuple(self._samples)

    @property
    def peak(self) -> MemorySample:
        """The first of the samples with the most bytes in total."""
        return self.peak_of_step(None)

    def peak_of_step(self, step: int | None) -> MemorySample:
        """The same within one step, counted from 0. ValueError where there is no such step."""
        samples = [sample for sample in self._samples if step in (None, sample.step)]
        if not samples:
            where = "yet: run something inside the block" if step is None else f"for step {step}"
            raise ValueError(f"no memory was recorded {where}")
        return max(samples, key=lambda sample: sample.total_bytes)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step; the steps are counted from 0."""
        tracker = self._open_tracker()
        self._add(tracker.held(), "start")
        yield
        self._add(tracker.held(), "end")
        self._step += 1

    @contextmanager
    def moment(self, name: str) -> Iterator[None]:
        """Name a part of the step. What is made in one of another name than "forward", and not
        in a backward, counts as "other" rather than as activations."""
        tracker, outer = self._open_tracker(), self._moment
        self._moment, tracker.in_forward = name, name in ("", "forward")
        try:
            yield
        finally:
            self._moment, tracker.in_forward = outer, outer in ("", "forward")

    def _open_tracker(self) -> Any:
        if self._tracker is None:
            raise RuntimeError("this memory log is closed: use it inside its track_memory block")
        return self._tracker

    def _add(self, held: dict[str, int], moment: str) -> None:
        sample = MemorySample(self._step, moment, **held, rank=self.rank)
        if not self._samples or self._samples[-1] != sample:
            self._samples.append(sample)


@contextmanager
def track_memory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    rank: int = 0,
    snapshot_path: str | Path | None = None,
) -> Iterator[MemoryLog]:
    """Record what is held inside the block.

    Args:
        model: under `fully_shard`, DDP, tensor parallelism, or plain. Only its device's memory
            is counted. It is there from the start, with its gradients and buffers.
        optimizer: its states are there from the start; those of any other optimizer are found
            when it steps.
        rank: whose samples they are.
        snapshot_path: on a GPU, also write the allocator's history there, to be opened at
            pytorch.org/memory_viz.

    Raises:
        TypeError: `model` is not an nn.Module, or `optimizer` not an optimizer.
        ValueError: `snapshot_path` for a model that is not on a GPU.
    """
    _check_model(model, optimizer)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if snapshot_path is not None and device.type != "cuda":
        raise ValueError(
            f"snapshot_path needs a model on a GPU, found {device}: CPU memory has no "
            "allocator history; use memory.samples"
        )
    # Not at the top: it takes a second of every process that imports this wing.
    from playbook_utils.measure.tracker import make_tracker

    memory = MemoryLog(rank)
    masters = _master_copies(model, optimizer)
    memory._tracker = make_tracker(
        model, optimizer, device, masters,
        on_change=lambda held, phase: memory._add(held, memory._moment or phase),
    )  # fmt: skip
    try:
        with memory._tracker, _allocator_watched(memory, device, snapshot_path):
            yield memory
    finally:
        memory._tracker = None


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemorySample:
    """Exact bytes of what `model` and `optimizer` hold at this moment on this rank.

    Tied parameters count once and a DTensor counts as this rank's shard. Optimizer states are
    all tensors in them, Adam's 4-byte step counters too, and the FP32 master copies of mixed
    precision, which are parameters of the optimizer and not of the model; gradients of master
    copies are gradients. `other_bytes` are the buffers; activations are none.

    Raises:
        TypeError: `model` is not an nn.Module, or `optimizer` not an optimizer.
    """
    _check_model(model, optimizer)
    params = list(model.parameters())
    masters = _master_copies(model, optimizer)
    states = [] if optimizer is None else private.tree_leaves(list(optimizer.state.values()))
    seen: set[tuple[int, int, int]] = set()
    return MemorySample(
        step=0,
        moment="end",
        params_bytes=_distinct_bytes(params, seen),
        grads_bytes=_distinct_bytes((p.grad for p in [*params, *masters]), seen),
        optimizer_states_bytes=_distinct_bytes([*masters, *states], seen),
        activations_bytes=0,
        other_bytes=_distinct_bytes(model.buffers(), seen),
    )


def _master_copies(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """What the optimizer steps that is no parameter of the model: FP32 copies of its weights."""
    if optimizer is None:
        return []
    own = {id(param) for param in model.parameters()}
    stepped = [param for group in optimizer.param_groups for param in group["params"]]
    return [param for param in stepped if id(param) not in own]


def _distinct_bytes(values: Iterable[Any], seen: set[tuple[int, int, int]]) -> int:
    """Bytes of the tensors among `values` that are not yet in `seen`, which they join."""
    total = 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        tensor = private.local_part(value)
        size = tensor.numel() * tensor.element_size()
        key = (private.storage_id(tensor), int(tensor.storage_offset()), size)
        if key not in seen:
            seen.add(key)
            total += size
    return total


@contextmanager
def _allocator_watched(
    memory: MemoryLog, device: torch.device, snapshot_path: str | Path | None
) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.reset_peak_memory_stats(device)
    if snapshot_path is not None:
        private.record_memory_history()
    try:
        yield
    finally:
        memory.allocator = AllocatorPeak(
            torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        )
        if snapshot_path is not None:
            private.dump_snapshot(str(snapshot_path))
            private.record_memory_history(enabled=None)


def _check_model(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: expected an nn.Module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}: expected a torch.optim.Optimizer or None"
        )
