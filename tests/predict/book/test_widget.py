"""The book's calculator against predict_memory: equal where it is right, else by how much not."""

from __future__ import annotations

from typing import Any

import pytest

from playbook_utils.predict.book import book_facts
from playbook_utils.predict.book.widget import WIDGET_FAULTS, widget_memory, widget_shape
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import CATEGORIES, predict_memory

SIZES: dict[str, Any] = dict(
    dim=96, ff_dim=384, num_layers=5, num_heads=8, seq_len=40, vocab_size=1000, mlp="gelu"
)
SBH, SQUARE = 40 * 3 * 96, 8 * 40 * 40 * 3  # of a micro-batch of 3


def widget(**changes: Any) -> dict[str, int]:
    return widget_memory(**({"microbatch_size": 3} | SIZES | changes))


def ours(
    layout: ParallelLayout | None = None,
    mixed: bool = True,
    recompute: str = "none",
    **changes: Any,
) -> dict[str, int]:
    sizes = SIZES | changes
    found = predict_memory(
        widget_shape(**sizes),
        seq_len=sizes["seq_len"],
        microbatch_size=3,
        layout=layout,
        precision="bf16" if mixed else "fp32",
        recompute=recompute,
    )
    by_category = {name: getattr(found, f"{name}_bytes") for name in CATEGORIES}
    return by_category | {"activations": by_category["activations"] - found.recomputed_bytes}


def categories(found: dict[str, int]) -> dict[str, int]:
    return {name: found[name] for name in CATEGORIES}


@pytest.mark.parametrize("mlp", ["gelu", "relu"])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_equal_to_ours_on_one_rank(mlp: str, mixed: bool, recompute: str) -> None:
    theirs = widget(mlp=mlp, mixed=mixed, recompute=recompute)
    assert categories(theirs) == ours(mlp=mlp, mixed=mixed, recompute=recompute)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_equal_to_ours_under_zero(zero_stage: int) -> None:
    layout = ParallelLayout(dp=4, zero_stage=zero_stage)
    assert categories(widget(dp=4, zero_stage=zero_stage)) == ours(layout)


def test_layers_are_korthikantis_formula() -> None:
    found = widget()
    layers = sum(found[f"activations.{part}"] for part in ("attention", "mlp", "norms"))
    assert layers == 5 * (34 * SBH + 5 * SQUARE)
    assert found["activations.once"] == 5 * SBH + 4 * 40 * 3 * 1000


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_fault_tp_divides_neither_params_nor_logits(tp: int) -> None:
    theirs, right = widget(tp=tp), ours(ParallelLayout(tp=tp))
    logits = 4 * 40 * 3 * 1000
    assert theirs["activations"] - right["activations"] == logits - logits // tp
    assert theirs["params"] == widget()["params"]
    assert tp * 0.8 < theirs["params"] / right["params"] < tp


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_fault_sequence_parallelism_forgets_the_square(tp: int) -> None:
    theirs = widget(tp=tp, sequence_parallel=True)
    right = ours(ParallelLayout(tp=tp, sequence_parallel=True))
    assert theirs["activations"] - right["activations"] == 5 * 5 * (SQUARE - SQUARE // tp)
    selective = widget(tp=tp, sequence_parallel=True, recompute="selective")
    assert (
        categories(selective)["activations"]
        == ours(ParallelLayout(tp=tp, sequence_parallel=True), recompute="selective")["activations"]
    )


def test_fault_full_recomputation_under_sequence_parallelism() -> None:
    theirs = widget(tp=4, sequence_parallel=True, recompute="full")
    right = ours(ParallelLayout(tp=4, sequence_parallel=True), recompute="full")
    assert theirs["activations"] - right["activations"] == 5 * (2 * SBH - 2 * SBH // 4)


def test_fault_params_ignore_the_mlp() -> None:
    narrow = widget(ff_dim=100)
    assert narrow["params"] == widget()["params"]
    assert narrow["params"] - ours(ff_dim=100)["params"] == 2 * 5 * (2 * 96 + 1) * (384 - 100)
    assert ours(mlp="swiglu")["params"] - widget(mlp="swiglu")["params"] == 2 * 5 * 97 * 384


def test_fault_swiglu_keeps_four() -> None:
    kept = 2 * 40 * 3 * 384
    assert widget(mlp="swiglu")["activations"] - ours(mlp="swiglu")["activations"] == 5 * kept


def test_faults_are_told_with_what_we_do() -> None:
    assert len(WIDGET_FAULTS) >= 8
    assert all(theirs and instead for theirs, instead in WIDGET_FAULTS)


def test_the_presets_run_and_llama_3_8b_is_another_model() -> None:
    presets = book_facts()["widget_presets"]
    assert list(presets) == ["Llama 3 Tiny", "Llama 3 8B", "Llama 3 70B", "Llama 3 405B"]
    for sizes in presets.values():
        assert widget_memory(**sizes)["params"] > 0
    assert widget_memory(**presets["Llama 3 8B"])["params"] / 2 == pytest.approx(6.57e9, rel=1e-2)


@pytest.mark.parametrize("name", [*sorted(set(SIZES) - {"mlp"}), "microbatch_size", "tp", "dp"])
def test_inputs_are_whole_numbers(name: str) -> None:
    for value in (0, -1, 2.0, "8", None, True):
        with pytest.raises(ValueError, match=f"{name} is {value!r}: expected a whole number"):
            widget(**{name: value})


def test_switches_are_switches() -> None:
    for name in ("mixed", "sequence_parallel"):
        with pytest.raises(ValueError, match=f"{name} is 1: expected True or False"):
            widget(**{name: 1})
    with pytest.raises(ValueError, match="zero_stage is 4: expected 0, 1, 2 or 3"):
        widget(zero_stage=4)
    with pytest.raises(ValueError, match="optimizer_multiplier is -8"):
        widget(optimizer_multiplier=-8)


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="found mlp='geglu', recompute='none'; expected"):
        widget(mlp="geglu")
    with pytest.raises(ValueError, match="recompute='some'"):
        widget(recompute="some")
