"""Drawings of ideas: boxes and arrows in the colours of the plots, placed in units of one's own.

canvas = Canvas(width=10, height=3, title="Two ranks")
left = canvas.box(0, 1, 3, 1, "rank 0", color=rank_color(0))
right = canvas.box(7, 1, 3, 1, "rank 1", color=rank_color(1))
canvas.arrow(left.right, right.left, "gradients")
return canvas.picture("Two ranks exchange gradients.")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from playbook_utils.show.style import (
    INK,
    QUIET,
    WIDTH_IN,
    Picture,
    house_style,
    new_figure,
    text_color_on,
)

__all__ = ["Box", "Canvas", "expect_within"]

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A box that was drawn: the middles of its edges, where arrows start and end."""

    left: Point
    right: Point
    top: Point
    bottom: Point


class Canvas:
    """A sheet of `width` x `height` units, (0, 0) at the upper left, units square."""

    def __init__(self, *, width: float, height: float, title: str = "") -> None:
        height_in = WIDTH_IN * height / width + (0.4 if title else 0.0)
        with new_figure(title, height_in=height_in) as (self.figure, self.axes):
            self.axes.set_axis_off()
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
        across, down = x + width / 2, y + height / 2
        if text:
            self.text(across, down, text, color=text_color_on(color), fontsize=fontsize)
        return Box((x, down), (x + width, down), (across, y), (across, y + height))

    def names(self, x: float, names: Sequence[str], boxes: Sequence[tuple[float, float]]) -> None:
        """Write names that end at x, each level with the middle of its (top, height)."""
        for name, (top, height) in zip(names, boxes, strict=True):
            self.text(x, top + height / 2, name, ha="right")

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


def expect_within(low: int, high: int, **sizes: int) -> None:
    """Raise ValueError for a size that a drawing has no room for."""
    for name, size in sizes.items():
        if not low <= size <= high:
            raise ValueError(
                f"{name} is {size}; expected {low} to {high}, more do not fit a drawing"
            )
