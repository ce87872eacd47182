"""Spans as a file for Perfetto and Chrome, and spans out of torch's profiler.

    write_chrome_trace(spans, "step.json")        # open in ui.perfetto.dev or chrome://tracing

Left out: recording spans (`measure.traces`); reading files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from playbook_utils.events import Span

__all__ = ["KINDS", "spans_from_profiler", "write_chrome_trace"]

KINDS = ("forward", "backward", "optimizer", "compute", "communication", "idle")
"""The kinds of a `Span`, as in `playbook_utils.events`."""


def write_chrome_trace(spans: Iterable[Span], path: str | Path) -> Path:
    """Write spans for ui.perfetto.dev or chrome://tracing; a rank is a process, a lane a thread.

    Format: "Trace Event Format", complete events ("ph": "X") in microseconds.
    """
    spans = list(spans)
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (lane != "compute", lane))
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        for tid, lane in enumerate(lanes):
            named = {"process_name": f"rank {rank}", "thread_name": lane}
            events += [
                {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": {"name": name}}
                for what, name in named.items()
            ]
    for span in spans:
        place = {"pid": span.rank, "tid": lanes.index(span.lane)}
        times = {"ts": span.start_s * 1e6, "dur": span.duration_s * 1e6}
        events.append({"ph": "X", "name": span.name, "cat": span.kind, **place, **times})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0))
    return path


def spans_from_profiler(prof: Any, rank: int, *, operators: bool = False) -> tuple[Span, ...]:
    """Spans of a finished `torch.profiler.profile`: one per `record_function` block, collective
    and GPU kernel.

    A block named after one of `KINDS` ("forward", "backward 3") gets that kind, any other is
    "compute". Collectives are told by their "gloo:", "nccl:" or "c10d::" names. Zero is the
    profiler's own. The blocks that torch adds itself (each step, the optimizer's calls) are left
    out: they would cover the gaps in which nothing runs.

    Args:
        prof: with a `schedule`, only what it recorded last.
        rank: whose spans they are.
        operators: also one span per operator that no other operator called ("aten::mm"), on the
            lane "operators", of the kind of the block in which it ran.
    """
    spans = []
    for event in prof.events():
        on_gpu = str(event.device_type).endswith("CUDA")
        if event.name.startswith(("ProfilerStep", "Optimizer.")):
            continue
        if event.name.startswith(("gloo:", "nccl:", "c10d::")) or (on_gpu and "nccl" in event.name):
            kind, lane = "communication", "communication"
        elif getattr(event, "is_user_annotation", False) or on_gpu:
            kind, lane = _kind_of(event.name) or "compute", "compute"
        elif operators and _is_operator(event) and not any(map(_is_operator, _ancestors(event))):
            kinds = (_kind_of(a.name) for a in _ancestors(event) if a.is_user_annotation)
            kind, lane = next(filter(None, kinds), "compute"), "operators"
        else:
            continue
        start_s, end_s = event.time_range.start / 1e6, event.time_range.end / 1e6
        spans.append(Span(rank, event.name, kind, start_s, end_s, lane))
    return tuple(spans)


def _kind_of(name: str) -> str:
    return next((kind for kind in KINDS if name.split()[:1] == [kind]), "")


def _is_operator(event: Any) -> bool:
    # Autograd's nodes ("MmBackward0") have no namespace, or one of C++ ("torch::autograd::").
    return "::" in event.name and not event.name.startswith(("autograd::", "torch::autograd::"))


def _ancestors(event: Any) -> Iterator[Any]:
    """The events inside which this one ran, from the innermost."""
    while (event := event.cpu_parent) is not None:
        yield event
