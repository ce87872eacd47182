"""The stages of lesson 07, imported from its cells, against one process and PyTorch's AdamW.

The lesson shows them at sizes that are easy to follow; here they meet world sizes 1 to 4, a model
whose parameters are odd in number, subgroups, accumulation, and the mistakes they refuse.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.data_parallelism import accumulate
from notebooks.zero import (
    AdamW,
    Flat,
    MixedPrecisionDDP,
    ZeRO1,
    ZeRO1AllReduce,
    ZeRO2,
    ZeRO3,
    full_state,
    held_bytes,
    load_full_state,
    predicted_wire,
    train,
    zero_bytes,
)
from playbook_utils.data import GeneratedLanguage, shard_batch
from playbook_utils.errors import LaunchError
from playbook_utils.measure import record_communication
from playbook_utils.model import Decoder, DecoderConfig, cross_entropy
from playbook_utils.workers import launch

RUNGS: dict[str, Any] = {
    "MixedPrecisionDDP": MixedPrecisionDDP,
    "ZeRO1AllReduce": ZeRO1AllReduce,
    "ZeRO1": ZeRO1,
    "ZeRO2": partial(ZeRO2, bucket_bytes=20_000),
    "ZeRO3": ZeRO3,
}
VARIANTS: dict[str, Any] = {
    "ZeRO2, one bucket": ZeRO2,
    "ZeRO2, wide sum": partial(ZeRO2, bucket_bytes=20_000, grad_dtype=torch.float64),
    "ZeRO3, on demand": partial(ZeRO3, prefetch=False),
    "ZeRO3, kept": partial(ZeRO3, reshard_after_forward=False),
}
STAGES = {"MixedPrecisionDDP": 0, "ZeRO1AllReduce": 1, "ZeRO1": 1, "ZeRO2": 2, "ZeRO3": 3}
LANGUAGE = GeneratedLanguage(vocab_size=65)
BATCHES = [LANGUAGE.batch(step, batch_size=24, seq_len=7) for step in range(5)]


def odd(dtype: torch.dtype = torch.float64) -> nn.Module:
    """11,011 parameters, odd in every layer; GPT's blocks, with biases."""
    sizes = {"dim": 20, "ff_dim": 37, "num_heads": 2, "num_kv_heads": 1, "num_layers": 3}
    changes = {"vocab_size": 65, "max_seq_len": 9, "tied": False}
    return Decoder(DecoderConfig.gpt_tiny(**sizes, **changes)).to(dtype)


def special(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Tied embedding and head, a frozen layer, and a frozen part of another."""
    sizes = {"dim": 20, "ff_dim": 37, "num_heads": 2, "num_kv_heads": 1, "num_layers": 3}
    model = Decoder(DecoderConfig.tiny(**sizes, vocab_size=65, tied=True)).to(dtype)
    model.layers[0].mlp.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    return model


def alone(make_model: Callable[[], nn.Module], max_norm: float | None = None) -> Any:
    torch.manual_seed(0)
    model = make_model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses, norms = torch.optim.AdamW(trainable, lr=1e-2), [], []
    for tokens, targets in BATCHES:
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trainable]).item())
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(trainable, max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def train_all(rungs: dict[str, Any], *args: Any) -> Any:
    found = {}
    for name, wrap in rungs.items():
        result = train(wrap, *args)
        found[name] = result["losses"], result["norms"], result["state"]
    return found


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        size = max(float(value.abs().max()), 1e-3)  # a bias of k has no gradient but for rounding
        assert (found[name] - value).abs().max() < 1e-10 * size, name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("make_model", [odd, special])
def test_trains_like_one_process(make_model: Callable[[], nn.Module], world_size: int) -> None:
    rungs = {name: partial(wrap, max_norm=0.7) for name, wrap in (RUNGS | VARIANTS).items()}
    losses, norms, params = alone(make_model, max_norm=0.7)
    assert max(norms) > 0.7, "nothing was clipped"
    parts = 2 if world_size < 4 else 1
    ranks = launch(train_all, rungs, make_model, BATCHES, parts, world_size=world_size)
    for name in rungs:
        found_losses = torch.tensor([rank[name][0] for rank in ranks]).double().mean(0)
        torch.testing.assert_close(found_losses, torch.tensor(losses).double(), rtol=1e-6, atol=0)
        for _, found_norms, state in (rank[name] for rank in ranks):
            assert found_norms == pytest.approx(norms, rel=1e-10)
            assert_close(state["params"], params)
            assert state["num_steps"] == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_agree_bit_for_bit(dtype: torch.dtype) -> None:
    """Two numbers have only one order in which they can be added."""
    results = launch(train_all, RUNGS, partial(odd, dtype), BATCHES, world_size=2)[0]
    expected = results["MixedPrecisionDDP"][2]
    for _, _, state in results.values():
        for kind in ("params", "exp_avg", "exp_avg_sq"):
            for name, value in expected[kind].items():
                assert torch.equal(state[kind][name], value), (kind, name)


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_more_ranks_agree_to_rounding(world_size: int, dtype: torch.dtype, most: float) -> None:
    """Distance between results over the distance that training went."""
    torch.manual_seed(0)
    start = {name: p.detach().float() for name, p in odd(dtype).named_parameters()}
    results = launch(train_all, RUNGS, partial(odd, dtype), BATCHES, world_size=world_size)[0]
    states = {name: state["params"] for name, (_, _, state) in results.items()}
    expected = states.pop("MixedPrecisionDDP")

    def distance(a: Any, b: Any) -> float:
        return sum(float((a[n] - b[n]).square().sum()) for n in a) ** 0.5

    went = distance(expected, start)
    assert went > 0.1
    assert max(distance(expected, found) for found in states.values()) < most * went


def measure(wrap: Callable[[nn.Module], Any], parts: int = 1) -> Any:
    """In a process of its own: a rung whose hooks sit on its parameters is never collected."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = shard_batch(BATCHES[0], rank, world_size)
    before = alive_bytes()
    rung = wrap(odd(torch.bfloat16))
    with record_communication() as log:
        accumulate(rung, mine, parts)
        held = held_bytes(rung)
        for _ in range(500):  # gloo's thread lets go of a message a moment later
            total = alive_bytes() - before
            if total == sum(held.values()):
                break
            time.sleep(0.01)
        rung.step()
    numels = [(flat.numel, flat.padded_numel) for flat in rung.flats]
    return numels, held, total, log


def alive_bytes() -> int:
    """Of all tensors in this process, each piece of memory once."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    pieces = [t.untyped_storage() for t in tensors]
    return sum({piece._cdata: piece.nbytes() for piece in pieces}.values())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_held_and_sent_are_the_formulas_to_the_byte(world_size: int) -> None:
    for name in RUNGS:
        numels, held, total, log = launch(measure, RUNGS[name], world_size=world_size)[0]
        psi, padded = (sum(column) for column in zip(*numels, strict=True))
        assert psi % 2 == 1
        assert padded == sum(-(-n // world_size) * world_size for n, _ in numels)
        assert held == zero_bytes(padded, world_size, STAGES[name]), name
        assert total == sum(held.values()), f"{name} holds something that held_bytes does not see"
        assert log.wire_bytes() == predicted_wire(name, padded, world_size), name


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_volumes_in_units_of_psi(world_size: int) -> None:
    share = 2 * (world_size - 1) / world_size
    volumes = {}
    for name in RUNGS:
        numels, *_, log = launch(measure, RUNGS[name], world_size=world_size)[0]
        volumes[name] = log.wire_bytes() / share / sum(padded for _, padded in numels)
    assert list(volumes.values()) == pytest.approx([2, 3, 2, 2, 3])


@pytest.mark.parametrize("parts", [1, 3])
def test_calls_of_stage_3(parts: int) -> None:
    wraps = {"ZeRO2": ZeRO2, "ZeRO3": ZeRO3, **VARIANTS}
    calls = {}
    for name, wrap in wraps.items():
        *_, log = launch(measure, wrap, parts, world_size=2)[0]
        calls[name] = log.calls("all_gather"), log.calls("reduce_scatter")
    units = 4  # three layers and the root
    assert calls["ZeRO2"] == (1, parts)
    assert calls["ZeRO3"] == calls["ZeRO3, on demand"] == (2 * units * parts, units * parts)
    assert calls["ZeRO3, kept"] == (units * parts, units * parts)
    assert calls["ZeRO3"][0] - calls["ZeRO2"][0] == 2 * units * parts - 1


def test_a_wide_sum_holds_four_bytes_and_loses_nothing() -> None:
    def grads(grad_dtype: torch.dtype | None) -> Any:
        rung = ZeRO2(odd(torch.bfloat16), grad_dtype=grad_dtype)
        for _ in range(3):
            accumulate(rung, shard_batch(BATCHES[0], dist.get_rank(), 2), 1)
        (flat,) = rung.flats
        return flat.grad, held_bytes(rung)["grads"], flat.shard_numel

    wide, num_bytes, numel = launch(grads, torch.float32, world_size=2)[0]
    assert (wide.dtype, num_bytes) == (torch.float32, 4 * numel)
    once = launch(grads, None, world_size=2)[0]
    assert (once[0].dtype, once[1]) == (torch.bfloat16, 2 * numel)
    # Three times the same BF16 gradient: exact in FP32, rounded in BF16.
    assert not torch.equal(once[0].float(), wide)
    torch.testing.assert_close(once[0].float(), wide, rtol=2**-6, atol=0)


@pytest.mark.parametrize("ends", list(itertools.product((1, 2, 3), ("ZeRO1", "ZeRO2", "ZeRO3"))))
def test_a_full_state_resumes_anywhere(ends: tuple[int, str], saved: Any) -> None:
    world_size, name = ends
    state, params = saved
    results = launch(train, RUNGS[name], special, BATCHES[3:], 1, state, world_size=world_size)
    for result in results:
        assert_close(result["state"]["params"], params)


@pytest.fixture(scope="module")
def saved() -> Any:
    state = launch(train, ZeRO3, special, BATCHES[:3], world_size=4)[0]["state"]
    return state, alone(special)[2]


def test_a_state_goes_in_and_out_unchanged() -> None:
    def there_and_back() -> Any:
        first = train(ZeRO3, odd, BATCHES[:2])["state"]
        rung = ZeRO2(odd(), bucket_bytes=5000)
        load_full_state(rung, first)
        return first, full_state(rung)

    for first, second in launch(there_and_back, world_size=3):
        assert first["num_steps"] == second["num_steps"] == 2
        for kind in ("params", "exp_avg", "exp_avg_sq"):
            assert first[kind].keys() == second[kind].keys()
            assert all(torch.equal(first[kind][n], second[kind][n]) for n in first[kind])


def test_our_adamw_is_torchs() -> None:
    torch.manual_seed(0)
    mine = torch.randn(101, dtype=torch.float64)
    theirs = nn.Parameter(mine.clone())
    ours, reference = AdamW([mine], lr=1e-2), torch.optim.AdamW([theirs], lr=1e-2)
    for _ in range(20):
        theirs.grad = torch.randn(101, dtype=torch.float64)
        ours.num_steps += 1
        ours.update(0, theirs.grad)
        reference.step()
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-13, atol=1e-15)


def test_between_uses_stage_3_has_no_weights() -> None:
    def look() -> Any:
        rung = ZeRO3(odd())
        seen = []
        for unit in rung.module.layers:
            unit.mlp.register_forward_hook(
                lambda *_: seen.append([flat.whole for flat in rung.flats])
            )
        tokens, targets = BATCHES[0]
        loss = cross_entropy(rung(tokens), targets)
        after_forward = [flat.whole for flat in rung.flats]
        loss.backward()
        after_backward = [flat.data.untyped_storage().nbytes() for flat in rung.flats]
        return seen, after_forward, after_backward

    seen, after_forward, after_backward = launch(look, world_size=2)[0]
    # The root, then the layer in use and the one being prefetched; never all.
    assert seen == [[True, True, True, False], [True, False, True, True],
                    [True, False, False, True]]  # fmt: skip
    assert after_forward == [False] * 4
    assert after_backward == [0] * 4


def test_evaluation_between_steps_changes_nothing() -> None:
    def run(evaluate: bool) -> Any:
        torch.manual_seed(0)
        rung = ZeRO3(odd())
        for batch in BATCHES[:3]:
            if evaluate:
                with torch.no_grad():
                    rung(batch[0])
            accumulate(rung, shard_batch(batch, dist.get_rank(), 2), 1)
            rung.step()
        return full_state(rung)["params"]

    plain, evaluated = launch(run, False, world_size=2)[0], launch(run, True, world_size=2)[0]
    assert all(torch.equal(plain[name], evaluated[name]) for name in plain)


def test_replicas_of_a_subgroup_are_its_own() -> None:
    def run() -> Any:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[dist.get_rank() % 2]
        torch.manual_seed(dist.get_rank())
        found = {}
        for name, wrap in RUNGS.items():
            rung = wrap(odd(), group=group)
            batch = shard_batch(BATCHES[0], dist.get_rank(group), 2)
            accumulate(rung, batch, 1)
            rung.step()
            found[name] = full_state(rung)["params"]
        return found

    ranks = launch(run, world_size=4)
    for name in RUNGS:
        a, b, c, d = (rank[name]["head.weight"] for rank in ranks)
        assert torch.equal(a, c)
        assert torch.equal(b, d)
        assert not torch.equal(a, b)


def test_an_unused_parameter_stops_stage_2() -> None:
    def run() -> None:
        rung = ZeRO2(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        rung.module[0](torch.ones(1, 2)).sum().backward()
        rung.finish_gradients()

    with pytest.raises(LaunchError, match="did not reach every trainable parameter"):
        launch(run, world_size=2)


def test_a_weight_tied_between_layers_stops_stage_3() -> None:
    def run() -> None:
        model = odd()
        model.layers[1].mlp = model.layers[0].mlp
        ZeRO3(model)

    with pytest.raises(LaunchError, match="two layers share a parameter"):
        launch(run, world_size=2)


def test_a_buffer_of_two_dtypes_is_refused() -> None:
    def run() -> None:
        Flat([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())])

    with pytest.raises(LaunchError, match="one dtype"):
        launch(run, world_size=1)
