"""Predictions of memory as bars: parameters, gradients, optimizer states, activations, total.

What is there beside the total for a moment only, at the peak, stands at the end of the bar, in
grey: whether a GPU holds the rank is a question of the peak.

    estimate = predict_memory(preset("llama-3-8b"), seq_len=4096)
    show.memory_bars({"one H100": estimate}, gpu="h100-sxm")
"""

from __future__ import annotations

from collections.abc import Mapping

from playbook_utils.predict.estimate import CATEGORIES, MemoryEstimate
from playbook_utils.predict.hardware import Accelerator
from playbook_utils.predict.hardware import gpu as find_gpu
from playbook_utils.predict.headroom import verdict
from playbook_utils.show.plots import stacked_bars
from playbook_utils.show.style import Picture
from playbook_utils.show.units import bytes_text

__all__ = ["in_words", "memory_bars", "whole"]


def memory_bars(
    estimates: MemoryEstimate | Mapping[str, MemoryEstimate],
    *,
    gpu: Accelerator | str | None = None,
    title: str = "Memory of one rank",
) -> Picture:
    """One stacked bar for each of {label: estimate} (or one estimate), and what `gpu` holds.

    gpu: an `Accelerator` or its name, "h100-sxm". Raises ValueError without estimates and for an
    unknown name.
    """
    named = estimates if isinstance(estimates, Mapping) else {"one rank": estimates}
    limit = find_gpu(gpu) if isinstance(gpu, str) else gpu
    words = [f"{label}: {in_words(estimate, limit)}" for label, estimate in named.items()]
    return stacked_bars(
        {label: whole(estimate) for label, estimate in named.items()},
        unit="bytes",
        title=title,
        limit=None if limit is None else limit.usable_bytes,
        limit_label="" if limit is None else f"{limit.name} holds",
        description=" ".join([f"{title}.", *words]),
    )


def whole(estimate: MemoryEstimate) -> dict[str, int]:
    """Bytes by category, and what is there for a moment, if anything."""
    parts = {name: getattr(estimate, f"{name}_bytes") for name in CATEGORIES}
    moment = {"for a moment": estimate.transient_bytes} if estimate.transient_bytes else {}
    return parts | moment


def in_words(estimate: MemoryEstimate, gpu: Accelerator | None) -> str:
    """The numbers, and whether they fit, for those who do not see the bars."""
    sizes = {name.replace("_", " "): getattr(estimate, f"{name}_bytes") for name in CATEGORIES}
    words = ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items())
    words += f"; total {bytes_text(estimate.total_bytes)}"
    if estimate.transient_bytes:
        words += f", at the peak {bytes_text(estimate.peak_bytes)}"
    return f"{words}." if gpu is None else f"{words}. It {verdict(estimate, gpu)}."
