"""Predictions of memory as bars: lengths, colours, and what is said in words."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex

from playbook_utils import show
from playbook_utils.predict.estimate import CATEGORIES
from playbook_utils.predict.memory import predict_memory
from playbook_utils.predict.presets import preset
from tests.show.drawn import flaws


def test_memory_bars_says_its_numbers_in_words_and_draws_them() -> None:
    shape = preset("llama-3-8b")
    estimates = {
        mode: predict_memory(shape, seq_len=16384, recompute=mode) for mode in ("none", "full")
    }
    picture = show.memory_bars(estimates, gpu="h100", title="Llama 3 8B")
    assert flaws(picture) == []
    assert repr(picture).startswith("Llama 3 8B. none: params 15 GiB, grads 15 GiB, ")
    (axes,) = picture.figure.axes
    unit = 2**30
    widths = [patch.get_width() * unit for patch in axes.patches]
    expected = [
        getattr(estimate, f"{name}_bytes")
        for estimate in estimates.values()
        for name in (*CATEGORIES, "transient")
    ]
    assert widths == pytest.approx(expected)
    moments = [patch for patch in axes.patches][4::5]
    assert {to_hex(patch.get_facecolor()) for patch in moments} == {"#bbbbbb"}


def test_memory_bars_of_one_estimate_without_a_gpu() -> None:
    estimate = predict_memory(preset("gpt2"), seq_len=128)
    picture = show.memory_bars(estimate)
    assert flaws(picture) == [] and "fit" not in repr(picture)
    with pytest.raises(ValueError, match="no GPU is called"):
        show.memory_bars(estimate, gpu="h900")
