"""Lesson 00: the map of the course."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from playbook_utils.show.canvas import Canvas
from playbook_utils.show.style import INK, Picture, rank_color

__all__ = ["course_map"]


def course_map(lessons: Sequence[Mapping[str, Any]]) -> Picture:
    """All lessons, a column per part, each with its minutes and what should come before it.

    lessons: in reading order, each with "number", "title", "part", "minutes" (None where the lesson
    is planned), and optionally "needs" (numbers of earlier lessons) and "gpu" (True where a GPU
    adds something).

    Raises ValueError for no lesson, a missing key, and for a lesson that needs one that is not
    before it.
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
            name, remark = _lesson_texts(lesson, characters)
            ink = "#888888" if planned else INK
            canvas.text(x + 0.26, y + 0.12, name, ha="left", va="top", fontsize=8.5, color=ink)
            canvas.text(x + 0.26, y + row - 0.27, remark, ha="left", va="bottom", **quiet)
    titles = {part: ", ".join(str(of["title"]) for of in inside) for part, inside in parts.items()}
    named = "; ".join(f"{part}: {inside}" for part, inside in titles.items())
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
