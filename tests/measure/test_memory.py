"""The timeline against sizes counted by hand, and its peak against torch's profiler."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from playbook_utils.events import MemorySample
from playbook_utils.measure.memory import MemoryLog, state_bytes, track_memory
from playbook_utils.workers import launch


class Block(nn.Module):
    def __init__(self, width: int = 24, recompute: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.recompute = recompute

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.recompute:
            return self.mlp(x)
        # The generator's state, if preserved, is a tensor that no operator makes.
        return checkpoint(self.mlp, x, use_reentrant=False, preserve_rng_state=False)


def make(recompute: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(recompute=recompute) for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters())


def param_bytes(model: nn.Module) -> int:
    return sum(4 * p.numel() for p in model.parameters())


def train(
    memory: MemoryLog,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    microbatches: int = 1,
    rows: int = 7,
) -> tuple[MemorySample, ...]:
    for _ in range(steps):
        with memory.step():
            for _ in range(microbatches):
                with memory.moment("forward"):
                    loss = model(torch.ones(rows, 24)).square().mean()
                with memory.moment("backward"):
                    loss.backward()
                del loss
            with memory.moment("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    return memory.samples


def tracked(
    recompute: bool = False, microbatches: int = 1, rows: int = 7
) -> tuple[nn.Module, MemoryLog]:
    model, optimizer = make(recompute)
    with track_memory(model, optimizer) as memory:
        train(memory, model, optimizer, microbatches=microbatches, rows=rows)
    return model, memory


def at(memory: MemoryLog, step: int, moment: str) -> list[MemorySample]:
    return [s for s in memory.samples if s.step == step and s.moment == moment]


def test_categories_follow_the_training_step() -> None:
    model, memory = tracked()
    size = param_bytes(model)
    adam = 2 * size + 4 * len(list(model.parameters()))  # two moments, a 4-byte step a tensor
    assert {s.params_bytes for s in memory.samples} == {size}
    for step in range(3):
        before = adam if step else 0
        (start,), (end,) = at(memory, step, "start"), at(memory, step, "end")
        assert start == MemorySample(step, "start", size, 0, before, 0)
        assert end == MemorySample(step, "end", size, 0, adam, 0)
        forward, backward = at(memory, step, "forward"), at(memory, step, "backward")
        activations = [s.activations_bytes for s in forward]
        assert activations[0] < activations[-1] and {s.grads_bytes for s in forward} == {0}
        grads = [s.grads_bytes for s in backward]
        assert grads == sorted(grads) and grads[-1] == size
        falling = [s.activations_bytes for s in backward]
        assert falling == sorted(falling, reverse=True) and falling[-1] < activations[-1] / 10
        assert at(memory, step, "optimizer")[0].grads_bytes == size
    growing = [s.optimizer_states_bytes for s in at(memory, 0, "optimizer")]
    assert len(set(growing)) > len(list(model.parameters())) and growing == sorted(growing)
    # Temporaries of the optimizer are not taken for states.
    assert max(s.optimizer_states_bytes for s in memory.samples) == adam


def test_every_run_gives_the_same_timeline() -> None:
    assert tracked()[1].samples == tracked()[1].samples


@pytest.mark.parametrize(
    ("recompute", "rows", "moment"),
    [(False, 7, "optimizer"), (False, 300, "backward"), (True, 301, "backward")],
)
def test_peak_is_what_the_profiler_counts(recompute: bool, rows: int, moment: str) -> None:
    _, memory = tracked(recompute, rows=rows)
    assert memory.peak.moment == moment
    model, optimizer = make(recompute)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        train(_Untracked(), model, optimizer, rows=rows)
    changes = [
        (event.start_ns(), event.nbytes())
        for event in prof.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = most = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        most = max(most, held)
    start = memory.samples[0].total_bytes
    assert memory.peak.total_bytes - start == pytest.approx(most, abs=64)  # a few scalars


class _Untracked(MemoryLog):
    """Runs the same loop without a tracker."""

    def _open_tracker(self) -> Any:
        return SimpleNamespace(held=dict)

    def _add(self, held: dict[str, int], moment: str) -> None:
        pass


def test_recomputing_holds_fewer_activations() -> None:
    def most(memory: MemoryLog) -> int:
        return max(s.activations_bytes for s in memory.samples)

    _, memory = tracked(recompute=True)
    assert most(memory) < 0.6 * most(tracked()[1])
    held = [s.activations_bytes for s in at(memory, 1, "backward")]
    assert held != sorted(held, reverse=True)  # what is made again counts as activations


def test_microbatches_accumulate_into_one_gradient() -> None:
    model, memory = tracked(microbatches=3)
    second = [s.grads_bytes for s in at(memory, 2, "forward")]
    assert second[0] == 0 and second[-1] == param_bytes(model)
    assert len(memory.samples) > 0 and memory.samples[-1].step == 2


def test_moments_are_told_without_being_named_and_buckets_are_other() -> None:
    model, optimizer = make()
    with track_memory(model, optimizer) as memory, memory.step():
        model(torch.ones(7, 24)).sum().backward()
        with memory.moment("all_reduce"):
            bucket = torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
    assert {s.moment for s in memory.samples} == {
        *("start", "forward", "backward", "all_reduce", "optimizer", "end")
    }
    (last,) = at(memory, 0, "end")
    assert last.other_bytes == bucket.nbytes == param_bytes(model)
    assert last.activations_bytes == 0


def test_peak_of_a_step_and_a_log_that_travels() -> None:
    _, memory = tracked()
    assert memory.peak.total_bytes == max(memory.peak_of_step(i).total_bytes for i in range(3))
    assert memory.peak_of_step(0).optimizer_states_bytes <= memory.peak.optimizer_states_bytes
    assert pickle.loads(pickle.dumps(memory)).samples == memory.samples
    assert memory.allocator is None
    with pytest.raises(ValueError, match="no memory was recorded for step 7"):
        memory.peak_of_step(7)
    with pytest.raises(RuntimeError, match="closed"), memory.step():
        pass


def test_state_bytes_counts_tied_parameters_once() -> None:
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 11, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.tensor([1, 2])).sum().backward()
    assert state_bytes(model) == MemorySample(0, "end", 220, 220, 0, 0, 24)
    optimizer.step()
    assert state_bytes(model, optimizer) == MemorySample(0, "end", 220, 220, 220, 0, 24)
    optimizer.zero_grad()
    assert state_bytes(model, optimizer).grads_bytes == 0
    copy = nn.Linear(5, 11, bias=False)
    copy.weight.data = model[1].weight.data  # two parameters, one memory
    assert state_bytes(nn.Sequential(model, copy)).params_bytes == 220


@pytest.mark.parametrize("call", [state_bytes, track_memory])
def test_bad_arguments(call: Callable[..., object]) -> None:
    def use(*args: object, **kwargs: object) -> None:
        result = call(*args, **kwargs)
        if call is track_memory:
            with result:  # type: ignore[attr-defined]
                pass

    with pytest.raises(TypeError, match=r"model is a list: expected an nn\.Module"):
        use([])
    with pytest.raises(TypeError, match=r"optimizer is a dict: expected a torch\.optim"):
        use(nn.Linear(1, 1), {})
    if call is track_memory:
        with pytest.raises(ValueError, match="snapshot_path needs a model on a GPU, found cpu"):
            use(nn.Linear(1, 1), snapshot_path="x")


def train_sharded() -> tuple[MemorySample, tuple[MemorySample, ...]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in list(model)[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the root holds the last block
    optimizer = torch.optim.AdamW(model.parameters())
    with track_memory(model, optimizer, rank=dist.get_rank()) as memory:
        samples = train(memory, model, optimizer, steps=2, microbatches=2)
    return state_bytes(model, optimizer), samples


def test_fsdp2_holds_a_shard_of_everything() -> None:
    model, _ = make()
    size = param_bytes(model)
    block = size // 3
    for rank, (state, samples) in enumerate(launch(train_sharded, world_size=2)):
        assert {s.rank for s in samples} == {rank}
        assert state.params_bytes == size // 2
        assert size <= state.optimizer_states_bytes < size + 200  # 2 moments of half, and steps
        (end,) = [s for s in samples if s.step == 1 and s.moment == "end"]
        assert end.optimizer_states_bytes == state.optimizer_states_bytes
        unsharded = max(s.params_bytes for s in samples)
        assert size // 2 + block <= unsharded <= size // 2 + size


def test_master_copies_are_optimizer_states_from_the_start() -> None:
    """Mixed precision by hand: 2 + 2 bytes in the model, 4 of the copy, 8 of Adam's moments."""
    model = nn.Linear(30, 20, bias=False).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    number = 600

    def step() -> None:
        model(torch.ones(3, 30).bfloat16()).sum().backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)

    start = state_bytes(model, optimizer)
    assert (start.params_bytes, start.optimizer_states_bytes) == (2 * number, 4 * number)
    with track_memory(model, optimizer) as memory:
        for _ in range(2):
            with memory.step():
                step()
            model.zero_grad()
            optimizer.zero_grad()
    first, second = (next(s for s in memory.samples if s.step == n) for n in (0, 1))
    assert first.optimizer_states_bytes == 4 * number
    assert second.optimizer_states_bytes == 12 * number + 4  # and Adam's step counter
    step()
    end = state_bytes(model, optimizer)
    assert end.optimizer_states_bytes == 12 * number + 4
    assert end.grads_bytes == (2 + 4) * number


def test_gradients_dropped_by_a_hook_are_gone_without_a_warning() -> None:
    model, optimizer = make()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with track_memory(model) as memory, memory.step():
        model(torch.randn(7, 24)).sum().backward()
    largest = max(param.numel() for param in model.parameters())
    grads = [sample.grads_bytes for sample in memory.samples]
    assert 0 < max(grads) < param_bytes(model) / 3
    assert max(grads) >= 4 * largest
    assert grads[-1] == 0
    assert optimizer.state == {}
