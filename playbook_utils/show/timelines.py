"""Who did what when: one row per rank and lane.

show.timeline(spans, title="Buckets hide the all-reduce behind backward")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from playbook_utils.events import Span
from playbook_utils.show.labels import write_inside
from playbook_utils.show.style import (
    KIND_COLORS,
    QUIET,
    Picture,
    color_key,
    new_figure,
    text_color_on,
)

__all__ = ["timeline"]

_BAR = 0.8
"""Height of a bar where a row is 1 high."""


def timeline(spans: Iterable[Span], *, title: str = "", description: str = "") -> Picture:
    """Draw spans as bars: rows are ranks and their lanes, the axis is milliseconds.

    Where a rank's "compute" lane has no bar, it is idle, and its row shows that. Spans of one lane
    that overlap in time share its height. Names, or their end from a number on
    ("bucket 3" as "3"), are written on the bars that are long enough; idle bars carry none.

    Raises ValueError without spans, for an unknown kind, and for a span that ends before it starts.
    """
    spans = sorted(spans, key=lambda span: (span.rank, span.start_s, span.end_s))
    _check(spans)
    rows = _rows(spans)
    row_in = min(0.42, 12 / len(rows))
    with new_figure(title, height_in=1.3 + len(rows) * row_in) as (figure, axes):
        start_ms = min(span.start_s for span in spans) * 1e3
        end_ms = max(span.end_s for span in spans) * 1e3
        end_ms += 1e-3 if end_ms == start_ms else 0.0
        axes.set_xlim(start_ms, end_ms)
        axes.set_xlabel("time (ms)")
        axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
        _draw_rows(axes, rows, start_ms, end_ms)
        axes.tick_params(axis="y", length=0, labelsize=min(10.0, 34 * row_in))
        used = {span.kind for span in spans} | {"idle"}
        color_key(axes, {kind: color for kind, color in KIND_COLORS.items() if kind in used})
        figure.draw_without_rendering()
        _draw_bars(axes, rows, spans, fontsize=min(9.0, 34 * row_in))
        return Picture(figure, description or _describe(title, spans))


def _check(spans: Sequence[Span]) -> None:
    if not spans:
        raise ValueError("no spans to draw: was anything traced?")
    for span in spans:
        which = f"span {span.name!r} of rank {span.rank}"
        if span.kind not in KIND_COLORS:
            known = ", ".join(KIND_COLORS)
            raise ValueError(f"{which} has kind {span.kind!r}; expected one of: {known}")
        if span.end_s < span.start_s:
            when = f"{span.end_s} s, before it starts at {span.start_s} s"
            raise ValueError(f"{which} ends at {when}")


def _rows(spans: Sequence[Span]) -> list[tuple[int, str]]:
    """(rank, lane) from the top: ranks in order, "compute" before the other lanes."""
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (lane != "compute", lane))
    present = {(span.rank, span.lane) for span in spans}
    ranks = sorted({span.rank for span in spans})
    return [(rank, lane) for rank in ranks for lane in lanes if (rank, lane) in present]


def _draw_rows(axes: Axes, rows: list[tuple[int, str]], start_ms: float, end_ms: float) -> None:
    labels = []
    for y, (rank, lane) in enumerate(rows):
        first = y == 0 or rows[y - 1][0] != rank
        alone = len({lane for _, lane in rows}) == 1
        labels.append(f"rank {rank}" if alone else f"rank {rank}   {lane}" if first else lane)
        if first and y > 0:
            axes.axhline(y - 0.5, color=QUIET, linewidth=0.6, clip_on=False)
        if lane == "compute":
            axes.barh(y, end_ms - start_ms, _BAR, start_ms, color=KIND_COLORS["idle"], zorder=0)
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)


def _draw_bars(
    axes: Axes, rows: list[tuple[int, str]], spans: Sequence[Span], fontsize: float
) -> None:
    low, high = axes.get_xlim()
    pixel = (high - low) / axes.get_window_extent().width
    candidates = []
    for y, row in enumerate(rows):
        inside = [span for span in spans if (span.rank, span.lane) == row]
        tracks = _tracks(inside)
        thickness = _BAR / (1 + max(tracks))
        for span, track in zip(inside, tracks, strict=True):
            middle = y - _BAR / 2 + thickness * (track + 0.5)
            left, width = span.start_s * 1e3, span.duration_s * 1e3
            color = KIND_COLORS[span.kind]
            # A white edge parts neighbours; on a bar of a few pixels it would be all there is, and
            # waiting is one thing, however many calls it is for.
            edge = "white" if width > 6 * pixel and span.kind != "idle" else color
            bar = axes.barh(middle, max(width, 1.5 * pixel), thickness, left, color=color)
            bar[0].set(edgecolor=edge, linewidth=0.5, label=span.name)
            if thickness > 0.35 and span.kind != "idle":  # what it waits for is named in its lane
                name_color = text_color_on(color)
                candidates.append((left, left + width, middle, span.name, name_color))
    axes.set_xlim(low, high)
    write_inside(axes, candidates, fontsize=fontsize)


def _tracks(spans: Sequence[Span]) -> list[int]:
    """For each span, sorted by start, the first track that is free again."""
    free_from: dict[int, float] = {}
    tracks = []
    for span in spans:
        free = (track for track, end_s in free_from.items() if end_s <= span.start_s)
        tracks.append(next(free, len(free_from)))
        free_from[tracks[-1]] = span.end_s
    return tracks


def _describe(title: str, spans: Sequence[Span]) -> str:
    ranks, used = {span.rank for span in spans}, {span.kind for span in spans}
    kinds = [kind for kind in KIND_COLORS if kind in used]
    which = f"rank {min(ranks)}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    head = f"{title}: timeline" if title else "Timeline"
    return f"{head} of {which}, with {', '.join(kinds)}."
