"""Every bar of the book's memory charts, equal to the last bit under its convention."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from playbook_utils.predict import book
from playbook_utils.predict.book import (
    BOOK_MODELS,
    CHARTS,
    ChartRow,
    book_facts,
    book_params,
    chart,
    gpt_shape,
    predict_chart_row,
)
from playbook_utils.predict.presets import preset

GIB = 2**30
NUM_BARS = {
    "memusage_activations": 15,
    "memory_recomputation": 60,
    "dp_ourjourney_memoryusage": 15,
    "zero3_memoryusage": 12,
    "tp_memoryusage": 9,
    "tp_sp_memoryusage": 9,
    "cp_8Bmemoryusage": 15,
    "pp_memoryusage": 6,
}


def predicted(row: ChartRow) -> ChartRow:
    return predict_chart_row(row.chart, row.panel, row.seq_len, row.recompute)


@pytest.mark.parametrize("name", CHARTS)
def test_every_bar_is_reproduced_exactly(name: str) -> None:
    rows = chart(name)
    assert len(rows) == NUM_BARS[name]
    assert [predicted(row) for row in rows] == list(rows)


def test_all_charts_are_covered() -> None:
    assert set(book_facts()["charts"]) == set(CHARTS) == set(NUM_BARS)
    for name, (convention, _) in CHARTS.items():
        assert book_facts()["charts"][name]["convention"].startswith(convention)


def test_bars_add_up() -> None:
    for name in CHARTS:
        for row in chart(name):
            assert row.total_gib == pytest.approx(sum(astuple(row)[4:8]), abs=1e-9)


def test_a_wrong_convention_does_not_reproduce_the_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt, llama = book.CONVENTIONS["gpt-fp32"], book.CONVENTIONS["llama-bf16"]
    for changed, name in (
        (replace(gpt, embedding_mask=False), "memory_recomputation"),
        (replace(gpt, activation_bytes=4), "memusage_activations"),
        (replace(gpt, gpt_params=False), "memusage_activations"),
        (replace(llama, precision="bf16"), "cp_8Bmemoryusage"),
        (replace(llama, recompute="none"), "pp_memoryusage"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(book.CONVENTIONS, changed.name, changed)
            wrong = [
                row for row in chart(name) if predict_chart_row(name, row.panel, row.seq_len) != row
            ]
            assert wrong
    with monkeypatch.context() as patch:
        patch.delitem(book.ROUNDED_PARAMS_GIB, "tp_memoryusage")
        assert predicted(chart("tp_memoryusage")[0]) != chart("tp_memoryusage")[0]


@pytest.mark.parametrize(
    ("model", "billions"), [("8B", 6.97), ("70B", 65.5), ("405B", 408.0), ("1B", 1.07)]
)
def test_the_books_parameter_formula_is_a_gpts(model: str, billions: float) -> None:
    shape = preset(BOOK_MODELS[model])
    n = book_params(shape.dim, shape.num_layers, shape.vocab_size)
    assert n / 1e9 == pytest.approx(billions, rel=2e-3)
    seq_len = 777
    positions = seq_len * shape.dim
    assert book_params(shape.dim, shape.num_layers, shape.vocab_size, seq_len) == n + positions
    assert gpt_shape(shape, seq_len).num_params == n + positions


def test_llamas_own_parameters_are_other_than_the_formulas() -> None:
    shape = preset("llama-3-8b")
    ratio = book_params(shape.dim, shape.num_layers, shape.vocab_size) / shape.num_params
    assert ratio == pytest.approx(0.868, abs=1e-3)


def test_layouts_that_the_charts_do_not_have() -> None:
    row = predict_chart_row("tp_memoryusage", "TP=4", 4096)
    assert row.params_gib == 131.5 / 4
    assert row.activations_gib == 80 * 4096 * 8192 * (10 + 24 / 4) / GIB
    longer = predict_chart_row("memory_recomputation", "8B", 32768, "selective")
    assert longer.activations_gib == (32 * 34 + 1) * 32768 * 4096 / GIB


def test_the_memory_profile_is_llama_1b_in_fp32() -> None:
    profile = book_facts()["memory_profile"]
    shape = preset(profile["model"])
    peaks = profile["peak_by_category_gib"]
    assert peaks["optimizer_state"] * GIB == 8 * shape.num_params
    for category in ("parameter", "gradient"):  # 5,120 and 65,536 bytes more
        assert 1 < peaks[category] * GIB / (4 * shape.num_params) < 1.00002
    assert 60 <= len(profile["rows"]) <= 100
    assert all(len(row) == len(profile["columns"]) == 8 for row in profile["rows"])
    assert [row[0] for row in profile["rows"]] == sorted(row[0] for row in profile["rows"])
    assert max(row[-1] for row in profile["rows"]) == round(profile["peak_total_gib"], 4)
    for row in profile["rows"]:
        assert row[-1] == pytest.approx(sum(row[1:-1]), abs=3e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tp_memory", "TP=1", 4096), "no chart is called 'tp_memory'; expected one of memusage"),
        (("tp_memoryusage", "EP=2", 4096), "panel is 'EP=2'; expected degrees such as"),
        (("memory_recomputation", "7B", 4096), "panel is '7B'; expected one of 1B, 3B"),
        (("tp_memoryusage", "TP=2 TP=4", 4096), "expected each degree once, found tp twice"),
        (("tp_memoryusage", "TP=2+SP+SP", 4096), "found sequence_parallel twice"),
    ],
)
def test_unknown_charts_and_panels(arguments: tuple[str, str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict_chart_row(*arguments)
