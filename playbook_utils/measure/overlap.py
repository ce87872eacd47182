"""How much communication is hidden behind compute, summed over spans of any origin.

    overlap_s(spans, rank=0), exposed_communication_s(spans, rank=0)

Left out: recording spans (`measure.traces`).
"""

from __future__ import annotations

from collections.abc import Iterable

from playbook_utils.events import Span

__all__ = ["exposed_communication_s", "overlap_s"]

_BUSY = ("forward", "backward", "optimizer", "compute")


def overlap_s(spans: Iterable[Span], rank: int) -> float:
    """Seconds in which `rank` both communicates and computes.

    Computing is any span of kind forward, backward, optimizer or compute, less the "idle" ones
    inside it (a backward that waits for an all_reduce does not compute).
    """
    communicating, computing = _communicating_and_computing(spans, rank)
    return _length(_intersect(communicating, computing))


def exposed_communication_s(spans: Iterable[Span], rank: int) -> float:
    """Seconds in which `rank` communicates and does not compute: what overlap would save."""
    communicating, computing = _communicating_and_computing(spans, rank)
    return _length(communicating) - _length(_intersect(communicating, computing))


_Intervals = list[tuple[float, float]]


def _communicating_and_computing(spans: Iterable[Span], rank: int) -> tuple[_Intervals, _Intervals]:
    mine = [span for span in spans if span.rank == rank]
    busy = _union(span for span in mine if span.kind in _BUSY)
    idle = _union(span for span in mine if span.kind == "idle")
    return _union(span for span in mine if span.kind == "communication"), _subtract(busy, idle)


def _union(spans: Iterable[Span]) -> _Intervals:
    merged: _Intervals = []
    for start, end in sorted((span.start_s, span.end_s) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _intersect(a: _Intervals, b: _Intervals) -> _Intervals:
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return [(start, end) for start, end in pairs if start < end]


def _subtract(a: _Intervals, b: _Intervals) -> _Intervals:
    for cut_start, cut_end in b:
        parts = [
            part
            for start, end in a
            for part in ((start, min(end, cut_start)), (max(start, cut_end), end))
        ]
        a = [(start, end) for start, end in parts if start < end]
    return a


def _length(intervals: _Intervals) -> float:
    return sum(end - start for start, end in intervals)
