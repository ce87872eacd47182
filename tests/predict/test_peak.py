"""What a rank needs for a moment beside what it keeps: by hand, and measured on the course's model.

Whether a GPU holds a rank is decided by the peak, in the estimate, in words and in bytes alike.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from playbook_utils.measure import track_memory
from playbook_utils.model import Decoder, DecoderConfig, cross_entropy
from playbook_utils.predict.estimate import CATEGORIES, MOMENTS, MemoryEstimate
from playbook_utils.predict.hardware import gpu
from playbook_utils.predict.headroom import headroom_bytes, verdict
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import predict_memory
from playbook_utils.predict.presets import preset
from playbook_utils.predict.shapes import ModelShape
from tests.predict.test_memory import Checkpointed

LLAMA = preset("llama-3-8b")
HEAD = 128_256 * 4096
LAYER = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
ROTARY = 2 * 128 * 2  # bytes a position: cosines and sines of 128, in BF16


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_of_a_tracked_step_to_the_byte(recompute: str) -> None:
    config = DecoderConfig(
        vocab_size=2003, dim=96, num_layers=3, num_heads=6, num_kv_heads=2, ff_dim=250
    )
    model = (Checkpointed if recompute == "full" else Decoder)(config)
    tokens, targets = torch.randint(0, 2003, (2, 2, 61))
    with track_memory(model) as memory, memory.step():
        with memory.moment("forward"):
            loss = cross_entropy(model(tokens), targets)
        with memory.moment("backward"):
            loss.backward()
    found = predict_memory(
        ModelShape.from_decoder(config),
        seq_len=61,
        microbatch_size=2,
        precision="fp32",
        recompute=recompute,
        kernels="eager",
        statistics=True,
    )
    assert found.moment == "loss"
    assert found.transient_bytes == 2 * 4 * 2 * 61 * 2003 - found.recomputed_bytes
    # At that moment there are no gradients of params yet; the loss is there besides.
    peak = max(sample.total_bytes for sample in memory.samples if sample.moment == "backward")
    expected = found.params_bytes + found.activations_bytes + found.transient_bytes
    assert peak == expected + loss.nbytes


@pytest.mark.parametrize(("microbatch_size", "fits"), [(4, True), (8, False)])
def test_a_layout_whose_total_fits_may_not_run(microbatch_size: int, fits: bool) -> None:
    layout = ParallelLayout(dp=64, zero_stage=3)
    found = predict_memory(
        LLAMA, seq_len=8192, microbatch_size=microbatch_size, layout=layout, recompute="full"
    )
    tokens = 8192 * microbatch_size
    states = 16 * LLAMA.num_params // 64
    kept = tokens * (2 * 32 * 4096 + 2 * 2 * 4096 + 4 * 128_256) + 8192 * ROTARY
    assert found.total_bytes == states + kept
    assert found.transient_bytes == 2 * 4 * tokens * 128_256
    assert found.peak_bytes == states + kept + 8 * tokens * 128_256
    assert found.total_bytes < 80 * 2**30
    assert found.fits("a100-80gb") is fits
    assert found.peak_bytes <= 80 * 2**30 or not fits


def test_each_moment_by_hand() -> None:
    """Few tokens, so that ZeRO's units outweigh the logits; two stages of 16 layers."""
    tokens = 128
    kept = 16 * tokens * 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14_336)  # a micro-batch
    after = tokens * (2 * 2 * 4096 + 4 * 128_256)

    def at(stage: int, zero_stage: int, shape: ModelShape = LLAMA) -> MemoryEstimate:
        layout = ParallelLayout(pp=2, dp=4, zero_stage=zero_stage, num_microbatches=2)
        return predict_memory(shape, seq_len=tokens, layout=layout, stage=stage)

    for zero_stage, copies in ((0, 0), (1, 0), (2, 1), (3, 2)):  # params, gradient: 2 bytes each
        first, last = at(0, zero_stage), at(1, zero_stage)
        # The first stage keeps two micro-batches; at its embedding one of them is gone.
        moments = {"layer": copies * 2 * LAYER, "embedding": copies * 2 * HEAD - kept}
        assert first.transient_bytes == max(moments.values())
        assert moments[first.moment] == max(moments.values())
        moments = {
            "loss": 2 * 4 * tokens * 128_256,
            "head": copies * 2 * HEAD,
            "layer": copies * 2 * LAYER - after,
        }
        assert last.transient_bytes == max(moments.values())
        assert moments[last.moment] == max(moments.values())
        gathered = 2 * HEAD if zero_stage == 3 else 0
        assert first.gathered_bytes == last.gathered_bytes == gathered
        assert first.moment in MOMENTS and last.moment in MOMENTS
    assert {at(0, 0).moment, at(0, 3).moment} == {"layer", "embedding"}
    assert {at(1, 0).moment, at(1, 3).moment} == {"loss", "head"}
    small = LLAMA.with_changes(vocab_size=256)
    after = tokens * (2 * 2 * 4096 + 4 * 256)
    assert (at(1, 3, small).moment, at(1, 3, small).transient_bytes) == ("layer", 4 * LAYER - after)


def test_the_logits_count_where_they_are_and_are_split_as_they_are() -> None:
    layout = ParallelLayout(pp=2, tp=4, cp=2)
    first, last = (predict_memory(LLAMA, seq_len=4096, layout=layout, stage=i) for i in (0, 1))
    assert first.transient_bytes == 0
    assert last.transient_bytes == 2 * 4 * 4096 * 128_256 // 8


def test_the_stage_that_is_named_has_the_highest_peak() -> None:
    """The last stage keeps less than the first, but its logits peak higher."""
    shape, layout = preset("llama-3.2-1b"), ParallelLayout(pp=5, num_microbatches=2)
    every = [predict_memory(shape, seq_len=4096, layout=layout, stage=stage) for stage in range(5)]
    totals = [found.total_bytes for found in every]
    peaks = [found.peak_bytes for found in every]
    assert (totals.index(max(totals)), peaks.index(max(peaks))) == (0, 4)
    assert predict_memory(shape, seq_len=4096, layout=layout) == every[4]


def test_recomputation_and_zero_meet_in_the_same_layer() -> None:
    small = LLAMA.with_changes(vocab_size=8)
    layout = ParallelLayout(pp=2, dp=2, zero_stage=3)
    found = predict_memory(small, seq_len=512, layout=layout, recompute="full", stage=0)
    layer = 512 * 2 * (3 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14_336)  # all but its input
    assert found.recomputed_bytes == layer
    assert found.transient_bytes == 2 * 2 * LAYER  # the layer itself is in the total
    assert found.moment == "layer"


def estimate_of(total: int, transient: int) -> MemoryEstimate:
    parts = {name: {"mlp": total} if name == "params" else {} for name in CATEGORIES}
    return MemoryEstimate(0, 1, parts, (1,), transient_bytes=transient, moment="loss")


@pytest.mark.parametrize("reported", [None, 90, 100])
@pytest.mark.parametrize(("total", "transient"), [(80, 10), (80, 11), (90, 10), (90, 11), (101, 0)])
def test_fits_words_and_bytes_agree(total: int, transient: int, reported: int | None) -> None:
    accelerator = replace(gpu("h100"), memory_bytes=100, reported_bytes=reported)
    assert accelerator.usable_bytes == (reported or 100)
    found = estimate_of(total, transient)
    fits = total + transient <= (reported or 100)
    assert found.fits(accelerator) is fits
    assert verdict(found, accelerator).startswith("fits") is fits
    assert headroom_bytes(found, accelerator) == (reported or 100) - total - transient


def test_the_numbers_in_json() -> None:
    data: dict[str, Any] = json.loads(json.dumps(estimate_of(80, 11).as_dict()))
    assert (data["transient_bytes"], data["peak_bytes"], data["moment"]) == (11, 91, "loss")


@pytest.mark.parametrize("accelerator", [None, 80, {"memory_bytes": 80}])
def test_only_a_gpu_or_its_name_is_asked(accelerator: Any) -> None:
    with pytest.raises(TypeError, match=r"accelerator is .*: expected Accelerator"):
        estimate_of(1, 1).fits(accelerator)
