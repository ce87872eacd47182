"""Spans as files for Perfetto and Chrome, and spans out of torch's profiler.

    write_chrome_trace(spans, "step.json")        # open in ui.perfetto.dev or chrome://tracing
    spans = read_chrome_trace("step.json")

Left out: recording spans (`measure.traces`); reading traces that other tools wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from playbook_utils.events import Span

__all__ = ["KINDS", "read_chrome_trace", "spans_from_profiler", "write_chrome_trace"]

KINDS = ("forward", "backward", "optimizer", "compute", "communication", "idle")
"""The kinds of a `Span`, as in `playbook_utils.events`."""


def write_chrome_trace(spans: Iterable[Span], path: str | Path) -> Path:
    """Write spans for ui.perfetto.dev or chrome://tracing; a rank is a process, a lane a thread.

    Format: "Trace Event Format", complete events ("ph": "X") in microseconds.
    """
    spans = list(spans)
    events: list[dict[str, Any]] = []
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (lane != "compute", lane))
    for rank in sorted({span.rank for span in spans}):
        events.append(_name_event("process_name", rank, 0, f"rank {rank}"))
        events += [_name_event("thread_name", rank, i, lane) for i, lane in enumerate(lanes)]
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": span.rank,
                "tid": lanes.index(span.lane),
                "ts": span.start_s * 1e6,
                "dur": span.duration_s * 1e6,
            }
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0))
    return path


def read_chrome_trace(path: str | Path) -> tuple[Span, ...]:
    """The spans of a file that `write_chrome_trace` wrote, in its order.

    Raises:
        ValueError: not such a file.
    """
    try:
        events = json.loads(Path(path).read_text())["traceEvents"]
        lanes = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        return tuple(
            Span(
                rank=int(event["pid"]),
                name=event["name"],
                kind=event["cat"],
                start_s=event["ts"] / 1e6,
                end_s=(event["ts"] + event["dur"]) / 1e6,
                lane=lanes[event["pid"], event["tid"]],
            )
            for event in events
            if event["ph"] == "X"
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a trace of write_chrome_trace ({type(error).__name__}: {error})"
        ) from error


def spans_from_profiler(prof: Any, rank: int) -> tuple[Span, ...]:
    """Spans of a finished `torch.profiler.profile`: one per `record_function` block, collective
    and GPU kernel; the many operators inside them are left out.

    A block named after one of `KINDS` ("forward", "backward 3") gets that kind, any other is
    "compute". Collectives are told by their "gloo:", "nccl:" or "c10d::" names. Zero is the
    profiler's own.
    """
    spans = []
    for event in prof.events():
        on_gpu = str(event.device_type).endswith("CUDA")
        kind = event.name.split()[0] if event.name.split()[:1] else ""
        if event.name.startswith(("gloo:", "nccl:", "c10d::")) or (on_gpu and "nccl" in event.name):
            kind, lane = "communication", "communication"
        elif getattr(event, "is_user_annotation", False) or on_gpu:
            kind, lane = (kind if kind in KINDS else "compute"), "compute"
        else:
            continue
        start_s, end_s = event.time_range.start / 1e6, event.time_range.end / 1e6
        spans.append(Span(rank, event.name, kind, start_s, end_s, lane))
    return tuple(spans)


def _name_event(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
