"""The harness: equal training passes, and each planted fault is named.

Ranks are simulated in one process by training a replica on each slice in turn, gradients averaged
by hand; one test at the end uses real workers.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from playbook_utils.checks import TrainingRecord, assert_same_training, record_training
from playbook_utils.checks.differences import Quantity, compare
from playbook_utils.data import Batch, GeneratedLanguage, shard_batch
from playbook_utils.errors import NotEquivalent
from playbook_utils.model import Decoder, DecoderConfig, cross_entropy
from playbook_utils.workers import launch

CONFIG = DecoderConfig.tiny(vocab_size=16, dim=16, num_layers=1, ff_dim=24, tied=True)
BATCHES = [GeneratedLanguage(vocab_size=16).batch(step, 6, 5) for step in range(3)]
Fault = Callable[[nn.Module, int, int], None]
"""fault(module, rank, step): changes what the sound technique left."""


def build(dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(CONFIG).to(dtype)
    model.norm.weight.requires_grad_(False)
    return model


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        return self.module(tokens)


def simulate(
    world_size: int = 2,
    fault: Fault | None = None,
    make: Callable[[int], nn.Module] = lambda rank: build(),
    batches: list[Batch] = BATCHES,
    **options: Any,
) -> list[TrainingRecord]:
    """Data-parallel training, rank by rank: the gradients are those of all slices, averaged."""

    def step_of(rank: int) -> Callable[[nn.Module, Batch], Tensor]:
        wholes = enumerate(batches)

        def step(model: nn.Module, own: Batch) -> Tensor:
            number, whole = next(wholes)
            for other in range(world_size):
                tokens, targets = shard_batch(whole, other, world_size)
                (cross_entropy(model(tokens), targets) / world_size).backward()
            if fault is not None:
                fault(model.module, rank, number)
            return cross_entropy(model(own[0]), own[1]).detach()

        return step

    return [
        record_training(
            Wrapper(make(rank)),
            [shard_batch(batch, rank, world_size) for batch in batches],
            step=step_of(rank),
            **options,
        )
        for rank in range(world_size)
    ]


@pytest.fixture(scope="module")
def reference() -> TrainingRecord:
    return record_training(build(), BATCHES)


def with_tokens(records: list[TrainingRecord], per_rank: list[int]) -> list[TrainingRecord]:
    return [
        replace(r, steps=tuple(replace(s, num_tokens=n) for s in r.steps))
        for r, n in zip(records, per_rank, strict=True)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_training_passes(world_size: int, dtype: torch.dtype) -> None:
    reference = record_training(build(dtype), BATCHES)
    records = simulate(world_size, make=lambda rank: build(dtype))
    report = assert_same_training(reference, pickle.loads(pickle.dumps(records)))
    assert set(report.largest) == {"loss", "gradient", "gradient norm", "parameter"}
    assert max(report.largest.values()) <= report.tolerance
    assert report.num_ranks == world_size and report.num_steps == 3
    if dtype == torch.float64:
        assert report.tolerance == 1e-10
        assert max(report.largest.values()) < 1e-13


def test_report_is_short_and_stable(reference: TrainingRecord) -> None:
    report = assert_same_training(reference, simulate())
    assert str(report) == repr(report)
    assert str(report).splitlines() == [
        "trains like the reference: 3 steps, 2 ranks, float64",
        "  loss            relative difference < 1e-10",
        "  10 gradients    relative difference < 1e-10",
        "  gradient norm   relative difference < 1e-10",
        "  11 parameters   relative difference < 1e-10",
        "  tied            embedding.weight = head.weight",
        "  frozen          norm.weight",
    ]


def test_records_hold_what_torch_computes() -> None:
    """Against a training loop written out by hand."""
    record = record_training(build(), BATCHES, clip=0.05)
    model = build()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for (tokens, targets), step in zip(BATCHES, record.steps, strict=True):
        optimizer.zero_grad()
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.view(-1, 16), targets.view(-1))
        loss.backward()
        assert step.loss == loss.item()
        assert torch.equal(step.grads["head.weight"], model.head.weight.grad)
        assert torch.equal(step.grads["embedding.weight"], model.head.weight.grad)
        assert step.grads["norm.weight"] is None
        unclipped = nn.utils.clip_grad_norm_(params, 0.05)
        assert step.grad_norm == pytest.approx(unclipped.item(), rel=1e-12)
        assert step.grad_norm > 0.05
        optimizer.step()
        for name, param in model.named_parameters():
            assert torch.equal(step.params[name], param)
        assert step.num_tokens == 30
    assert record.tied == (("embedding.weight", "head.weight"),)
    unclipped_record = record_training(build(), BATCHES)
    assert unclipped_record.steps[0].grad_norm == pytest.approx(
        record.steps[0].grad_norm, rel=1e-12
    )


def test_names_lose_the_wrappers_prefix() -> None:
    plain = record_training(build(), BATCHES[:1])
    nested = record_training(Wrapper(Wrapper(build())), BATCHES[:1])
    assert list(plain.initial) == list(nested.initial)
    renamed = record_training(Wrapper(build()), BATCHES[:1], rename=str.upper)
    assert "MODULE.HEAD.WEIGHT" in renamed.initial
    with pytest.raises(ValueError, match="makes 1 names of 12 parameters"):
        record_training(build(), BATCHES[:1], rename=lambda name: "same")
    with pytest.raises(ValueError, match="no parameters"):
        record_training(nn.ReLU(), [])


def test_finish_gradients_is_called() -> None:
    class Late(Wrapper):
        def finish_gradients(self) -> None:
            self.module.head.weight.grad.zero_()

    record = record_training(Late(build()), BATCHES[:1])
    assert not record.steps[0].grads["head.weight"].any()


def test_views_into_a_flat_buffer_are_not_tied(reference: TrainingRecord) -> None:
    def flat(rank: int) -> nn.Module:
        model = build()
        params = list(model.parameters())
        buffer = torch.cat([param.detach().flatten() for param in params])
        for param, part in zip(params, buffer.split([p.numel() for p in params]), strict=True):
            param.data = part.view_as(param)
        return model

    assert_same_training(reference, simulate(make=flat))


def test_gather_makes_shards_whole(reference: TrainingRecord) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = model.weight.sum()
        loss.backward()
        return loss

    record = record_training(
        Half(), [None], step=step, gather=lambda name, half: torch.cat([half, half])
    )
    assert record.initial["weight"].shape == record.steps[0].grads["weight"].shape == (4,)
    assert record.steps[0].grad_norm == pytest.approx(2.0)


def scale_all(factor: float) -> Fault:
    def fault(module: nn.Module, rank: int, step: int) -> None:
        for param in module.parameters():
            if param.grad is not None:
                param.grad.mul_(factor)

    return fault


def on(rank: int, name: str, change: Callable[[Tensor], Tensor], first: int = 0) -> Fault:
    def fault(module: nn.Module, at: int, step: int) -> None:
        if at == rank and step >= first:
            param = module.get_parameter(name)
            param.grad = change(param.grad)

    return fault


def swap(module: nn.Module, rank: int, step: int) -> None:
    attention = module.layers[0].attention
    k, v = attention.k_proj.weight, attention.v_proj.weight
    k.grad, v.grad = v.grad, k.grad


UP = "layers.0.mlp.up_proj.weight"
FAULTS: dict[str, tuple[Fault, list[str]]] = {
    "summed": (scale_all(2), [
        "gradient of ", "on rank 0, at step 0", "wrong: 10 of 10 gradients, on all ranks",
        "2 times too large with 2 ranks: summed, not averaged?"]),
    "averaged twice": (scale_all(0.5), ["1/2 of it with 2 ranks: averaged twice"]),
    "other factor": (scale_all(3), ["3 times what was expected, throughout"]),
    "sign": (scale_all(-1), ["the sign is flipped"]),
    "one tensor off": (on(1, UP, lambda g: g + 1e-6), [
        f"gradient of {UP} differs on rank 1, at step 0", "wrong: 1 of 10 gradients, on rank 1",
        "only rank 1 differs"]),
    "later": (on(1, UP, lambda g: g + 1e-6, first=2), ["on rank 1, at step 2"]),
    "zero": (on(0, UP, torch.zeros_like), [f"gradient of {UP}", "all zero"]),
    "none": (on(0, UP, lambda g: None), [f"{UP} has no gradient on rank 0, at step 0"]),
    "nan": (on(1, UP, lambda g: g * torch.nan), [
        f"gradient of {UP} differs on rank 1", "found nan", "inf", "not a number"]),
    "swapped": (swap, [
        "gradient of layers.0.attention.", "proj.weight", "these are the values of layers.0."]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_named(name: str, reference: TrainingRecord) -> None:
    fault, words = FAULTS[name]
    fails(reference, simulate(fault=fault), *words)


def fails(reference: TrainingRecord, records: Any, *words: str, **options: Any) -> None:
    with pytest.raises(NotEquivalent) as caught:
        assert_same_training(reference, records, **options)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_never_averaged(reference: TrainingRecord) -> None:
    slices = [[shard_batch(b, rank, 2) for b in BATCHES] for rank in range(2)]
    records = [record_training(build(), part) for part in slices]
    fails(reference, records, "at step 0", "their mean is right: never averaged?")


def test_never_summed(reference: TrainingRecord) -> None:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        (loss / 2).backward()
        return loss.detach()

    slices = [[shard_batch(b, rank, 2) for b in BATCHES] for rank in range(2)]
    records = [record_training(build(), part, step=step) for part in slices]
    fails(reference, records, "their sum is right: never summed?")


def test_stale_and_accumulated_gradients(reference: TrainingRecord) -> None:
    kept: dict[int, dict[str, Tensor]] = {}

    def stale(module: nn.Module, rank: int, step: int) -> None:
        now = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        if step and rank == 1:
            for name, grad in kept[rank].items():
                module.get_parameter(name).grad.copy_(grad)
        kept[rank] = now

    fails(reference, simulate(fault=stale), "on rank 1, at step 1", "these are the last step's")

    class Keeps(Wrapper):
        def zero_grad(self, set_to_none: bool = True) -> None:
            pass

    record = record_training(Keeps(build()), BATCHES)
    fails(reference, record, "at step 1", "still in it: cleared by zero_grad()?")


def test_ranks_start_differently(reference: TrainingRecord) -> None:
    records = simulate(make=lambda rank: build(seed=rank))
    fails(reference, records, "initial value of ", "on rank 1, before the first step", "Broadcast")


def test_frozen_parameter_moves_or_gets_a_gradient(reference: TrainingRecord) -> None:
    def move(module: nn.Module, rank: int, step: int) -> None:
        if rank == 1 and step == 1:
            module.norm.weight.data += 1e-9

    words = "frozen parameter norm.weight moved on rank 1, at step 1"
    fails(reference, simulate(fault=move), words)

    def give(module: nn.Module, rank: int, step: int) -> None:
        module.norm.weight.grad = torch.zeros_like(module.norm.weight)

    words = "frozen parameter norm.weight got a gradient on rank 0, at step 0"
    fails(reference, simulate(fault=give), words)

    def thawed(rank: int) -> nn.Module:
        return build().requires_grad_(True)

    fails(reference, simulate(make=thawed), "norm.weight: frozen on rank 0 or in the reference")


def test_tied_parameters_come_apart(reference: TrainingRecord) -> None:
    def untied(rank: int) -> nn.Module:
        model = build()
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model

    words = ("before the first step", "found none", "expected embedding.weight = head.weight")
    fails(reference, simulate(make=untied), *words)

    def untie(module: nn.Module, rank: int, step: int) -> None:
        if step == 2:
            grad = module.head.weight.grad
            module.head.weight = nn.Parameter(module.head.weight.detach().clone())
            module.head.weight.grad = grad

    fails(reference, simulate(fault=untie), "tied parameters differ on rank 0, at step 2")


def test_parameters_must_move(reference: TrainingRecord) -> None:
    def still(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)

    unmoved = record_training(build(), BATCHES, optimizer=still)
    with pytest.raises(ValueError, match="no parameter of the reference moved"):
        assert_same_training(unmoved, [unmoved])
    records = simulate(optimizer=still)
    fails(reference, records, "parameter of ", "at step 0", "it did not move: left out of the opt")

    def without_up(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in params if p.shape != (24, 16)], lr=0.1, momentum=0.9)

    fails(reference, simulate(optimizer=without_up), "wrong: 2 of 11 parameters", "did not move")


def test_a_step_smaller_than_the_tolerance_must_still_move() -> None:
    def slow(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1e-5)

    def none(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)

    whole = record_training(build(), BATCHES, optimizer=slow)
    fails(whole, simulate(optimizer=none), "did not move on rank 0", tolerance=1e-2)


def test_wrong_clipping(reference: TrainingRecord) -> None:
    clipped = record_training(build(), BATCHES, clip=0.05)
    assert_same_training(clipped, simulate(clip=0.05))
    fails(clipped, simulate(), "parameter of", "look at clipping and the optimizer")

    def twice_counted(model: nn.Module) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.05) * 2**0.5

    fails(clipped, simulate(clip=twice_counted), "gradient norm differs on rank 0", "1.414 times")


def test_loss_rules(reference: TrainingRecord) -> None:
    whole = record_training(build(), BATCHES)
    assert_same_training(reference, [whole, whole], loss="same")
    fails(reference, [whole, whole], "[30, 30] tokens", "Slice them with shard_batch")
    slices = [[shard_batch(b, rank, 2) for b in BATCHES] for rank in range(2)]
    parts = [record_training(build(), part) for part in slices]
    fails(reference, parts, "[15, 15] tokens", 'Pass loss="mean"', loss="same")
    as_whole = with_tokens(simulate(), [30, 30])
    fails(reference, as_whole, "loss differs on rank", "never averaged?", loss="same")
    with pytest.raises(ValueError, match="loss is 'sum'"):
        assert_same_training(reference, whole, loss="sum")


def test_uneven_ranks_are_weighted_by_tokens() -> None:
    """Seven rows on four ranks, and two rows on four, where two ranks have none."""
    for rows in (7, 2):
        batches = [GeneratedLanguage(vocab_size=16).batch(s, rows, 5) for s in range(3)]
        reference = record_training(build(), batches)
        records = []
        for rank in range(4):
            mine = [shard_batch(b, rank, 4, uneven="allow") for b in batches]
            steps = []
            for number, step in enumerate(reference.steps):
                start = reference.steps[number - 1].params if number else reference.initial
                model = build()
                model.load_state_dict(start)
                loss = float(cross_entropy(model(mine[number][0]), mine[number][1]).detach())
                steps.append(replace(step, loss=loss, num_tokens=mine[number][0].numel()))
            records.append(replace(reference, steps=tuple(steps)))
        assert_same_training(reference, records)
        fails(reference, with_tokens(records, [0] * 4), "the ranks' mean loss differs, at step 0")


def test_names_shapes_and_steps_are_compared(reference: TrainingRecord) -> None:
    renamed = record_training(build(), BATCHES, rename=lambda name: name.replace("mlp", "ffn"))
    fails(reference, renamed, "missing layers.0.mlp", "layers.0.ffn", "Pass rename=", loss="same")
    cut = copy.deepcopy(reference)
    cut.initial[UP] = cut.initial[UP][:12]
    fails(reference, cut, f"{UP} has shape (12, 16) on rank 0, expected (24, 16)", "Pass gather=")
    short = replace(reference, steps=reference.steps[:2])
    fails(reference, short, "rank 0 made 2 steps, expected 3")
    with pytest.raises(ValueError, match="found 0 ranks and 3 steps"):
        assert_same_training(reference, [])


def test_real_workers() -> None:
    def train(broadcast: bool, average: bool) -> TrainingRecord:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        model = build(seed=rank)
        if broadcast:
            for param in model.parameters():
                dist.broadcast(param.data, src=0)

        class Averaging(Wrapper):
            def finish_gradients(self) -> None:
                for param in self.parameters():
                    if param.grad is not None:
                        dist.all_reduce(param.grad)
                        param.grad /= world_size if average else 1

        return record_training(
            Averaging(model), [shard_batch(b, rank, world_size) for b in BATCHES]
        )

    reference = record_training(build(), BATCHES)
    report = assert_same_training(reference, launch(train, True, True, world_size=2))
    assert max(report.largest.values()) < 1e-12
    fails(reference, launch(train, True, False, world_size=2), "summed, not averaged?")
    fails(reference, launch(train, False, True, world_size=2), "Broadcast rank 0's parameters")


def test_a_small_tensor_is_held_to_a_thousandth_of_the_largest() -> None:
    """Relative to its own size, but not below a thousandth of the largest tensor's."""
    big, allowed = torch.ones(3, dtype=torch.float64), 1e-6
    quantity = Quantity("gradient", 0, allowed)

    def difference(size: float, error: float) -> float:
        expected = {"big": big, "small": torch.full((3,), size, dtype=torch.float64)}
        return compare(quantity, expected, [expected | {"small": expected["small"] + error}])

    assert difference(1e-3, 0.5 * allowed * 1e-3) == pytest.approx(0.5 * allowed)
    with pytest.raises(NotEquivalent, match="small"):
        difference(1e-3, 5 * allowed * 1e-3)
    assert difference(1e-9, 0.5 * allowed * 1e-3) == pytest.approx(0.5 * allowed)


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_loss_and_norm_are_compared_in_full_precision(field: str) -> None:
    sound = record_training(build(), BATCHES)
    steps = [replace(step, **{field: getattr(step, field) * (1 + 1e-9)}) for step in sound.steps]
    with pytest.raises(NotEquivalent, match=field.replace("grad_", "gradient ")):
        assert_same_training(sound, replace(sound, steps=tuple(steps)))


def test_parameters_whose_memory_was_freed_are_not_tied() -> None:
    """As under ZeRO-3 between steps: the address of freed memory is 0 for all."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for param in model.parameters():
        param.untyped_storage().resize_(0)
    record = record_training(model, [], gather=lambda name, tensor: torch.ones(4, 4))
    assert record.tied == ()


def test_tokens_are_the_targets_that_count() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = model.weight.sum()
        loss.backward()
        return loss

    targets = torch.tensor([[1, -100, 2]])
    batch = (targets, targets, torch.arange(100))
    record = record_training(nn.Linear(2, 2, bias=False), [batch, [batch, batch]], step=step)
    assert [one.num_tokens for one in record.steps] == [2, 4]
