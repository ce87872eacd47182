"""The map of the course: every lesson in its box. The ring: an arrow from each to the next."""

from __future__ import annotations

import pytest
from matplotlib.patches import Circle, FancyArrowPatch

from playbook_utils import show
from tests.show.drawn import flaws


def lessons(count: int, parts: int, title: str = "Context parallelism: ring attention") -> list:
    return [
        {
            "number": i,
            "title": title,
            "part": f"Part {i * parts // count}",
            "minutes": 10,
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


def test_the_map_refuses_what_it_cannot_draw() -> None:
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


@pytest.mark.parametrize("size", [3, 4, 6])
def test_each_arrow_of_the_ring_leads_to_the_right_hand_neighbour(size: int) -> None:
    picture = show.ring({f"rank {r}": f"part {r}" for r in range(size)}, title="One step")
    (axes,) = picture.figure.axes
    nodes = [patch.center for patch in axes.patches if isinstance(patch, Circle)]
    arcs = [p._path_original.vertices for p in axes.patches if isinstance(p, FancyArrowPatch)]
    assert len(nodes) == len(arcs) == size

    def nearest(point: tuple[float, float]) -> int:
        return min(
            range(size),
            key=lambda i: (nodes[i][0] - point[0]) ** 2 + (nodes[i][1] - point[1]) ** 2,
        )

    assert [(nearest(arc[0]), nearest(arc[-1])) for arc in arcs] == [
        (rank, (rank + 1) % size) for rank in range(size)
    ]
    assert flaws(picture) == []
    assert f"rank {size - 1} to rank 0: part {size - 1}." in repr(picture)


def test_a_ring_has_three_nodes_at_least() -> None:
    with pytest.raises(ValueError, match="nodes is 2; expected 3 to 6"):
        show.ring({"a": "", "b": ""})
