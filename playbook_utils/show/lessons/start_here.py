"""Lesson 00: a ring, and the map of the course."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Circle, FancyArrowPatch
from matplotlib.path import Path

from playbook_utils.show.canvas import Canvas, expect_within
from playbook_utils.show.style import INK, Picture, color_of, rank_color, text_color_on

__all__ = ["course_map", "ring"]


def ring(arrows: Mapping[str, str], *, title: str = "", middle: str = "") -> Picture:
    """Nodes in a circle, clockwise, an arrow from each to the next: {node: what its arrow says}.

    middle: what stands inside the ring. ValueError for fewer than 3 nodes or more than 6.
    """
    expect_within(3, 6, nodes=len(arrows))
    canvas, x, y, radius = Canvas(width=14, height=6.6, title=title), 7.0, 3.3, 2.35

    def at(turn: float, distance: float = radius) -> tuple[float, float]:
        return x + distance * math.sin(turn), y - distance * math.cos(turn)

    step, gap = 2 * math.pi / len(arrows), 0.4
    for place, (node, text) in enumerate(arrows.items()):
        color, turn = color_of(node, place), place * step
        canvas.axes.add_patch(Circle(at(turn), 0.85, facecolor=color, lw=0))
        canvas.text(*at(turn), node, color=text_color_on(color), fontsize=9)
        arc = [at(turn + gap + (step - 2 * gap) * i / 20) for i in range(21)]
        arrow = FancyArrowPatch(path=Path(arc), arrowstyle="-|>", color=INK, lw=1.8)
        arrow.set(mutation_scale=16)
        canvas.axes.add_patch(arrow)
        across, down = at(turn + step / 2, radius + 0.25)
        side = "center" if abs(across - x) < 0.1 else "left" if across > x else "right"
        over = "center" if side != "center" else "top" if down > y else "bottom"
        canvas.text(across, down, text, ha=side, va=over, fontsize=9.5)
    canvas.text(x, y, middle, fontsize=9.5)
    nodes = list(arrows)
    told = [f"{a} to {b}: {arrows[a]}" for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)]
    head = f"{title}. " if title else ""
    return canvas.picture(f"{head}In a circle: {'; '.join(told)}.".replace("\n", " "))


def course_map(lessons: Sequence[Mapping[str, Any]]) -> Picture:
    """All lessons, a column per part, each with its minutes.

    lessons: in reading order, each with "number", "title", "part" and "minutes" (None where the
    lesson is planned). Raises ValueError for no lesson and for a missing key.
    """
    parts = _parts(lessons)
    width, row, quiet = 16.0, 1.65, {"fontsize": 8, "color": "#666666"}
    column = width / len(parts)
    most = max(len(part) for part in parts.values())
    canvas = Canvas(width=width, height=0.7 + most * row, title="The course")
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
            name = f"{lesson['number']:02d} {lesson['title']}"
            name = "\n".join(textwrap.wrap(name, characters, max_lines=2, placeholder=" ..."))
            remark = "planned" if planned else f"{lesson['minutes']} min"
            ink = "#888888" if planned else INK
            canvas.text(x + 0.26, y + 0.12, name, ha="left", va="top", fontsize=8.5, color=ink)
            canvas.text(x + 0.26, y + row - 0.27, remark, ha="left", va="bottom", **quiet)
    titles = {part: ", ".join(str(of["title"]) for of in inside) for part, inside in parts.items()}
    named = "; ".join(f"{part}: {inside}" for part, inside in titles.items())
    return canvas.picture(f"Map of {len(lessons)} lessons. {named}.")


def _parts(lessons: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for lesson in lessons:
        missing = {"number", "title", "part", "minutes"} - set(lesson)
        if missing:
            raise ValueError(f"lesson {dict(lesson)} lacks {', '.join(sorted(missing))}")
        parts.setdefault(lesson["part"], []).append(lesson)
    if not parts:
        raise ValueError("no lessons to draw")
    return parts
