"""Whether a rank fits a GPU, in words and in bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from playbook_utils.predict.hardware import gpu
from playbook_utils.predict.headroom import gib_text, headroom_bytes, verdict
from playbook_utils.predict.memory import MemoryEstimate

GIB = 2**30
H100 = replace(gpu("h100-sxm"), reported_bytes=None)


def rank_of(num_bytes: int) -> MemoryEstimate:
    parts = {"params": {"mlp": num_bytes}, "grads": {}, "optimizer_states": {}, "activations": {}}
    return MemoryEstimate(0, 1, parts, (1,))


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (20 * GIB, "fits h100-sxm (80.00 GiB): 60.00 GiB left"),
        (80 * GIB, "fits h100-sxm (80.00 GiB): 0.00 GiB left"),
        (80 * GIB + 1, "does not fit h100-sxm (80.00 GiB): 0.0000 GiB missing"),
        (1500 * GIB, "does not fit h100-sxm (80.00 GiB): 1,420.00 GiB missing"),
    ],
)
def test_the_sentence_and_the_bytes_agree_with_the_estimate(num_bytes: int, expected: str) -> None:
    estimate = rank_of(num_bytes)
    assert verdict(estimate, H100) == expected
    assert headroom_bytes(estimate, H100) == 80 * GIB - num_bytes
    assert (headroom_bytes(estimate, H100) >= 0) == estimate.fits(H100)


def test_the_gpu_is_the_one_given() -> None:
    small = replace(H100, name="small", memory_bytes=3 * GIB)
    assert verdict(rank_of(GIB), small) == "fits small (3.00 GiB): 2.00 GiB left"


def test_what_the_driver_reports_counts_where_it_is_known() -> None:
    less = replace(H100, reported_bytes=79 * GIB)
    estimate = rank_of(80 * GIB)
    assert verdict(estimate, less) == "does not fit h100-sxm (79.00 GiB): 1.00 GiB missing"
    assert headroom_bytes(estimate, less) == -GIB and not estimate.fits(less)


def test_less_than_a_gib_gets_more_digits() -> None:
    assert [gib_text(n) for n in (0, 2**20, GIB, 16_060_522_496)] == [
        "0.00 GiB",
        "0.0010 GiB",
        "1.00 GiB",
        "14.96 GiB",
    ]
