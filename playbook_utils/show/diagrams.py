"""Drawings of ideas: boxes and arrows in the colours of the plots.

A drawing is a function that opens a `Canvas`, puts boxes and arrows on it, in its own units, and
returns the picture.

    canvas = Canvas(width=10, height=3, title="Two ranks")
    left = canvas.box(0, 1, 3, 1, "rank 0", color=rank_color(0))
    right = canvas.box(7, 1, 3, 1, "rank 1", color=rank_color(1))
    canvas.arrow(left.right, right.left, "gradients")
    return canvas.picture("Two ranks exchange gradients.")
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from playbook_utils.show.style import (
    CATEGORY_COLORS,
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

__all__ = ["Box", "Canvas", "batch_split", "course_map", "data_parallel_diagram"]

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A box that was drawn; its edges' middles are where arrows start and end."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> Point:
        """Middle of the left edge."""
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> Point:
        """Middle of the right edge."""
        return self.x + self.width, self.y + self.height / 2

    @property
    def top(self) -> Point:
        """Middle of the upper edge."""
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> Point:
        """Middle of the lower edge."""
        return self.x + self.width / 2, self.y + self.height


class Canvas:
    """A sheet of `width` x `height` units, (0, 0) at the upper left, units square."""

    def __init__(self, *, width: float, height: float, title: str = "") -> None:
        self.title = title
        with house_style():
            height_in = WIDTH_IN * height / width + (0.4 if title else 0.0)
            self.figure, self.axes = new_figure(title, height_in=height_in, axes_off=True)
        self.axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        *,
        color: str = "#FFFFFF",
        fontsize: float = 10,
    ) -> Box:
        """Draw a box with its upper left corner at (x, y) and text in its middle."""
        style = "round,pad=0,rounding_size=0.08"
        edge = QUIET if color.upper() == "#FFFFFF" else "none"
        patch = FancyBboxPatch((x, y), width, height, style, facecolor=color, edgecolor=edge)
        self.axes.add_patch(patch)
        if text:
            middle = (x + width / 2, y + height / 2)
            self.text(*middle, text, color=text_color_on(color), fontsize=fontsize)
        return Box(x, y, width, height)

    def text(self, x: float, y: float, text: str, **how: Any) -> None:
        """Write text around (x, y); `how` is passed to matplotlib."""
        with house_style():
            self.axes.text(x, y, text, **{"ha": "center", "va": "center", **how})

    def arrow(
        self, start: Point, end: Point, text: str = "", *, color: str = INK, both: bool = False
    ) -> None:
        """Draw an arrow from `start` to `end`, with a head at both ends if `both`."""
        style = "<|-|>" if both else "-|>"
        arrow = FancyArrowPatch(start, end, arrowstyle=style, color=color, linewidth=1.4)
        arrow.set(mutation_scale=11)
        self.axes.add_patch(arrow)
        if text:
            middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 0.12)
            self.text(*middle, text, color=color, va="bottom", fontsize=9)

    def picture(self, description: str) -> Picture:
        """Finish the drawing."""
        return Picture(self.figure, description)


def data_parallel_diagram(world_size: int = 4) -> Picture:
    """Data parallelism: a replica a rank, a slice of the batch each, gradients averaged by all.

    world_size: number of replicas drawn, 1 to 8.
    """
    if not 1 <= world_size <= 8:
        raise ValueError(f"world_size is {world_size}; expected 1 to 8, more do not fit a drawing")
    gap, left = 0.25, 2.3
    column = min(2.4, 11.2 / world_size - gap)
    full = world_size * (column + gap) - gap
    canvas = Canvas(width=13.5, height=6.7)
    steps = (
        "one batch",
        "forward and\nbackward",
        "gradients",
        "average\nof gradients",
        "optimizer step",
    )
    tops, heights = (0.1, 1.4, 2.9, 4.2, 5.7), (0.7, 0.9, 0.6, 0.8, 0.8)
    for name, top, height in zip(steps, tops, heights, strict=True):
        canvas.text(left - 0.3, top + height / 2, name, ha="right")
    communication = KIND_COLORS["communication"]
    reduce_box = canvas.box(left, tops[3], full, heights[3], "all-reduce", color=communication)
    for rank in range(world_size):
        x = left + rank * (column + gap)
        wide = column > 1.6
        part = canvas.box(x, tops[0], column, heights[0], f"slice {rank}", color=rank_color(rank))
        label = f"rank {rank}\nall parameters" if wide else f"rank {rank}"
        model = canvas.box(x, tops[1], column, heights[1], label, color=CATEGORY_COLORS["params"])
        own = f"of slice {rank}" if wide else f"slice {rank}"
        grads = canvas.box(x, tops[2], column, heights[2], own, color=CATEGORY_COLORS["grads"])
        same = "same update" if wide else "same"
        after = canvas.box(x, tops[4], column, heights[4], same, color=KIND_COLORS["optimizer"])
        canvas.arrow(part.bottom, model.top)
        canvas.arrow(model.bottom, grads.top)
        canvas.arrow(grads.bottom, (grads.bottom[0], reduce_box.y), both=True)
        canvas.arrow((after.top[0], reduce_box.bottom[1]), after.top)
    return canvas.picture(
        f"Data parallelism on {world_size} ranks: the batch is cut into {world_size} slices; each "
        "rank holds all parameters and computes the gradients of its own slice; an all-reduce "
        "gives every rank the average; all ranks make the same update."
    )


def batch_split(
    micro_batch_size: int, grad_accumulation: int, data_parallel_size: int, *, title: str = ""
) -> Picture:
    """Which rank trains on which samples when: gbs = mbs x grad_acc x dp (the book, section 1).

    Samples are numbered in the order in which ranks slice the batch. Up to 8 ranks and 8 steps.
    """
    sizes = {
        "micro_batch_size": (micro_batch_size, 10**9),
        "grad_accumulation": (grad_accumulation, 8),
        "data_parallel_size": (data_parallel_size, 8),
    }
    for name, (value, most) in sizes.items():
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; expected 1 to {most}")
    column, row, left = 12.0 / grad_accumulation, 0.8, 1.6
    canvas = Canvas(width=left + 12.2, height=0.8 + row * data_parallel_size, title=title)
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


def course_map(lessons: Sequence[Mapping[str, Any]], *, title: str = "The course") -> Picture:
    """All lessons, a column per part, each with its minutes and what should come before it.

    lessons: in reading order, each with "number", "title", "part", "minutes" (None where the lesson
    is planned), and optionally "needs" (numbers of earlier lessons) and "gpu" (True where a GPU
    adds something).

    Raises ValueError for no lesson, a missing key, and for a lesson that needs one that is not
    before it.
    """
    parts = _parts(lessons)
    width, row = 16.0, 1.65
    column = width / len(parts)
    most = max(len(part) for part in parts.values())
    canvas = Canvas(width=width, height=0.7 + most * row, title=title)
    for place, (part, inside) in enumerate(parts.items()):
        x, color = place * column, rank_color(place)
        characters = int(column * 7.2)
        head = textwrap.shorten(part, characters, placeholder=" ...")
        canvas.text(x, 0.35, head, ha="left", fontweight="bold", fontsize=9.5)
        for position, lesson in enumerate(inside):
            y = 0.7 + position * row
            canvas.box(x, y, column - 0.2, row - 0.15)
            planned = lesson["minutes"] is None
            canvas.box(x, y, 0.14, row - 0.15, color="#dddddd" if planned else color)
            name, remark = _lesson_texts(lesson, characters)
            ink = "#888888" if planned else INK
            canvas.text(x + 0.26, y + 0.12, name, ha="left", va="top", fontsize=8.5, color=ink)
            quiet = {"fontsize": 8, "color": "#666666"}
            canvas.text(x + 0.26, y + row - 0.27, remark, ha="left", va="bottom", **quiet)
    named = "; ".join(
        f"{part}: {', '.join(str(lesson['title']) for lesson in inside)}"
        for part, inside in parts.items()
    )
    return canvas.picture(f"Map of {len(lessons)} lessons. {named}.")


def _lesson_texts(lesson: Mapping[str, Any], characters: int) -> tuple[str, str]:
    """Name (two lines) and remark (one or two lines) of a lesson on the map."""
    name = f"{lesson['number']:02d} {lesson['title']}"
    lines = textwrap.wrap(name, characters, max_lines=2, placeholder=" ...")
    needs = ", ".join(f"{number:02d}" for number in lesson.get("needs", ()))
    gpu = ", more with a GPU" if lesson.get("gpu") else ""
    minutes = "planned" if lesson["minutes"] is None else f"{lesson['minutes']} min{gpu}"
    remark = textwrap.shorten(minutes, characters + 2, placeholder=" ...")
    after = textwrap.shorten(f"after {needs}", characters, placeholder=" ...") if needs else ""
    return "\n".join(lines), "\n".join(filter(None, [remark, after]))


def _parts(lessons: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    parts: dict[str, list[Mapping[str, Any]]] = {}
    seen: set[int] = set()
    for lesson in lessons:
        missing = {"number", "title", "part", "minutes"} - set(lesson)
        if missing:
            raise ValueError(f"lesson {dict(lesson)} lacks {', '.join(sorted(missing))}")
        if later := sorted(set(lesson.get("needs", ())) - seen):
            raise ValueError(f"lesson {lesson['number']} needs {later}, not found before it")
        seen.add(lesson["number"])
        parts.setdefault(lesson["part"], []).append(lesson)
    if not parts:
        raise ValueError("no lessons to draw")
    return parts
