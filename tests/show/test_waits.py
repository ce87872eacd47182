"""Waits cut out of spans: nothing is lost but the waits."""

from __future__ import annotations

from playbook_utils.events import Span
from playbook_utils.show import without_waits

FORWARD = Span(0, "forward", "forward", 0.0, 10.0)
SENT = Span(0, "all_gather", "communication", 1.0, 5.0, lane="communication")


def idle(start_s: float, end_s: float, rank: int = 0) -> Span:
    return Span(rank, "wait", "idle", start_s, end_s)


def times(*spans: Span) -> list[tuple[float, float]]:
    found = without_waits(spans)
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
    assert without_waits([FORWARD]) == (FORWARD,)
