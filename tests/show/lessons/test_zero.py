"""ZeRO's stages, drawn to scale; and waits cut out of spans: nothing is lost but the waits."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch

from playbook_utils.events import Span
from playbook_utils.show import color_of, gathers_and_scatters, zero_diagram
from tests.show.drawn import flaws, texts


def widths(world_size: int, kind: str) -> list[float]:
    axes = zero_diagram(world_size).figure.axes[0]
    color = color_of(kind).lower()
    boxes = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    return [box.get_width() for box in boxes if to_hex(box.get_facecolor()) == color]


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize(("kind", "size", "first"), [
    ("params", 2, 3), ("grads", 2, 2), ("optimizer_states", 12, 1),
])  # fmt: skip
def test_widths_are_bytes(world_size: int, kind: str, size: int, first: int) -> None:
    found = widths(world_size, kind)
    assert len(found) == 4 * world_size
    for stage in range(4):
        part = found[stage * world_size : (stage + 1) * world_size]
        expected = size / (world_size if stage >= first else 1)
        assert part == pytest.approx([expected] * world_size, rel=0.04)  # a gap between boxes


def test_bytes_are_written_beside_the_stages() -> None:
    said = " ".join(text.get_text() for text in texts(zero_diagram(4)))
    assert [f"{size} bytes" in said for size in (16, 7, 5.5, 4)] == [True] * 4


@pytest.mark.parametrize("world_size", [1, 4, 8])
def test_drawing_is_readable(world_size: int) -> None:
    assert flaws(zero_diagram(world_size)) == []


@pytest.mark.parametrize("world_size", [0, 9])
def test_too_many_ranks_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 8"):
        zero_diagram(world_size)


FORWARD = Span(0, "forward", "forward", 0.0, 10.0)
SENT = Span(0, "barrier", "communication", 1.0, 5.0, lane="communication")


def idle(start_s: float, end_s: float, rank: int = 0) -> Span:
    return Span(rank, "wait", "idle", start_s, end_s)


def times(*spans: Span) -> list[tuple[float, float]]:
    found = gathers_and_scatters(spans)
    assert all(span.kind != "idle" for span in found)
    return [(span.start_s, span.end_s) for span in found]


def test_a_wait_inside_parts_a_span() -> None:
    assert times(FORWARD, idle(2, 3), idle(6, 8)) == [(0, 2), (3, 6), (8, 10)]


def test_waits_at_the_ends_and_overlapping_ones() -> None:
    assert times(FORWARD, idle(-1, 1), idle(5, 7), idle(6, 8), idle(9, 12)) == [(1, 5), (8, 9)]


def test_a_span_that_only_waits_goes() -> None:
    assert times(FORWARD, idle(0, 10)) == []


def test_other_ranks_and_lanes_are_left_alone() -> None:
    assert times(FORWARD, SENT, idle(2, 3, rank=1)) == [(0, 10), (1, 5)]
    assert times(SENT, idle(2, 3)) == [(1, 5)]
    assert gathers_and_scatters([FORWARD]) == (FORWARD,)


def test_gathers_and_scatters_are_told_apart() -> None:
    names = ("all_gather_single 3", "reduce_scatter_single", "all_reduce")
    spans = [Span(0, name, "communication", 0, 1, lane="communication") for name in names]
    kinds = [span.kind for span in gathers_and_scatters(spans)]
    assert kinds == ["gather", "scatter", "communication"]
    assert len({color_of(kind) for kind in kinds}) == 3
