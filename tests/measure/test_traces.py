"""Spans by a clock that the test turns, module hooks by their order, files by reading them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from playbook_utils.events import Span
from playbook_utils.measure import (
    TraceRecorder,
    exposed_communication_s,
    merge_spans,
    overlap_s,
    read_chrome_trace,
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


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        out: torch.Tensor = self.head(x)
        return out


def train(model: nn.Module, trace: TraceRecorder, **watch: Any) -> list[tuple[str, str]]:
    with trace.watch_module(model, **watch):
        model(torch.tensor([1, 2])).sum().backward()
    model(torch.tensor([1, 2])).sum().backward()  # not watched any more
    return [(span.kind, span.name) for span in trace.spans]


def test_modules_are_watched_forward_and_backward() -> None:
    trace = ticking()
    parts = ["embedding", "layers.0", "layers.1", "head"]
    assert train(Net(), trace) == [
        *(("forward", name) for name in parts),
        *(("backward", name) for name in reversed(parts)),
    ]
    by_name = {(s.kind, s.name): s for s in trace.spans}
    for earlier, later in itertools.pairwise(parts):
        assert by_name["forward", earlier].end_s <= by_name["forward", later].start_s
        assert by_name["backward", later].start_s < by_name["backward", earlier].start_s


def test_a_checkpointed_module_runs_forward_again() -> None:
    seen = train(Net(recompute=True), ticking())
    assert [name for kind, name in seen if kind == "backward"] == [
        *("head", "layers.1", "layers.0", "embedding")
    ]
    assert [name for kind, name in seen if kind == "forward"] == [
        *("embedding", "layers.0", "layers.1", "head", "layers.1 again", "layers.0 again")
    ]


def test_watching_chosen_modules_changes_no_gradient() -> None:
    torch.manual_seed(0)
    model = Net()
    model(torch.tensor([1, 2])).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    trace = ticking()
    with trace.watch_module(model, select=lambda name, _: name == "layers"):
        pass  # a ModuleList is never called
    with trace.watch_module(model, select=lambda name, _: name == ""):
        model(torch.tensor([1, 2])).sum().backward()
    assert [(s.kind, s.name) for s in trace.spans] == [("forward", ""), ("backward", "")]
    for p, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=0, atol=0)


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


def test_a_chrome_trace_comes_back_and_names_ranks_and_lanes(tmp_path: Path) -> None:
    path = write_chrome_trace(SPANS, tmp_path / "new folder" / "trace.json")
    back = read_chrome_trace(path)
    assert [(s.rank, s.name, s.kind, s.lane) for s in back] == [
        (s.rank, s.name, s.kind, s.lane) for s in SPANS
    ]
    for ours, theirs in zip(SPANS, back, strict=True):
        assert (theirs.start_s, theirs.end_s) == pytest.approx((ours.start_s, ours.end_s))
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["process_name", 1, 0] == "rank 1"
    assert names["thread_name", 0, 0] == "compute"
    (bucket,) = [e for e in events if e["name"] == "bucket 1"]
    assert (bucket["ts"], bucket["dur"], bucket["pid"], bucket["tid"]) == (4.5e6, 3.5e6, 0, 1)


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}'])
def test_another_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match="is not a trace of write_chrome_trace"):
        read_chrome_trace(tmp_path / "other.json")


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
    with (
        pytest.raises(ValueError, match="no part of Linear was selected"),
        trace.watch_module(nn.Linear(1, 1)),
    ):
        pass
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
