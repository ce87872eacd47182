"""Lesson 19: fusion, drawn by what crosses between memory and chip; and the programs of a launch.

Left out: how many bytes an arrow carries (count them), caches, and which threads of the GPU carry
the lanes of a program; that is the compiler's choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from playbook_utils.show.canvas import Canvas, expect_within
from playbook_utils.show.style import QUIET, Picture, color_of, rank_color, text_color_on

__all__ = ["fusion_diagram", "program_lanes"]

_COMPUTE, _MEMORY = color_of("compute"), color_of("other")
_MOVED = color_of("communication")


def fusion_diagram(operators: Sequence[str]) -> Picture:
    """Above: a kernel an operator, each reads memory and writes it. Below: one kernel for all.

    operators: names of 2 to 7 operators, in order.
    """
    expect_within(2, 7, number_of_operators=len(operators))
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
        canvas.arrow((up, memory.top[1]), (up, kernel.bottom[1]), color=_MOVED)
        canvas.arrow((down, kernel.bottom[1]), (down, memory.top[1]), color=_MOVED)
        x += width


def program_lanes(size: int, block: int) -> Picture:
    """A row a program, a box a lane with its offset inside; a lane beyond `size` is white.

    size: elements of the vector. block: lanes of a program, 2 to 32; at most 8 programs.
    """
    expect_within(2, 32, block=block)
    programs = -(-size // block)
    expect_within(1, 8, number_of_programs=programs)
    canvas = Canvas(width=13.5, height=0.85 * programs + 0.1)
    left, column = 2.2, 11.1 / block
    for program in range(programs):
        top = 0.1 + 0.85 * program
        canvas.text(left - 0.25, top + 0.35, f"program {program}", ha="right")
        for lane in range(block):
            offset = program * block + lane
            color = rank_color(program) if offset < size else "#FFFFFF"
            x = left + lane * column
            canvas.box(x, top, column - 0.08, 0.7, color=color)
            ink = text_color_on(color) if offset < size else QUIET
            canvas.text(x + column / 2 - 0.04, top + 0.35, str(offset), color=ink, fontsize=8.5)
    masked = programs * block - size
    return canvas.picture(
        f"{programs} programs of {block} lanes for {size} elements: program p takes the offsets "
        f"{block} p to {block} p + {block - 1}. {masked} lanes of the last program are masked."
    )
