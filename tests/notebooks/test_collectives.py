"""The collectives of lesson 05, imported from its cells, against PyTorch's and the formulas.

The lesson shows some world sizes and types; here they meet all of 1 to 8, every type that gloo
adds, lengths that do not divide, subgroups, and planted bugs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.collectives import (
    average_is_sound,
    exchange,
    hierarchical_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    ring_sent_bytes,
    root_all_reduce,
    tree_broadcast,
    two_levels,
)
from playbook_utils.commands.export import export_script
from playbook_utils.errors import CheckFailed, LaunchError, LaunchTimeout
from playbook_utils.exercises.collectives import expect_ring
from playbook_utils.measure import record_communication
from playbook_utils.predict.collective_time import collective_cost
from playbook_utils.predict.communication import wire_bytes
from playbook_utils.predict.hierarchy import flat_ring_time_s, two_level_cost
from playbook_utils.predict.link import Link
from playbook_utils.predict.message_clock import replay_s
from playbook_utils.workers import launch

ALL_REDUCES = {
    "root": root_all_reduce,
    "ring": ring_all_reduce,
    "recursive_doubling": recursive_doubling_all_reduce,
}
NAMES = "float32 float64 bfloat16 float16 int8 uint8 int32 int64 complex64 complex128"
DTYPES = [getattr(torch, name) for name in NAMES.split()]
LENGTHS = (0, 1, 2, 3, 5, 7, 8, 9, 30, 1001)
FAST, SLOW = Link(1e-6, 4e11), Link(1e-5, 5e10)


def numbers(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Small whole numbers that differ by rank: sums are exact in every type."""
    # Not torch.manual_seed: without a GPU that writes down three stack traces a call.
    generator = torch.Generator().manual_seed(1000 * numel + dist.get_rank())
    return torch.randint(0, 8, (numel,), generator=generator).to(dtype)


def cases() -> list[tuple[torch.dtype, int]]:
    """All lengths at any world size; all types at one power of two, and at one that is none."""
    lengths = [(torch.float32, numel) for numel in LENGTHS]
    types = [(dtype, numel) for dtype in DTYPES for numel in (0, 3, 11)]
    return lengths + types * (dist.get_world_size() in (3, 4))


def differing(collectives: list[Callable], reference: Callable, group_of: Any = None) -> list:
    """(collective, type, length) of each result that is not the reference's."""
    group = group_of() if group_of else None
    wrong = []
    for dtype, numel in cases():
        expected = numbers(dtype, numel)
        reference(expected, group=group)
        for place, collective in enumerate(collectives):
            tensor = numbers(dtype, numel)
            collective(tensor, group=group)
            if not torch.equal(tensor, expected):
                wrong.append((place, dtype, numel))
    return wrong


@pytest.fixture(scope="module", params=range(1, 9), ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found, everything of one world size in one launch."""
    return launch(of_one_world_size, world_size=request.param)


def of_one_world_size() -> dict[str, Any]:
    mine, n = list(ALL_REDUCES.values()), dist.get_world_size()
    src = (n * 2) // 3
    broadcast, theirs = partial(tree_broadcast, src=src), partial(dist.broadcast, src=src)
    halves()
    return {
        "all_reduces": differing(mine, dist.all_reduce),
        "broadcasts": differing([broadcast], theirs),
        "calls": record([*mine, tree_broadcast], [840]),
        "ring": record([ring_all_reduce], [*LENGTHS, 840], torch.int64),
    }


def halves() -> None:
    """Reduce-scatter and all-gather by the ring."""
    for numel in LENGTHS:
        tensor = numbers(torch.float64, numel)
        total = tensor.clone()
        dist.all_reduce(total)
        own = ring_reduce_scatter(tensor)
        assert own.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert torch.equal(own, total.tensor_split(dist.get_world_size())[dist.get_rank()])
        gathered = torch.full_like(tensor, -1)
        gathered.tensor_split(dist.get_world_size())[dist.get_rank()].copy_(own)
        ring_all_gather(gathered)
        assert torch.equal(gathered, total)


def test_all_reduces_and_the_tree_s_broadcast_are_pytorch_s(ranks: Any) -> None:
    """The broadcast from a source that is not always rank 0."""
    assert [rank["all_reduces"] for rank in ranks] == [[]] * len(ranks)
    assert [rank["broadcasts"] for rank in ranks] == [[]] * len(ranks)


def test_what_gloo_cannot_add_can_be_sent_and_bool_is_a_logical_or() -> None:
    def work() -> tuple[list, list, list]:
        float8 = torch.full((5,), float(dist.get_rank())).to(torch.float8_e4m3fn)
        tree_broadcast(float8, src=1)
        results = []
        for all_reduce in (ring_all_reduce, recursive_doubling_all_reduce):
            flags = torch.arange(5) == dist.get_rank()
            all_reduce(flags)
            results.append(flags.view(torch.uint8).tolist())  # gloo's own leaves 3s here
        return float8.float().tolist(), *results

    assert launch(work, world_size=3) == [([1.0] * 5, [1, 1, 1, 0, 0], [1, 1, 1, 0, 0])] * 3


def test_all_ranks_end_with_the_same_bits() -> None:
    def bits() -> list[torch.Tensor]:
        torch.manual_seed(dist.get_rank())
        tensors = [torch.randn(1001) for _ in ALL_REDUCES]
        for all_reduce, tensor in zip(ALL_REDUCES.values(), tensors, strict=True):
            all_reduce(tensor)
        return tensors

    first, *others = launch(bits, world_size=7)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_shapes_scalars_and_parameters() -> None:
    def work() -> bool:
        for collective in (*ALL_REDUCES.values(), tree_broadcast):
            param = torch.nn.Parameter(torch.full((3, 5), dist.get_rank() + 1.0))
            collective(param)  # outside of no_grad, as dist.all_reduce can be called
            expected = 1.0 if collective is tree_broadcast else 6.0
            assert torch.equal(param, torch.full((3, 5), expected)) and param.requires_grad
            scalar = torch.tensor(dist.get_rank() + 1.0)
            collective(scalar)
            assert scalar.shape == () and scalar.item() == expected
        return True

    assert launch(work, world_size=3) == [True] * 3


def test_a_tensor_that_is_not_contiguous_is_refused_not_ignored() -> None:
    def work() -> None:
        for name in ("ring", "recursive_doubling"):
            with pytest.raises(RuntimeError, match="view"):
                ALL_REDUCES[name](torch.ones(4, 3).t())

    launch(work, world_size=2)


def test_subgroups_count_their_own_ranks() -> None:
    def odd_or_even() -> Any:
        n = dist.get_world_size()
        groups = [dist.new_group(range(first, n, 2)) for first in (0, 1)]
        return groups[dist.get_rank() % 2]

    def work() -> Any:
        mine, theirs = partial(tree_broadcast, src=1), partial(dist.broadcast, group_src=1)
        wrong = differing(list(ALL_REDUCES.values()), dist.all_reduce, odd_or_even)
        return wrong, differing([mine], theirs, odd_or_even)

    assert launch(work, world_size=5) == [([], [])] * 5


def record(collectives: list[Callable], numels: list[int], dtype: Any = torch.float32) -> Any:
    """The calls of each collective at each length, in order."""
    found = []
    for collective in collectives:
        for numel in numels:
            with record_communication() as log:
                collective(numbers(dtype, numel))
            found.append(log.events)
    return found


def test_messages_bytes_and_time_are_as_predicted(ranks: Any) -> None:
    world_size = len(ranks)
    recorded = zip(*(rank["calls"] for rank in ranks), strict=True)
    for name, events in zip([*ALL_REDUCES, "tree"], recorded, strict=True):
        op = "broadcast" if name == "tree" else "all_reduce"
        cost = collective_cost(op, 4 * 840, world_size, name)
        assert max(replay_s(events, Link(1.0, float("inf")))) == cost.messages
        assert max(replay_s(events, Link(0.0, 1.0))) == pytest.approx(cost.path_bytes)
        for link in (FAST, SLOW):
            assert max(replay_s(events, link)) == pytest.approx(cost.time_s(link), rel=1e-9)
        sent = [sum(e.wire_bytes for e in calls) for calls in events]
        assert max(sent) == cost.sent_bytes
        if name == "tree":
            assert sum(sent) == (world_size - 1) * 3360


def test_the_ring_s_bytes_are_exact_for_any_length(ranks: Any) -> None:
    numels, n = [*LENGTHS, 840], len(ranks)
    recorded = [rank["ring"] for rank in ranks]
    for numel, events in zip(numels, zip(*recorded, strict=True), strict=True):
        sent = [sum(e.payload_bytes for e in calls if e.op == "send") for calls in events]
        received = [sum(e.payload_bytes for e in calls if e.op == "recv") for calls in events]
        assert sent == ring_sent_bytes(numel, 8, n)
        assert sum(sent) == sum(received) == 2 * (n - 1) * 8 * numel
        assert [len(calls) for calls in events] == [4 * (n - 1)] * n
        if numel % n == 0:
            assert set(sent) == set(received) == {wire_bytes("all_reduce", 8 * numel, n)}
        else:
            assert all(abs(s - 8 * numel * 2 * (n - 1) / n) < 2 * 8 for s in sent)
        expect_ring(events, 8 * numel)


def pretend(kind: str, tensor: torch.Tensor, reverse: Any) -> None:
    """Right sums by other means than a ring to the right."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if kind == "pytorch":
        dist.all_reduce(tensor)
    elif kind == "root":
        root_all_reduce(tensor)
    elif kind == "doubling":
        recursive_doubling_all_reduce(tensor)
    elif kind == "ring and a call":
        ring_all_reduce(tensor)
        dist.barrier()
    elif kind == "whole tensors":
        passing, incoming = tensor.clone(), torch.empty_like(tensor)
        for step in range(2 * (n - 1)):
            exchange(passing, (rank + 1) % n, incoming, (rank - 1) % n)
            passing, incoming = incoming, passing
            if step < n - 1:
                tensor += passing
    elif kind == "a hidden call and empty messages":
        for _ in range(2 * (n - 1)):
            exchange(tensor[:0], (rank + 1) % n, tensor[:0].clone(), (rank - 1) % n)
        dist.all_reduce(tensor)
    elif kind == "left":
        ring_all_reduce(tensor, group=reverse)


KINDS = [
    *("pytorch", "root", "doubling", "ring and a call", "whole tensors"),
    *("a hidden call and empty messages", "left"),
]


def test_impostors_are_seen_through() -> None:
    def work() -> Any:
        reverse, found = dist.new_group([3, 2, 1, 0], sort_ranks=False), []
        for kind in KINDS:
            tensor = numbers(torch.float32, 12)
            total = tensor.clone()
            dist.all_reduce(total)
            with record_communication() as log:
                pretend(kind, tensor, reverse)
            assert torch.equal(tensor, total)  # the result is right
            found.append(log.events)
        return found

    for kind, events in zip(KINDS, zip(*launch(work, world_size=4), strict=True), strict=True):
        with pytest.raises(CheckFailed, match="hint: "):
            expect_ring(events, 48)
        if kind == "left":
            expect_ring(events, 48, direction=-1)


def is_inside(ranks_per_node: int, source: int, destination: int) -> bool:
    return source // ranks_per_node == destination // ranks_per_node


def of_nodes(ranks_per_node: int) -> Any:
    """The calls of two levels at 48 numbers, and of the single ring at 48 and 840."""
    groups = two_levels(ranks_per_node)
    for length in (0, 1, 5, 1001):
        tensor = numbers(torch.float64, length)
        total = tensor.clone()
        dist.all_reduce(total)
        hierarchical_all_reduce(tensor, *groups)
        assert torch.equal(tensor, total)
    (two,) = record([lambda tensor: hierarchical_all_reduce(tensor, *groups)], [48])
    return two, *record([ring_all_reduce], [48, 840])


@pytest.mark.parametrize(("ranks_per_node", "nodes"), [(1, 3), (3, 1), (2, 2), (2, 3), (4, 2)])
def test_nodes(ranks_per_node: int, nodes: int) -> None:
    """Two levels sum and send as predicted; the single ring goes as its slow links do."""
    calls = launch(of_nodes, ranks_per_node, world_size=ranks_per_node * nodes)
    two, ring, long_ring = zip(*calls, strict=True)
    check_two_levels(two, ranks_per_node, nodes)
    if nodes > 1 and ranks_per_node > 1:
        predicted_s = flat_ring_time_s(3360, ranks_per_node, nodes, FAST, SLOW)
        found_s = max(replay_s(long_ring, link_of(ranks_per_node)))
        assert found_s == pytest.approx(predicted_s, rel=1e-9)
        check_links(two, ring, ranks_per_node, nodes)


def link_of(ranks_per_node: int) -> Callable[[int, int], Link]:
    return lambda a, b: FAST if is_inside(ranks_per_node, a, b) else SLOW


def check_two_levels(events: Any, ranks_per_node: int, nodes: int) -> None:
    cost = two_level_cost(4 * 48, ranks_per_node, nodes)
    for calls in events:
        sends = [e for e in calls if e.op == "send"]
        inside = sum(e.wire_bytes for e in sends if is_inside(ranks_per_node, *e.group))
        between = sum(e.wire_bytes for e in sends if not is_inside(ranks_per_node, *e.group))
        assert inside == pytest.approx(cost.node.sent_bytes)
        assert between == pytest.approx(cost.network.sent_bytes)
    found_s = max(replay_s(events, link_of(ranks_per_node)))
    assert found_s == pytest.approx(cost.time_s(FAST, SLOW), rel=1e-9)


def check_links(two: Any, ring: Any, ranks_per_node: int, nodes: int) -> None:
    """The single ring leaves a node through one rank's card, two levels through all alike."""
    n, found = ranks_per_node * nodes, []
    for events in (ring, two):
        links: dict[tuple[int, ...], int] = {}
        for event in (e for calls in events for e in calls if e.op == "send"):
            if not is_inside(ranks_per_node, *event.group):
                links[event.group] = links.get(event.group, 0) + event.wire_bytes
        found.append(links)
    flat = wire_bytes("all_reduce", 4 * 48, n)
    last = range(ranks_per_node - 1, n, ranks_per_node)
    assert found[0] == {(rank, (rank + 1) % n): flat for rank in last}
    share = wire_bytes("all_reduce", 4 * 48 // ranks_per_node, nodes)
    assert found[1] == {(rank, (rank + ranks_per_node) % n): share for rank in range(n)}


def test_nodes_that_do_not_fill_the_world_and_sources_outside_it_are_refused() -> None:
    def work() -> None:
        for size in (2, 6, 0, -5):
            with pytest.raises(ValueError, match=f"5 ranks do not make nodes of {size}"):
                two_levels(size)
        for src in (-1, 5):
            says = f"src is {src}: expected a rank of the group, 0 to 4"
            with pytest.raises(ValueError, match=says):
                tree_broadcast(torch.ones(1), src=src)

    launch(work, world_size=5)


SOUND = {"all_reduce": True, "reduce": True, "reduce_scatter": True}


def test_the_average_is_sound_in_the_world_and_in_groups() -> None:
    def work() -> Any:
        groups = [dist.new_group(range(first, 5, 2)) for first in (0, 1)]
        return average_is_sound(), average_is_sound(groups[dist.get_rank() % 2])

    assert launch(work, world_size=5) == [(SOUND, SOUND)] * 5


def test_the_probe_of_the_average_sees_a_sum_and_a_refusal() -> None:
    cases = [(op, refused) for op in SOUND for refused in (False, True)]

    def with_the_bug(op: str, refused: bool) -> dict[str, bool]:
        real = getattr(dist, op)

        def summing(*args: Any, **kwargs: Any) -> None:
            if refused:
                raise RuntimeError("Cannot use ReduceOp.AVG with Gloo")
            real(*args, **kwargs | {"op": dist.ReduceOp.SUM})

        with mock.patch.object(dist, op, summing):
            return average_is_sound()

    ranks = launch(lambda: [with_the_bug(*case) for case in cases], world_size=2)
    for (op, refused), *found in zip(cases, *ranks, strict=True):
        on_1 = op == "reduce" and not refused  # only rank 0 has the result of a reduce
        assert found == [SOUND | {op: False}, SOUND | {op: on_1}]


BUGS = {
    "one step short": ("for step in range(n - 1):\n        outgoing = chunks",
                       "for step in range(n - 2):\n        outgoing = chunks"),
    "chunk off by one": ("chunks[(rank - step - 2) % n]", "chunks[(rank - step - 3) % n]"),
    "not added": ("growing += incoming", "growing.copy_(incoming)"),
    "gather starts wrong": ("chunks[(rank - step) % n], chunks", "chunks[(rank + step) % n], "
                            "chunks"),
    "remainder forgotten": ("extra = n - power", "extra = 0"),
    "wrong partner": ("2 * partner + 1 if", "2 * partner if"),
    "result not handed back": ("    if paired:\n        dist.send(flat, group=group, group_dst="
                               "rank - 1)", "    if False:\n        pass"),
    "source ignored": ("place, distance = (rank - src) % n, 1", "place, distance = rank, 1"),
    "tree too short": ("while distance < n:\n        if place", "while 2 * distance < n:\n"
                       "        if place"),
    "send before recv": ("for work in dist.batch_isend_irecv(calls):\n        work.wait()",
                         "dist.send(outgoing, group=group, group_dst=to)\n    "
                         "dist.recv(incoming, group=group, group_src=source)"),
}  # fmt: skip


def all_of(names: dict[str, Any]) -> bool:
    for collective in ("ring_all_reduce", "recursive_doubling_all_reduce", "tree_broadcast"):
        tensor = numbers(torch.float64, 10)  # equal chunks: bugs give wrong sums, not aborts
        expected = tensor.clone()
        if collective == "tree_broadcast":
            dist.broadcast(expected, src=2)
            names[collective](tensor, src=2)
        else:
            dist.all_reduce(expected)
            names[collective](tensor)
        if not torch.equal(tensor, expected):
            return False
    return True


def run_source(source: str) -> bool:
    names: dict[str, Any] = {"__name__": "broken"}
    exec(compile(source, "<broken>", "exec"), names)
    return all_of(names)


def test_the_exported_cells_stand_alone() -> None:
    source = export_script("05").split("if __name__")[0]
    assert launch(run_source, source, world_size=5) == [True] * 5


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    source = export_script("05").split("if __name__")[0]
    old, new = BUGS[bug]
    assert old in source
    try:
        found = launch(run_source, source.replace(old, new), world_size=5, collective_timeout_s=2)
    except LaunchTimeout:
        return  # a rank waits for a message that nobody sends
    except LaunchError as error:  # rank 4 of 5 takes rank 5 for its partner
        assert bug == "remainder forgotten" and "found peer 5" in str(error)
        return
    assert False in found
