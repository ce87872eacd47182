"""Lesson 18: the parts of a GPU, and what the threads of a launch did.

    show.thread_grid(block, thread, shape=(10, 18))
    show.requests({"A, naive": rows * 32, "B, naive": columns}, row_length=32, num_rows=32)

These numbers come from a launch, emulated or real: a kernel writes down who it is. Sizes of the
GPU: NVIDIA H100 Tensor Core GPU Architecture (white paper, 2022), SXM5 board; left out of it:
tensor cores, copy engines, the clusters of SMs, and constant and texture memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from matplotlib.patches import Rectangle

from playbook_utils.show.canvas import Canvas
from playbook_utils.show.style import (
    INK,
    QUIET,
    WIDTH_IN,
    Picture,
    color_of,
    new_figure,
    rank_color,
    text_color_on,
)

__all__ = ["gpu_diagram", "requests", "thread_grid"]

_ROWS, _COLUMNS = 11, 12  # 132 SMs
_PARTS, _CORES = 4, 32
_CORE, _SHARED, _MEMORY = (color_of(kind) for kind in ("compute", "forward", "backward"))
_REGISTERS, _CACHE = color_of("grads"), color_of("other")
_FLOATS_PER_SECTOR = 8  # 32 bytes
_LANES = 32
_MOST_CELLS = 40


def gpu_diagram() -> Picture:
    """An H100: its 132 SMs, L2 cache and memory on the left; the inside of one SM on the right."""
    canvas = Canvas(width=14.4, height=7.4)
    canvas.text(3.0, 0.25, "the GPU: 132 SMs", fontweight="bold")
    for number in range(_ROWS * _COLUMNS):
        row, column = divmod(number, _COLUMNS)
        canvas.box(0.12 + 0.48 * column, 0.6 + 0.37 * row, 0.4, 0.29, color=_CORE)
    cache = canvas.box(0.1, 5.0, 5.8, 0.75, "L2 cache, 50 MB", color=_CACHE)
    memory = canvas.box(
        0.1, 6.35, 5.8, 0.85, "global memory (HBM), 80 GB\n3,350 GB/s", color=_MEMORY
    )
    canvas.arrow(cache.bottom, memory.top, both=True)
    canvas.arrow((3.0, 4.62), cache.top, both=True)
    canvas.arrow((5.9, 0.75), (7.1, 0.75), "one of them")
    _draw_sm(canvas, 7.3)
    return canvas.picture(
        "An H100. Left: 132 SMs, below them one L2 cache of 50 MB, below that global memory of "
        "80 GB, reached at 3,350 GB/s. Right: one SM has 4 parts; each has a scheduler that gives "
        "one instruction to one warp of 32 threads, 32 cores, and registers of 64 KiB; the 4 parts "
        "share 256 KiB of shared memory and L1 cache."
    )


def _draw_sm(canvas: Canvas, left: float) -> None:
    canvas.text(left + 3.5, 0.25, "one SM: 128 cores in 4 parts", fontweight="bold")
    canvas.box(left, 0.6, 7.0, 6.6)
    width = 1.55
    for part in range(_PARTS):
        x = left + 0.22 + part * (width + 0.12)
        canvas.box(x, 0.8, width, 1.0, "scheduler:\n1 instruction\nto 32 threads", fontsize=8)
        for core in range(_CORES):
            row, column = divmod(core, 4)
            canvas.box(x + 0.05 + 0.37 * column, 1.95 + 0.27 * row, 0.32, 0.21, color=_CORE)
        canvas.text(x + width / 2, 4.3, "32 cores", fontsize=9)
        canvas.box(x, 4.55, width, 0.85, "registers\n64 KiB", color=_REGISTERS, fontsize=9)
    wide = _PARTS * (width + 0.12) - 0.12
    text = "shared memory and L1 cache, 256 KiB\n(a block's threads meet here)"
    canvas.box(left + 0.22, 5.65, wide, 1.3, text, color=_SHARED)


def thread_grid(
    block: Sequence[Sequence[int]], thread: Sequence[Sequence[int]], *, shape: tuple[int, int]
) -> Picture:
    """Each cell an element: coloured by the block that took it, with its thread's number inside.

    block, thread: numbers of rows x columns cells, of the whole grid; `shape` is that of the
    matrix, and cells outside of it, whose threads have nothing to do, stay white. The second warp
    of a block is paler.
    """
    rows, columns = len(block), len(block[0]) if block else 0
    if not 1 <= rows <= _MOST_CELLS or not 1 <= columns <= _MOST_CELLS:
        raise ValueError(f"found {rows} x {columns} cells; expected 1 to {_MOST_CELLS} each way")
    if any(len(row) != columns for row in (*block, *thread)) or len(thread) != rows:
        raise ValueError(f"block and thread must both have {rows} rows of {columns} numbers")
    with new_figure("", height_in=WIDTH_IN * rows / columns + 0.1) as (figure, axes):
        axes.set_axis_off()
        axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
        for y, x in product(range(rows), range(columns)):
            color, edge, ink, alpha = "#FFFFFF", "#DDDDDD", QUIET, 1.0
            if y < shape[0] and x < shape[1]:
                color, edge = rank_color(block[y][x]), "white"
                alpha = 0.55 if thread[y][x] // _LANES % 2 else 1.0
                ink = INK if alpha < 1 else text_color_on(color)
            cell = Rectangle((x, y), 1, 1, facecolor=color, edgecolor=edge, alpha=alpha, lw=0.8)
            axes.add_patch(cell)
            text = axes.text(x + 0.5, y + 0.52, str(thread[y][x]), color=ink, fontsize=8)
            text.set(ha="center", va="center")
        axes.add_patch(Rectangle((0, 0), shape[1], shape[0], fill=False, edgecolor=INK, lw=2.5))
    blocks = len({number for row in block for number in row})
    idle = rows * columns - shape[0] * shape[1]
    return Picture(
        figure,
        f"{blocks} blocks cover a matrix of {shape[0]} x {shape[1]}: each element has the colour "
        f"of its block and the number of its thread; {idle} of {rows * columns} threads lie "
        "outside.",
    )


def requests(wanted: Mapping[str, Sequence[int]], *, row_length: int, num_rows: int) -> Picture:
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
    said = []
    height_in = WIDTH_IN / len(wanted) * num_rows / row_length + 1.0
    with new_figure("", height_in=height_in) as (figure, first):
        first.remove()
        for place, (label, indices) in enumerate(wanted.items(), start=1):
            axes = figure.add_subplot(1, len(wanted), place)
            axes.set(xlim=(0, row_length), ylim=(num_rows, 0), aspect="equal", xticks=[], yticks=[])
            axes.spines[:].set_visible(True)
            sectors = sorted({index // _FLOATS_PER_SECTOR for index in indices})
            for index in (8 * sector + i for sector in sectors for i in range(_FLOATS_PER_SECTOR)):
                y, x = divmod(index, row_length)
                color = color_of("backward") if index in set(indices) else "#BFE0F5"
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", lw=0.3))
            count = f"{len(sectors)} sector{'s' if len(sectors) != 1 else ''}"
            moved, used = f"{32 * len(sectors):,} bytes", 4 * len(set(indices))
            axes.set_title(label, fontsize=10)
            axes.set_xlabel(f"{count}: {moved}\nmoved, {used} wanted", fontsize=9)
            said.append(f"{label}: {count}, {moved} moved, {used} wanted")
    return Picture(figure, f"What one request of a warp moves. {'; '.join(said)}.")
