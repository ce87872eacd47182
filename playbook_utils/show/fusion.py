"""Fusion, drawn: what crosses between the memory and the chip, operator by operator and fused.

    fusion_diagram(["x < 0", "exp", "- 1", "* alpha", "where"])

Left out: how many bytes an arrow carries (count them), caches.
"""

from __future__ import annotations

from collections.abc import Sequence

from playbook_utils.show.diagrams import Canvas
from playbook_utils.show.style import CATEGORY_COLORS, KIND_COLORS, Picture

__all__ = ["fusion_diagram"]

_COMPUTE, _MEMORY = KIND_COLORS["compute"], CATEGORY_COLORS["other"]
_MOVED = KIND_COLORS["communication"]


def fusion_diagram(operators: Sequence[str]) -> Picture:
    """Above: a kernel an operator, each reads memory and writes it. Below: one kernel for all.

    operators: names of 2 to 7 operators, in order.
    """
    if not 2 <= len(operators) <= 7:
        raise ValueError(f"{len(operators)} operators; expected 2 to 7, more do not fit a drawing")
    canvas = Canvas(width=13.5, height=6.5)
    left, full = 2.6, 10.7
    column = full / len(operators)
    _row(canvas, 0.2, "one kernel\nan operator", left, [column] * len(operators), operators)
    _row(canvas, 3.6, "one kernel\nfor all", left, [full], ["   ".join(operators)])
    names = ", ".join(operators)
    return canvas.picture(
        f"Above, {len(operators)} kernels ({names}): each reads its inputs from the memory and "
        "writes its result back. Below, one kernel does all of it: one arrow up, one down."
    )


def _row(
    canvas: Canvas, top: float, name: str, left: float, widths: list[float], labels: Sequence[str]
) -> None:
    canvas.text(left - 0.3, top + 0.5, name, ha="right")
    canvas.text(left - 0.3, top + 2.35, "memory", ha="right")
    memory = canvas.box(left, top + 2.0, sum(widths) - 0.25, 0.7, color=_MEMORY)
    x = left
    for width, label in zip(widths, labels, strict=True):
        kernel = canvas.box(x, top, width - 0.25, 1.0, label, color=_COMPUTE)
        third = (width - 0.25) / 3 if len(widths) > 1 else 1.2
        up, down = x + third, x + width - 0.25 - third
        canvas.arrow((up, memory.y), (up, kernel.y + kernel.height), color=_MOVED)
        canvas.arrow((down, kernel.y + kernel.height), (down, memory.y), color=_MOVED)
        x += width
