"""Spans by a clock that the test turns, sums by counting, files by reading them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from playbook_utils.events import Span
from playbook_utils.measure import (
    TraceRecorder,
    exposed_communication_s,
    merge_spans,
    overlap_s,
    spans_from_profiler,
    write_chrome_trace,
)


def ticking(rank: int = 0, start: int = 0) -> TraceRecorder:
    """A recorder whose clock goes on by one second with each look at it."""
    ticks = itertools.count(start)
    return TraceRecorder(rank, clock=lambda: float(next(ticks)))


def test_spans_nest_and_are_sorted_by_their_start() -> None:
    trace = ticking(rank=3)
    with trace.span("step"), trace.span("inner", kind="forward", lane="other"):
        pass
    trace.add("sent", "communication", 0.5, 2.5, lane="communication")
    assert trace.spans == (
        Span(3, "step", "compute", 0.0, 3.0),
        Span(3, "sent", "communication", 0.5, 2.5, "communication"),
        Span(3, "inner", "forward", 1.0, 2.0, "other"),
    )


def test_a_span_ends_when_its_block_fails() -> None:
    trace = ticking()
    with pytest.raises(KeyError), trace.span("step"):
        raise KeyError
    assert trace.spans == (Span(0, "step", "compute", 0.0, 1.0),)


def test_merging_moves_the_common_zero() -> None:
    ranks = [[Span(0, "a", "compute", 10.0, 11.0)], [Span(1, "b", "idle", 9.5, 12.0)], []]
    assert merge_spans(ranks) == (
        Span(0, "a", "compute", 0.5, 1.5),
        Span(1, "b", "idle", 0.0, 2.5),
    )
    assert merge_spans([]) == ()


SPANS = (
    Span(0, "backward", "backward", 0.0, 6.0),
    Span(0, "layers.1", "backward", 1.0, 3.0),  # inside: counted once
    Span(0, "wait", "idle", 4.0, 5.0),
    Span(0, "bucket 0", "communication", 2.0, 4.5, "communication"),
    Span(0, "bucket 1", "communication", 4.5, 8.0, "communication"),
    Span(1, "other rank", "compute", 0.0, 8.0),
)


def test_overlap_leaves_out_waiting_and_other_ranks() -> None:
    # Communication [2, 8); compute [0, 4) and [5, 6).
    assert overlap_s(SPANS, rank=0) == pytest.approx(3.0)
    assert exposed_communication_s(SPANS, rank=0) == pytest.approx(3.0)
    assert overlap_s(SPANS, rank=1) == exposed_communication_s(SPANS, rank=1) == 0.0


def test_overlap_against_counting_small_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = ("forward", "compute", "idle", "communication")
    for _ in range(20):
        picks = torch.randint(0, 50, (8, 3), generator=generator).tolist()
        spans = [Span(0, "", kinds[k % 4], min(a, b), max(a, b)) for a, b, k in picks]

        def active(second: int, *wanted: str, among: list[Span] = spans) -> bool:
            return any(s.kind in wanted and s.start_s <= second < s.end_s for s in among)

        both = alone = 0
        for second in range(50):
            computing = active(second, "forward", "compute") and not active(second, "idle")
            both += active(second, "communication") and computing
            alone += active(second, "communication") and not computing
        assert overlap_s(spans, 0) == both
        assert exposed_communication_s(spans, 0) == alone


def test_a_chrome_trace_names_ranks_and_lanes(tmp_path: Path) -> None:
    path = write_chrome_trace(SPANS, tmp_path / "new folder" / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    complete = [(e["pid"], e["name"], e["cat"]) for e in events if e["ph"] == "X"]
    assert complete == [(s.rank, s.name, s.kind) for s in SPANS]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["process_name", 1, 0] == "rank 1"
    assert names["thread_name", 0, 0] == "compute"
    assert names["thread_name", 1, 1] == "communication"
    (bucket,) = [e for e in events if e["name"] == "bucket 1"]
    assert (bucket["ts"], bucket["dur"], bucket["pid"], bucket["tid"]) == (4.5e6, 3.5e6, 0, 1)


def test_bad_spans_are_errors() -> None:
    trace = ticking()
    with (
        pytest.raises(ValueError, match=r"unknown kind 'comm'.*communication"),
        trace.span("x", "comm"),
    ):
        pass
    with pytest.raises(ValueError, match="ends at 1"):
        trace.add("x", "idle", 2.0, 1.0)
    with pytest.raises(ValueError, match="rank is -1"):
        TraceRecorder(-1)
    assert trace.spans == ()


def test_spans_from_the_profiler() -> None:
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with record_function("forward 0"):
            torch.ones(4, 4) @ torch.ones(4, 4)
        with record_function("loading"):
            torch.ones(3)
    spans = spans_from_profiler(prof, rank=1)
    assert [(s.rank, s.name, s.kind, s.lane) for s in spans] == [
        (1, "forward 0", "forward", "compute"),
        (1, "loading", "compute", "compute"),
    ]
    assert spans[0].start_s <= spans[0].end_s <= spans[1].start_s


def test_torchs_own_blocks_do_not_cover_the_gaps() -> None:
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    linear = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters())
    once = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=once) as prof:
        for _ in range(3):
            with record_function("optimizer"):
                optimizer.step()
            prof.step()
    assert any(event.name.startswith("ProfilerStep") for event in prof.events())
    assert any(event.name.startswith("Optimizer.step") for event in prof.events())
    assert [span.name for span in spans_from_profiler(prof, rank=0)] == ["optimizer"] * 2


def test_operators_from_the_profiler_are_those_that_were_called_from_outside() -> None:
    from torch.profiler import ProfilerActivity, profile, record_function

    weight = torch.ones(4, 4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        with record_function("forward"), record_function("layer 0"):
            loss = torch.nn.functional.linear(torch.ones(3, 4), weight).sum()
        with record_function("backward"):
            loss.backward()
        torch.ones(2)
    spans = [s for s in spans_from_profiler(prof, 0, operators=True) if s.lane == "operators"]
    by_kind = {kind: [s.name for s in spans if s.kind == kind] for kind in ("forward", "compute")}
    # linear calls t, matmul and mm, which calls more: only linear is a span.
    assert by_kind["forward"] == ["aten::ones", "aten::linear", "aten::sum"]
    assert by_kind["compute"] == ["aten::ones"]
    backward = [s.name for s in spans if s.kind == "backward"]
    assert backward.count("aten::mm") == 1 and "aten::expand" in backward
    assert not any("autograd" in s.name or "Backward0" in s.name for s in spans)
    assert "operators" not in {s.lane for s in spans_from_profiler(prof, 0)}
