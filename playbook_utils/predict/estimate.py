"""The memory of one rank as numbers: by category and part, in total, at the peak.

    estimate.total_bytes, estimate.peak_bytes, estimate.fits("h100")
    estimate.parts["activations"]["attention"]

`playbook_utils.predict.memory` makes one; how, and what is left out, is said there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from playbook_utils.predict._checks import expect_type
from playbook_utils.predict.hardware import Accelerator, gpu

__all__ = ["CATEGORIES", "MOMENTS", "MemoryEstimate"]

CATEGORIES: tuple[str, ...] = ("params", "grads", "optimizer_states", "activations")
"""The keys of `MemoryEstimate.parts`."""

MOMENTS: dict[str, str] = {
    "loss": "in the loss, the gradients of its log-probabilities and of the logits",
    "head": "at the head, ZeRO's unsharded params and gradient of it",
    "layer": "in a layer's backward pass, what is recomputed and ZeRO's unsharded params and "
    "gradient",
    "embedding": "at the embedding, ZeRO's unsharded params and gradient of it",
}
"""When memory may peak (`playbook_utils.predict.memory`)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, by category and part."""

    stage: int
    """The pipeline stage that this is."""
    num_params: int
    """Parameters that the rank computes with (before ZeRO shards them)."""
    parts: dict[str, dict[str, int]]
    """For each of `CATEGORIES`, bytes by part (embedding, attention, mlp, ...); zeros left out."""
    microbatches_in_flight: tuple[int, ...]
    """Kept at the peak, for each of the stage's chunks (one, unless stages are interleaved)."""
    recomputed_bytes: int = 0
    """What recomputing one layer adds to the activations at the peak (in `activations_bytes`)."""
    gathered_bytes: int = 0
    """ZeRO-3: the params of the stage's largest unit (a layer, the embedding or the head) while it
    is computed; twice that with prefetching. Not in `total_bytes`."""
    transient_bytes: int = 0
    """What the worst moment of a step adds to `total_bytes`."""
    moment: str = ""
    """Which that is: one of `MOMENTS`."""

    @property
    def params_bytes(self) -> int:
        """Weights as the forward pass reads them."""
        return sum(self.parts["params"].values())

    @property
    def grads_bytes(self) -> int:
        """Gradients, and the FP32 buffer where the recipe has one."""
        return sum(self.parts["grads"].values())

    @property
    def optimizer_states_bytes(self) -> int:
        """Adam's moments, and the FP32 master copy where the recipe has one."""
        return sum(self.parts["optimizer_states"].values())

    @property
    def activations_bytes(self) -> int:
        """What is kept for the backward pass, and one layer that is being recomputed."""
        return sum(self.parts["activations"].values())

    @property
    def total_bytes(self) -> int:
        """All four categories: what the papers and the book add up."""
        return sum(sum(parts.values()) for parts in self.parts.values())

    @property
    def peak_bytes(self) -> int:
        """The total and what is there beside it for a moment: what must fit."""
        return self.total_bytes + self.transient_bytes

    def fits(self, accelerator: Accelerator | str) -> bool:
        """Whether the peak is no more than that GPU's `usable_bytes`; one or two GiB of these are
        never free."""
        found = gpu(accelerator) if isinstance(accelerator, str) else accelerator
        expect_type("accelerator", found, Accelerator)
        return self.peak_bytes <= found.usable_bytes

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return {
            "stage": self.stage,
            "num_params": self.num_params,
            **{f"{name}_bytes": getattr(self, f"{name}_bytes") for name in CATEGORIES},
            "total_bytes": self.total_bytes,
            "recomputed_bytes": self.recomputed_bytes,
            "gathered_bytes": self.gathered_bytes,
            "transient_bytes": self.transient_bytes,
            "peak_bytes": self.peak_bytes,
            "moment": self.moment,
            "microbatches_in_flight": list(self.microbatches_in_flight),
            "parts": {name: dict(parts) for name, parts in self.parts.items()},
        }
