"""Ranks whose bytes are added up here by hand, without the package's own terms."""

from __future__ import annotations

from typing import Any

import pytest

from playbook_utils.predict.activations import layer_terms, output_terms
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import predict_memory
from playbook_utils.predict.presets import preset

LLAMA, MIXTRAL, DEEPSEEK = (preset(n) for n in ("llama-3-8b", "mixtral-8x7b", "deepseek-v3"))
TOKENS = 4096

# DeepSeek-V3: elements a token and layer, the layer's input aside.
MLA = (
    7168  # input of the latents
    + 2 * (1536 + 512)  # each latent and its norm's input
    + 64  # the rotary key
    + 2 * 128 * 192  # queries, keys
    + 2 * 128 * 128  # values, output
    + 7168  # input of the second norm
)
DENSE = MLA + 7168 + 3 * 18_432
EXPERTS = MLA + 7168 + 2 * 8 * 7168 + 8 * 3 * 2048 + 3 * 2048  # and 256 probabilities in FP32
MLA_PARAMS = (
    7168 * (1536 + 512 + 64)
    + 1536 * 128 * 192
    + 512 * 128 * 256
    + 128 * 128 * 7168
    + 2 * 7168 + 1536 + 512
)  # fmt: skip
EXPERT_PARAMS, ROUTER_PARAMS = 3 * 7168 * 2048, 7168 * 256 + 256


def test_deepseek_v3_first_stage_recomputed_in_full() -> None:
    layout = ParallelLayout(pp=16, dp=128, ep=64, zero_stage=3)
    found = predict_memory(DEEPSEEK, seq_len=TOKENS, layout=layout, recompute="full", stage=0)
    # 61 layers on 16 stages: four on the first, three dense and one with experts.
    assert found.parts["activations"] == {
        "layer_inputs": 16 * 4 * 2 * TOKENS * 7168,
        "positions": 2 * 2 * TOKENS * 64,
        "recomputed_layer": TOKENS * (2 * EXPERTS + 4 * 256),
    }
    assert found.gathered_bytes == 2 * 129_280 * 7168
    dense = MLA_PARAMS + 3 * 7168 * 18_432
    # The layer with experts has more to recompute, and ZeRO more to gather of it than it has less.
    sparse = MLA_PARAMS + ROUTER_PARAMS + (256 // 64 + 1) * EXPERT_PARAMS
    again = {"dense": 2 * TOKENS * DENSE, "experts": TOKENS * (2 * EXPERTS + 4 * 256)}
    layer = max(again["dense"] + 4 * dense, again["experts"] + 4 * sparse)
    embedding = 4 * 129_280 * 7168 - 4 * 2 * TOKENS * 7168
    assert found.transient_bytes == max(layer, embedding) - again["experts"]
    second = predict_memory(DEEPSEEK, seq_len=TOKENS, layout=layout, stage=1)
    assert second.gathered_bytes == 2 * sparse


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_gathered_is_the_largest_kind_of_layer(recompute: str) -> None:
    small = DEEPSEEK.with_changes(vocab_size=8)
    layout = ParallelLayout(pp=16, dp=128, ep=64, zero_stage=3)
    found = predict_memory(small, seq_len=64, layout=layout, recompute=recompute, stage=0)
    assert found.gathered_bytes == 2 * (MLA_PARAMS + 3 * 7168 * 18_432)  # dense
    # Experts that stand on one rank only are never sharded, and so never gathered.
    alone = layout.with_changes(dp=64)
    found = predict_memory(small, seq_len=64, layout=alone, stage=1)
    assert found.gathered_bytes == 2 * (MLA_PARAMS + ROUTER_PARAMS + EXPERT_PARAMS)


def test_experts_stand_on_dp_and_cp_over_ep_ranks() -> None:
    layout = ParallelLayout(cp=2, dp=4, ep=8, zero_stage=1)
    found = predict_memory(MIXTRAL, seq_len=64, layout=layout).parts
    experts, attention = 32 * 3 * 4096 * 14_336, 32 * (2 * 4096**2 + 2 * 4096 * 1024)
    assert found["params"]["experts"] == 2 * experts
    assert found["optimizer_states"]["experts"] == 12 * experts  # on this rank alone
    assert found["optimizer_states"]["attention"] == 12 * attention // 8
    shared = layout.with_changes(dp=8)
    found = predict_memory(MIXTRAL, seq_len=64, layout=shared).parts
    assert found["optimizer_states"]["experts"] == 12 * experts // 2


# Mixtral with tp=4: bytes a token on a rank, without sequence parallelism and with it.
MIXTRAL_TP4 = {
    "attention norm: input": (2 * 4096, 2 * 1024),
    "shared input of q, k, v": (2 * 4096, 2 * 1024),
    "queries": (2 * 1024, 2 * 1024),
    "keys": (2 * 256, 2 * 256),
    "values": (2 * 256, 2 * 256),
    "output (o_proj input)": (2 * 1024, 2 * 1024),
    "mlp norm: input": (2 * 4096, 2 * 1024),
    "router input": (2 * 4096, 2 * 1024),
    "router probabilities": (4 * 8, 4 * 2),
    "tokens sent to experts": (2 * 2 * 4096, 2 * 2 * 4096),  # gathered: whole either way
    "gate": (2 * 2 * 3584, 2 * 2 * 3584),
    "up": (2 * 2 * 3584, 2 * 2 * 3584),
    "product (down_proj input)": (2 * 2 * 3584, 2 * 2 * 3584),
    "experts' outputs (weighted sum's input)": (2 * 2 * 4096, 2 * 2 * 1024),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_experts_under_tensor_parallelism_term_by_term(sequence_parallel: bool) -> None:
    layout = ParallelLayout(tp=4, sequence_parallel=sequence_parallel)
    found = {t.name: t.bytes_on_rank(layout) for t in layer_terms(MIXTRAL, TOKENS)}
    assert found == {name: TOKENS * sizes[sequence_parallel] for name, sizes in MIXTRAL_TP4.items()}


def test_mixtral_on_eight_ranks_with_sequence_parallelism() -> None:
    layout = ParallelLayout(tp=8, sequence_parallel=True)
    found = predict_memory(MIXTRAL, seq_len=TOKENS, layout=layout).parts["activations"]
    whole, split = 2 * 2 * 4096, 2 * (3 * 2 * 14_336 + 2 * 4096)
    assert found["experts"] == 32 * TOKENS * (whole + split // 8)
    assert found["router"] == 32 * TOKENS * (2 * 4096 + 4 * 8) // 8


def test_zero_3_gathers_what_tensor_parallelism_leaves() -> None:
    layout = ParallelLayout(tp=2, dp=8, zero_stage=3)
    found = predict_memory(LLAMA, seq_len=64, layout=layout)
    assert found.gathered_bytes == 2 * 128_256 * 4096 // 2
    assert predict_memory(LLAMA, seq_len=64, layout=layout.with_changes(dp=1)).gathered_bytes == 0


@pytest.mark.parametrize("schedule", ["afab", "1f1b"])
def test_the_loss_is_gone_when_the_last_stage_recomputes(schedule: str) -> None:
    small = LLAMA.with_changes(vocab_size=8)
    layout = ParallelLayout(pp=2, schedule=schedule, num_microbatches=4)
    found = predict_memory(small, seq_len=512, layout=layout, recompute="full", stage=1)
    kept = 4 if schedule == "afab" else 1
    after = 512 * (2 * 2 * 4096 + 4 * 8)
    layer = 512 * 2 * (3 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14_336)
    table = 512 * 2 * 2 * 128
    inputs = 16 * 512 * 2 * 4096
    assert found.recomputed_bytes == layer - after  # of one micro-batch, however many are kept
    assert found.activations_bytes == kept * (inputs + after) + table + layer - after


@pytest.mark.parametrize(
    "fields",
    [
        dict(pp=4, num_microbatches=8),
        dict(pp=4, num_microbatches=8, schedule="afab"),
        dict(pp=4, num_microbatches=8, schedule="interleaved_1f1b", virtual_stages=2),
        dict(pp=2, tp=4, sequence_parallel=True),
    ],
)
def test_a_rank_has_one_rotary_table(fields: dict[str, Any]) -> None:
    for cp in (1, 2):
        layout = ParallelLayout(**fields, cp=cp)
        for stage in range(layout.pp):
            found = predict_memory(LLAMA, seq_len=512, layout=layout, stage=stage)
            assert found.parts["activations"]["positions"] == 2 * 512 * 128 * 2 // cp


def test_learned_positions_are_kept_beside_the_embedding() -> None:
    layout = ParallelLayout(pp=2, schedule="interleaved_1f1b", virtual_stages=2)
    found = [
        predict_memory(preset("gpt2"), seq_len=512, layout=layout, stage=i, statistics=True)
        for i in (0, 1)
    ]
    in_flight = found[0].microbatches_in_flight[0]
    assert in_flight > 1
    assert found[0].parts["activations"]["positions"] == in_flight * 8 * 512
    assert "positions" not in found[1].parts["activations"]


def test_ids_and_tables_are_whole_on_every_tensor_parallel_rank() -> None:
    layout = ParallelLayout(tp=4, cp=2, sequence_parallel=True)
    names = ("token ids", "rotary cosines and sines", "position ids", "targets and their weight")
    seen = set()
    for shape in (LLAMA, preset("gpt2")):
        for term in output_terms(shape, 512, statistics=True):
            if term.name in names:
                seen.add(term.name)
                assert term.bytes_on_rank(layout) == term.num_bytes // 2
            else:
                assert term.bytes_on_rank(layout) == -(-term.num_bytes // 8)
    assert seen == set(names)


def test_layers_as_llama_3_405b_places_them() -> None:
    shape = preset("llama-3-405b")
    layout = ParallelLayout(tp=8, pp=16, layers_per_chunk=(7, *[8] * 14, 7))
    states = [
        predict_memory(shape, seq_len=8192, layout=layout, stage=stage).num_params
        for stage in range(16)
    ]
    layer = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248
    table = 128_256 * 16384 // 8
    assert states[0] == 7 * (layer // 8 + 2 * 16384) + table
    assert states[15] == states[0] + 16384
    assert set(states[1:15]) == {8 * (layer // 8 + 2 * 16384)}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(seq_len="4096"), ValueError, "seq_len is '4096': expected a whole number"),
        (dict(seq_len=None), ValueError, "seq_len is None"),
        (dict(seq_len=True), ValueError, "seq_len is True"),
        (dict(seq_len=0), ValueError, "seq_len is 0"),
        (dict(seq_len=8, microbatch_size="2"), ValueError, "microbatch_size is '2'"),
        (dict(seq_len=8, microbatch_size=None), ValueError, "microbatch_size is None"),
        (dict(seq_len=8, microbatch_size=True), ValueError, "microbatch_size is True"),
        (dict(seq_len=8, microbatch_size=0), ValueError, "microbatch_size is 0"),
        (dict(seq_len=8, statistics="no"), ValueError, "statistics is 'no': expected True or"),
        (dict(seq_len=8, layout={"dp": 8}), TypeError, "layout is .* expected ParallelLayout"),
        (dict(seq_len=8, shape="llama-3-8b"), TypeError, "shape is .* expected ModelShape"),
        (dict(seq_len=8, stage=True), ValueError, "stage is True"),
    ],
)
def test_arguments_are_checked_before_they_are_used(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        predict_memory(**({"shape": LLAMA} | arguments))
