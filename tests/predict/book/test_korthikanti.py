"""The bars of Korthikanti et al. 2022, figure 7: predicted against read off."""

from __future__ import annotations

import pytest

from playbook_utils.predict.book.korthikanti import Figure7Row, figure_7, predict_percent

ROWS = figure_7()
READING_STEP = 100 / 562.5  # percent: the bars were read off in steps of this size


def name(row: Figure7Row) -> str:
    return f"{row.model} {row.recompute}{' sp' if row.sequence_parallel else ''}"


def test_all_bars_are_there() -> None:
    assert len(ROWS) == 20
    assert {row.model for row in ROWS} == {"22B", "175B", "530B", "1T"}
    for row in (row for row in ROWS if row.percent < 100):
        steps = row.percent / READING_STEP
        assert abs(steps - round(steps)) < 0.03


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_within_one_percent_or_as_near_as_one_can_read(row: Figure7Row) -> None:
    found = predict_percent(row)
    coarse = row.recompute == "full" and row.model in ("530B", "1T")  # 9.42 read, 9.52 predicted
    assert found == pytest.approx(
        row.percent, **({"abs": READING_STEP} if coarse else {"rel": 0.01})
    )


def test_the_papers_equations() -> None:
    for row in ROWS:
        core = 5 * row.shape.num_heads * row.seq_len / row.shape.dim
        t = row.tp
        left = {
            ("none", False): 10 + 24 / t + core / t,
            ("none", True): 34 / t + core / t,
            ("selective", False): 10 + 24 / t,
            ("selective", True): 34 / t,
            ("full", False): 2,
        }[row.recompute, row.sequence_parallel]
        assert predict_percent(row) == pytest.approx(100 * left / (10 + 24 / t + core / t))


@pytest.mark.parametrize(
    ("model", "billions"), [("22B", 22), ("175B", 175), ("530B", 530), ("1T", 1000)]
)
def test_the_models_have_the_size_of_their_names(model: str, billions: float) -> None:
    shape = next(row.shape for row in ROWS if row.model == model)
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=0.02)
