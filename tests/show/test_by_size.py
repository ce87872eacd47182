"""Curves and points over message sizes."""

from __future__ import annotations

import pytest

from playbook_utils import show
from tests.show.drawn import flaws, texts

SIZES = [4**i for i in range(1, 12)]
CURVES = {"ring": [1e-4 + n / 1e9 for n in SIZES], "tree": [1e-5 + n / 1e8 for n in SIZES]}


def test_points_have_the_colour_of_their_curve_and_all_is_within_the_axes() -> None:
    measured = [10 * value for value in CURVES["tree"]]
    picture = show.by_size(CURVES, SIZES, points={"tree": measured}, ylabel="time (s)")
    (axes,) = picture.figure.axes
    ring, tree, dots = axes.lines[:3]
    for line, label in ((ring, "ring"), (tree, "tree")):
        assert list(line.get_xdata()) == SIZES and list(line.get_ydata()) == CURVES[label]
    assert list(dots.get_ydata()) == measured and dots.get_linestyle() == "None"
    assert dots.get_color() == tree.get_color() != ring.get_color()
    low, high = axes.get_ylim()
    assert low < 1e-5 and high > max(measured)
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert repr(picture) == "time (s) over the size of a message: ring, tree."


def test_labels_stand_at_the_ends_of_their_lines() -> None:
    picture = show.by_size(CURVES, SIZES, points={"tree": [1.0] * 11}, ylabel="time (s)")
    (axes,) = picture.figure.axes
    picture.figure.draw_without_rendering()
    renderer = picture.figure.canvas.get_renderer()
    for label, values in CURVES.items():
        (text,) = [t for t in texts(picture) if t.get_text() == label]
        box = text.get_window_extent(renderer)
        end = axes.transData.transform((SIZES[-1], values[-1]))
        assert abs((box.y0 + box.y1) / 2 - end[1]) < 2 * box.height


@pytest.mark.parametrize("sizes", [SIZES, SIZES[:1], [2**i for i in range(31)]])
def test_any_sizes_stay_readable(sizes: list[int]) -> None:
    curves = {"ring": [float(n) for n in sizes], "tree": [2.0 * n for n in sizes]}
    picture = show.by_size(curves, sizes, ylabel="bus bandwidth (GB/s)", hline={"link": 9.0})
    assert flaws(picture) == []
    (dashes,) = [line for line in picture.figure.axes[0].lines if line.get_linestyle() == "--"]
    assert set(dashes.get_ydata()) == {9.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, SIZES), "0 curves over sizes"),
        (({"a": []}, []), "expected at least one curve"),
        (({"a": [1.0, 1.0]}, [8, 4]), "positive and ascending"),
        (({"a": [1.0]}, [4, 8]), "'a' has 1 values for 2 sizes"),
        (({"a": [1.0, 0.0]}, [4, 8]), "'a' has the value 0.0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        show.by_size(*arguments, ylabel="y")


def test_points_need_a_curve() -> None:
    with pytest.raises(ValueError, match=r"points of \['b'\] have no curve"):
        show.by_size({"a": [1.0]}, [4], points={"b": [1.0]}, ylabel="y")
    with pytest.raises(ValueError, match="'link' has the value 0"):
        show.by_size({"a": [1.0]}, [4], hline={"link": 0.0}, ylabel="y")
