"""What may go wrong in lesson 07's stages: stale weights, lost gradients, leftovers, bad input."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.zero import (
    ZeRO1,
    ZeRO1AllReduce,
    ZeRO2,
    ZeRO2Overlapped,
    ZeRO3,
    ZeRO3Prefetch,
    reduce_and_free,
)
from playbook_utils.errors import LaunchError
from playbook_utils.measure import record_communication
from playbook_utils.model import cross_entropy
from tests.notebooks.zero_cases import (
    BATCHES,
    RUNGS,
    WRAPS,
    Trained,
    assert_close,
    checkpointed,
    frozen_embedding,
    launch,
    odd,
    partly_frozen,
)

STAGE_3 = [name for name in WRAPS if "ZeRO3" in name]


def whole(rung: Any) -> list[bool]:
    """Which units' weights have memory."""
    return [unit.memory.nbytes() > 0 for unit in rung.units]


def test_evaluation_between_backward_and_step() -> None:
    """It gathers weights that the step makes stale."""
    tokens = BATCHES[4][0]

    def run(wrap: Any, make_model: Callable[[], nn.Module], evaluate: bool) -> Any:
        one = Trained(wrap, make_model)
        for batch in BATCHES[:3]:
            if evaluate:
                with torch.no_grad():
                    one.model(tokens)
            one.backward(batch)
            if evaluate:
                with torch.no_grad():
                    one.model(tokens)
            one.step()
        with torch.no_grad():
            return one.params(), {"output": one.model(tokens)}

    def run_all() -> Any:
        found = {}
        for make_model in (odd, frozen_embedding, partly_frozen, checkpointed):
            plain = run(RUNGS["ZeRO1"], make_model, False)
            others = {name: run(WRAPS[name], make_model, True) for name in STAGE_3}
            found[make_model.__name__] = plain, others
        return found

    for plain, evaluated in launch(run_all, world_size=2)[0].values():
        assert len(evaluated) == 2
        for found in evaluated.values():
            for a, b in zip(found, plain, strict=True):
                assert_close(a, b)


def test_nothing_gathered_survives_a_step() -> None:
    def run(stage: Any, evaluate: bool) -> Any:
        one = Trained(stage, frozen_embedding)
        with record_communication() as log:
            one.backward(BATCHES[0])
        after_backward = whole(one.rung)
        if evaluate:
            one.model(BATCHES[0][0])[0, 0, 0].item()
            one.rung.units[1].gather()  # as an evaluation broken off would leave it
        before = whole(one.rung)
        one.step()
        return after_backward, before, whole(one.rung), log.calls("all_gather")

    def both() -> Any:
        return [(run(stage, False), run(stage, True)) for stage in (ZeRO3, ZeRO3Prefetch)]

    for plain, evaluated in launch(both, world_size=2)[0]:
        assert plain == ([False] * 4, [False] * 4, [False] * 4, 8)
        assert evaluated[1] == [False, True, False, False]
        assert evaluated[2] == [False] * 4


class Watched:
    """A call on its way that notes when it is waited for."""

    def __init__(self, work: Any, name: str, events: list[str]) -> None:
        self.work, self.name, self.events = work, name, events
        events.append(f"{name} starts")

    def wait(self) -> None:
        self.events.append(f"{self.name} waits")
        self.work.wait()


def test_what_is_on_the_wire_while_a_layer_computes() -> None:
    def look() -> Any:
        one, events = Trained(ZeRO3Prefetch, odd), []
        gather = dist.all_gather_single

        def watched_gather(output: Any, *args: Any, **options: Any) -> Any:
            (unit,) = [i for i, unit in enumerate(one.rung.units) if unit.whole is output]
            return Watched(gather(output, *args, **options), f"gather {unit}", events)

        dist.all_gather_single = watched_gather
        for i, layer in enumerate(one.model.layers):
            layer.mlp.register_forward_hook(lambda *_, i=i: events.append(f"layer {i}"))
            layer.mlp.register_full_backward_hook(lambda *_, i=i: events.append(f"layer {i}"))
        for part in (one.model.embedding, one.model.head):
            part.register_forward_hook(lambda *_: events.append("root"))
        one.model.head.register_full_backward_hook(lambda *_: events.append("root"))
        loss = cross_entropy(one.model(BATCHES[0][0]), BATCHES[0][1])
        forward = events.copy()
        events.clear()
        loss.backward()
        backward = events.copy()
        events.clear()
        unit = one.rung.units[0]
        unit.start()
        unit.free()
        return forward, backward, events, unit.memory.nbytes()

    forward, backward, freed, left = launch(look, world_size=2)[0]
    # The root's own computing hides the first layer's gather, and in backward the last one's.
    assert between(forward[: forward.index("layer 0")], "gather 0 starts", "root", "gather 0 waits")
    assert between(backward, "gather 2 starts", "root", "gather 2 waits")
    # Nobody may write into memory that is given back.
    assert (freed, left) == (["gather 0 starts", "gather 0 waits"], 0)
    for i in (1, 2):  # the next layer comes while the one before it computes
        assert between(forward, f"gather {i} starts", f"layer {i - 1}", f"gather {i} waits")
        assert between(backward, f"gather {i - 1} starts", f"layer {i}", f"gather {i - 1} waits")


def between(events: list[str], *expected: str) -> bool:
    """Whether these happened once each, in this order."""
    return [event for event in events if event in expected] == list(expected)


def test_between_uses_stage_3_has_no_weights() -> None:
    def look(stage: Any) -> Any:
        one = Trained(stage, odd)
        seen = []
        for layer in one.model.layers:
            layer.mlp.register_forward_hook(lambda *_: seen.append(whole(one.rung)))
        tokens, targets = BATCHES[0]
        loss = cross_entropy(one.model(tokens), targets)
        after_forward = whole(one.rung)
        loss.backward()
        return seen, after_forward, whole(one.rung)

    def both() -> Any:
        return [look(stage) for stage in (ZeRO3, ZeRO3Prefetch)]

    on_demand, prefetched = launch(both, world_size=2)[0]
    # The layer in use, the one being prefetched, and the root; never all.
    assert on_demand[0] == [[True, False, False, True], [False, True, False, True],
                            [False, False, True, True]]  # fmt: skip
    assert prefetched[0] == [[True, True, False, True], [False, True, True, True],
                             [False, False, True, True]]  # fmt: skip
    for _, after_forward, after_backward in (on_demand, prefetched):
        assert after_forward == [False] * 4
        assert after_backward == [False] * 4


def test_zero_grad_between_steps_changes_nothing() -> None:
    def run(wrap: Any, call: bool) -> Any:
        one = Trained(wrap, odd)
        for batch in BATCHES[:2]:
            if call:
                one.model.zero_grad()
            one.backward(batch, 2)
            one.step()
        return one.params()

    def run_all() -> Any:
        return {name: (run(wrap, False), run(wrap, True)) for name, wrap in WRAPS.items()}

    for wrap, (plain, called) in launch(run_all, world_size=2)[0].items():
        assert all(torch.equal(plain[name], called[name]) for name in plain), wrap


def test_a_rung_is_collected_with_its_memory() -> None:
    def run() -> list[str]:
        kept = []
        for name, wrap in WRAPS.items():
            one = Trained(wrap, odd)
            one.backward(BATCHES[0])
            one.step()
            unit = one.rung.units[0]
            alive = [weakref.ref(thing) for thing in (one.rung, unit, unit.params[0])]
            del one, unit
            gc.collect()
            kept += [name] if any(thing() is not None for thing in alive) else []
        return kept

    assert launch(run, world_size=2) == [[], []]


def test_replicas_of_a_subgroup_are_its_own() -> None:
    """Against one process a group: a call without `group` would mix them."""

    def batches_of(number: int) -> Any:
        return BATCHES[2 * number :][:2]  # Adam's first step is blind to the gradient's scale

    def run() -> Any:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        number = dist.get_rank() % 2
        found = {}
        for name, wrap in WRAPS.items():
            one = Trained(wrap, odd, groups[number], seed=100 + 10 * number)
            norms = []
            for batch in batches_of(number):
                one.backward(batch)
                norms.append(one.step(0.3))
            found[name] = norms, one.params()
        return found

    expected = [alone_on(number, batches_of(number)) for number in (0, 1)]
    for rank, results in enumerate(launch(run, world_size=4)):
        norms, params = expected[rank % 2]
        for found_norms, found in results.values():
            assert found_norms == pytest.approx(norms, rel=1e-10)
            assert_close(found, params)


def alone_on(number: int, batches: Any) -> Any:
    torch.manual_seed(100 + 10 * number)
    model, norms = odd(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(tokens), targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
    assert min(norms) > 0.3
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def test_full_gradients_are_freed_before_the_message() -> None:
    """Else a unit's gradients, their flat copy and the backend's exist at one time."""

    def run() -> list[bool]:
        params, freed = [nn.Parameter(torch.ones(3)) for _ in range(2)], []
        for param in params:
            param.grad = torch.ones(3)
        scatter = dist.reduce_scatter_single

        def watched(*args: Any, **options: Any) -> Any:
            freed.extend(param.grad is None for param in params)
            return scatter(*args, **options)

        dist.reduce_scatter_single = watched
        reduce_and_free(params)
        dist.reduce_scatter_single = scatter
        return freed

    assert launch(run, world_size=2) == [[True, True]] * 2


def test_gathers_of_the_overlapped_stage_2() -> None:
    """Nobody waits for them before the next forward; `finish` brings them without one."""

    def run() -> Any:
        one, events = Trained(ZeRO2Overlapped, odd), []
        gather = dist.all_gather_single

        def watched(*args: Any, **options: Any) -> Any:
            return Watched(gather(*args, **options), "gather", events)

        dist.all_gather_single = watched
        one.backward(BATCHES[0])
        one.step()
        after_step = events.copy()
        one.backward(BATCHES[1])
        after_forward = events.copy()
        one.step()
        one.rung.finish()
        dist.all_gather_single = gather
        live = {name: p.detach().clone() for name, p in one.model.named_parameters()}
        return after_step, after_forward, live, one.params()

    after_step, after_forward, live, params = launch(run, world_size=2)[0]
    assert after_step == ["gather starts"] * 4
    assert after_forward[4:] == ["gather waits"] * 4
    assert all(torch.equal(live[name], params[name]) for name in params)


class Pairs(nn.Module):
    """A layer that returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.linear(x[0]), x[1]


def test_a_layer_that_returns_a_tuple() -> None:
    def run() -> Any:
        found = []
        for stage in (ZeRO2, ZeRO3, ZeRO3Prefetch):
            torch.manual_seed(0)
            model = nn.Sequential(Pairs(), Pairs()).double()
            rung = stage(model, layers=list(model))
            x = torch.ones(2, 3, dtype=torch.float64)
            model((x, None))[0].square().sum().backward()
            rung.finish_gradients()
            found.append([unit.grad for unit in rung.units])
        return found

    first, *others = launch(run, world_size=2)[0]
    for other in others:
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(a, b)


def test_what_cannot_be_cut_is_refused() -> None:
    def mixed() -> None:
        ZeRO1(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))

    def shared() -> None:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        second.weight = first.weight
        model = nn.Sequential(first, second)
        ZeRO3(model, layers=list(model))

    with pytest.raises(LaunchError, match="one dtype a unit"):
        launch(mixed, world_size=2)
    with pytest.raises(LaunchError, match="two layers share a weight"):
        launch(shared, world_size=2)


STAGES = [ZeRO1AllReduce, ZeRO1, ZeRO2, ZeRO3]


def two_linears(stage: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return model, stage(model) if "ZeRO1" in stage.__name__ else stage(model, layers=())


@pytest.mark.parametrize("stage", [ZeRO1, ZeRO2])
def test_a_unit_filled_by_halves_is_seen(stage: Any) -> None:
    """The first backward reaches all, the second one half of the unit."""

    def run() -> None:
        model, rung = two_linears(stage)
        model(torch.ones(1, 2)).sum().backward()
        if stage is ZeRO1:
            rung.finish_gradients()
        model[0](torch.ones(1, 2)).sum().backward()
        rung.finish_gradients()

    with pytest.raises(LaunchError, match="did not reach every trainable parameter"):
        launch(run, world_size=2)


@pytest.mark.parametrize("stage", STAGES)
def test_an_unused_parameter_stops_a_step(stage: Any) -> None:
    def run() -> None:
        model, rung = two_linears(stage)
        if stage is ZeRO3:
            [unit.gather() for unit in rung.units]
        model[0](torch.ones(1, 2)).sum().backward()
        rung.finish_gradients()

    with pytest.raises(LaunchError, match="did not reach every trainable parameter"):
        launch(run, world_size=2)


def test_clipping_by_a_local_norm_is_another_training() -> None:
    """The mistake that the lesson makes on purpose: replicas agree, and are wrong."""

    def clip_mine(one: Trained) -> None:
        shards = [unit.grad for unit in one.rung.units]
        norm = torch.stack([shard.norm() for shard in shards]).norm()
        for shard in shards:
            shard *= (0.3 / norm).clamp(max=1)

    def run(right: bool) -> Any:
        one = Trained(ZeRO3, odd)
        for batch in BATCHES[:3]:
            one.backward(batch)
            if right:
                one.step(0.3)
            else:
                clip_mine(one)
                one.step()
        return one.params()

    def both() -> Any:
        return run(True), run(False)

    (right, wrong), (_, others) = launch(both, world_size=2)
    assert all(torch.equal(wrong[name], others[name]) for name in wrong)
    with pytest.raises(AssertionError):
        assert_close(wrong, right)
