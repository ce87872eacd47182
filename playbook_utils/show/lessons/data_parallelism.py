"""Lesson 06: replicas and their slices of a batch."""

from __future__ import annotations

from playbook_utils.show.canvas import Canvas, expect_within
from playbook_utils.show.style import INK, Picture, color_of, rank_color

__all__ = ["batch_split", "data_parallel_diagram"]


def data_parallel_diagram(world_size: int = 4) -> Picture:
    """Data parallelism: a replica a rank, a slice of the batch each, gradients averaged by all.

    world_size: number of replicas drawn, 1 to 8.
    """
    expect_within(1, 8, world_size=world_size)
    gap, left = 0.25, 2.3
    column = min(2.4, 11.2 / world_size - gap)
    full, wide = world_size * (column + gap) - gap, column > 1.6
    canvas = Canvas(width=13.5, height=6.7)
    steps = ("one batch", "forward and\nbackward", "gradients", "average\nof gradients")
    places = ((0.1, 0.7), (1.4, 0.9), (2.9, 0.6), (4.2, 0.8), (5.7, 0.8))
    canvas.names(left - 0.3, (*steps, "optimizer step"), places)
    label = "all-reduce: add up, divide by N" if world_size > 1 else "all-reduce"
    reduce_box = canvas.box(left, 4.2, full, 0.8, label, color=color_of("communication"))
    for rank in range(world_size):
        texts = (
            f"slice {rank}",
            f"rank {rank}\nall parameters" if wide else f"rank {rank}",
            f"of slice {rank}" if wide else f"slice {rank}",
            "same update" if wide else "same",
        )
        fills = (rank_color(rank), color_of("params"), color_of("grads"), color_of("optimizer"))
        x = left + rank * (column + gap)
        part, model, grads, after = (
            canvas.box(x, top, column, height, text, color=color)
            for (top, height), text, color in zip(
                (*places[:3], places[4]), texts, fills, strict=True
            )
        )
        canvas.arrow(part.bottom, model.top)
        canvas.arrow(model.bottom, grads.top)
        canvas.arrow(grads.bottom, (grads.bottom[0], reduce_box.top[1]))
        canvas.arrow((after.top[0], reduce_box.bottom[1]), after.top)
    return canvas.picture(
        f"Data parallelism on {world_size} ranks: the batch is cut into {world_size} slices; each "
        "rank holds all parameters and computes the gradients of its own slice; an all-reduce "
        "gives every rank the average; all ranks make the same update."
    )


def batch_split(micro_batch_size: int, grad_accumulation: int, data_parallel_size: int) -> Picture:
    """Which rank trains on which samples when: gbs = mbs x grad_acc x dp (the book, section 1).

    Samples are numbered in the order in which ranks slice the batch. Up to 8 ranks and 8 steps.
    """
    expect_within(1, 10**9, micro_batch_size=micro_batch_size)
    expect_within(1, 8, grad_accumulation=grad_accumulation, data_parallel_size=data_parallel_size)
    column, row, left = 12.0 / grad_accumulation, 0.8, 1.6
    canvas = Canvas(width=left + 12.2, height=0.8 + row * data_parallel_size)
    for step in range(grad_accumulation):
        canvas.text(left + (step + 0.5) * column, 0.4, f"backward {step}", color=INK)
    for rank in range(data_parallel_size):
        y = 0.8 + rank * row
        canvas.text(left - 0.2, y + row / 2 - 0.06, f"rank {rank}", ha="right")
        for step in range(grad_accumulation):
            first = (rank * grad_accumulation + step) * micro_batch_size
            last = first + micro_batch_size - 1
            samples = f"{first:,}" if first == last else f"{first:,}-{last:,}"
            if len(samples) > 8 * column:
                samples = samples.replace("-", "-\n")
            place = (left + step * column, y, column - 0.15, row - 0.12)
            canvas.box(*place, samples, color=rank_color(rank), fontsize=9)
    total = micro_batch_size * grad_accumulation * data_parallel_size
    return canvas.picture(
        f"Global batch of {total:,} samples: {data_parallel_size} ranks x {grad_accumulation} "
        f"backward passes x {micro_batch_size:,} samples each."
    )
