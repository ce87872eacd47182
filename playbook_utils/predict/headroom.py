"""What a GPU has left beside a predicted rank, in one sentence; and what the prediction leaves out.

    estimate = predict_memory(preset("llama-3-8b"), seq_len=4096)
    verdict(estimate, gpu("h100-sxm"))    # "does not fit h100-sxm (79.65 GiB): 59.03 GiB missing"

The rank's memory is its peak, the GPU's what the driver reports, where that is known (up to 6 %
less than is printed): `Accelerator.usable_bytes`, as in `MemoryEstimate.fits`. What `NOT_COUNTED`
names comes on top of the prediction: leave a few GiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from playbook_utils.predict.estimate import MOMENTS, MemoryEstimate
from playbook_utils.predict.hardware import Accelerator

__all__ = ["NOT_COUNTED", "gib_text", "headroom_bytes", "remarks", "verdict"]

NOT_COUNTED = (
    "CUDA context, fragmentation, NCCL and ZeRO buffers, gradients of activations other than the "
    "logits', the optimizer step's own temporaries (foreach AdamW: 4 bytes a parameter that the "
    "rank updates)"
)
"""What a real GPU holds beside the prediction (see `playbook_utils.predict.memory`)."""


def headroom_bytes(estimate: MemoryEstimate, accelerator: Accelerator) -> int:
    """Memory of the GPU minus the rank's peak; negative where it does not fit."""
    return accelerator.usable_bytes - estimate.peak_bytes


def verdict(estimate: MemoryEstimate, accelerator: Accelerator) -> str:
    """Whether the rank fits the GPU, and how much is left or missing."""
    room = headroom_bytes(estimate, accelerator)
    holds = f"{accelerator.name} ({gib_text(accelerator.usable_bytes)})"
    if room >= 0:
        return f"fits {holds}: {gib_text(room)} left"
    return f"does not fit {holds}: {gib_text(-room)} missing"


def remarks(estimate: MemoryEstimate, notes: Iterable[str] = ()) -> Iterator[str]:
    """Sentences on what the numbers hold and leave out; `notes` as `ParallelLayout.notes` gives."""
    if estimate.transient_bytes:
        yield f"For a moment: {MOMENTS[estimate.moment]}."
    yield f"Not counted: {NOT_COUNTED}."
    if estimate.gathered_bytes:
        yield (
            f"ZeRO-3 gathers up to {gib_text(estimate.gathered_bytes)} for a moment: not in the "
            "total, and in the peak only if that moment is the worst."
        )
    yield from (f"Note: {note}." for note in notes)


def gib_text(num_bytes: int) -> str:
    """Bytes in GiB, in two decimals, or four below one GiB: "14.96 GiB"."""
    gib = num_bytes / 2**30
    return f"{gib:,.2f} GiB" if gib >= 1 or not num_bytes else f"{gib:.4f} GiB"
