"""The parts of a GPU that a kernel's author has to know, with an H100's sizes.

    show.gpu_diagram()

Sizes: NVIDIA H100 Tensor Core GPU Architecture (white paper, 2022), SXM5 board. Left out: tensor
cores, copy engines, the clusters of SMs, and constant and texture memory.
"""

from __future__ import annotations

from playbook_utils.show.diagrams import Canvas
from playbook_utils.show.style import CATEGORY_COLORS, KIND_COLORS, Picture

__all__ = ["gpu_diagram"]

_ROWS, _COLUMNS = 11, 12  # 132 SMs
_PARTS, _CORES = 4, 32
_CORE, _REGISTERS, _SHARED = (
    KIND_COLORS["compute"],
    CATEGORY_COLORS["grads"],
    KIND_COLORS["forward"],
)
_CACHE, _MEMORY = CATEGORY_COLORS["other"], KIND_COLORS["backward"]


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
