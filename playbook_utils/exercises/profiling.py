"""Exercises of lesson 04, profiling: what is asked, and how an answer is checked.

    check(FAIR_TIME, fair_time_s)

Nothing here reads a real clock: timing is checked on a device whose time the check makes up, and
traces are written by hand, so that an answer is right or wrong and never unlucky.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from playbook_utils.checks import Exercise, expect_close, expect_equal
from playbook_utils.errors import CheckFailed
from playbook_utils.events import Span
from playbook_utils.measure import exposed_communication_s

__all__ = ["EXPOSED", "FAIR_TIME", "GREW_MOST", "IDLE_SHARE"]

_WARMUP, _REPEATS = 3, 9
_LAUNCH_S = 0.25
_KERNEL_S = (40.0, 9.0, 6.0, *(4.5, 3.25, 30.0, 4.0, 3.0, 3.5, 5.0, 50.0, 3.75))
"""Three calls that warm up, then nine of which two were disturbed; their median is 4.0."""


class _Device:
    """Works off what `run` queues; it and the host's clock advance only as the answer acts."""

    def __init__(self) -> None:
        self.now_s, self.free_s = 100.0, 107.0  # something else is under way
        self.calls = self.busy_reads = 0

    def run(self) -> None:
        """What is to be timed: it returns as soon as the kernel is queued."""
        self.now_s += _LAUNCH_S
        kernel_s = _KERNEL_S[min(self.calls, len(_KERNEL_S) - 1)]
        self.free_s = max(self.now_s, self.free_s) + kernel_s
        self.calls += 1

    def clock(self) -> float:
        """The host's time in seconds."""
        self.busy_reads += self.free_s > self.now_s
        return self.now_s

    def synchronize(self) -> None:
        """Wait until all that was queued is done."""
        self.now_s = max(self.now_s, self.free_s)


def _verify_fair_time(attempt: Callable[[Callable[[], None], Any], float]) -> None:
    device = _Device()
    found = attempt(device.run, device)
    hint = "3 calls that are not timed, then 9 that are, each on its own"
    expect_equal(device.calls, _WARMUP + _REPEATS, "calls of fn", hint=hint)
    if device.busy_reads:
        raise CheckFailed(
            f"the clock was read while the device was still working ({device.busy_reads} of the "
            "looks), expected never\nhint: synchronize before each look at the clock, at the start "
            "too: what is still in the queue would be timed with the first call"
        )
    hint = (
        "in seconds, the median of the 9 timed samples alone: the 3 warm-up calls are slower, "
        "a mean follows every disturbance, a minimum the luckiest one"
    )
    expect_close(found, _LAUNCH_S + 4.0, "seconds of a call", rtol=1e-9, hint=hint)


def _spans(*rows: tuple[str, float, float, str]) -> list[Span]:
    return [Span(0, kind, kind, start, end, lane) for kind, start, end, lane in rows]


_IDLE_CASES: Mapping[str, tuple[float, list[Span]]] = {
    "two spans with a gap": (
        0.25, _spans(("forward", 0, 2, "compute"), ("backward", 3, 4, "compute")),
    ),
    "a span inside another": (
        0.25, _spans(("forward", 1, 3, "compute"), ("compute", 1.5, 2.5, "compute"),
                    ("optimizer", 4, 5, "compute"), ("compute", 4.5, 4.75, "compute")),
    ),
    "spans that overlap, not in order of time": (
        0.2, _spans(("backward", 4, 8, "compute"), ("forward", 0, 5, "compute"),
                    ("optimizer", 10, 10, "compute")),
    ),
    "a wait at the start, on the row itself": (
        0.4, _spans(("idle", 0, 2, "compute"), ("forward", 2, 5, "compute")),
    ),
    "a long span on another row": (
        0.5, _spans(("compute", 0, 8, "host"), ("forward", 2, 3, "compute"),
                    ("forward", 5, 6, "compute"), ("communication", 0, 9, "communication"),
                    ("backward", 4, 4.5, "compute"), ("idle", 6, 7, "compute")),
    ),
    "a gap between times that are not round": (
        0.0137 / 3.1907, _spans(("forward", 0.1093, 1.2071, "compute"),
                                ("backward", 1.2208, 3.3, "compute")),
    ),
    "no gap at all": (0.0, _spans(("forward", 7, 9, "compute"), ("backward", 9, 12, "compute"))),
}  # fmt: skip


def _verify_idle_share(attempt: Callable[[Sequence[Span]], float]) -> None:
    for name, (expected, spans) in _IDLE_CASES.items():
        found = attempt(list(spans))
        if isinstance(found, (int, float)) and found < 0:
            hint = "less than nothing is idle: where spans overlap, time was counted twice"
        elif name.startswith("a gap between"):
            hint = "the sum of the gaps is exact: samples of the row only come near it"
        elif name.startswith("a wait"):
            hint = "an idle span lies on the row and is part of its length, but nothing runs in it"
        else:
            hint = (
                "from the first start to the last end of lane compute, less the union of its work"
            )
        expect_close(found, expected, f"{name}: idle share", atol=1e-9, hint=hint)


_EXPOSED_CASES: Mapping[str, list[Span]] = {
    "one after the other": _spans(
        ("backward", 0, 4, "compute"), ("communication", 4, 6, "communication")
    ),
    "half under backward": _spans(
        ("backward", 0, 4, "compute"), ("communication", 3, 5, "communication")
    ),
    "two messages at once": _spans(
        ("backward", 0, 4, "compute"), ("communication", 2, 6, "communication"),
        ("communication", 5, 7, "communication"),
    ),
    "backward with a part inside": _spans(
        ("backward", 0, 6, "compute"), ("backward", 1, 3, "compute"),
        ("communication", 2, 8, "communication"),
    ),
    "work on both sides": _spans(
        ("communication", 1, 9, "communication"), ("optimizer", 7, 12, "compute"),
        ("backward", 0, 3, "compute"),
    ),
    "a wait is no work": _spans(
        ("backward", 0, 4, "compute"), ("idle", 4, 6, "compute"),
        ("communication", 3, 6, "communication"),
    ),
    "times that are not round": _spans(
        ("backward", 0.0, 2.7183, "compute"), ("communication", 1.7321, 3.1416, "communication"),
        ("optimizer", 3.1407, 4.6692, "compute"),
    ),
    "everything hidden": _spans(
        ("communication", 1, 2, "communication"), ("backward", 0, 3, "compute"),
    ),
}  # fmt: skip


def _verify_exposed(attempt: Callable[[Sequence[Span]], float]) -> None:
    for name, spans in _EXPOSED_CASES.items():
        expected = exposed_communication_s(spans, rank=0)
        found = attempt(list(spans))
        total = sum(span.duration_s for span in spans if span.kind == "communication")
        hint = "cut time at every start and end: each piece is either hidden or exposed, once"
        if isinstance(found, (int, float)) and abs(found - total) < 1e-9 < abs(total - expected):
            hint = "this is all of the communication"
        elif name.startswith("times that"):
            hint = "cut time at the starts and ends themselves: samples only come near the sum"
        elif name.startswith("a wait"):
            hint = "an idle span computes nothing, so it hides nothing"
        elif isinstance(found, (int, float)) and found < expected - 1e-9:
            hint = "too little: is computing that overlaps computing taken off twice?"
        expect_close(found, expected, f"{name}: exposed seconds", atol=1e-9, hint=hint)


def _trace(num_steps: int, calls: Mapping[str, int], **others: int) -> dict[str, Any]:
    """As torch writes it: operators, steps, and other events that carry operators' names."""

    def events(name: str, category: str, count: int) -> list[dict[str, Any]]:
        common = {"ph": "X", "cat": category, "pid": 1, "tid": 1, "dur": 2.0}
        return [{**common, "name": name, "ts": 10.0 * i} for i in range(count)]

    found: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {}}]
    for i in range(num_steps):
        found += events(f"ProfilerStep#{i + 2}", "user_annotation", 1)
    for name, count in calls.items():
        found += events(name, "cpu_op", count)
    for category, count in others.items():
        found += events("aten::add", category, count)
    return {"schemaVersion": 1, "traceEvents": found}


_GREW_CASES: Mapping[str, tuple[str | None, dict[str, Any], dict[str, Any]]] = {
    "an .item() crept in": (
        "aten::item",
        _trace(3, {"aten::mm": 261, "aten::item": 6}),
        _trace(3, {"aten::mm": 261, "aten::item": 18, "aten::copy_": 3}),
    ),
    "more steps were recorded": (
        "aten::item",
        _trace(2, {"aten::mm": 100, "aten::item": 2}),
        _trace(6, {"aten::mm": 300, "aten::item": 24}),
    ),
    "calls that do not divide by the steps": (
        "aten::item",
        _trace(4, {"aten::add": 8, "aten::item": 5}),
        _trace(4, {"aten::add": 9, "aten::item": 7}),
    ),
    "it was not called at all before": (
        "aten::_to_copy",
        _trace(1, {"aten::mm": 10, "aten::add": 5}),
        _trace(2, {"aten::mm": 20, "aten::add": 12, "aten::_to_copy": 30}),
    ),
    "events that are no operators": (
        "aten::mul",
        _trace(1, {"aten::add": 5, "aten::mul": 5}),
        _trace(1, {"aten::add": 5, "aten::mul": 7}, python_function=40),
    ),
    "nothing grew": (
        None,
        _trace(2, {"aten::mm": 8, "aten::item": 4}),
        _trace(3, {"aten::mm": 12, "aten::item": 3}),
    ),
}


def _verify_grew_most(attempt: Callable[[Any, Any], str | None]) -> None:
    for name, (expected, before, after) in _GREW_CASES.items():
        hint = (
            'count events whose "cat" is "cpu_op", and divide by the number of ProfilerStep '
            "events; then the largest difference, not the largest factor"
        )
        if expected is None:
            hint = "None where no operator is called more often a step than before"
        expect_equal(attempt(before, after), expected, name, hint=hint)


FAIR_TIME = Exercise(
    "fair_time_s",
    "3 warm-up calls, 9 timed ones, a device that works on after the call",
    _verify_fair_time,
)
IDLE_SHARE = Exercise(
    "idle_share", "the share of a row in which nothing runs, spans may overlap", _verify_idle_share
)
EXPOSED = Exercise("exposed_s", "seconds of communication that no computing hides", _verify_exposed)
GREW_MOST = Exercise(
    "grew_most", "the operator whose calls a step grew most between two traces", _verify_grew_most
)
