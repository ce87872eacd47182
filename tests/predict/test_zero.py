"""Shards by part, and what is whole for a moment."""

from __future__ import annotations

import pytest

from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.zero import gathered_bytes, states_bytes, unit_bytes

PARAMS = {"mlp": 1001, "experts": 90}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_each_stage_by_hand(zero_stage: int) -> None:
    layout = ParallelLayout(dp=4, cp=2, ep=2, zero_stage=zero_stage)
    for from_stage in (1, 2, 3):
        sharded = zero_stage >= from_stage
        expected = {"mlp": 3 * (126 if sharded else 1001), "experts": 3 * (23 if sharded else 90)}
        assert states_bytes(PARAMS, 3, from_stage, layout) == expected
    whole = 2 * (1001 + 90)
    assert gathered_bytes(PARAMS, 2, layout) == (whole if zero_stage == 3 else 0)
    assert unit_bytes(PARAMS, 2, layout) == {0: 0, 1: 0, 2: whole, 3: 2 * whole}[zero_stage]


def test_what_one_rank_holds_is_not_gathered() -> None:
    layout = ParallelLayout(dp=4, ep=4, zero_stage=3)
    assert gathered_bytes(PARAMS, 2, layout) == 2 * 1001
    assert unit_bytes(PARAMS, 2, layout) == 4 * 1001
    assert unit_bytes(PARAMS, 2, ParallelLayout(zero_stage=3)) == 0
