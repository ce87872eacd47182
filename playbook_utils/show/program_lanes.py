"""Programs of a Triton launch, drawn: which offsets each takes, and which lanes are masked.

    program_lanes(size=20, block=8)

Left out: which threads of the GPU carry the lanes; that is the compiler's choice.
"""

from __future__ import annotations

from playbook_utils.show.diagrams import Canvas
from playbook_utils.show.style import QUIET, Picture, rank_color, text_color_on

__all__ = ["program_lanes"]


def program_lanes(size: int, block: int) -> Picture:
    """A row a program, a box a lane with its offset inside; a lane beyond `size` is white.

    size: elements of the vector. block: lanes of a program, 2 to 32; at most 8 programs.
    """
    if size < 1 or not 2 <= block <= 32:
        raise ValueError(f"size is {size}, block {block}; expected 1 or more, and 2 to 32")
    programs = -(-size // block)
    if programs > 8:
        raise ValueError(f"{programs} programs; expected at most 8, more do not fit a drawing")
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
