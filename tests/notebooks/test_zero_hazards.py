"""What may go wrong in lesson 07's stages: stale weights, lost gradients, leftovers, bad input."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.data_parallelism import accumulate
from notebooks.zero import Flat, ZeRO2, ZeRO3, full_state, load_full_state, train
from playbook_utils.data import shard_batch
from playbook_utils.errors import LaunchError
from playbook_utils.measure import record_communication
from playbook_utils.model import cross_entropy
from tests.notebooks.zero_cases import (
    BATCHES,
    RUNGS,
    VARIANTS,
    assert_close,
    checkpointed,
    frozen_embedding,
    launch,
    odd,
    partly_frozen,
    special,
)

WRAPS = RUNGS | VARIANTS


def my_part(batch: Any, group: Any = None) -> Any:
    return shard_batch(batch, dist.get_rank(group), dist.get_world_size(group))


def break_off(*_: Any) -> None:
    raise KeyError("broken off")


@pytest.mark.parametrize("make_model", [odd, frozen_embedding, partly_frozen, checkpointed])
def test_evaluation_between_backward_and_step(make_model: Callable[[], nn.Module]) -> None:
    """It gathers weights that the step makes stale; loading a state does too."""
    tokens = BATCHES[4][0]

    def run(wrap: Any, evaluate: bool) -> Any:
        torch.manual_seed(0)
        rung = wrap(make_model())
        for batch in BATCHES[:3]:
            accumulate(rung, my_part(batch), 1)
            if evaluate:
                with torch.no_grad():
                    rung(tokens)
            rung.step()
            if batch is BATCHES[1]:
                state = full_state(rung)
        trained = full_state(rung)["params"]
        if evaluate:
            with torch.no_grad():
                rung(tokens)
        load_full_state(rung, state)
        with torch.no_grad():
            return trained, {"output": rung(tokens)}

    def run_all() -> Any:
        plain = run(RUNGS["ZeRO1"], False)
        return plain, {name: run(WRAPS[name], True) for name in WRAPS if "ZeRO3" in name}

    plain, evaluated = launch(run_all, world_size=2)[0]
    assert len(evaluated) == 3
    for found in evaluated.values():
        for a, b in zip(found, plain, strict=True):
            assert_close(a, b)


def test_nothing_gathered_survives_a_step() -> None:
    def run(wrap: Any, evaluate: bool) -> Any:
        rung = wrap(frozen_embedding())
        with record_communication() as log:
            accumulate(rung, my_part(BATCHES[0]), 1)
        if evaluate:
            rung(BATCHES[0][0])
        before = [flat.whole for flat in rung.flats]
        rung.step()
        return before, [flat.whole for flat in rung.flats], log.calls("all_gather")

    for wrap, calls in ((ZeRO3, 8), (VARIANTS["ZeRO3, kept"], 4)):
        found = launch(run, wrap, False, world_size=2)[0]
        assert found == ([False] * 4, [False] * 4, calls)
    found = launch(run, VARIANTS["ZeRO3, kept"], True, world_size=2)[0]
    assert found == ([True] * 4, [False] * 4, 4)


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
        rung, events = ZeRO3(odd()), []
        gather, scatter = dist.all_gather_single, dist.reduce_scatter_single
        send, sent = rung.send, []

        def watched_gather(output: Any, *args: Any, **options: Any) -> Any:
            (unit,) = [i for i, flat in enumerate(rung.flats) if flat.data is output]
            return Watched(gather(output, *args, **options), f"gather {unit}", events)

        def watched_scatter(*args: Any, **options: Any) -> Any:
            return Watched(scatter(*args, **options), f"send {sent[-1]}", events)

        rung.send = lambda flat: (sent.append(rung.flats.index(flat)), send(flat))
        dist.all_gather_single, dist.reduce_scatter_single = watched_gather, watched_scatter
        for i, layer in enumerate(rung.module.layers):
            layer.mlp.register_forward_hook(lambda *_, i=i: events.append(f"layer {i}"))
            layer.mlp.register_full_backward_hook(lambda *_, i=i: events.append(f"layer {i}"))
        loss = cross_entropy(rung(BATCHES[0][0]), BATCHES[0][1])
        forward = events.copy()
        events.clear()
        loss.backward()
        rung.finish_gradients()
        return forward, events

    forward, backward = launch(look, world_size=2)[0]
    for i in (1, 2):  # the next layer comes while the one before it computes
        assert between(forward, f"gather {i} starts", f"layer {i - 1}", f"gather {i} waits")
        assert between(backward, f"gather {i - 1} starts", f"layer {i}", f"gather {i - 1} waits")
        assert between(backward, f"send {i} starts", f"layer {i - 1}", f"send {i} waits")


def between(events: list[str], *expected: str) -> bool:
    """Whether these happened once each, in this order."""
    return [event for event in events if event in expected] == list(expected)


def test_zero_grad_on_the_module_changes_nothing() -> None:
    def run(wrap: Any, call: bool) -> Any:
        torch.manual_seed(0)
        rung = wrap(odd())
        for batch in BATCHES[:2]:
            if call:
                rung.module.zero_grad()
            accumulate(rung, my_part(batch), 2)
            rung.step()
        return full_state(rung)["params"]

    def run_all() -> Any:
        return {name: (run(wrap, False), run(wrap, True)) for name, wrap in WRAPS.items()}

    for wrap, (plain, called) in launch(run_all, world_size=2)[0].items():
        assert all(torch.equal(plain[name], called[name]) for name in plain), wrap


def test_a_backward_broken_off_leaves_nothing() -> None:
    def run(wrap: Any, layer: int | None) -> Any:
        torch.manual_seed(0)
        rung = wrap(odd())
        if layer is not None:
            hook = rung.module.layers[layer].mlp.register_full_backward_hook(break_off)
            with pytest.raises(KeyError, match="broken off"):
                accumulate(rung, my_part(BATCHES[4]), 1)
            hook.remove()
            rung.clear_gradients()
            assert not any(getattr(flat, "whole", False) for flat in rung.flats)
        for batch in BATCHES[:2]:
            accumulate(rung, my_part(batch), 1)
            rung.step()
        return full_state(rung)["params"]

    def run_all() -> Any:
        return {n: [run(wrap, layer) for layer in (None, 0, 1)] for n, wrap in WRAPS.items()}

    for wrap, (plain, *others) in launch(run_all, world_size=2)[0].items():
        for broken in others:
            assert all(torch.equal(plain[name], broken[name]) for name in plain), wrap


def test_a_rung_is_collected_with_its_memory() -> None:
    def run() -> list[str]:
        kept = []
        for name, wrap in WRAPS.items():
            rung = wrap(odd())
            accumulate(rung, my_part(BATCHES[0]), 1)
            rung.step()
            alive = [weakref.ref(thing) for thing in (rung, *rung.flats, *rung.flats[0].params)]
            del rung
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
            wrap = partial(wrap, max_norm=0.3)
            group, batches = groups[number], batches_of(number)
            result = train(wrap, partial(seeded, number), batches, 1, None, group)
            found[name] = result["norms"], result["state"]["params"]
        return found

    expected = [alone_on(number, batches_of(number)) for number in (0, 1)]
    for rank, results in enumerate(launch(run, world_size=4)):
        norms, params = expected[rank % 2]
        for found_norms, found in results.values():
            assert found_norms == pytest.approx(norms, rel=1e-10)
            assert_close(found, params)


def seeded(number: int) -> nn.Module:
    torch.manual_seed(100 + number)
    return odd()


def alone_on(number: int, batches: Any) -> Any:
    model, norms = seeded(number), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(tokens), targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
    assert min(norms) > 0.3
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def test_a_bucket_filled_by_halves_is_seen() -> None:
    """The first backward reaches all, the second one half of the bucket."""

    def run() -> None:
        rung = ZeRO2(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        rung(torch.ones(1, 2)).sum().backward()
        rung.module[0](torch.ones(1, 2)).sum().backward()
        rung.finish_gradients()

    with pytest.raises(LaunchError, match="did not reach every trainable parameter"):
        launch(run, world_size=2)


class Nested(nn.Module):
    """Lists in a list, and a layer with a list of its own inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(Parts() if i else nn.Linear(3, 3) for i in range(2)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
        return x


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x) for part in self.parts)


def test_nested_lists_are_cut_at_the_outermost_layers() -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        rung, x = make(Nested().double()), torch.linspace(-1, 1, 6).double().view(2, 3)
        for _ in range(2):
            rung(x).square().sum().backward()
            rung.finish_gradients()
            rung.step()
        return len(rung.flats), full_state(rung)["params"]

    (_, expected), (num_units, found) = (
        launch(run, make, world_size=2)[0] for make in (RUNGS["ZeRO1"], ZeRO3)
    )
    assert num_units == 4  # two linear layers, and two of two parts each
    assert_close(found, expected)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.GRU(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)[0]


def mixed_layer() -> nn.Module:
    model = odd()
    model.layers[0].mlp.float()
    return model


def test_what_is_refused() -> None:
    def run() -> None:
        with pytest.raises(TypeError, match="layers that return one tensor"):
            ZeRO3(Pair())(torch.ones(1, 1, 2))
        with pytest.raises(ValueError, match="one dtype"):
            ZeRO3(mixed_layer())
        for wrap in WRAPS.values():
            with pytest.raises(ValueError, match="no trainable parameter"):
                wrap(odd().requires_grad_(False))

    launch(run, world_size=1)


def test_a_state_of_another_model_is_refused() -> None:
    changes: dict[str, Any] = {
        "norm.weight": lambda tensor: tensor[:1],
        "layers.1.mlp_norm.weight": lambda tensor: tensor[:1],  # frozen
        "head.bias": lambda _: torch.ones(65),  # there is none
    }

    def run() -> None:
        rung = ZeRO3(special())
        for name, change in changes.items():
            state = full_state(rung)
            state["params"][name] = change(state["params"].get(name))
            with pytest.raises(ValueError, match="names or shapes are not the model's"):
                load_full_state(rung, state)
        del (state := full_state(rung))["params"]["norm.weight"]
        with pytest.raises(ValueError, match="names or shapes are not the model's"):
            load_full_state(rung, state)

    launch(run, world_size=1)


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
    # The layer in use, the one being prefetched, and the root; never all.
    assert seen == [[True, True, False, True], [False, True, True, True],
                    [False, False, True, True]]  # fmt: skip
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
