"""Latency and bandwidth, given and fitted."""

from __future__ import annotations

import math

import pytest

from playbook_utils.predict.link import Link, fit_link

SIZES = [4**i for i in range(1, 12)]


def test_a_message_costs_latency_and_bytes() -> None:
    link = Link(latency_s=2e-6, bytes_per_s=5e9)
    assert link.message_s(0) == 2e-6
    assert link.message_s(5_000_000) == pytest.approx(2e-6 + 1e-3)
    assert link.half_bytes == pytest.approx(10_000)
    # Of n_1/2 bytes, half of the time is latency: half of the bandwidth (Hockney 1994).
    assert link.half_bytes / link.message_s(link.half_bytes) == pytest.approx(2.5e9)


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(1e-5, 1e9), (3e-4, 2e7), (0.0, 5e10)])
def test_exact_points_give_the_link_back(latency_s: float, bytes_per_s: float) -> None:
    link = Link(latency_s, bytes_per_s)
    fitted = fit_link([(n, link.message_s(n)) for n in SIZES])
    assert fitted.latency_s == pytest.approx(latency_s, abs=1e-12)
    assert fitted.bytes_per_s == pytest.approx(bytes_per_s)


def test_short_messages_count_as_much_as_long_ones() -> None:
    """Errors of 5 % up and down in turn: an unweighted fit would lose the latency altogether."""
    link = Link(1e-5, 1e9)
    points = [(n, link.message_s(n) * (1.05 if i % 2 else 0.95)) for i, n in enumerate(SIZES)]
    fitted = fit_link(points)
    assert fitted.latency_s == pytest.approx(1e-5, rel=0.05)
    assert fitted.bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_no_better_link_is_near() -> None:
    points = [(8, 3e-5), (1000, 2.5e-5), (10**5, 1.9e-4), (10**6, 1.2e-3)]

    def error(latency_s: float, bytes_per_s: float) -> float:
        link = Link(latency_s, bytes_per_s)
        return math.fsum((link.message_s(n) / t - 1) ** 2 for n, t in points)

    fitted = fit_link(points)
    least = error(fitted.latency_s, fitted.bytes_per_s)
    for a in (0.98, 1.0, 1.02):
        for b in (0.98, 1.0, 1.02):
            assert error(a * fitted.latency_s, b * fitted.bytes_per_s) >= least


def test_what_would_be_negative_is_zero() -> None:
    bytes_only = fit_link([(1, 1e-9), (1000, 1e-3), (2000, 3e-3)])
    assert bytes_only.latency_s == 0  # least sum of (n / (B t) - 1)^2: B = sum (n/t)^2 / sum n/t
    rates = (1e9, 1e6, 2e6 / 3)
    best = sum(rate**2 for rate in rates) / sum(rates)
    assert bytes_only.bytes_per_s == pytest.approx(best, rel=1e-6)
    flat = fit_link([(8, 2e-5), (1000, 1e-5)])
    assert flat.bytes_per_s == math.inf and 1e-5 < flat.latency_s < 2e-5


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "0 points: expected at least two different sizes"),
        ([(8, 1e-5), (8, 2e-5)], "2 points"),
        ([(8, 1e-5), (16, 0.0)], r"\(16.0, 0.0\): expected bytes >= 0 and seconds > 0"),
        ([(8, 1e-5), (-1, 1e-5)], "expected bytes >= 0"),
        ([(8, 1e-5), (16, math.nan)], "seconds > 0"),
    ],
)
def test_points_that_cannot_be_are_refused(points: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_link(points)


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "message"),
    [(-1e-9, 1.0, "latency_s is -1e-09"), (0.0, 0.0, "bytes_per_s is 0"), (math.nan, 1.0, "nan")],
)
def test_links_that_cannot_be_are_refused(
    latency_s: float, bytes_per_s: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Link(latency_s, bytes_per_s)
    with pytest.raises(ValueError, match="nbytes is -1"):
        Link(0.0, 1.0).message_s(-1)
