"""Labels that keep apart."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from playbook_utils.show.labels import spread


def test_labels_that_have_room_stay_where_they_are() -> None:
    assert spread([30.0, 0.0, 10.0], gap=5, low=0, high=50) == [30.0, 0.0, 10.0]


def test_two_labels_at_one_place_part_evenly() -> None:
    assert spread([20.0, 20.0], gap=10, low=0, high=50) == [15.0, 25.0]


def test_labels_stay_within_bounds_and_in_order() -> None:
    assert spread([49.0, 50.0], gap=10, low=0, high=50) == [40.0, 50.0]
    assert spread([0.0, 0.0, 0.0], gap=10, low=0, high=50) == [0.0, 10.0, 20.0]


@pytest.mark.parametrize("seed", range(20))
def test_any_labels_are_a_gap_apart_and_as_near_as_can_be(seed: int) -> None:
    """Moving one label, or all that touch, by a little never brings the labels nearer."""
    rng = random.Random(seed)
    wanted = [rng.uniform(0, 100) for _ in range(rng.randint(1, 9))]
    placed = spread(wanted, gap=9, low=-1000, high=1000)
    ordered = sorted(placed)
    assert all(b - a >= 9 - 1e-9 for a, b in pairwise(ordered))
    assert [wanted.index(w) for w in sorted(wanted)] == [placed.index(p) for p in ordered]

    def cost(positions: list[float]) -> float:
        return sum((p - w) ** 2 for p, w in zip(positions, wanted, strict=True))

    for start in range(len(placed)):
        for stop in range(start + 1, len(placed) + 1):
            for shift in (-0.01, 0.01):
                moved = list(placed)
                for value in ordered[start:stop]:
                    moved[placed.index(value)] += shift
                ranked = sorted(moved)
                if all(b - a >= 9 for a, b in pairwise(ranked)):
                    assert cost(moved) >= cost(placed) - 1e-6
