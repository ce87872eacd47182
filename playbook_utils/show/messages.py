"""Who sends how much to whom, as a matrix of bytes.

show.traffic(events, title="A ring: everyone talks to the next rank")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.colors import LinearSegmentedColormap, to_hex

from playbook_utils.events import CollectiveEvent
from playbook_utils.show.style import KIND_COLORS, Picture, new_figure, text_color_on
from playbook_utils.show.units import bytes_text

__all__ = ["traffic", "traffic_matrix"]


def traffic_matrix(events: Iterable[CollectiveEvent]) -> list[list[int]]:
    """Bytes that rank i (row) sends to rank j (column) in all these calls together.

    By the ring convention a rank sends its `wire_bytes` to the next rank of the group; all_to_all
    goes to all others in equal parts; send goes to its peer.
    """
    events = list(events)
    ranks = {rank for event in events for rank in (event.rank, *event.group)}
    size = max(ranks, default=-1) + 1
    matrix = [[0] * size for _ in range(size)]
    for event in events:
        others = [rank for rank in event.group if rank != event.rank]
        if not event.wire_bytes or not others:
            continue
        if event.op.startswith("all_to_all"):
            share, rest = divmod(event.wire_bytes, len(others))
            for place, rank in enumerate(others):
                matrix[event.rank][rank] += share + (place < rest)
        else:
            after = event.group.index(event.rank) + 1
            matrix[event.rank][event.group[after % len(event.group)]] += event.wire_bytes
    return matrix


def traffic(
    events: Iterable[CollectiveEvent] | Sequence[Sequence[int]],
    *,
    title: str = "",
    description: str = "",
) -> Picture:
    """Draw the bytes from each rank (row) to each rank (column), darker for more.

    events: the calls of all ranks, read by `traffic_matrix`; or such a matrix. Numbers are written
    into the cells for up to 12 ranks.

    Raises ValueError for nothing to draw and for a matrix that is not square.
    """
    given: list[CollectiveEvent | Sequence[int]] = list(events)
    rows = [list(row) for row in given if not isinstance(row, CollectiveEvent)]
    calls = [event for event in given if isinstance(event, CollectiveEvent)]
    matrix = rows or traffic_matrix(calls)
    size = len(matrix)
    if not size or any(len(row) != size for row in matrix):
        lengths = [len(row) for row in matrix]
        raise ValueError(f"expected events, or one row of N bytes per rank; got rows of {lengths}")
    largest = max(max(row) for row in matrix) or 1
    shades = LinearSegmentedColormap.from_list("traffic", ["white", KIND_COLORS["communication"]])
    side_in = min(7.0, max(2.4, 0.72 * size))
    with new_figure(title, height_in=side_in + 0.9, width_in=side_in + 1.4) as (figure, axes):
        axes.pcolormesh(matrix, cmap=shades, vmin=0, vmax=largest, edgecolors="#DDDDDD", lw=0.6)
        axes.set(xlim=(0, size), ylim=(size, 0), aspect="equal")
        axes.set(xlabel="to rank", ylabel="from rank")
        named = range(0, size, 1 if size <= 16 else size // 8)
        for set_ticks in (axes.set_xticks, axes.set_yticks):
            set_ticks([rank + 0.5 for rank in named], [str(rank) for rank in named])
        axes.tick_params(length=0)
        for i, row in enumerate(matrix) if size <= 12 else []:
            for j, sent in enumerate(row):
                if sent:
                    color = text_color_on(to_hex(shades(sent / largest)))
                    text = axes.text(j + 0.5, i + 0.5, bytes_text(sent), color=color)
                    text.set(ha="center", va="center", fontsize=8.5)
        pairs = sum(1 for row in matrix for sent in row if sent)
        head = f"{title}: bytes" if title else "Bytes"
        return Picture(figure, description or f"{head} sent between {size} ranks, {pairs} pairs.")
