"""Memory of a rank, against a tracked training step and against published sums."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from playbook_utils.measure import track_memory
from playbook_utils.model import Decoder, DecoderConfig, cross_entropy, rope_cos_sin
from playbook_utils.predict.activations import layer_terms, output_terms
from playbook_utils.predict.layout import ParallelLayout
from playbook_utils.predict.memory import CATEGORIES, MemoryEstimate, predict_memory
from playbook_utils.predict.presets import preset
from playbook_utils.predict.shapes import ModelShape, MoEShape
from playbook_utils.predict.weights import params_on_rank

LLAMA = preset("llama-3-8b")
GB, GIB = 10**9, 2**30


class Checkpointed(Decoder):
    """The course's Decoder, each layer recomputed in the backward pass."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """(B, T) -> (B, T, V)."""
        x = self.embedding(tokens)
        table = rope_cos_sin(torch.arange(tokens.size(1)), self.config.head_dim, 1e4, x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, table, use_reentrant=False, preserve_rng_state=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_tracked_training_step_to_the_byte(recompute: str) -> None:
    config = DecoderConfig(
        vocab_size=101, dim=96, num_layers=5, num_heads=6, num_kv_heads=2, ff_dim=250
    )
    model = (Checkpointed if recompute == "full" else Decoder)(config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(0, 101, (2, 61))
    with track_memory(model, optimizer) as memory:
        for _ in range(2):
            with memory.step():
                with memory.moment("forward"):
                    loss = cross_entropy(model(tokens), tokens)
                with memory.moment("backward"):
                    loss.backward()
                with memory.moment("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()

    found = predict_memory(
        ModelShape.from_decoder(config),
        seq_len=61,
        microbatch_size=2,
        precision="fp32",
        recompute=recompute,
        kernels="eager",
        statistics=True,
    )
    backward = [s for s in memory.samples if s.step == 1 and s.moment == "backward"]
    activations = max(sample.activations_bytes for sample in backward)
    # Tracked besides: the loss. Here tokens are their own targets, one tensor, and it is there
    # all the time; the prediction has two, and drops the targets with the loss.
    shared = tokens.nbytes if recompute == "none" else 0
    assert activations == found.activations_bytes + loss.nbytes - shared
    assert max(sample.grads_bytes for sample in memory.samples) == found.grads_bytes
    last = memory.samples[-1]
    counters = 4 * len(list(model.parameters()))  # AdamW's step, one number a tensor
    assert last.params_bytes == found.params_bytes
    assert last.optimizer_states_bytes == found.optimizer_states_bytes + counters
    assert bool(found.recomputed_bytes) == (recompute == "full")


def test_llama_3_8b_takes_16_bytes_a_parameter() -> None:
    found = predict_memory(LLAMA, seq_len=4096)
    states = found.params_bytes + found.grads_bytes + found.optimizer_states_bytes
    assert states == 16 * 8_030_261_248
    assert round(states / GB, 1) == 128.5
    assert found.num_params == LLAMA.num_params
    assert not found.fits("h100")
    sharded = predict_memory(LLAMA, seq_len=4096, layout=ParallelLayout(dp=8, zero_stage=3))
    assert sharded.fits("h100")


@pytest.mark.parametrize(("stage", "printed_gb"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_stages_as_printed_in_the_zero_paper(stage: int, printed_gb: float) -> None:
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 ranks, K = 12.
    layout = ParallelLayout(dp=64, zero_stage=stage)
    found = predict_memory(LLAMA, seq_len=8, layout=layout)
    states = found.params_bytes + found.grads_bytes + found.optimizer_states_bytes
    assert round(states / LLAMA.num_params * 7.5, 1) == printed_gb


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_shards_over_dp_and_cp_and_rounds_up(stage: int) -> None:
    shape = LLAMA.with_changes(num_layers=3, vocab_size=1001)
    plain = predict_memory(shape, seq_len=63, layout=ParallelLayout(dp=5, cp=3))
    found = predict_memory(shape, seq_len=63, layout=ParallelLayout(dp=5, cp=3, zero_stage=stage))
    for category, from_stage, size in (
        ("params", 3, 2),
        ("grads", 2, 2),
        ("optimizer_states", 1, 12),
    ):
        for part, whole in plain.parts[category].items():
            count, mine = whole // size, found.parts[category][part] // size
            if stage < from_stage:
                assert mine == count
            else:
                assert 0 <= 15 * mine - count < 15  # all of it, and less than one each too many
    assert found.parts["activations"] == plain.parts["activations"]
    assert found.num_params == plain.num_params


def test_zero_3_gathers_its_largest_unit_again() -> None:
    layout = ParallelLayout(dp=8, zero_stage=3)
    found = predict_memory(LLAMA, seq_len=64, layout=layout)
    assert found.gathered_bytes == 2 * 128256 * 4096  # the head outweighs a layer
    for stage in (0, 1, 2):
        plain = ParallelLayout(dp=8, zero_stage=stage)
        assert predict_memory(LLAMA, seq_len=64, layout=plain).gathered_bytes == 0
    small = LLAMA.with_changes(vocab_size=256)
    layer = sum(small.layer_params().values())
    assert predict_memory(small, seq_len=64, layout=layout).gathered_bytes == 2 * layer
    assert found.total_bytes == sum(getattr(found, f"{name}_bytes") for name in CATEGORIES)


def test_fp32_gradients_are_counted_with_the_gradients() -> None:
    plain = predict_memory(LLAMA, seq_len=64)
    buffered = predict_memory(LLAMA, seq_len=64, precision="bf16-fp32-grads")
    assert buffered.grads_bytes - plain.grads_bytes == 4 * LLAMA.num_params
    assert buffered.optimizer_states_bytes == plain.optimizer_states_bytes


def test_experts_are_sharded_over_their_own_replicas() -> None:
    shape = preset("mixtral-8x7b")
    layout = ParallelLayout(dp=16, ep=8, zero_stage=1)
    found = predict_memory(shape, seq_len=64, layout=layout).parts
    experts = shape.params_by_part()["experts"]
    assert found["params"]["experts"] == 2 * experts // 8
    assert found["optimizer_states"]["experts"] == 12 * experts // 8 // 2
    attention = shape.params_by_part()["attention"]
    assert found["optimizer_states"]["attention"] == 12 * attention // 16


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_pipelines_keep_a_whole_models_activations_on_the_first_stage(pp: int) -> None:
    # p micro-batches of 1 / p of the layers (Korthikanti et al. 2022, section 4.2.3)
    one = predict_memory(LLAMA, seq_len=512).parts["activations"]
    first = predict_memory(LLAMA, seq_len=512, layout=ParallelLayout(pp=pp), stage=0)
    assert first.microbatches_in_flight == (pp,)
    for part in ("attention", "mlp"):
        assert first.parts["activations"][part] == one[part]
    assert "logits" not in first.parts["activations"]


def test_interleaving_keeps_more_by_the_papers_factor() -> None:
    p, v = 4, 2
    layout = ParallelLayout(pp=p, virtual_stages=v, schedule="interleaved_1f1b")
    first = predict_memory(LLAMA, seq_len=512, layout=layout, stage=0).parts["activations"]
    one = predict_memory(LLAMA, seq_len=512).parts["activations"]
    assert first["mlp"] == one["mlp"] * (1 + (p - 1) / (p * v))


def test_each_stage_by_hand() -> None:
    """7 layers on 3 stages, GPT with dropout, 4 micro-batches: from the terms, stage by stage."""
    shape = ModelShape(
        vocab_size=101, dim=24, num_layers=7, num_heads=3, num_kv_heads=3, ff_dim=96,
        norm="layernorm", mlp="gelu", position="learned", bias=True, tied=True, dropout=True,
        max_seq_len=16,
    )  # fmt: skip
    layer = sum(term.num_bytes for term in layer_terms(shape, 11))
    outside = {"embedding": 0, "norms": 0, "head": 0, "logits": 0}
    for term in output_terms(shape, 11):
        outside[term.part] += term.num_bytes
    after = outside["norms"] + outside["head"] + outside["logits"]
    for schedule, kept in (("1f1b", (3, 2, 1)), ("afab", (4, 4, 4))):
        layout = ParallelLayout(pp=3, num_microbatches=4, schedule=schedule)
        estimates = [
            predict_memory(shape, seq_len=11, layout=layout, stage=stage) for stage in range(3)
        ]
        per_microbatch = (3 * layer + outside["embedding"], 2 * layer, 2 * layer + after)
        for found, count, each in zip(estimates, kept, per_microbatch, strict=True):
            assert found.activations_bytes == count * each
            assert found.num_params == sum(params_on_rank(shape, layout, found.stage).values())
        heaviest = max(estimates, key=lambda found: found.peak_bytes)
        assert predict_memory(shape, seq_len=11, layout=layout) == heaviest
    assert "head" in estimates[2].parts["params"]  # the tied matrix again
    assert "head" not in predict_memory(shape, seq_len=11).parts["params"]


def test_tensor_and_sequence_parallelism_and_context_parallelism() -> None:
    def activations(**fields: Any) -> dict[str, int]:
        layout = ParallelLayout(**fields)
        return predict_memory(LLAMA, seq_len=4096, layout=layout).parts["activations"]

    plain, tp = activations(), activations(tp=8)
    assert tp["logits"] == plain["logits"] // 8
    assert tp["norms"] == plain["norms"]
    sp = activations(tp=8, sequence_parallel=True)
    for part in ("norms", "attention", "mlp", "logits", "head"):
        assert sp[part] == plain[part] // 8
    cp = activations(cp=4)
    assert all(cp[part] == plain[part] // 4 for part in plain)


def test_recomputing_adds_one_layer_unless_the_loss_weighed_more() -> None:
    small = LLAMA.with_changes(vocab_size=8)
    layer = sum(term.num_bytes for term in layer_terms(small, 512))
    sbh = 512 * 4096
    full = predict_memory(small, seq_len=512, recompute="full")
    after = 2 * (2 * sbh) + 4 * 512 * 8  # final norm, head input, log-probabilities
    assert full.recomputed_bytes == layer - 2 * sbh - after
    assert full.parts["activations"]["layer_inputs"] == 32 * 2 * sbh
    assert full.parts["activations"]["recomputed_layer"] == full.recomputed_bytes
    # Llama's own vocabulary: what the loss keeps is more than a layer
    assert predict_memory(LLAMA, seq_len=512, recompute="full").recomputed_bytes == 0

    unfused = dict(seq_len=4096, attention="unfused")
    selective = predict_memory(small, **unfused, recompute="selective")  # type: ignore[arg-type]
    core = 2 * 32 * 4096**2
    assert selective.recomputed_bytes == core - 4 * 4096 * 4096 - 4 * 4096 * 8
    none = predict_memory(small, **unfused)  # type: ignore[arg-type]
    kept = selective.activations_bytes - selective.recomputed_bytes
    assert none.activations_bytes - kept == 32 * core
    on_first = predict_memory(
        small, seq_len=512, recompute="full", layout=ParallelLayout(pp=2), stage=0
    )
    assert on_first.recomputed_bytes == layer - 2 * sbh


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepseek-v3", dict(pp=16, dp=64, ep=64, zero_stage=1)),
        ("deepseek-v3", dict(pp=7, schedule="interleaved_1f1b", virtual_stages=4)),
        ("deepseek-v3", dict(pp=7, schedule="afab", num_microbatches=30)),
        ("llama-3.2-1b", dict(pp=5, num_microbatches=2)),
        ("llama-3.2-3b", dict(pp=6, schedule="interleaved_1f1b", virtual_stages=3)),
    ],
)
def test_no_stage_needs_more_than_the_one_that_is_named(name: str, fields: dict[str, Any]) -> None:
    layout, shape = ParallelLayout(**fields), preset(name)
    every = [
        predict_memory(shape, seq_len=4096, layout=layout, stage=stage)
        for stage in range(layout.pp)
    ]
    found = predict_memory(shape, seq_len=4096, layout=layout)
    assert found == max(every, key=lambda estimate: estimate.peak_bytes)
    if fields.get("ep"):
        assert found.stage == 1  # the first has the dense layers


def test_the_heaviest_stage_may_lie_in_the_middle() -> None:
    moe = MoEShape(num_experts=8, experts_per_token=2, expert_ff_dim=14336, num_dense_layers=16)
    shape = preset("mixtral-8x7b").with_changes(moe=moe, vocab_size=8)
    layout = ParallelLayout(pp=8)
    every = [
        predict_memory(shape, seq_len=512, layout=layout, stage=stage).peak_bytes
        for stage in range(8)
    ]
    found = predict_memory(shape, seq_len=512, layout=layout)
    assert found.stage == every.index(max(every)) == 4  # the first with experts


def test_as_dict_is_json_and_complete() -> None:
    layout = ParallelLayout(pp=4, virtual_stages=2, schedule="interleaved_1f1b", dp=2, zero_stage=3)
    found = predict_memory(LLAMA, seq_len=512, layout=layout, recompute="full")
    data = json.loads(json.dumps(found.as_dict()))
    assert data["total_bytes"] == sum(data[f"{name}_bytes"] for name in CATEGORIES)
    assert data["microbatches_in_flight"] == list(found.microbatches_in_flight)
    assert all(type(n) is int for parts in data["parts"].values() for n in parts.values())
    assert set(data["parts"]) == set(CATEGORIES)


def test_fits_reads_the_memory_that_the_driver_reports() -> None:
    def fits(num_bytes: int, name: str) -> bool:
        parts = {"params": {"mlp": num_bytes}}
        return MemoryEstimate(0, 1, parts, (1,)).fits(name)

    assert fits(81_559 * 2**20, "h100")
    assert not fits(81_559 * 2**20 + 1, "h100")
    assert fits(192 * GIB, "mi300x")  # no driver's number is known
    with pytest.raises(ValueError, match="no GPU is called"):
        fits(1, "abacus")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(seq_len=4096, layout=ParallelLayout(tp=5)), "tp is 5 and must divide num_heads, 32"),
        (dict(seq_len=4096, stage=1), "stage is 1; expected one of 0 to pp - 1 = 0"),
        (dict(seq_len=4096, precision="int4"), "precision is 'int4'"),
        (dict(seq_len=4096, recompute="half"), "recompute is 'half'"),
        (dict(seq_len=0), "seq_len is 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict_memory(LLAMA, **arguments)


def test_no_more_tokens_than_learned_positions() -> None:
    with pytest.raises(ValueError, match="seq_len is 2048, and the model has 1024 learned"):
        predict_memory(preset("gpt2"), seq_len=2048)
    assert predict_memory(preset("gpt2"), seq_len=1024).total_bytes > 0
