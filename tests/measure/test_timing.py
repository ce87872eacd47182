"""The timer with a clock that the test turns, so that nothing here depends on real time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from playbook_utils.measure.timing import Timing, measure_time


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: list[float], name: str) -> Callable[[], None]:
        left = iter(seconds)

        def run() -> None:
            self.calls.append(name)
            self.now += next(left)

        return run


def test_warmup_is_not_counted_and_each_repeat_is_on_its_own() -> None:
    clock = Clock()
    fn = clock.taking([100, 50, 2, 9, 1, 3], "fn")
    timing = measure_time(fn, warmup=2, repeats=4, clock=clock)
    assert timing.samples_s == (2, 9, 1, 3)
    assert (timing.median_s, timing.min_s) == (2.5, 1)


def test_setup_runs_before_each_call_and_is_not_timed() -> None:
    clock = Clock()
    setup = clock.taking([1000] * 3, "setup")
    timing = measure_time(
        clock.taking([1, 2, 3], "fn"), warmup=1, repeats=2, setup=setup, clock=clock
    )
    assert timing.samples_s == (2, 3)
    assert clock.calls == ["setup", "fn"] * 3


def test_work_that_was_handed_on_is_waited_for_before_and_after() -> None:
    clock = Clock()
    ready_at = [7.0]  # something is under way already

    def synchronize() -> None:
        clock.now = max(clock.now, ready_at[0])

    def fn() -> None:
        clock.now += 1
        ready_at[0] = clock.now + 4

    handed_on = measure_time(fn, warmup=0, repeats=2, synchronize=synchronize, clock=clock)
    assert handed_on.samples_s == (5, 5)
    assert measure_time(fn, warmup=0, repeats=2, clock=clock).samples_s == (1, 1)


def test_events_leave_nothing_to_synchronize() -> None:
    with pytest.raises(ValueError, match="device is cuda:1, which events time"):
        measure_time(lambda: None, device="cuda:1", synchronize=lambda: None)


def test_quartiles_enclose_half_of_the_samples() -> None:
    assert Timing((9.0, 1.0, 5.0, 3.0, 7.0)).quartiles_s == (3.0, 7.0)
    assert Timing((1.0, 2.0)).quartiles_s == (1.25, 1.75)
    assert Timing((4.0,)).quartiles_s == (4.0, 4.0)


def test_the_real_clock_gives_seconds() -> None:
    timing = measure_time(lambda: sum(range(1000)), warmup=0, repeats=3, device="cpu")
    assert len(timing.samples_s) == 3 and all(0 < s < 60 for s in timing.samples_s)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"repeats": 0}, ValueError, "repeats is 0: expected at least 1"),
        ({"warmup": -1}, ValueError, "warmup is -1: expected at least 0"),
        ({"repeats": 2.0}, TypeError, "repeats is 2.0 (float): expected an int"),
        ({"warmup": True}, TypeError, "warmup is True (bool): expected an int"),
        ({"fn": 3.0}, TypeError, "fn is 3.0: expected a function"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        measure_time(**{"fn": lambda: None, **arguments})


def test_timing_of_one_sample() -> None:
    assert Timing((4.0,)).median_s == Timing((4.0,)).min_s == 4.0
