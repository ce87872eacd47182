"""The paired runs: what the lesson says of them, from the stored rows."""

from __future__ import annotations

import hashlib
from statistics import median, quantiles

import pytest

from playbook_utils.predict.book.zero_pairs import _ROWS, zero_pairs


def test_rows_are_those_of_the_published_table() -> None:
    """They were compared with it once; a changed digit is seen here."""
    assert hashlib.sha256(_ROWS.encode()).hexdigest() == (
        "8bc69515bfd75a8df7e34addc64c1d1c4b05e039c8bbbc19568380a310cf9cfb"
    )


def test_medians() -> None:
    pairs = zero_pairs()
    assert len(pairs) == len(set(pairs)) == 106
    assert median(pair.throughput_ratio for pair in pairs) == pytest.approx(0.998, abs=5e-4)
    assert median(pair.allocated_ratio for pair in pairs) == pytest.approx(0.605, abs=5e-4)
    assert median(pair.reserved_ratio for pair in pairs) == pytest.approx(0.723, abs=5e-4)


def test_extremes() -> None:
    ratios = sorted(pair.throughput_ratio for pair in zero_pairs())
    assert ratios[0] == pytest.approx(0.167, abs=5e-4)
    assert ratios[-1] == pytest.approx(5.031, abs=5e-4)
    lower, _, upper = quantiles(ratios, n=4)
    assert (lower, upper) == (pytest.approx(0.964, abs=5e-4), pytest.approx(1.028, abs=5e-4))


def test_rows_are_plausible() -> None:
    for pair in zero_pairs():
        assert pair.dp >= 2
        assert pair.allocated_ratio < 1  # ZeRO-1 always allocates less
        for allocated, reserved in zip(pair.allocated_gib, pair.reserved_gib, strict=True):
            assert 0 < allocated <= reserved < 80


def test_pure_data_parallel_runs_hold_what_the_book_counts() -> None:
    pure = [pair for pair in zero_pairs() if (pair.tp, pair.pp) == (1, 1)]
    assert len(pure) == 7
    for pair in pure:
        before, after = (gib * 2**30 / 1.34e9 for gib in pair.allocated_gib)
        assert before == pytest.approx(20, rel=0.01)  # 2 + 6 + 12 bytes a parameter
        assert 2 < after - (8 + 12 / pair.dp) < 2.4
