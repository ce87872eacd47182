"""The stages of lesson 07, imported from its cells, against one process and PyTorch's AdamW.

The lesson shows them at sizes that are easy to follow; here they meet world sizes 1 to 4, models
whose parameters are odd in number, frozen in parts or computed twice, and every way from one
stage and world size to another. What goes wrong on the way is in `test_zero_hazards.py`.
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
    ZeRO2,
    ZeRO3,
    fsdp2,
    full_state,
    held_bytes,
    load_full_state,
    predicted_wire,
    pytorch_run,
    train,
    zero_bytes,
    zero_redundancy,
)
from playbook_utils.data import shard_batch
from playbook_utils.measure import record_communication
from playbook_utils.predict.communication import wire_bytes
from tests.notebooks.zero_cases import (
    BATCHES,
    RUNGS,
    STAGES,
    VARIANTS,
    alone,
    assert_close,
    checkpointed,
    frozen_embedding,
    launch,
    odd,
    partly_frozen,
    special,
    train_all,
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("make_model", [odd, special])
def test_trains_like_one_process(make_model: Callable[[], nn.Module], world_size: int) -> None:
    chosen = RUNGS | (VARIANTS if (make_model is odd) == (world_size % 2 == 1) else {})
    rungs = {name: partial(wrap, max_norm=0.7) for name, wrap in chosen.items()}
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_unusual_models_train_like_one_process(world_size: int) -> None:
    """Frozen in parts or computed twice: stage 3 gathers in another order than usual."""
    models = [frozen_embedding, partly_frozen, checkpointed]
    wraps = {name: (RUNGS | VARIANTS)[name] for name in (*VARIANTS, "ZeRO2", "ZeRO3")}

    def run() -> Any:
        return [train_all(wraps, make_model, BATCHES) for make_model in models]

    for results in launch(run, world_size=world_size):
        for make_model, found in zip(models, results, strict=True):
            _, _, params = alone(make_model)
            for _, _, state in found.values():
                assert_close(state["params"], params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_agree_bit_for_bit(dtype: torch.dtype) -> None:
    """Two numbers have only one order in which they can be added."""
    results = launch(train_all, RUNGS, partial(odd, dtype), BATCHES, world_size=2)[0]
    expected = results["MixedPrecisionDDP"][2]
    for _, _, state in results.values():
        for kind in ("params", "exp_avg", "exp_avg_sq"):
            for name, value in expected[kind].items():
                assert torch.equal(state[kind][name], value), (kind, name)


@pytest.mark.parametrize("world_size", [1, 3, 4])
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


def measure_all(wraps: dict[str, Any], parts: int = 1) -> Any:
    """One rung after the other: a rung that is dropped gives all its memory back."""
    mine = shard_batch(BATCHES[0], dist.get_rank(), dist.get_world_size())
    before = alive_bytes()
    return {name: measure(wrap, mine, parts, before) for name, wrap in wraps.items()}


def measure(wrap: Callable[[nn.Module], Any], mine: Any, parts: int, before: int) -> Any:
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
    units = {"MixedPrecisionDDP": 2, "ZeRO1AllReduce": 3, "ZeRO1": 2, "ZeRO2": 2, "ZeRO3": 3}
    found = launch(measure_all, RUNGS, world_size=world_size)[0]
    for name, (numels, held, total, log) in found.items():
        psi, padded = (sum(column) for column in zip(*numels, strict=True))
        assert psi % 2 == 1
        assert padded == sum(-(-n // world_size) * world_size for n, _ in numels)
        assert held == zero_bytes(padded, world_size, STAGES[name]), name
        assert total == sum(held.values()), f"{name} holds something that held_bytes does not see"
        assert log.wire_bytes() == predicted_wire(name, padded, world_size), name
        assert log.wire_bytes() * world_size == units[name] * padded * 2 * (world_size - 1), name


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_calls_of_stage_3(world_size: int) -> None:
    wraps = {"ZeRO2": ZeRO2, "ZeRO3": ZeRO3, **VARIANTS}
    units = 4  # three layers and the root

    def run() -> Any:
        return {parts: measure_all(wraps, parts) for parts in (1, 2)}

    for parts, found in launch(run, world_size=world_size)[0].items():
        calls = {
            name: (log.calls("all_gather"), log.calls("reduce_scatter"))
            for name, (*_, log) in found.items()
        }
        assert calls["ZeRO2"] == (1, parts)
        assert calls["ZeRO3"] == calls["ZeRO3, on demand"] == (2 * units * parts, units * parts)
        assert calls["ZeRO3, kept"] == (units * parts, units * parts)
        assert calls["ZeRO3"][0] - calls["ZeRO2"][0] == 2 * units * parts - 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_wide_sum_holds_four_bytes_and_loses_nothing(world_size: int) -> None:
    def grads(grad_dtype: torch.dtype | None) -> Any:
        torch.manual_seed(0)
        rung = ZeRO2(odd(torch.bfloat16), grad_dtype=grad_dtype)
        for _ in range(3):
            accumulate(rung, shard_batch(BATCHES[0], dist.get_rank(), world_size), 1)
        (flat,) = rung.flats
        return flat.grad, held_bytes(rung)["grads"], flat.shard_numel

    def run() -> Any:
        return grads(torch.float32), grads(None)

    (wide, num_bytes, numel), once = launch(run, world_size=world_size)[0]
    assert (wide.dtype, num_bytes) == (torch.float32, 4 * numel)
    assert (once[0].dtype, once[1]) == (torch.bfloat16, 2 * numel)
    # Three times the same BF16 gradient: exact in FP32, rounded in BF16.
    assert not torch.equal(once[0].float(), wide)
    torch.testing.assert_close(once[0].float(), wide, rtol=2**-6, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_full_state_resumes_anywhere(world_size: int, saved: Any) -> None:
    state, params = saved
    wraps = {name: RUNGS[name] for name in ("ZeRO1", "ZeRO2", "ZeRO3")}
    for results in launch(train_all, wraps, special, BATCHES[3:], 1, state, world_size=world_size):
        for _, _, found in results.values():
            assert_close(found["params"], params)


@pytest.fixture(scope="module")
def saved() -> Any:
    state = launch(train, ZeRO3, special, BATCHES[:3], world_size=4)[0]["state"]
    return state, alone(special)[2]


@pytest.mark.parametrize("make_model", [odd, special])
def test_a_state_goes_in_and_out_unchanged(make_model: Callable[[], nn.Module]) -> None:
    def there_and_back() -> Any:
        first = train(ZeRO3, make_model, BATCHES[:2])["state"]
        torch.manual_seed(7)
        rung = ZeRO2(make_model(), bucket_bytes=5000)
        load_full_state(rung, first)
        params = rung.module.named_parameters()
        frozen = {name: p.detach() for name, p in params if not p.requires_grad}
        return first, full_state(rung), frozen

    for first, second, frozen in launch(there_and_back, world_size=3):
        assert first["num_steps"] == second["num_steps"] == 2
        for kind in ("params", "exp_avg", "exp_avg_sq"):
            assert first[kind].keys() == second[kind].keys()
            assert all(torch.equal(first[kind][n], second[kind][n]) for n in first[kind])
        assert all(torch.equal(value, first["params"][n]) for n, value in frozen.items())


def fsdp2_padded(world_size: int) -> int:
    """Numbers that FSDP2 sends of `odd`: it cuts each parameter along its first dimension."""
    return sum(-(-len(p) // world_size) * world_size * p[0].numel() for p in odd().parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_pytorchs_own_stages(world_size: int) -> None:
    def run() -> Any:
        return [pytorch_run(wrap, odd, BATCHES) for wrap in (zero_redundancy, fsdp2)]

    ranks, expected = launch(run, world_size=world_size), alone(odd)[2]
    psi, padded = sum(p.numel() for p in expected.values()), fsdp2_padded(world_size)
    counters = 4 * len(expected)  # Adam's steps, one FP32 number a parameter
    for params, _, _ in itertools.chain(*ranks):
        assert_close(params, expected)
    held_1, held_3 = (sum(rank[i][1].total_bytes for rank in ranks) for i in range(2))
    assert held_1 == 8 * (2 * psi * world_size + 2 * psi) + counters  # moments are dealt out
    whole = 8 * 4 * padded / world_size
    assert ranks[0][1][1].total_bytes == whole + counters
    assert held_3 <= world_size * (whole + counters)
    for stage_1, stage_3 in ranks:
        ops = ("all_reduce", "broadcast")
        sent = sum(wire_bytes(op, 8 * psi, world_size) for op in ops)
        assert stage_1[2].wire_bytes() == sent
        sent = 3 * wire_bytes("all_gather", 8 * padded, world_size)
        assert stage_3[2].wire_bytes() == sent
        assert stage_3[2].calls("reduce_scatter") == (4 if world_size > 1 else 0)


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
