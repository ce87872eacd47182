"""The techniques of lesson 03, imported from its cells, against training on whole batches.

The lesson cuts eight rows into four parts; here they meet other numbers of parts, uneven ones,
padding, parts without a single token, tied and frozen parameters, and Hugging Face's Accelerate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.gradient_accumulation import (
    MixedPrecision,
    accumulate,
    accumulate_tokens,
    flat_gradient,
    scaled_step,
    train_step,
)
from playbook_utils.checks import assert_same_training, record_training
from playbook_utils.commands.export import export_script
from playbook_utils.data import Batch, GeneratedLanguage, microbatches
from playbook_utils.errors import NotEquivalent
from playbook_utils.model import Decoder, DecoderConfig, cross_entropy

LANGUAGE = GeneratedLanguage(vocab_size=65)
BATCHES = [LANGUAGE.batch(step, batch_size=15, seq_len=7) for step in range(3)]
LENGTHS = torch.tensor([7, 7, 7, 5, 1, 0, 0, 0, 2, 7, 6, 3, 1, 1, 4])
"""Three rows in a row without a token: with five parts, a part without one."""


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def tiny(**changes: Any) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.tiny(dim=24, num_heads=4, ff_dim=40, vocab_size=65, **changes)
    return Decoder(config).double()


def tied_and_frozen() -> Decoder:
    model = tiny(tied=True)
    model.layers[1].attention.requires_grad_(False)
    return model


def padded(batch: Batch) -> Batch:
    tokens, targets = batch
    hidden = torch.arange(targets.size(1)) >= LENGTHS[:, None]
    return tokens, targets.masked_fill(hidden, -100)


def rows(batch: Batch, sizes: list[int]) -> list[Batch]:
    return list(zip(batch[0].split(sizes), batch[1].split(sizes), strict=True))


@pytest.mark.parametrize("num_parts", [1, 3, 5, 15])
@pytest.mark.parametrize("make_model", [tiny, tied_and_frozen])
@pytest.mark.parametrize("technique", [accumulate, accumulate_tokens])
def test_equal_parts_are_the_whole(
    technique: Callable[..., Any], make_model: Callable[[], Decoder], num_parts: int
) -> None:
    def step(model: nn.Module, batch: Batch) -> torch.Tensor:
        return technique(model, microbatches(batch, num_parts))

    for optimizer in (None, adamw):
        run = partial(record_training, optimizer=optimizer)
        assert_same_training(run(make_model(), BATCHES), run(make_model(), BATCHES, step=step))


@pytest.mark.parametrize("sizes", [[15], [3] * 5, [1, 14], [5, 3, 7]])
def test_unequal_token_counts_need_weights(sizes: list[int]) -> None:
    batches = [padded(batch) for batch in BATCHES]
    reference = record_training(tiny(), batches)

    def run(technique: Callable[..., Any]) -> Any:
        step = lambda model, batch: technique(model, rows(batch, sizes))  # noqa: E731
        return record_training(tiny(), batches, step=step)

    assert_same_training(reference, run(accumulate_tokens))
    if len(sizes) > 1:
        with pytest.raises(NotEquivalent):
            assert_same_training(reference, run(accumulate))


def test_a_batch_without_a_token_moves_nothing() -> None:
    model = tiny()
    tokens, targets = BATCHES[0]
    loss = accumulate_tokens(model, rows((tokens, torch.full_like(targets, -100)), [7, 8]))
    assert loss == 0
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())


def test_parts_may_be_an_iterator() -> None:
    parts = rows(padded(BATCHES[0]), [5, 3, 7])
    reference, model = tiny(), tiny()
    right = accumulate_tokens(reference, parts)
    found = accumulate_tokens(model, iter(parts))
    assert found == right and found > 0
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param.grad, other.grad)
    start = model.head.weight.detach().clone()
    loss, norm = train_step(model, adamw(list(model.parameters())), iter(parts))
    assert loss == right and norm > 0
    assert not torch.equal(model.head.weight, start)


@pytest.mark.parametrize("make", [list, iter])
def test_no_parts_are_an_error(make: Callable[..., Any]) -> None:
    model = tiny()
    with pytest.raises(ValueError, match="no parts"):
        accumulate_tokens(model, make([]))
    with pytest.raises(ValueError, match="no parts"):
        train_step(model, adamw(list(model.parameters())), make([]))


def test_the_loss_holds_no_graph() -> None:
    assert accumulate_tokens(tiny(), microbatches(BATCHES[0], 3)).requires_grad is False


class HeldOutputs(nn.Module):
    """Notes at each forward how many of its earlier outputs are still in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.outputs: list[StorageWeakRef] = []
        self.held: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held.append(sum(not output.expired() for output in self.outputs))
        out = torch.tanh(self.inner(x))  # kept for backward
        self.outputs.append(StorageWeakRef(out.untyped_storage()))
        return out


@pytest.mark.parametrize("name", ["accumulate", "accumulate_tokens"])
def test_activations_of_one_part_are_gone_before_the_next(name: str) -> None:
    model = HeldOutputs()
    globals()[name](model, rows((torch.ones(8, 3), torch.zeros(8, dtype=torch.int64)), [2] * 4))
    # The variable `logits` holds the logits of one part until they are replaced.
    assert model.held == [0, *[int(name == "accumulate_tokens")] * 3]


def whole_batch_steps(max_norm: float) -> tuple[Decoder, list[float], list[float]]:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    norms, losses = [], []
    for batch in map(padded, BATCHES):
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        losses.append(loss.item())
        optimizer.step()
        decay.step()
    return model, losses, norms


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_train_step_does_everything_once(max_norm: float) -> None:
    reference, losses, norms = whole_batch_steps(max_norm)
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for batch, right_loss, right_norm in zip(map(padded, BATCHES), losses, norms, strict=True):
        parts = rows(batch, [4, 4, 4, 3])
        loss, norm = train_step(model, optimizer, parts, max_norm, decay)
        assert loss.item() == pytest.approx(right_loss, rel=1e-12)
        assert norm.item() == pytest.approx(right_norm, rel=1e-9)
    for found, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


def scaled(model: Decoder, scaler: torch.amp.GradScaler) -> list[float | None]:
    """Norms of three steps with a scaler, four rows at a time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    found = []
    for batch in map(padded, BATCHES):
        found.append(scaled_step(model, optimizer, scaler, batch, 4, 0.1))
        decay.step()
    return found


def test_a_scaled_step_is_a_step() -> None:
    reference, _, norms = whole_batch_steps(0.1)
    model = tiny()
    found = scaled(model, torch.amp.GradScaler("cpu", init_scale=2.0**10))
    assert found == pytest.approx(norms, rel=1e-9)
    for param, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, right, rtol=1e-9, atol=1e-12)


def test_an_overflow_skips_the_whole_batch_and_halves_the_scale() -> None:
    model = tiny().float()
    with torch.no_grad():
        model.head.weight.mul_(1e4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = [param.clone() for param in model.parameters()]
    assert scaled_step(model, optimizer, scaler, BATCHES[0], 5, 1.0) is None
    assert scaler.get_scale() == 2.0**126
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("keep", [False, True])
def test_mixed_precision_sums_in_fp32_and_steps_the_masters(keep: bool) -> None:
    def make() -> Decoder:
        model = tied_and_frozen().bfloat16()
        return model

    parts, reference, sums = microbatches(BATCHES[0], 15), make(), {}
    for part in parts:
        reference.zero_grad()
        (cross_entropy(reference(part[0]), part[1]) / 15).backward()
        for name, param in reference.named_parameters():
            if param.grad is not None:
                zero = torch.zeros_like(param, dtype=torch.float32)
                sums[name] = sums.get(name, zero) + param.grad.float()
    model = make()
    mixed = MixedPrecision(model, keep)
    optimizer = torch.optim.SGD(mixed.masters.values(), lr=1e-3)
    start = {p: master.detach().clone() for p, master in mixed.masters.items()}
    accumulate(model, parts)
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert set(named) == set(sums)
    for name, param in named.items():
        assert torch.equal(mixed.masters[param].grad, sums[name])
        assert (param.grad is not None) == keep
    mixed.step(optimizer)
    for name, param in named.items():
        master = mixed.masters[param]
        torch.testing.assert_close(master, start[param] - 1e-3 * sums[name])
        assert torch.equal(param, master.bfloat16())
        assert not master.grad.any()


@pytest.mark.parametrize("keep", [False, True])
def test_mixed_precision_survives_zero_grad_of_the_optimizer(keep: bool) -> None:
    models = [tied_and_frozen().bfloat16() for _ in range(2)]
    left, right = (MixedPrecision(model, keep) for model in models)
    optimizers = [torch.optim.SGD(mixed.masters.values(), lr=1e-2) for mixed in (left, right)]
    optimizers[0].zero_grad()
    left.step(optimizers[0])  # nothing to do, and no error
    for batch in BATCHES:
        optimizers[0].zero_grad()
        for model, mixed, optimizer in zip(models, (left, right), optimizers, strict=True):
            accumulate(model, microbatches(batch, 3))
            mixed.step(optimizer)
    for found, expected in zip(left.masters.values(), right.masters.values(), strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(left.masters[models[0].head.weight], tied_and_frozen().head.weight)


def test_clipping_the_masters_bounds_the_step() -> None:
    """As the lesson says; the model's own parameters have nothing left to clip."""
    model = tied_and_frozen().bfloat16()
    mixed = MixedPrecision(model)
    optimizer = torch.optim.SGD(mixed.masters.values(), lr=1.0)
    start = [master.detach().clone() for master in mixed.masters.values()]
    accumulate(model, microbatches(BATCHES[0], 3))
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) == 0
    assert nn.utils.clip_grad_norm_(mixed.masters.values(), 0.01) > 0.01
    mixed.step(optimizer)
    moved = [m.detach() - s for m, s in zip(mixed.masters.values(), start, strict=True)]
    assert nn.utils.get_total_norm(moved).item() == pytest.approx(0.01, rel=1e-3)


def test_flat_gradient_starts_from_zero_and_keeps_the_order_of_parameters() -> None:
    model = tiny()
    first = flat_gradient(model, BATCHES[0])
    assert torch.equal(flat_gradient(model, BATCHES[0]), first)
    embedding = model.embedding.weight
    assert torch.equal(first[: embedding.numel()].view_as(embedding), embedding.grad)


@pytest.mark.parametrize("lengths", ["equal", "padded"])
def test_accelerate_takes_the_mean_of_the_parts(lengths: str) -> None:
    """As the lesson says: its `accumulate` equals ours, and is wrong for unequal token counts."""
    from accelerate import Accelerator

    batch = BATCHES[0] if lengths == "equal" else padded(BATCHES[0])
    parts = rows(batch, [4, 4, 4, 3])[:3]
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    model = accelerator.prepare(tiny())
    for tokens, targets in parts:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(tokens), targets))
    found = torch.cat([param.grad.flatten() for param in model.parameters()])
    plain, weighted = tiny(), tiny()
    accumulate(plain, parts)
    accumulate_tokens(weighted, parts)
    ours, right = (
        torch.cat([param.grad.flatten() for param in m.parameters()]) for m in (plain, weighted)
    )
    torch.testing.assert_close(found, ours, rtol=1e-9, atol=1e-12)
    assert torch.allclose(found, right, rtol=1e-9, atol=1e-12) == (lengths == "equal")


BUGS = {
    "not divided": ("targets) / len(parts)", "targets)"),
    "padding counted": ("int((targets != -100).sum())", "targets.numel()"),
    "not cleared": ("optimizer.zero_grad()", "pass"),
    "not clipped": ("(model.parameters(), max_norm)", "(model.parameters(), 1e9)"),
    "schedule for each part": ("scheduler.step()", "[scheduler.step() for _ in parts]"),
    "one backward": (
        "        loss.backward()\n        total += loss.detach()\n    return total",
        "        total = total + loss\n    total.backward()\n    return total",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = BUGS[bug]
    source = export_script("03").split("if __name__")[0]
    assert old in source
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source.replace(old, new), "<broken>", "exec"), names)
    for name in ("accumulate", "accumulate_tokens", "train_step"):
        monkeypatch.setitem(globals(), name, names[name])
    with pytest.raises((AssertionError, NotEquivalent, RuntimeError)):
        test_equal_parts_are_the_whole(names["accumulate"], tiny, 3)
        test_unequal_token_counts_need_weights([3] * 5)
        test_train_step_does_everything_once(0.1)
        test_activations_of_one_part_are_gone_before_the_next("accumulate")
