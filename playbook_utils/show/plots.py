"""The plots of the course: lines, bars, stacked bars, and memory over time.

Each returns a `Picture`; give `description` to say in words what is to be seen.

    show.lines({"4 ranks": (steps, losses)}, xlabel="step", ylabel="loss (nats per token)")
    show.stacked_bars({"ZeRO-1": {"params": 2.0, "optimizer_states": 3.0}}, unit="GiB", limit=8.0)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

from playbook_utils.events import MemorySample
from playbook_utils.show.labels import label_size, place_line_labels, write_inside
from playbook_utils.show.style import (
    CATEGORY_COLORS,
    INK,
    QUIET,
    Picture,
    color_key,
    color_of,
    new_figure,
    text_color_on,
)
from playbook_utils.show.units import bytes_text, bytes_unit, number_text

__all__ = ["lines", "memory", "stacked_bars"]


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    logx: bool = False,
    logy: bool = False,
    xunit: str = "",
    hline: Mapping[str, float] | None = None,
    markers: bool = False,
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    description: str = "",
) -> Picture:
    """Draw {label: (xs, ys)} as lines, each labelled at its end; `hline` {label: y} as dashes.

    `points` {label: (xs, ys)} are rings in the colour of the line of that label, without one of
    their own: what was measured, on what was predicted.

    xlabel and ylabel name the quantity and its unit. A label "rank 3", "grads" or "communication"
    takes the colour that this has everywhere. With `logx`, the ticks are the xs themselves where
    there are few, and every few of them in KiB, MiB, ... with xunit="bytes".

    Raises ValueError for empty or unequal xs and ys, and for values <= 0 on a logarithmic axis.
    """
    _check_series(series, logx, logy)
    if points:
        _check_series(points, logx, logy)
    if strays := sorted(set(points or {}) - set(series)):
        raise ValueError(f"points {strays} belong to no line; the lines are {list(series)}")
    with new_figure(title, height_in=3.9) as (figure, axes):
        ends: dict[str, tuple[float, float, str]] = {}
        for position, (label, (xs, ys)) in enumerate(series.items()):
            color = color_of(label, position)
            marker = "o" if markers or len(xs) == 1 else None
            axes.plot(xs, ys, color=color, marker=marker, markersize=5, clip_on=False)
            ends[label] = (xs[-1], ys[-1], color)
        for label, (xs, ys) in (points or {}).items():
            axes.plot(xs, ys, "o", ms=8, mec=ends[label][2], mfc="white", mew=2, clip_on=False)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if logx:
            axes.set_xscale("log", base=2)
            xs_all = sorted({x for xs, _ in series.values() for x in xs})
            as_text = bytes_text if xunit == "bytes" else number_text
            xs_all = xs_all[:: -(-len(xs_all) // 9)] if xunit == "bytes" else xs_all
            if len(xs_all) <= 12:
                axes.set_xticks(xs_all, [as_text(x) for x in xs_all])
                axes.minorticks_off()
        if logy:
            axes.set_yscale("log")
        axes.grid(axis="y", color="#E8E8E8", linewidth=0.8)
        # The lines end at the edge, so that their labels' leaders don't look like data.
        right = max(x for xs, _ in series.values() for x in xs)
        for label, level in (hline or {}).items():
            axes.axhline(level, color=QUIET, linestyle="--", linewidth=1.2)
            ends[label] = (right, level, QUIET)
        if axes.get_xlim()[0] < right:
            axes.set_xlim(right=right)
        place_line_labels(axes, ends)
        return Picture(figure, description or _describe(title, f"{ylabel} over {xlabel}", ends))


def _check_series(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], logx: bool, logy: bool
) -> None:
    if not series:
        raise ValueError("no lines to draw: pass {label: (xs, ys)} with at least one label")
    for label, (xs, ys) in series.items():
        if len(xs) != len(ys) or len(xs) == 0:
            raise ValueError(f"line {label!r} has {len(xs)} xs and {len(ys)} ys; expected as many")
        for axis, logarithmic, values in (("x", logx, xs), ("y", logy, ys)):
            if logarithmic and min(values) <= 0:
                raise ValueError(
                    f"line {label!r} has the {axis} value {min(values)}, which a logarithmic axis "
                    f"cannot show: leave it out, or drop log{axis}"
                )


def stacked_bars(
    rows: Mapping[str, Mapping[str, float]],
    *,
    unit: str,
    title: str = "",
    limit: float | None = None,
    limit_label: str = "limit",
    description: str = "",
) -> Picture:
    """Draw {label: {category: value}} as horizontal stacked bars with their totals beside them.

    Values are >= 0, in `unit`; unit="bytes" shows them in KiB, MiB, ... `limit` is a dashed line in
    the same unit: what a GPU holds.

    Raises ValueError without rows and for negative values.
    """
    if not rows:
        raise ValueError("no bars to draw: pass at least one row")
    for label, parts in rows.items():
        if any(value < 0 for value in parts.values()):
            raise ValueError(f"row {label!r} has a negative value: {dict(parts)}")
    totals = [sum(parts.values()) for parts in rows.values()]
    largest = max([*totals, limit or 0.0])
    scale, shown_unit = bytes_unit(largest) if unit == "bytes" else (1, unit)
    as_text = bytes_text if unit == "bytes" else number_text
    single = all(len(parts) <= 1 for parts in rows.values())
    names = dict.fromkeys(name for parts in rows.values() for name in parts)
    colors = {name: color_of(name, 5 if single else place) for place, name in enumerate(names)}
    with new_figure(title, height_in=1.2 + 0.42 * len(rows)) as (figure, axes):
        axes.set(xlabel=shown_unit, ylim=(len(rows) - (0.4 if limit is None else 0.0), -0.6))
        axes.set_yticks(range(len(rows)), list(rows))
        axes.tick_params(axis="y", length=0)
        if not single:
            color_key(axes, colors)
        axes.set_xlim(0, (largest or 1) / scale)
        if limit is not None:
            axes.axvline(limit / scale, color=INK, linestyle="--", linewidth=1.2)
            place, name = axes.get_xaxis_transform(), f"{limit_label} {as_text(limit)} "
            beside = axes.text(limit / scale, 0.01, name, transform=place, fontsize=9)
            beside.set(ha="right", va="bottom")
        ends = [
            axes.annotate(
                as_text(total),
                (total / scale, y),
                (5, 0),
                va="center",
                textcoords="offset points",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},  # over the limit
            )
            for y, total in enumerate(totals)
        ]
        figure.draw_without_rendering()
        # Room for the longest value beside its bar.
        room, width = max(label_size(t)[0] for t in ends) + 12, axes.get_window_extent().width
        axes.set_xlim(0, (largest or 1) / scale * width / max(width - room, width / 2))
        candidates = []
        for y, parts in enumerate(rows.values()):
            left = 0.0
            for category, value in parts.items():
                color = colors[category]
                axes.barh(y, value / scale, 0.72, left, color=color, edgecolor="white", lw=0.5)
                right = left + value / scale
                room_inside = _beside(None if limit is None else limit / scale, left, right)
                text = as_text(value)
                candidates.append((*room_inside, float(y), text, text_color_on(color)))
                left = right
        if not single:
            write_inside(axes, candidates, fontsize=9)
        what = f"{unit} by {', '.join(colors)}" if not single else unit
        return Picture(figure, description or _describe(title, what, rows))


def _beside(limit: float | None, left: float, right: float) -> tuple[float, float]:
    """The part of a bar for its text: the wider one where the limit's line cuts it in two."""
    if limit is None or not left < limit < right:
        return left, right
    return (left, limit) if limit - left >= right - limit else (limit, right)


def memory(samples: Iterable[MemorySample], *, title: str = "", description: str = "") -> Picture:
    """Draw what one rank holds at the moments of one or more steps, by category, in order.

    Vertical lines part the steps; the peak is marked.

    Raises ValueError without samples, and for samples of several ranks.
    """
    samples = list(samples)
    ranks = sorted({sample.rank for sample in samples})
    if len(ranks) != 1:
        what = f"ranks {', '.join(map(str, ranks))}" if ranks else "no rank"
        raise ValueError(f"samples of {what}; expected one rank: filter them by `sample.rank`")
    totals = [sample.total_bytes for sample in samples]
    scale, unit = bytes_unit(max(totals))
    held = {
        name: [getattr(s, f"{name}_bytes") / scale for s in samples] for name in CATEGORY_COLORS
    }
    stacks = {name: sizes for name, sizes in held.items() if any(sizes)}
    with new_figure(title, height_in=4.2) as (figure, axes):
        xs = range(len(samples))
        axes.set(ylabel=f"memory of rank {ranks[0]} ({unit})", xlim=(0, max(len(samples) - 1, 1)))
        axes.set_ylim(0, max(totals) / scale * 1.18 or 1)
        if stacks:
            colors = [CATEGORY_COLORS[name] for name in stacks]
            edge = 0.5 if len(samples) <= 200 else 0  # of many samples it would eat the spikes
            axes.stackplot(xs, list(stacks.values()), colors=colors, edgecolor="white", lw=edge)
            color_key(axes, {name: CATEGORY_COLORS[name] for name in reversed(stacks)})
        _mark_steps(axes, samples)
        peak = totals.index(max(totals))
        _mark_peak(axes, peak, totals[peak] / scale, bytes_text(totals[peak]), len(samples))
        what = f"memory of rank {ranks[0]} by category"
        return Picture(figure, description or _describe(title, what, stacks))


def _mark_steps(axes: Axes, samples: Sequence[MemorySample]) -> None:
    firsts = [i for i, s in enumerate(samples) if i == 0 or s.step != samples[i - 1].step]
    for i in firsts:
        if i > 0:
            axes.axvline(i, color=INK, linewidth=0.8, linestyle=":")
        if len(firsts) <= 12:
            place = axes.get_xaxis_transform()
            axes.text(i, 0.985, f" step {samples[i].step}", va="top", transform=place, fontsize=9)
    if len(samples) <= 20:
        slanted = len(samples) > 8
        axes.set_xticks(range(len(samples)), [sample.moment for sample in samples])
        axes.tick_params(axis="x", labelsize=9, rotation=40 if slanted else 0)
        for label in axes.get_xticklabels() if slanted else []:
            label.set(ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks(firsts, [str(samples[i].step) for i in firsts])
        axes.set_xlabel("step")


def _mark_peak(axes: Axes, x: int, height: float, text: str, num_samples: int) -> None:
    axes.plot([x], [height], marker="o", color=INK, markersize=5, clip_on=False)
    late = x > (num_samples - 1) * 0.7
    axes.annotate(
        f"peak {text}",
        (x, height),
        (-8 if late else 8, 5),
        ha="right" if late else "left",
        textcoords="offset points",
        fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
    )


def _describe(title: str, what: str, names: Iterable[str]) -> str:
    head = f"{title}: " if title else ""
    return f"{head}{what}; drawn: {', '.join(names)}."
