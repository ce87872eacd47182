"""Lesson 03: microbatches one after the other, one sum, one step."""

from __future__ import annotations

from playbook_utils.show.canvas import Canvas, expect_within
from playbook_utils.show.style import Picture, color_of, rank_color

__all__ = ["accumulation_diagram"]


def accumulation_diagram(num_microbatches: int = 4) -> Picture:
    """A batch cut into microbatches whose gradients add up before the optimizer's only step.

    num_microbatches: number of columns, 1 to 8; time runs from left to right.
    """
    expect_within(1, 8, num_microbatches=num_microbatches)
    gap, left = 0.25, 2.3
    column = min(2.4, 11.2 / num_microbatches - gap)
    full = num_microbatches * (column + gap) - gap
    wide = column > 1.6
    canvas = Canvas(width=13.5, height=6.1)
    steps = ("one batch", "forward and\nbackward", "gradients", "optimizer step")
    canvas.names(left - 0.3, steps, ((0.1, 0.7), (1.4, 1.3), (3.6, 0.8), (5.2, 0.8)))
    total = canvas.box(left, 3.6, full, 0.8, "one buffer, added up", color=color_of("grads"))
    for number in range(num_microbatches):
        x = left + number * (column + gap)
        label = f"microbatch {number}" if wide else f"{number}"
        part = canvas.box(x, 0.1, column, 0.7, label, color=rank_color(0))
        label = "activations,\nheld only now" if wide else "act."
        work = canvas.box(x, 1.4, column, 1.3, label, color=color_of("activations"))
        canvas.arrow(part.bottom, work.top)
        canvas.arrow(work.bottom, (work.bottom[0], total.top[1]))
        if number:
            canvas.arrow((x - gap, work.left[1]), work.left)
    label = "once, at the end" if wide else "once"
    step = canvas.box(left + full - column, 5.2, column, 0.8, label, color=color_of("optimizer"))
    canvas.arrow((step.top[0], total.bottom[1]), step.top)
    return canvas.picture(
        f"Gradient accumulation over {num_microbatches} microbatches, one after the other: each "
        "holds activations only while it runs; their gradients are added up in one buffer; the "
        "optimizer steps once, after the last."
    )
