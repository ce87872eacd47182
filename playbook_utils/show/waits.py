"""Spans made ready to be drawn: where a rank waits inside a long span, the span is cut.

    show.timeline(show.without_waits(spans))

A forward that stops for a layer's weights is one span with an "idle" one inside it. Drawn as it
is, the two share the height of the row; cut, the row shows grey where the rank waits. Left out:
sums over spans, which take waits into account themselves (`measure.overlap`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from playbook_utils.events import Span

__all__ = ["without_waits"]


def without_waits(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans without the idle ones, those of a lane "compute" cut where their rank is idle."""
    spans = tuple(spans)
    kept = []
    for span in spans:
        if span.kind == "idle":
            continue
        pieces = [span]
        if span.lane == "compute":
            for wait in spans:
                if wait.kind == "idle" and wait.rank == span.rank:
                    pieces = [part for piece in pieces for part in _cut(piece, wait)]
        kept += pieces
    return tuple(kept)


def _cut(span: Span, wait: Span) -> list[Span]:
    before = replace(span, end_s=min(span.end_s, wait.start_s))
    after = replace(span, start_s=max(span.start_s, wait.end_s))
    return [piece for piece in (before, after) if piece.start_s < piece.end_s]
