"""A quantity over the size of a message, both axes logarithmic: curves, and measured points.

    show.by_size({"ring": predicted_s}, sizes, points={"ring": measured_s}, ylabel="time (s)")

Left out: fitting the curves to the points (`predict.link.fit_link`), error bars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from playbook_utils.show.labels import place_line_labels
from playbook_utils.show.style import QUIET, Picture, color_of, house_style, new_figure
from playbook_utils.show.units import bytes_text

__all__ = ["by_size"]


def by_size(
    curves: Mapping[str, Sequence[float]],
    sizes_bytes: Sequence[int],
    *,
    ylabel: str,
    points: Mapping[str, Sequence[float]] | None = None,
    hline: Mapping[str, float] | None = None,
    title: str = "",
    description: str = "",
) -> Picture:
    """Draw {label: one value a size} as lines, the points of a label as dots in its colour.

    Args:
        curves: a value for each of the sizes, labelled at their ends.
        sizes_bytes: of the messages, ascending.
        ylabel: names the quantity and its unit.
        points: measured values, by the labels of the curves.
        hline: {label: y} as dashes.

    Raises ValueError without curves, for points without a curve, for as many values as sizes are
    not, and for what a logarithmic axis cannot show.
    """
    dots, levels = dict(points or {}), dict(hline or {})
    _check(curves, dots, levels, sizes_bytes)
    with house_style():
        figure, axes = new_figure(title, height_in=3.9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        every = -(-len(sizes_bytes) // 9)
        ticks = list(sizes_bytes)[::every]
        axes.set_xticks(ticks, [bytes_text(size) for size in ticks])
        axes.minorticks_off()
        axes.set(xlabel="message", ylabel=ylabel)
        axes.grid(axis="y", color="#E8E8E8", linewidth=0.8)
        ends = {}
        for position, (label, values) in enumerate(curves.items()):
            color = color_of(label, position)
            axes.plot(sizes_bytes, values, color=color)
            ends[label] = (sizes_bytes[-1], values[-1], color)
            if label in dots:
                axes.plot(sizes_bytes, dots[label], "o", color=color, markeredgecolor="white")
        for label, level in levels.items():
            axes.axhline(level, color=QUIET, linestyle="--", linewidth=1.2)
            ends[label] = (sizes_bytes[-1], level, QUIET)
        axes.set_xlim(right=sizes_bytes[-1])  # the lines end at the edge, where their labels are
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.06)  # room for a label at the very top
        for line in axes.lines:
            line.set_clip_on(False)
        place_line_labels(axes, ends)
    said = description or f"{ylabel} over the size of a message: {', '.join(curves)}."
    return Picture(figure, said)


def _check(
    curves: Mapping[str, Sequence[float]],
    dots: Mapping[str, Sequence[float]],
    levels: Mapping[str, float],
    sizes: Sequence[int],
) -> None:
    if not curves or not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] <= 0:
        raise ValueError(
            f"{len(curves)} curves over sizes {list(sizes)}: expected at least one curve, and "
            "sizes that are positive and ascending"
        )
    if unknown := sorted(set(dots) - set(curves)):
        raise ValueError(f"points of {unknown} have no curve; expected labels among {list(curves)}")
    for label, values in (*curves.items(), *dots.items()):
        if len(values) != len(sizes):
            raise ValueError(f"{label!r} has {len(values)} values for {len(sizes)} sizes")
    for label, values in (*curves.items(), *dots.items(), *((k, [v]) for k, v in levels.items())):
        if min(values) <= 0:
            raise ValueError(
                f"{label!r} has the value {min(values)}, which a logarithmic axis cannot show"
            )
