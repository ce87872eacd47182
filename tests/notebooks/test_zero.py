"""The stages of lesson 07, imported from its cells, against one process and PyTorch's AdamW.

The lesson shows them at sizes that are easy to follow; here they meet world sizes 1 to 4, models
whose parameters are odd in number, frozen in parts or computed twice. What goes wrong on the way is
in `test_zero_hazards.py`. One launch for each world size runs all cases; tests read its results.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.zero import (
    Forgetful,
    ZeRO3,
    ZeRO3Prefetch,
    difference,
    fsdp2,
    measure,
    pytorch_run,
    recomputed,
    train,
    train_alone,
    zero_bytes,
)
from playbook_utils.commands.export import export_script
from playbook_utils.measure import record_communication
from playbook_utils.model import Decoder, DecoderConfig
from playbook_utils.predict.communication import wire_bytes
from tests.notebooks.zero_cases import (
    BATCHES,
    MESSAGES,
    RUNGS,
    STAGES,
    WRAPS,
    Trained,
    alone,
    assert_close,
    checkpointed,
    checkpointed_reentrant,
    checkpointed_whole,
    frozen_embedding,
    launch,
    odd,
    partly_frozen,
    special,
    train_all,
)

UNUSUAL = [frozen_embedding, partly_frozen, checkpointed, checkpointed_whole,
           checkpointed_reentrant]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 2, 3, 4]


@cache
def everything(world_size: int) -> Any:
    """What the tests below look at, a dict for each rank."""
    parts = 2 if world_size < 4 else 1
    later = {name: wrap for name, wrap in WRAPS.items() if "ZeRO1" not in name}
    first, second = (odd, special) if world_size % 2 else (special, odd)
    chosen = {first: WRAPS, second: RUNGS}

    def run() -> Any:
        return {
            # First: what lives in this process is counted.
            "measured": measure_all(WRAPS),
            "calls": {n: measure_all({"ZeRO2": WRAPS["ZeRO2, one unit"], "ZeRO3": ZeRO3,
                                      "ZeRO3, prefetch": ZeRO3Prefetch}, n)
                      for n in (1, 2)},
            "clipped": {m.__name__: train_all(chosen[m], m, parts, 0.7) for m in chosen},
            "unusual": {m.__name__: train_all(later, m, 1) for m in UNUSUAL},
            "rounded": {d: train_all(RUNGS, partial(odd, d), 1) for d in DTYPES},
            "fsdp2": pytorch_run(fsdp2, odd, BATCHES),
        }  # fmt: skip

    return launch(run, world_size=world_size, timeout_s=300)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("make_model", [odd, special])
def test_trains_like_one_process(make_model: Any, world_size: int) -> None:
    losses, norms, params = alone(make_model, max_norm=0.7)
    assert max(norms) > 0.7, "nothing was clipped"
    ranks = [rank["clipped"][make_model.__name__] for rank in everything(world_size)]
    for name in ranks[0]:
        found_losses = torch.tensor([rank[name][0] for rank in ranks]).double().mean(0)
        torch.testing.assert_close(found_losses, torch.tensor(losses).double(), rtol=1e-6, atol=0)
        for _, found_norms, found in (rank[name] for rank in ranks):
            assert found_norms == pytest.approx(norms, rel=1e-10)
            assert_close(found, params)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("make_model", UNUSUAL)
def test_unusual_models_train_like_one_process(make_model: Any, world_size: int) -> None:
    """Frozen in parts or computed twice: stage 3 gathers in another order than usual."""
    _, _, params = alone(make_model)
    for rank in everything(world_size):
        for _, _, found in rank["unusual"][make_model.__name__].values():
            assert_close(found, params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_agree_bit_for_bit(dtype: torch.dtype) -> None:
    """Two numbers have only one order in which they can be added."""
    results = everything(2)[0]["rounded"][dtype]
    expected = results["ZeRO1AllReduce"][2]
    for _, _, found in results.values():
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_more_ranks_agree_to_rounding(world_size: int, dtype: torch.dtype, most: float) -> None:
    """Distance between results over the distance that training went."""
    torch.manual_seed(0)
    start = {name: p.detach().float() for name, p in odd(dtype).named_parameters()}
    results = everything(world_size)[0]["rounded"][dtype]
    weights = {name: found for name, (_, _, found) in results.items()}
    expected = weights.pop("ZeRO1AllReduce")

    def distance(a: Any, b: Any) -> float:
        return sum(float((a[n] - b[n]).square().sum()) for n in a) ** 0.5

    went = distance(expected, start)
    assert went > 0.1
    assert max(distance(expected, found) for found in weights.values()) < most * went


def measure_all(wraps: dict[str, Any], parts: int = 1) -> Any:
    """One rung after the other: a rung that is dropped gives all its memory back."""
    before = alive_bytes()
    return {name: measure_one(wrap, parts, before) for name, wrap in wraps.items()}


def measure_one(wrap: Any, parts: int, before: int) -> Any:
    """Of the second step: padded sizes, bytes held after backward, all alive, and messages."""
    one = Trained(wrap, partial(odd, torch.bfloat16))
    one.backward(BATCHES[0])
    one.step()
    with record_communication() as log:
        # `finish_gradients` would already cut the gradients of stage 1.
        rung, finish = one.rung, one.rung.finish_gradients
        rung.finish_gradients = lambda: None
        one.backward(BATCHES[0], parts)
        held = held_bytes(one.model, rung)
        for _ in range(500):  # gloo's thread lets go of a message a moment later
            total = alive_bytes() - before
            if total <= sum(held.values()) + 100:
                break
            time.sleep(0.01)
        finish()
        one.step()
        if hasattr(rung, "coming"):
            one.model(BATCHES[0][0])
    numels = [(sum(p.numel() for p in u.params), u.master.numel()) for u in rung.units]
    del rung.finish_gradients
    return numels, held, total, log


def held_bytes(model: Any, rung: Any) -> dict[str, int]:
    """Bytes of memory behind a rank's tensors, by kind."""
    params, units = list(model.parameters()), rung.units
    states = [s for unit in units for s in unit.optimizer.state.values()]
    moments = [s[name] for s in states for name in ("exp_avg", "exp_avg_sq")]
    kinds = {
        "params": [*params, *(unit.shard for unit in units if hasattr(unit, "shard"))],
        "grads": [*(p.grad for p in params), *(unit.grad for unit in units)],
        "optimizer_states": [*(unit.master for unit in units), *moments],
    }
    held = {}
    for kind, tensors in kinds.items():
        memory = [t.untyped_storage() for t in tensors if t is not None]
        held[kind] = sum({m.data_ptr(): m.nbytes() for m in memory}.values())
    return held


def alive_bytes() -> int:
    """Of all tensors in this process, each piece of memory once."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    pieces = [t.untyped_storage() for t in tensors]
    return sum({piece._cdata: piece.nbytes() for piece in pieces}.values())


@pytest.mark.parametrize("world_size", SIZES)
def test_bytes_held_and_sent_are_the_formulas_to_the_byte(world_size: int) -> None:
    volumes = {"ZeRO1AllReduce": 3, "ZeRO1": 2, "ZeRO2": 2, "ZeRO3": 3}
    found = everything(world_size)[0]["measured"]
    for name, stage in STAGES.items():
        numels, held, total, log = found[name]
        psi = sum(numel for numel, _ in numels)
        padded = world_size * sum(shard for _, shard in numels)
        assert psi % 2 == 1
        assert [shard for _, shard in numels] == [-(-n // world_size) for n, _ in numels]
        expected = zero_bytes(padded, world_size, stage)
        whole = 2 * (padded - psi)  # padding is only in what is cut
        for kind in ("params", "grads"):
            cut = stage >= {"params": 3, "grads": 2}[kind]
            assert held[kind] == expected[kind] - (0 if cut else whole), (name, kind)
        assert held["optimizer_states"] == expected["optimizer_states"], name
        # Adam's counters, one FP32 number a unit, are alive too.
        assert total == sum(held.values()) + 4 * len(numels), f"{name} holds something else"
        # An all-reduce needs no padding.
        sizes = {"all_reduce": psi}
        sent = sum(wire_bytes(op, 2 * sizes.get(op, padded), world_size) for op in MESSAGES[name])
        assert log.wire_bytes() == sent, name
        if name != "ZeRO1AllReduce":
            assert sent * world_size == volumes[name] * padded * 2 * (world_size - 1)


@pytest.mark.parametrize("world_size", SIZES)
def test_calls_of_stage_3(world_size: int) -> None:
    units = 4  # three layers and the root
    for parts, found in everything(world_size)[0]["calls"].items():
        calls = {
            name: (log.calls("all_gather"), log.calls("reduce_scatter"))
            for name, (*_, log) in found.items()
        }
        assert calls["ZeRO2"] == (1, parts)
        assert calls["ZeRO3"] == calls["ZeRO3, prefetch"] == (2 * units * parts, units * parts)
        assert calls["ZeRO3"][0] - calls["ZeRO2"][0] == 2 * units * parts - 1


def deep() -> Any:
    sizes = {"dim": 64, "ff_dim": 176, "num_layers": 5, "vocab_size": 64}
    return Decoder(DecoderConfig.tiny(**sizes)).bfloat16()


def test_recomputation_gathers_no_layer_once_more_and_leaves_none() -> None:
    """Five layers and the root: 12 gathers, whichever form of checkpoint, with a flag for it."""

    def run() -> Any:
        batch = tuple(part[:4] % 64 for part in BATCHES[0])
        found: dict[Any, Any] = {}
        for stage in (ZeRO3, ZeRO3Prefetch, Forgetful):
            found[stage.__name__, "plain"] = measure(stage, deep, batch)
            for form in (False, True):
                found[stage.__name__, form] = measure(partial(recomputed, stage, form), deep, batch)
        return {n: (m["log"].calls("all_gather"), m["peak"], m["held"]) for n, m in found.items()}

    found = launch(run, world_size=2, timeout_s=300)[0]
    for stage in ("ZeRO3", "ZeRO3Prefetch"):
        _, peak, held = found[stage, "plain"]
        for form in ("plain", False, True):
            gathers, its_peak, its_held = found[stage, form]
            assert gathers == 12, (stage, form)
            assert its_peak <= peak * 1.01 and its_held == pytest.approx(held, abs=100)
    # The mistake is seen: layers that nobody frees, and a third gather.
    assert found["Forgetful", False][0] == 12 + 4
    assert found["Forgetful", True][0] >= 12 + 5
    assert found["Forgetful", False][1] > 1.1 * found["ZeRO3Prefetch", "plain"][1]


def fsdp2_padded(world_size: int) -> int:
    """Numbers that FSDP2 sends of `odd`: it cuts each parameter along its first dimension."""
    return sum(-(-len(p) // world_size) * world_size * p[0].numel() for p in odd().parameters())


@pytest.mark.parametrize("world_size", SIZES)
def test_pytorchs_own_stage_3(world_size: int) -> None:
    ranks, expected = everything(world_size), alone(odd)[2]
    padded, counters = fsdp2_padded(world_size), 4 * len(expected)
    whole = 8 * 4 * padded / world_size
    assert ranks[0]["fsdp2"][1] == whole + counters
    assert sum(rank["fsdp2"][1] for rank in ranks) <= world_size * (whole + counters)
    for params, _, log in (rank["fsdp2"] for rank in ranks):
        assert_close(params, expected)
        assert log.wire_bytes() == 3 * wire_bytes("all_gather", 8 * padded, world_size)
        assert log.calls("reduce_scatter") == (4 if world_size > 1 else 0)


def zero_redundancy(module: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    params = [p for p in module.parameters() if p.requires_grad]
    return model, ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_pytorchs_own_stage_1(world_size: int) -> None:
    ranks = launch(pytorch_run, zero_redundancy, odd, BATCHES, world_size=world_size)
    expected = alone(odd)[2]
    psi, counters = sum(p.numel() for p in expected.values()), 4 * len(expected)
    held = sum(found for _, found, _ in ranks)
    assert held == 8 * (2 * psi * world_size + 2 * psi) + counters  # moments are dealt out
    for params, _, log in ranks:
        assert_close(params, expected)
        ops = ("all_reduce", "broadcast")
        assert log.wire_bytes() == sum(wire_bytes(op, 8 * psi, world_size) for op in ops)


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_the_lessons_own_loop_takes_any_world_size(world_size: int) -> None:
    batches = [tuple(part[:15] for part in batch) for batch in BATCHES[:3]]
    expected = train_alone(odd, batches)
    for name, ranks in {
        name: launch(train, wrap, odd, batches, world_size=world_size)
        for name, wrap in (("ZeRO1", RUNGS["ZeRO1"]), ("ZeRO3", ZeRO3))
    }.items():
        assert len({tuple(losses) for losses, _ in ranks}) == 1, name
        for _, params in ranks:
            # A bias of k has no gradient but for rounding, which Adam blows up.
            named = {n: p for n, p in params.items() if "k_proj.bias" not in n}
            assert difference({n: expected[n] for n in named}, named) < 1e-9, name


def test_the_exported_script_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "zero.py"
    script.write_text(export_script("07").replace("train_text, 60", "train_text, 6"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the loss has fallen") == 1, "rank 0 alone says it"
