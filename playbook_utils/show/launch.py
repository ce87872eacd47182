"""What the threads of a launch did: who took which element, and what one warp asked of memory.

    show.thread_grid(block, thread, shape=(10, 18))
    show.requests({"A, naive": rows * 32, "B, naive": columns}, row_length=32, num_rows=32)

The numbers come from a launch, emulated or real: a kernel writes down who it is. Left out: when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from playbook_utils.show.style import (
    INK,
    KIND_COLORS,
    QUIET,
    WIDTH_IN,
    Picture,
    house_style,
    new_figure,
    rank_color,
    text_color_on,
)

__all__ = ["requests", "thread_grid"]

_FLOATS_PER_SECTOR = 8  # 32 bytes
_LANES = 32
_MOST_CELLS = 40


def thread_grid(
    block: Sequence[Sequence[int]],
    thread: Sequence[Sequence[int]],
    *,
    shape: tuple[int, int],
    title: str = "",
) -> Picture:
    """Each cell an element: coloured by the block that took it, with its thread's number inside.

    block, thread: numbers of rows x columns cells, of the whole grid; `shape` is that of the
    matrix, and cells outside of it, whose threads have nothing to do, stay white.
    """
    rows, columns = len(block), len(block[0]) if block else 0
    if not 1 <= rows <= _MOST_CELLS or not 1 <= columns <= _MOST_CELLS:
        raise ValueError(f"found {rows} x {columns} cells; expected 1 to {_MOST_CELLS} each way")
    if any(len(row) != columns for row in (*block, *thread)) or len(thread) != rows:
        raise ValueError(f"block and thread must both have {rows} rows of {columns} numbers")
    with house_style():
        height_in = WIDTH_IN * rows / columns + (0.5 if title else 0.1)
        figure, axes = new_figure(title, height_in=height_in, axes_off=True)
        axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
        for y in range(rows):
            for x in range(columns):
                inside = y < shape[0] and x < shape[1]
                _cell(axes, x, y, block[y][x], thread[y][x], inside)
        axes.add_patch(Rectangle((0, 0), shape[1], shape[0], fill=False, edgecolor=INK, lw=2.5))
    blocks = len({number for row in block for number in row})
    idle = rows * columns - shape[0] * shape[1]
    return Picture(
        figure,
        f"{blocks} blocks cover a matrix of {shape[0]} x {shape[1]}: each element has the colour "
        f"of its block and the number of its thread; {idle} of {rows * columns} threads lie "
        "outside.",
    )


def _cell(axes: Axes, x: int, y: int, block: int, thread: int, inside: bool) -> None:
    color = rank_color(block) if inside else "#FFFFFF"
    edge = "white" if inside else "#DDDDDD"
    second = thread // _LANES % 2 == 1
    # The second warp of a block is paler.
    axes.add_patch(
        Rectangle(
            (x, y), 1, 1, facecolor=color, edgecolor=edge, lw=0.8, alpha=0.55 if second else 1
        )
    )
    ink = (INK if second else text_color_on(color)) if inside else QUIET
    axes.text(x + 0.5, y + 0.52, str(thread), ha="center", va="center", color=ink, fontsize=8)


def requests(
    wanted: Mapping[str, Sequence[int]], *, row_length: int, num_rows: int, title: str = ""
) -> Picture:
    """A warp's requests, a panel each: floats it wants dark, sectors that are moved for them pale.

    wanted: {label: index of the float that each thread wants}, in a row-major matrix of
    num_rows x row_length floats that starts at a sector's edge.
    """
    size = num_rows * row_length
    for label, indices in wanted.items():
        if not indices or min(indices) < 0 or max(indices) >= size:
            raise ValueError(f"{label!r} wants {list(indices)}: expected floats 0 to {size - 1}")
    if not wanted:
        raise ValueError("no requests to draw: pass {label: indices} with at least one label")
    with house_style():
        width = WIDTH_IN / len(wanted)
        figure, first = new_figure("", height_in=width * num_rows / row_length + 1.0)
        first.remove()
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
        said = [
            _panel(figure, place, len(wanted), label, indices, row_length, num_rows)
            for place, (label, indices) in enumerate(wanted.items())
        ]
    return Picture(figure, f"What one request of a warp moves. {'; '.join(said)}.")


def _panel(
    figure: Figure,
    place: int,
    panels: int,
    label: str,
    indices: Sequence[int],
    row_length: int,
    num_rows: int,
) -> str:
    axes = figure.add_subplot(1, panels, place + 1)
    axes.set(xlim=(0, row_length), ylim=(num_rows, 0), aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set_visible(True)
    sectors = sorted({index // _FLOATS_PER_SECTOR for index in indices})
    moved = [s * _FLOATS_PER_SECTOR + i for s in sectors for i in range(_FLOATS_PER_SECTOR)]
    for index in moved:
        y, x = divmod(index, row_length)
        color = KIND_COLORS["backward"] if index in set(indices) else "#BFE0F5"
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", lw=0.3))
    used = 4 * len(set(indices))
    count = f"{len(sectors)} sector{'s' if len(sectors) != 1 else ''}"
    axes.set_title(label, fontsize=10)
    axes.set_xlabel(f"{count}: {32 * len(sectors):,} bytes\nmoved, {used} wanted", fontsize=9)
    return f"{label}: {count}, {32 * len(sectors):,} bytes moved, {used} wanted"
