"""Layers per stage and micro-batches in flight, against schedules walked action by action and
against PyTorch's own interleaved schedule."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.stages import layers_of, peak_in_flight

Action = tuple[str, int]  # ("F" or "B", chunk)


def interleaved(pp: int, v: int, m: int) -> ParallelLayout:
    return ParallelLayout(pp=pp, virtual_stages=v, num_microbatches=m, schedule="interleaved_1f1b")


def walk(actions: list[Action], chunk_bytes: list[int]) -> int:
    """The most bytes kept at once."""
    kept = most = 0
    for kind, chunk in actions:
        kept += chunk_bytes[chunk] if kind == "F" else -chunk_bytes[chunk]
        most = max(most, kept)
    assert kept == 0
    return most


def torch_actions(layout: ParallelLayout, stage: int) -> list[Action]:
    """What PyTorch runs on that rank; the schedule alone, without its modules."""
    schedule: Any = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    schedule.pp_group_size = layout.pp
    schedule.n_local_stages = layout.virtual_stages
    schedule._n_microbatches = layout.microbatches
    schedule.rank = stage
    schedule.number_of_rounds = max(1, layout.microbatches // layout.pp)
    schedule.microbatches_per_round = layout.microbatches // schedule.number_of_rounds
    actions = schedule._calculate_single_rank_operations(stage)
    return [
        ("F" if action.computation_type.name == "FORWARD" else "B", action.stage_index // layout.pp)
        for action in actions
        if action is not None
    ]


@pytest.mark.parametrize(
    ("pp", "v", "m"), [(4, 2, 8), (2, 3, 6), (3, 2, 3), (5, 4, 15), (8, 2, 16)]
)
def test_interleaved_equals_pytorchs_schedule(pp: int, v: int, m: int) -> None:
    layout = interleaved(pp, v, m)
    for stage in range(pp):
        actions = torch_actions(layout, stage)
        assert sum(kind == "F" for kind, _ in actions) == m * v
        for sizes in (
            [1] * v,
            list(range(3, 3 + v)),
            list(range(9, 9 - v, -1)),
            [1] * (v - 1) + [50],
        ):
            counts = peak_in_flight(layout, stage, sizes)
            predicted = sum(n * size for n, size in zip(counts, sizes, strict=True))
            assert predicted == walk(actions, sizes), (stage, sizes)


def test_interleaved_closed_form() -> None:
    # p (1 + (p - 1) / (p v)) micro-batches of a stage's layers on rank 0: 5.5 for p = 4, v = 2
    peaks = [sum(peak_in_flight(interleaved(4, 2, 8), stage, [1, 1])) / 2 for stage in range(4)]
    assert peaks == [5.5, 4.5, 3.5, 2.5]


def one_f_one_b(p: int, stage: int, m: int) -> list[Action]:
    warm_up = min(m, p - stage - 1)
    steady: list[Action] = [("F", 0), ("B", 0)] * (m - warm_up)
    return [("F", 0)] * warm_up + steady + [("B", 0)] * warm_up


@pytest.mark.parametrize("m", [1, 3, 4, 9])
@pytest.mark.parametrize("p", [2, 3, 4, 7])
def test_1f1b_and_afab_walked(p: int, m: int) -> None:
    for stage in range(p):
        layout = ParallelLayout(pp=p, num_microbatches=m)
        assert peak_in_flight(layout, stage, [5]) == (walk(one_f_one_b(p, stage, m), [5]) // 5,)
        afab = layout.with_changes(schedule="afab")
        assert peak_in_flight(afab, stage, [5]) == (m,)


def test_without_stages_there_is_no_schedule() -> None:
    for schedule in ("afab", "1f1b"):
        layout = ParallelLayout(schedule=schedule, num_microbatches=16)
        assert peak_in_flight(layout, 0, [7]) == (1,)


@pytest.mark.parametrize(
    ("num_layers", "pp", "v"), [(32, 8, 1), (126, 16, 1), (61, 4, 3), (7, 7, 1)]
)
def test_every_layer_is_on_one_stage(num_layers: int, pp: int, v: int) -> None:
    layout = interleaved(pp, v, pp) if v > 1 else ParallelLayout(pp=pp)
    parts = [layers_of(num_layers, layout, stage) for stage in range(pp)]
    assert all(len(chunks) == v for chunks in parts)
    in_order = [parts[chunk % pp][chunk // pp] for chunk in range(pp * v)]
    assert [layer for chunk in in_order for layer in chunk] == list(range(num_layers))
    sizes = [len(chunk) for chunk in in_order]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # the first ones hold more


def test_a_split_of_ones_own() -> None:
    layout = interleaved(2, 2, 2).with_changes(layers_per_chunk=(1, 2, 3, 1))
    assert layers_of(7, layout, 0) == (range(0, 1), range(3, 6))
    assert layers_of(7, layout, 1) == (range(1, 3), range(6, 7))


def test_bad_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="stage is 4; expected one of 0 to pp - 1 = 3"):
        layers_of(8, ParallelLayout(pp=4), 4)
    for stage in (-1, 4, True, "0"):
        with pytest.raises(ValueError, match="expected one of 0 to pp - 1 = 3"):
            peak_in_flight(ParallelLayout(pp=4), stage, [1])  # type: ignore[arg-type]
    for num_layers in (0, "8", 8.0, True):
        with pytest.raises(ValueError, match=r"num_layers is .*: expected a whole number"):
            layers_of(num_layers, ParallelLayout(), 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="adds up to 7: expected num_layers=8"):
        layers_of(8, ParallelLayout(pp=2, layers_per_chunk=(3, 4)), 0)
    with pytest.raises(ValueError, match="found 1 chunk_bytes"):
        peak_in_flight(interleaved(2, 2, 2), 0, [1])
