"""Lesson 04's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from itertools import pairwise

import pytest

from playbook_utils.checks import check
from playbook_utils.exercises import profiling
from tests.notebooks.exercises import Lesson, ThreeWays, plant, run_cell

LESSON = Lesson.read("04_profiling")

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "ten thousand samples": (
        "idle_share",
        "    busy_s, done_s = 0.0, first_s\n",
        "    length_s = max(s.end_s for s in row) - first_s\n"
        "    times = [first_s + (i + 0.5) * length_s / 10_000 for i in range(10_000)]\n"
        "    work = [s for s in row if s.kind != 'idle']\n"
        "    return sum(not any(s.start_s <= t < s.end_s for s in work) for t in times) / 10_000\n"
        "    busy_s, done_s = 0.0, first_s\n",
        "samples of the row only come near it",
    ),
    "four samples a second": (
        "exposed_s",
        "    total_s = 0.0\n",
        "    times = [(i + 0.5) / 4 for i in range(60)]\n"
        "    seen = [{s.kind for s in spans if s.start_s <= t < s.end_s} for t in times]\n"
        "    return sum(kinds - {'idle'} == {'communication'} for kinds in seen) / 4\n"
        "    total_s = 0.0\n",
        "samples only come near the sum",
    ),
    "not waited for after the call": (
        "fair_time_s",
        "        fn()\n        device.synchronize()\n",
        "        fn()\n",
        "while the device was still working",
    ),
    "not waited for before the call": (
        "fair_time_s",
        "        device.synchronize()\n        start_s",
        "        start_s",
        "still working (1 of the looks)",
    ),
    "no warm-up": ("fair_time_s", "range(3)", "range(0)", "found 9, expected 12"),
    "mean": ("fair_time_s", "statistics.median", "statistics.mean", "a mean follows"),
    "minimum": ("fair_time_s", "statistics.median", "min", "a minimum the luckiest"),
    "warm-up counted": (
        "fair_time_s",
        "    for _ in range(3):\n        fn()\n    samples_s = []\n    for _ in range(9)",
        "    samples_s = []\n    for _ in range(12)",
        "the 3 warm-up calls are slower",
    ),
    "all in one": (
        "fair_time_s",
        "return statistics.median(samples_s)",
        "device.synchronize(); s = device.clock()\n"
        "    for _ in range(9): fn()\n"
        "    device.synchronize()\n"
        "    return (device.clock() - s) / 9",
        "found 21, expected 12",
    ),
    "durations added up": (
        "idle_share",
        "span.end_s - max(span.start_s, done_s)",
        "span.duration_s",
        "time was counted twice",
    ),
    "idle counted as work": ("idle_share", 'span.kind != "idle"', "True", "nothing runs in it"),
    "idle left out of the length": (
        "idle_share",
        'span.lane == "compute"]',
        'span.lane == "compute" and span.kind != "idle"]',
        "part of its length",
    ),
    "all rows": ("idle_share", 'if span.lane == "compute"', "", "a long span on another row"),
    "not sorted": (
        "idle_share", "sorted(row, key=lambda span: span.start_s)", "row", "not in order of time",
    ),
    "from zero": ("idle_share", "first_s = min(span.start_s for span in row)", "first_s = 0.0",
                  "idle share"),
    "busy share": ("idle_share", "1 - busy_s", "busy_s", "found 0.75, expected 0.25"),
    "all communication": (
        "exposed_s", 'kinds - {"idle"} == {"communication"}', '"communication" in kinds',
        "all of the communication",
    ),
    "overlaps subtracted in pairs": (
        "exposed_s",
        "    return total_s",
        "    sent = [s for s in spans if s.kind == 'communication']\n"
        "    work = [s for s in spans if s.kind != 'communication']\n"
        "    pairs = ((min(a.end_s, b.end_s), max(a.start_s, b.start_s))"
        " for a in sent for b in work)\n"
        "    hidden = sum(max(0, end - start) for end, start in pairs)\n"
        "    return sum(s.duration_s for s in sent) - hidden",
        "exposed seconds",
    ),
    "only what comes after all work": (
        "exposed_s",
        "    return total_s",
        "    work_s = max(s.end_s for s in spans if s.kind != 'communication')\n"
        "    sent_s = max(s.end_s for s in spans if s.kind == 'communication')\n"
        "    return max(0.0, sent_s - work_s)",
        "work on both sides",
    ),
    "a wait hides": ("exposed_s", ' - {"idle"}', "", "so it hides nothing"),
    "idle time": (
        "exposed_s", 'kinds - {"idle"} == {"communication"}', "not kinds", "exposed seconds",
    ),
    "not per step": ("grew_most", "count / steps", "count", "more steps were recorded"),
    "whole calls only": ("grew_most", "count / steps", "count // steps", "do not divide"),
    "everything counted": (
        "grew_most", 'if event["cat"] == "cpu_op"', 'if "::" in event["name"]', "no operators",
    ),
    "always one": ("grew_most", "if growth[name] > 0 else None", "", "nothing grew"),
    "most calls": ("grew_most", "key=growth.get", "key=after.get", "an .item() crept in"),
    "largest factor": (
        "grew_most",
        "calls - before.get(name, 0)",
        "calls / before[name] - 1 if name in before else 0",
        "not the largest factor",
    ),
}  # fmt: skip


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS


def test_another_right_way_passes() -> None:
    names = LESSON.setup()
    exec("import statistics\nfrom playbook_utils import check", names)
    exec("from playbook_utils.exercises import profiling as exercises", names)
    waits_often = plant(
        LESSON.solution("fair_time_s"), "        fn()\n", "        fn(); device.synchronize()\n"
    )
    assert run_cell(waits_often, names).passed

    def union(spans):  # type: ignore[no-untyped-def]
        work = [s for s in spans if s.lane == "compute"]
        cuts = sorted({t for s in work for t in (s.start_s, s.end_s)})
        idle = sum(
            b - a
            for a, b in pairwise(cuts)
            if not any(s.start_s <= a and b <= s.end_s and s.kind != "idle" for s in work)
        )
        return idle / (cuts[-1] - cuts[0])

    assert check(profiling.IDLE_SHARE, union).passed


@pytest.mark.parametrize("answer", [None, "0.25", True])
def test_an_answer_of_the_wrong_type_is_told_so(answer: object) -> None:
    result = check(profiling.IDLE_SHARE, lambda spans: answer)
    assert result.status == "failed"
