"""The records in which the wings meet: what was sent, what was held, what ran when.

A measured trace, a simulated schedule and a saved file all become these three small frozen
dataclasses, so that one plot draws them all. Standard library only: `predict` makes them too.

Left out: how they are measured (`playbook_utils.measure`) and drawn (`playbook_utils.show`).

    Span(rank=0, name="backward", kind="compute", start_s=0.0, end_s=0.2)
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CollectiveEvent", "MemorySample", "Span"]


@dataclass(frozen=True)
class Span:
    """One stretch of time in which one rank did one thing."""

    rank: int
    name: str
    """What is written on the bar: "forward 3", "all_reduce bucket 0"."""
    kind: str
    """What it is, which decides its colour: "forward", "backward", "optimizer", "compute" (any
    other work), "communication" or "idle"."""
    start_s: float
    """Seconds from the trace's own zero."""
    end_s: float
    lane: str = "compute"
    """The row within the rank: "compute", or "communication" for what runs beside it."""

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class CollectiveEvent:
    """One communication call, as one rank issued it."""

    rank: int
    index: int
    """Position among this rank's calls, from 0."""
    op: str
    """The name in `torch.distributed`: "all_reduce", "send", ..."""
    group: tuple[int, ...]
    """Global ranks that take part, in group order; for send and recv this rank and its peer."""
    dtype: str
    """Element type without the "torch." prefix: "float32"."""
    shape: tuple[int, ...]
    """Shape of the tensor that `payload_bytes` counts; (numel,) where several were passed."""
    payload_bytes: int
    """K of the ring formulas: bytes of the whole (unsharded) message on this rank."""
    wire_bytes: int
    """Bytes this rank sends under the ring convention (`predict.communication.wire_bytes`)."""
    label: str = ""
    """Free text: the phase of the step in which it was issued ("backward")."""


@dataclass(frozen=True)
class MemorySample:
    """Bytes held by one rank at one moment, by category."""

    step: int
    moment: str
    """Where in the step: "start", "forward", "backward", "optimizer", "end", or a module's name."""
    params_bytes: int
    grads_bytes: int
    optimizer_states_bytes: int
    activations_bytes: int
    other_bytes: int = 0
    rank: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum over the categories, in bytes."""
        state_bytes = self.params_bytes + self.grads_bytes + self.optimizer_states_bytes
        return state_bytes + self.activations_bytes + self.other_bytes
