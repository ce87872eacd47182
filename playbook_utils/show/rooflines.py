"""The roofline: how fast a kernel can be at most, from its FLOPs and the bytes it moves.

    show.roofline({"naive": 0.06, "tiled": 3.8}, peaks={"FP32 cores": 66.9e12}, bytes_per_s=3.35e12)

Attainable FLOP/s = min(peak, intensity x bytes per second) (Williams, Waterman, Patterson 2009).
Left out: caches, each of which has a roof of its own, and what a kernel reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from playbook_utils.show.style import INK, QUIET, Picture, color_of, new_figure

__all__ = ["roofline"]

_POINTS: dict[str, Any] = {"textcoords": "offset points"}
_LEVELS = (color_of("compute"), color_of("backward"))


def roofline(
    intensities: Mapping[str, float],
    *,
    peaks: Mapping[str, float],
    bytes_per_s: float,
    title: str = "",
) -> Picture:
    """Kernels {label: FLOPs per byte} under the roof; `peaks` {label: FLOP/s} are its levels.

    Each kernel stands where the lowest roof is at its intensity; kernels of one intensity share a
    mark. Both axes are logarithmic.
    """
    for what, values in (("intensities", intensities), ("peaks", peaks)):
        if not values or min(values.values()) <= 0:
            raise ValueError(f"{what} must be positive, and at least one; found {dict(values)}")
    if bytes_per_s <= 0:
        raise ValueError(f"bytes_per_s must be positive; found {bytes_per_s}")
    ridges = {label: peak / bytes_per_s for label, peak in peaks.items()}
    left, right = min(intensities.values()) / 2, 4 * max(*ridges.values(), *intensities.values())
    lowest = min(peaks.values())
    with new_figure(title, height_in=4.6) as (figure, axes):
        top = max(ridges.values())
        axes.plot([left, top], [left * bytes_per_s, top * bytes_per_s], color=INK)
        for position, (label, peak) in enumerate(peaks.items()):
            ridge, color = ridges[label], _LEVELS[position % len(_LEVELS)]
            axes.plot([ridge, right], [peak, peak], color=color)
            axes.plot([ridge, ridge], [left * bytes_per_s, peak], color=color, ls=":", lw=1.2)
            note = f"{label}: {peak / 1e12:.4g} TFLOP/s"
            axes.text(right, peak * 1.12, note, ha="right", va="bottom", color=color)
            foot = f" ridge\n {ridge:.3g}"
            axes.text(ridge, left * bytes_per_s * 1.15, foot, va="bottom", color=color, fontsize=9)
        for labels, x in _together(intensities).items():
            y = min(lowest, x * bytes_per_s)
            axes.plot([x], [y], "o", color=color_of("communication"), ms=8, zorder=3)
            name = axes.annotate(f"{labels}: {x:.3g}", (x, y), (10, -5), va="top", **_POINTS)
            name.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        axes.set(xscale="log", yscale="log", xlim=(left, right))
        axes.set_ylim(left * bytes_per_s, 3 * max(peaks.values()))
        axes.set(xlabel="FLOPs per byte moved", ylabel="FLOP/s at most")
        axes.grid(color="#EEEEEE", linewidth=0.8)
        slope = f"{bytes_per_s / 1e12:.4g} TB/s"
        place = (top / 3, top / 3 * bytes_per_s)
        axes.annotate(slope, place, (-8, 4), ha="right", color=QUIET, **_POINTS)
    said = ", ".join(f"{label} {x:.3g}" for label, x in intensities.items())
    edges = ", ".join(f"{ridge:.3g} for {label}" for label, ridge in ridges.items())
    return Picture(figure, f"Roofline. FLOPs per byte: {said}. The ridge lies at {edges}.")


def _together(intensities: Mapping[str, float]) -> dict[str, float]:
    """Kernels that share a place on the axis, as one mark with their names side by side."""
    groups: dict[str, list[str]] = {}
    for label, value in intensities.items():
        groups.setdefault(f"{value:.4g}", []).append(label)
    # The value itself, not the rounded one: it is rounded again where it is printed.
    return {", ".join(labels): intensities[labels[0]] for labels in groups.values()}
