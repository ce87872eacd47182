"""Drawing of gradient accumulation: microbatches one after the other, one sum, one step.

    show.accumulation_diagram(num_microbatches=4)

Left out: the ranks of data parallelism (`show.batch_split`, `show.data_parallel_diagram`).
"""

from __future__ import annotations

from playbook_utils.show.diagrams import Canvas
from playbook_utils.show.style import CATEGORY_COLORS, KIND_COLORS, Picture, rank_color

__all__ = ["accumulation_diagram"]


def accumulation_diagram(num_microbatches: int = 4) -> Picture:
    """A batch cut into microbatches whose gradients add up before the optimizer's only step.

    num_microbatches: number of columns, 1 to 8; time runs from left to right.
    """
    if not 1 <= num_microbatches <= 8:
        raise ValueError(
            f"num_microbatches is {num_microbatches}; expected 1 to 8, more do not fit a drawing"
        )
    gap, left = 0.25, 2.3
    column = min(2.4, 11.2 / num_microbatches - gap)
    full = num_microbatches * (column + gap) - gap
    canvas = Canvas(width=13.5, height=6.1)
    steps = ("one batch", "forward and\nbackward", "gradients", "optimizer step")
    tops, heights = (0.1, 1.4, 3.6, 5.2), (0.7, 1.3, 0.8, 0.8)
    for name, top, height in zip(steps, tops, heights, strict=True):
        canvas.text(left - 0.3, top + height / 2, name, ha="right")
    grads = CATEGORY_COLORS["grads"]
    total = canvas.box(left, tops[2], full, heights[2], "one buffer, added up", color=grads)
    for number in range(num_microbatches):
        x = left + number * (column + gap)
        wide = column > 1.6
        label = f"microbatch {number}" if wide else f"{number}"
        part = canvas.box(x, tops[0], column, heights[0], label, color=rank_color(0))
        label = "activations,\nheld only now" if wide else "act."
        work = canvas.box(
            x, tops[1], column, heights[1], label, color=CATEGORY_COLORS["activations"]
        )
        canvas.arrow(part.bottom, work.top)
        canvas.arrow(work.bottom, (work.bottom[0], total.y))
        if number:
            before = (x - gap, tops[1] + heights[1] / 2)
            canvas.arrow(before, work.left)
    step = canvas.box(
        left + full - column,
        tops[3],
        column,
        heights[3],
        "once" if column <= 1.6 else "once, at the end",
        color=KIND_COLORS["optimizer"],
    )
    canvas.arrow((step.top[0], total.bottom[1]), step.top)
    return canvas.picture(
        f"Gradient accumulation over {num_microbatches} microbatches, one after the other: each "
        "holds activations only while it runs; their gradients are added up in one buffer; the "
        "optimizer steps once, after the last."
    )
