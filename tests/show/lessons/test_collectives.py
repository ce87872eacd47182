"""Whose data is where."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch, Rectangle

from playbook_utils import show
from playbook_utils.show import origin_code, origins
from playbook_utils.show.style import KIND_COLORS, rank_color
from tests.show.drawn import flaws, texts


def codes(ranks: int, parts: int) -> list[list[int]]:
    return [[origin_code(r, p, parts) for p in range(parts)] for r in range(ranks)]


def summed(ranks: int, parts: int) -> list[list[int]]:
    columns = zip(*codes(ranks, parts), strict=True)
    return [[sum(column) for column in columns]] * ranks


def rgba(rank: int) -> tuple[float, ...]:
    return to_rgba(rank_color(rank))


def arrows(picture: show.Picture) -> list[tuple[float, float]]:
    """(y of the start, y of the end) of each arrow, in rows."""
    (axes,) = picture.figure.axes
    ends = [p._posA_posB for p in axes.patches if isinstance(p, FancyArrowPatch)]
    return sorted((round(a[1] - 1.45), round(b[1] - 1.45)) for a, b in ends)


def test_codes_and_their_sums_tell_where_they_come_from() -> None:
    assert origins(origin_code(2, 1, 3), 3) == ((2, 1),)
    for parts in (1, 3, 5):
        everything = [(r, p) for r in range(4) for p in range(parts)]
        total = sum(origin_code(r, p, parts) for r, p in everything)
        assert list(origins(total, parts)) == everything
    assert origins(0, 3) == ()


@pytest.mark.parametrize(("rank", "part", "parts"), [(-1, 0, 3), (0, 3, 3), (0, -1, 3), (21, 0, 3)])
def test_codes_that_do_not_fit_are_refused(rank: int, part: int, parts: int) -> None:
    with pytest.raises(ValueError, match="expected a part below"):
        origin_code(rank, part, parts)
    with pytest.raises(ValueError, match="negative"):
        origins(-1, 3)


def test_boxes_have_the_colours_of_those_who_contributed() -> None:
    picture = show.pieces({"all_reduce": [codes(3, 3), summed(3, 3)]}, parts=3)
    (axes,) = picture.figure.axes
    stripes = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_fill()]
    colors = [tuple(round(c, 3) for c in p.get_facecolor()[:3]) for p in stripes]
    for rank in range(3):
        rgb = tuple(round(int(rank_color(rank)[i : i + 2], 16) / 255, 3) for i in (1, 3, 5))
        # Before: its own three boxes. After: a stripe in each of nine.
        assert colors.count(rgb) == 3 + 9
    heights = [round(p.get_height(), 3) for p in stripes]
    assert heights.count(0.9) == 9 and heights.count(0.3) == 27  # whole boxes, then thirds
    places = {(round(p.get_x(), 3), round(p.get_y(), 3)) for p in stripes}
    assert len(places) == len(stripes)  # side by side, none hidden by another
    for rank in range(3):  # before: one row a rank, one column a part
        left = sorted(p.get_x() for p in stripes)[0]
        row = [p for p in stripes if p.get_height() == 0.9 and p.get_facecolor() == rgba(rank)]
        assert [round(p.get_x() - left, 3) for p in row] == [0, 1, 2]
        assert {round(p.get_y() - stripes[0].get_y(), 3) for p in row} == {rank}
    labels = {t.get_text() for t in texts(picture)}
    assert {"A0", "B1", "C2", "all_reduce", "rank 0", "rank 1", "rank 2"} <= labels
    new = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_linewidth() > 1]
    assert len(new) == 9 and not any(p.get_fill() for p in new)
    assert {p.get_edgecolor() for p in new} == {to_rgba(KIND_COLORS["communication"])}


def test_arrows_lead_from_whose_data_it_is() -> None:
    before = codes(3, 1)
    gathered = [[1, 2, 4], before[1], before[2]]
    picture = show.pieces({"gather": [before, gathered]}, parts=1)
    assert arrows(picture) == [(1, 0), (2, 0)]
    (axes,) = picture.figure.axes
    drawn = [p for p in axes.patches if isinstance(p, FancyArrowPatch)]
    assert [p.get_edgecolor() for p in drawn] == [rgba(1), rgba(2)]  # of those who send
    same = show.pieces({"nothing": [before, before]}, parts=1)
    assert arrows(same) == []
    own = show.pieces({"made here": [[[0], [0]], codes(2, 1)]}, parts=1)
    assert arrows(own) == []  # nobody sent it


def test_given_messages_are_drawn_instead() -> None:
    states = [codes(3, 3), codes(3, 3), summed(3, 3)]
    steps = [[(0, 1), (0, 1)], [(2, 0)]]
    picture = show.pieces({"ring": states}, parts=3, messages={"ring": steps})
    assert arrows(picture) == [(0, 1), (2, 0)]


@pytest.mark.parametrize(("stories", "columns", "ranks"), [(1, 1, 2), (8, 4, 3), (2, 1, 5)])
def test_it_stays_readable(stories: int, columns: int, ranks: int) -> None:
    one = [codes(ranks, ranks), summed(ranks, ranks)]
    picture = show.pieces({f"story {i}": one for i in range(stories)}, parts=ranks, columns=columns)
    assert flaws(picture) == []
    assert "story 0" in repr(picture)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="no stories"):
        show.pieces({}, parts=3)
    with pytest.raises(ValueError, match=r"states of \[2, 3\] ranks"):
        show.pieces({"a": [codes(2, 2), codes(3, 2)]}, parts=2)
    with pytest.raises(ValueError, match="messages of 2 steps"):
        show.pieces({"a": [codes(2, 2)] * 2}, parts=2, messages={"a": [[], []]})


SIZES = [4**i for i in range(1, 12)]
CURVES = {"ring": [1e-4 + n / 1e9 for n in SIZES], "tree": [1e-5 + n / 1e8 for n in SIZES]}


def by_size(curves: dict, sizes: list[int], points: dict | None = None, **how: Any) -> show.Picture:
    """Lines over the sizes of messages, as in the lesson."""
    over, rings = ({k: (sizes, v) for k, v in (what or {}).items()} for what in (curves, points))
    how |= {"logx": True, "logy": True, "xunit": "bytes", "xlabel": "message"}
    return show.lines(over, points=rings, **how)


def test_points_have_the_colour_of_their_curve() -> None:
    measured = [10 * value for value in CURVES["tree"]]
    picture = by_size(CURVES, SIZES, points={"tree": measured}, ylabel="time (s)")
    (axes,) = picture.figure.axes
    ring, tree, dots = axes.lines[:3]
    for line, label in ((ring, "ring"), (tree, "tree")):
        assert list(line.get_xdata()) == SIZES and list(line.get_ydata()) == CURVES[label]
    assert list(dots.get_ydata()) == measured and dots.get_linestyle() == "None"
    assert dots.get_markeredgecolor() == tree.get_color() != ring.get_color()
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert repr(picture) == "time (s) over message; drawn: ring, tree."


@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1], [2**i for i in range(31)]])
def test_any_sizes_stay_readable(sizes: list[int]) -> None:
    curves = {"ring": [float(n) for n in sizes], "tree": [2.0 * n for n in sizes]}
    picture = by_size(curves, sizes, ylabel="bus bandwidth (GB/s)", hline={"link": 9.0})
    assert flaws(picture) == []
    (dashes,) = [line for line in picture.figure.axes[0].lines if line.get_linestyle() == "--"]
    assert set(dashes.get_ydata()) == {9.0}
    shown = {text.get_text() for text in texts(picture)}
    assert {f"{sizes[0]} B"} <= shown


def test_the_first_drawing_shows_that_all_get_the_sum() -> None:
    picture = show.all_reduce_diagram()
    assert flaws(picture) == []
    shown = [text.get_text() for text in texts(picture)]
    assert shown.count("111   222   333") == 3 and "100   200   300" in shown


def test_what_is_new_has_another_colour_in_a_scatter_than_in_a_gather() -> None:
    steps = [[(0, 1), (1, 2), (2, 0)]]
    for name, kind in (("reduce-scatter", "scatter"), ("all-gather", "gather")):
        picture = show.pieces({name: [codes(3, 3), summed(3, 3)]}, parts=3, messages={name: steps})
        (axes,) = picture.figure.axes
        new = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_linewidth() > 1]
        drawn = [p for p in axes.patches if isinstance(p, FancyArrowPatch)]
        found = {p.get_edgecolor() for p in [*new, *drawn]}
        assert found == {to_rgba(KIND_COLORS[kind])} and len(new) == 9 and len(drawn) == 3
