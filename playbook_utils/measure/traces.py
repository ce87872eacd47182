"""What ran when on each rank, recorded by hand, and how much of it ran at the same time.

    trace = TraceRecorder(rank=dist.get_rank())
    with trace.span("backward", kind="backward"):
        loss.backward()
    return trace.spans                            # from a worker

    spans = merge_spans(launch(train, world_size=4))
    overlap_s(spans, rank=0), exposed_communication_s(spans, rank=0)

Times are seconds of the host's monotonic clock, which all processes of one machine share, so that
`merge_spans` only has to move the common zero. Left out: a GPU's own times, which torch's profiler
knows, and files (`measure.chrome` for both); drawing (`show`); the clocks of several machines.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from playbook_utils.events import Span
from playbook_utils.measure.chrome import KINDS

__all__ = ["TraceRecorder", "exposed_communication_s", "merge_spans", "overlap_s"]


class TraceRecorder:
    """Collects the spans of one rank; only tests need another `clock` (seconds)."""

    def __init__(self, rank: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        if type(rank) is not int or rank < 0:
            raise ValueError(f"rank is {rank!r}: expected a whole number, at least 0")
        self.rank, self.clock = rank, clock
        self._spans: list[Span] = []

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans so far, by their start."""
        return tuple(sorted(self._spans, key=lambda span: (span.start_s, -span.end_s)))

    @contextmanager
    def span(self, name: str, kind: str = "compute", lane: str = "compute") -> Iterator[None]:
        """Record the block as one span. ValueError for a kind that is not in `KINDS`."""
        _check_kind(kind)
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(name, kind, start_s, self.clock(), lane)

    def add(
        self, name: str, kind: str, start_s: float, end_s: float, lane: str = "compute"
    ) -> None:
        """Record a span whose times (seconds of `clock`) are already known; from any thread."""
        _check_kind(kind)
        if end_s < start_s:
            raise ValueError(f"span {name!r} ends at {end_s} s, before its start {start_s} s")
        self._spans.append(Span(self.rank, name, kind, start_s, end_s, lane))


def merge_spans(spans_per_rank: Iterable[Sequence[Span]]) -> tuple[Span, ...]:
    """One timeline of several ranks' spans, its zero at the earliest start."""
    spans = [span for one_rank in spans_per_rank for span in one_rank]
    zero = min((span.start_s for span in spans), default=0.0)
    return tuple(
        replace(span, start_s=span.start_s - zero, end_s=span.end_s - zero) for span in spans
    )


def overlap_s(spans: Iterable[Span], rank: int) -> float:
    """Seconds in which `rank` both communicates and computes.

    Computing is any span of kind forward, backward, optimizer or compute, less the "idle" ones
    inside it (a backward that waits for an all_reduce does not compute).
    """
    return _communication_s(spans, rank, computing=True)


def exposed_communication_s(spans: Iterable[Span], rank: int) -> float:
    """Seconds in which `rank` communicates and does not compute: what overlap would save."""
    return _communication_s(spans, rank, computing=False)


def _communication_s(spans: Iterable[Span], rank: int, computing: bool) -> float:
    mine = [span for span in spans if span.rank == rank]
    edges = [(span.start_s, span.kind, 1) for span in mine]
    edges += [(span.end_s, span.kind, -1) for span in mine]
    active: Counter[str] = Counter()
    total_s = last_s = 0.0
    for time_s, kind, step in sorted(edges):
        busy = not active["idle"] and active.total() > active["communication"]
        if active["communication"] and busy == computing:
            total_s += time_s - last_s
        active[kind] += step
        last_s = time_s
    return total_s


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}: expected one of {', '.join(KINDS)}")
