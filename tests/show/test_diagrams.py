"""Drawings of ideas: all texts inside their boxes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

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


@pytest.mark.parametrize("world_size", [1, 4, 8])
def test_data_parallelism_has_a_column_per_rank(world_size: int) -> None:
    picture = show.data_parallel_diagram(world_size)
    (axes,) = picture.figure.axes
    kinds = [type(patch) for patch in axes.patches]
    assert kinds.count(FancyBboxPatch) == 4 * world_size + 1
    assert kinds.count(FancyArrowPatch) == 4 * world_size
    assert flaws(picture) == []
    assert f"on {world_size} ranks" in repr(picture)


@pytest.mark.parametrize("world_size", [0, 9])
def test_more_ranks_than_fit_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size is {world_size}; expected 1 to 8"):
        show.data_parallel_diagram(world_size)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 2, 4), (16384, 8, 8)])
def test_every_sample_of_the_batch_is_in_one_box(sizes: tuple[int, int, int]) -> None:
    picture = show.batch_split(*sizes)
    (axes,) = picture.figure.axes
    ranges = [
        t.get_text().replace(",", "").replace("\n", "")
        for t in axes.texts
        if t.get_text()[0].isdigit()
    ]
    ends = sorted(tuple(int(n) for n in (r.split("-") * 2)[:2]) for r in ranges)
    assert ends[0][0] == 0 and ends[-1][1] == sizes[0] * sizes[1] * sizes[2] - 1
    assert all(b[0] == a[1] + 1 for a, b in pairwise(ends))
    assert len(ends) == sizes[1] * sizes[2]
    assert flaws(picture) == []
    with pytest.raises(ValueError, match="grad_accumulation is 9; expected 1 to 8"):
        show.batch_split(1, 9, 1)


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
