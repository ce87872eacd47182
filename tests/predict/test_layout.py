"""Layouts: what they refuse, with which words, and what they only remark on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.presets import preset

LLAMA = preset("llama-3-8b")  # 32 layers, 32 heads, 8 key/value heads, ff_dim 14336
MIXTRAL = preset("mixtral-8x7b")  # 8 experts


def test_ranks_and_replicas() -> None:
    layout = ParallelLayout(dp=6, tp=2, cp=4, pp=5, ep=3)
    assert layout.world_size == 6 * 2 * 4 * 5
    assert layout.replicas == 24
    assert layout.expert_replicas == 8
    assert ParallelLayout().world_size == 1


def test_microbatches_fill_the_pipeline_unless_given() -> None:
    assert ParallelLayout().microbatches == 1
    assert ParallelLayout(pp=4).microbatches == 4
    assert ParallelLayout(pp=4, schedule="afab").microbatches == 4
    interleaved = ParallelLayout(pp=4, schedule="interleaved_1f1b", virtual_stages=2)
    assert interleaved.microbatches == 8
    assert interleaved.chunks == 8
    assert ParallelLayout(pp=4, num_microbatches=3).microbatches == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 0}, "dp is 0: expected a whole number of at least 1"),
        ({"tp": 2.0}, "tp is 2.0: expected a whole number"),
        ({"pp": True}, "pp is True: expected a whole number"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"zero_stage": 4}, "zero_stage is 4; expected 0, 1, 2 or 3"),
        ({"zero_stage": True}, "zero_stage is True"),
        ({"schedule": "gpipe"}, "schedule is 'gpipe'; expected one of"),
        ({"virtual_stages": 2}, 'only "interleaved_1f1b" has more than 1'),
        ({"pp": 2, "schedule": "interleaved_1f1b"}, "virtual_stages is 1"),
        (
            dict(pp=4, schedule="interleaved_1f1b", virtual_stages=2, num_microbatches=6),
            "num_microbatches is 6 and pp 4: .* use a multiple",
        ),
        ({"dp": 4, "ep": 3}, "ep is 3 and dp x cp is 4 x 1 = 4"),
        (dict(pp=2, layers_per_chunk=(3,)), "has 1 numbers: expected .* = 2 x 1 chunks"),
        (dict(pp=2, layers_per_chunk=(3, 0)), r"layers_per_chunk is \(3, 0\): expected a tuple"),
        (dict(pp=2, layers_per_chunk=[3, 2]), r"layers_per_chunk is \[3, 2\]: expected a tuple"),
        (dict(pp=2, layers_per_chunk=(True, 2)), r"layers_per_chunk is \(True, 2\)"),
    ],
)
def test_fields_that_do_not_fit_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**fields)


def test_a_flag_is_not_a_number() -> None:
    with pytest.raises(TypeError, match="sequence_parallel is 1; expected True or False"):
        ParallelLayout(sequence_parallel=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"tp": 5}, {}, "tp is 5 and must divide num_heads, 32: each rank holds the same"),
        ({"tp": 4}, {"num_heads": 24, "num_kv_heads": 6, "dim": 3072}, "num_kv_heads is 6 and tp"),
        ({"tp": 4}, {"ff_dim": 1001}, "ff_dim is 1001 and tp 4"),
        ({"pp": 33}, {}, "num_layers is 32 and pp 33: each stage needs a layer"),
        (
            {"pp": 4, "schedule": "interleaved_1f1b", "virtual_stages": 9},
            {},
            "num_layers is 32 and pp 4 x virtual_stages 9",
        ),
        ({"dp": 2, "ep": 2}, {}, "ep is 2, but the model has no experts"),
        ({"cp": 3}, {}, "cp is 3 and must divide seq_len, 4096: each rank holds the same"),
        (dict(pp=2, layers_per_chunk=(16, 15)), {}, "adds up to 31: expected num_layers=32"),
    ],
)
def test_models_that_a_layout_cannot_hold(
    fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**fields).check(LLAMA.with_changes(**changes), 4096)


def test_experts_must_divide() -> None:
    ParallelLayout(dp=16, ep=8).check(MIXTRAL, 4096)
    with pytest.raises(ValueError, match="has 8 experts and ep is 16: ep must divide them"):
        ParallelLayout(dp=16, ep=16).check(MIXTRAL, 4096)
    assert MIXTRAL.moe is not None
    odd = MIXTRAL.with_changes(moe=replace(MIXTRAL.moe, expert_ff_dim=1001))
    ParallelLayout(tp=1).check(odd, 4096)
    with pytest.raises(ValueError, match="expert_ff_dim is 1001 and tp 2"):
        ParallelLayout(tp=2).check(odd, 4096)


def test_sequence_parallel_splits_the_tokens_that_cp_leaves() -> None:
    layout = ParallelLayout(tp=8, cp=4, sequence_parallel=True)
    layout.check(LLAMA, 4096)
    with pytest.raises(ValueError, match="seq_len / cp is 1025 and tp 8"):
        layout.check(LLAMA, 4100)
    layout.check(LLAMA)  # no sequence, no complaint
    ParallelLayout(tp=8, cp=4).check(LLAMA, 4100)


def test_notes_say_what_one_might_not_expect() -> None:
    def notes(seq_len: int | None = 4096, **fields: Any) -> str:
        return "\n".join(ParallelLayout(**fields).notes(LLAMA.with_changes(tied=True), seq_len))

    assert notes(dp=8, tp=8, zero_stage=1) == ""
    assert "each key/value head is held by 4 ranks" in notes(tp=32)
    assert "sequence_parallel has no effect at tp=1" in notes(sequence_parallel=True)
    assert "zero_stage=3 has no effect on one replica" in notes(zero_stage=3)
    assert "zero_stage" not in notes(cp=2, zero_stage=1)
    assert "for every micro-batch" in notes(dp=2, pp=2, zero_stage=3)
    assert "reduced again for every micro-batch" in notes(dp=2, pp=2, zero_stage=2)
    assert "the first stages hold one more" in notes(pp=5)
    assert "hold one more" not in notes(pp=5, layers_per_chunk=(7, 7, 6, 6, 6))
    assert "gathered again in the backward pass; DTensor keeps it" in notes(
        tp=2, sequence_parallel=True
    )
    assert "the first and by the last stage" in notes(pp=2)
    assert "never fills" in notes(pp=4, num_microbatches=3)
    assert "zigzag" in notes(seq_len=4100, cp=4)
    assert "zigzag" not in notes(seq_len=4096, cp=4)


@pytest.mark.parametrize("seq_len", ["4096", 0, True, 4096.0])
def test_a_sequence_length_is_a_whole_number(seq_len: Any) -> None:
    with pytest.raises(ValueError, match=f"seq_len is {seq_len!r}: expected a whole number"):
        ParallelLayout().check(LLAMA, seq_len)


def test_changes_are_checked_again() -> None:
    layout = ParallelLayout(dp=4, zero_stage=1)
    assert layout.with_changes(dp=8).replicas == 8
    with pytest.raises(ValueError, match="zero_stage is 7"):
        layout.with_changes(zero_stage=7)
