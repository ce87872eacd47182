"""Bars of the timeline: one a span, where the span is, in the colour of its kind."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from playbook_utils import show
from playbook_utils.events import Span
from playbook_utils.show.style import KIND_COLORS
from tests.show.drawn import boxes, flaws


def step(rank: int) -> list[Span]:
    """One step of a rank: forward, two backward halves with their all_reduce beside."""
    spans = [Span(rank, "forward", "forward", 0.0, 0.02)]
    for i in range(2):
        start = 0.02 + 0.02 * i
        spans.append(Span(rank, f"backward {i}", "backward", start, start + 0.02))
        beside = (start + 0.02, start + 0.03, "communication")
        spans.append(Span(rank, f"all_reduce bucket {i}", "communication", *beside))
    return [*spans, Span(rank, "optimizer", "optimizer", 0.072, 0.08)]


def bars(picture: show.Picture) -> list[Rectangle]:
    """The bars of spans; those of the idle background have no label of their own."""
    (axes,) = picture.figure.axes
    return [bar for bar in axes.patches if not bar.get_label().startswith("_")]


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_every_span_is_a_bar_at_its_place_in_its_colour(world_size: int) -> None:
    spans = [span for rank in range(world_size) for span in step(rank)]
    picture = show.timeline(spans, title="A step")
    drawn = bars(picture)
    assert len(drawn) == len(spans)
    expected = sorted(
        (s.name, round(s.start_s * 1e3, 6), round(s.duration_s * 1e3, 6)) for s in spans
    )
    found = sorted((b.get_label(), round(b.get_x(), 6), round(b.get_width(), 6)) for b in drawn)
    assert found == expected
    kinds = {span.name: span.kind for span in spans}
    for bar in drawn:
        assert to_hex(bar.get_facecolor()).upper() == KIND_COLORS[kinds[bar.get_label()]]


def test_rows_are_ranks_and_lanes_from_the_top() -> None:
    picture = show.timeline([*step(1), *step(0)])
    (axes,) = picture.figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["rank 0   compute", "communication", "rank 1   compute", "communication"]
    rows = {bar.get_label(): round(bar.get_y() + bar.get_height() / 2) for bar in bars(picture)}
    assert rows["forward"] == 2 and rows["all_reduce bucket 1"] == 3
    assert axes.get_ylim() == (3.5, -0.5) and axes.get_xlabel() == "time (ms)"


def test_idle_time_of_the_compute_lane_is_coloured() -> None:
    (axes,) = show.timeline(step(0)).figure.axes
    (idle,) = [bar for bar in axes.patches if bar.get_label().startswith("_")]
    assert to_hex(idle.get_facecolor()).upper() == KIND_COLORS["idle"]
    assert (idle.get_x(), idle.get_width()) == pytest.approx((0.0, 80.0))
    assert axes.get_xlim() == pytest.approx((0.0, 80.0))


def test_spans_that_overlap_in_a_lane_do_not_cover_each_other() -> None:
    spans = [Span(0, f"{i}", "communication", 0.01 * i, 0.01 * i + 0.025) for i in range(4)]
    drawn = bars(show.timeline(spans))
    for i, first in enumerate(drawn):
        for second in drawn[i + 1 :]:
            box, other = first.get_bbox(), second.get_bbox()
            apart = box.x1 <= other.x0 + 1e-9 or box.y1 <= other.y0 + 1e-9
            assert apart or other.y1 <= box.y0 + 1e-9


def test_names_are_shortened_to_fit_their_bars() -> None:
    picture = show.timeline([span for rank in range(4) for span in step(rank)])
    names = {text for text, _ in boxes(picture)}
    assert {"forward", "backward 0"} <= names and "bucket 1" not in names
    (axes,) = picture.figure.axes
    found = {bar.get_window_extent().bounds: bar for bar in bars(picture)}
    for text in axes.texts:
        box = text.get_window_extent()
        assert any(x <= box.x0 and box.x1 <= x + w for x, _, w, _ in found), text.get_text()


@pytest.mark.parametrize("num_ranks", [1, 8, 64])
def test_two_hundred_spans_stay_readable(num_ranks: int) -> None:
    spans = [
        Span(i % num_ranks, f"operation {i}", list(KIND_COLORS)[i % 5], 1e-3 * i, 1e-3 * i + length)
        for i, length in enumerate([1e-7, 1e-4, 3e-3] * 67)
    ]
    picture = show.timeline(spans, title="Many")
    assert flaws(picture, least_points=6) == []
    (axes,) = picture.figure.axes
    pixel = 201 / axes.get_window_extent().width
    assert min(bar.get_width() for bar in bars(picture)) >= pixel


def test_a_single_moment_can_be_drawn() -> None:
    (bar,) = bars(show.timeline([Span(3, "now", "compute", 1.0, 1.0)]))
    assert bar.get_x() == 1000.0


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(ValueError, match="no spans to draw"):
        show.timeline([])
    with pytest.raises(ValueError, match="kind 'sleep'; expected one of: forward, backward"):
        show.timeline([Span(2, "nap", "sleep", 0, 1)])
    with pytest.raises(ValueError, match=r"'x' of rank 2 ends at 0 s, before it starts at 1 s"):
        show.timeline([Span(2, "x", "compute", 1, 0)])


def test_the_description_holds_no_measured_time() -> None:
    picture = show.timeline(step(0), title="A step")
    assert repr(picture) == (
        "A step: timeline of rank 0, with forward, backward, optimizer, communication."
    )
    assert repr(show.timeline(step(0), description="My words.")) == "My words."
