"""The map of the course: every lesson in its box, in an order that can be read."""

from __future__ import annotations

import pytest

from playbook_utils import show
from tests.show.drawn import flaws


def lessons(count: int, parts: int, title: str = "Context parallelism: ring attention") -> list:
    return [
        {
            "number": i,
            "title": title,
            "part": f"Part {i * parts // count}",
            "minutes": 10,
            "needs": range(min(i, 6)),
            "gpu": i % 2 == 0,
        }
        for i in range(count)
    ]


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (24, 3), (24, 6)])
def test_the_map_holds_every_lesson_in_its_box(count: int, parts: int) -> None:
    picture = show.course_map(lessons(count, parts))
    (axes,) = picture.figure.axes
    frames = [patch for patch in axes.patches if patch.get_width() > 0.2]
    assert len(frames) == count
    assert flaws(picture) == []
    edges = [frame.get_window_extent() for frame in frames]
    for text in axes.texts:
        if not text.get_text().startswith("Part"):
            box = text.get_window_extent()
            within = [e for e in edges if e.x0 <= box.x0 and box.x1 <= e.x1]
            assert any(e.y0 <= box.y0 and box.y1 <= e.y1 for e in within), text.get_text()


def test_the_map_refuses_lessons_out_of_order() -> None:
    first, second = lessons(2, 1)
    with pytest.raises(ValueError, match=r"lesson 1 needs \[0\], not found before it"):
        show.course_map([second, first])
    with pytest.raises(ValueError, match="lacks minutes"):
        show.course_map([{"number": 0, "title": "x", "part": "y"}])
    with pytest.raises(ValueError, match="no lessons"):
        show.course_map([])


def test_a_lesson_without_minutes_is_planned() -> None:
    lessons = [
        {"number": 0, "title": "start", "part": "a", "minutes": 20},
        {"number": 1, "title": "later", "part": "a", "minutes": None},
    ]
    texts = [text.get_text() for text in show.course_map(lessons).figure.axes[0].texts]
    assert "20 min" in texts and "planned" in texts
