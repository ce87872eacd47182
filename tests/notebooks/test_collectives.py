"""The collectives of lesson 05, imported from its cells, against PyTorch's and the formulas.

The lesson shows some world sizes and types; here they meet all of 1 to 8, every type that gloo
adds, lengths that do not divide, subgroups, and planted bugs. All that is to be run on so many
ranks is run in one launch.
"""

from __future__ import annotations

import functools
import threading
import time
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
    slow_links,
    tree_all_reduce,
    tree_broadcast,
    two_levels,
    whole_tensor_ring,
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
    "tree": tree_all_reduce,
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


def sizes() -> list[tuple[torch.dtype, int]]:
    """All lengths at any world size; all types at one power of two, and at one that is none."""
    lengths = [(torch.float32, numel) for numel in LENGTHS]
    types = [(dtype, numel) for dtype in DTYPES for numel in (0, 3, 11)]
    return lengths + types * (dist.get_world_size() in (3, 4))


def differing(collectives: list[Callable], reference: Callable, group_of: Any = None) -> list:
    """(collective, type, length) of each result that is not the reference's."""
    group = group_of() if group_of else None
    wrong = []
    for dtype, numel in sizes():
        expected = numbers(dtype, numel)
        reference(expected, group=group)
        for place, collective in enumerate(collectives):
            tensor = numbers(dtype, numel)
            collective(tensor, group=group)
            if not torch.equal(tensor, expected):
                wrong.append((place, dtype, numel))
    return wrong


@functools.cache
def ranks_of(world_size: int) -> list[dict[str, Any]]:
    """What each rank found, everything of one world size in one launch."""
    return launch(of_one_world_size, world_size=world_size)


@pytest.fixture(params=range(1, 9), ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return ranks_of(request.param)


def of_one_world_size() -> dict[str, Any]:
    mine, n = list(ALL_REDUCES.values()), dist.get_world_size()
    src = (n * 2) // 3
    broadcast, theirs = partial(tree_broadcast, src=src), partial(dist.broadcast, src=src)
    halves()
    found = {
        "all_reduces": differing(mine, dist.all_reduce),
        "broadcasts": differing([broadcast], theirs),
        "calls": record([*mine, tree_broadcast], [840]),
        "ring": record([ring_all_reduce], [*LENGTHS, 840], torch.int64),
    }
    for name, (size, case) in cases().items():
        if size == n:
            found[name] = case()
    return found


def cases() -> dict[str, tuple[int, Callable[[], Any]]]:
    """{name: (how many ranks it wants, what each of them does)}."""
    nodes = {f"nodes of {g}, {m}": (g * m, partial(of_nodes, g)) for g, m in NODES}
    return nodes | {
        "not contiguous": (2, not_contiguous),
        "probe of a bug": (2, lambda: [with_the_bug(*case) for case in PROBES]),
        "what gloo cannot add": (3, not_for_gloo),
        "slowed": (3, slowed),
        "shapes": (3, shapes),
        "impostors": (4, impostors),
        "refused": (5, refused),
        "averages": (5, averages),
        "subgroups": (5, subgroups),
        "alone": (5, lambda: run_source(SOURCE)),
        "bits": (7, bits),
    }


def found_by(name: str) -> list[Any]:
    """What each rank found in the case of this name."""
    return [rank[name] for rank in ranks_of(cases()[name][0])]


NODES = [(1, 3), (3, 1), (2, 2), (2, 3), (4, 2)]
SOURCE = export_script("05").split("if __name__")[0]


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


def not_for_gloo() -> tuple[list, list, list]:
    float8 = torch.full((5,), float(dist.get_rank())).to(torch.float8_e4m3fn)
    tree_broadcast(float8, src=1)
    results = []
    for all_reduce in (ring_all_reduce, recursive_doubling_all_reduce):
        flags = torch.arange(5) == dist.get_rank()
        all_reduce(flags)
        results.append(flags.view(torch.uint8).tolist())  # gloo's own leaves 3s here
    return float8.float().tolist(), *results


def test_what_gloo_cannot_add_can_be_sent_and_bool_is_a_logical_or() -> None:
    expected = ([1.0] * 5, [1, 1, 1, 0, 0], [1, 1, 1, 0, 0])
    assert found_by("what gloo cannot add") == [expected] * 3


def bits() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensors = [torch.randn(1001, generator=generator) for _ in ALL_REDUCES]
    for all_reduce, tensor in zip(ALL_REDUCES.values(), tensors, strict=True):
        all_reduce(tensor)
    return tensors


def test_all_ranks_end_with_the_same_bits() -> None:
    first, *others = found_by("bits")
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def shapes() -> bool:
    for collective in (*ALL_REDUCES.values(), tree_broadcast):
        param = torch.nn.Parameter(torch.full((3, 5), dist.get_rank() + 1.0))
        collective(param)  # outside of no_grad, as dist.all_reduce can be called
        expected = 1.0 if collective is tree_broadcast else 6.0
        assert torch.equal(param, torch.full((3, 5), expected)) and param.requires_grad
        scalar = torch.tensor(dist.get_rank() + 1.0)
        collective(scalar)
        assert scalar.shape == () and scalar.item() == expected
    return True


def test_shapes_scalars_and_parameters() -> None:
    assert found_by("shapes") == [True] * 3


def not_contiguous() -> bool:
    for name in ("ring", "recursive_doubling"):
        with pytest.raises(RuntimeError, match="view"):
            ALL_REDUCES[name](torch.ones(4, 3).t())
    return True


def test_a_tensor_that_is_not_contiguous_is_refused_not_ignored() -> None:
    assert found_by("not contiguous") == [True] * 2


def odd_or_even() -> Any:
    groups = [dist.new_group(range(first, dist.get_world_size(), 2)) for first in (0, 1)]
    return groups[dist.get_rank() % 2]


def subgroups() -> Any:
    mine, theirs = partial(tree_broadcast, src=1), partial(dist.broadcast, group_src=1)
    wrong = differing(list(ALL_REDUCES.values()), dist.all_reduce, odd_or_even)
    return wrong, differing([mine], theirs, odd_or_even)


def test_subgroups_count_their_own_ranks() -> None:
    assert found_by("subgroups") == [([], [])] * 5


def slowed() -> Any:
    """What each rank sleeps on links that take 100 s a message, and 1 s a byte."""
    slept: list[int] = []
    before = dist.send, ring_all_reduce.__globals__["exchange"]
    with (
        mock.patch.object(time, "sleep", lambda seconds: slept.append(round(seconds, -1))),
        slow_links(Link(100.0, 1.0)),
    ):
        root_all_reduce(torch.ones(5))
        slept.append(-1)
        ring_all_reduce(torch.ones(12))
    assert before == (dist.send, ring_all_reduce.__globals__["exchange"])
    return slept


def test_slow_links_hold_messages_up_on_their_way_out_and_in() -> None:
    """With a sleep that does not sleep, so that the clock stands still: what is asked of it."""
    zero, *_ = found_by("slowed")
    at = zero.index(-1)
    # Two messages in, one behind the other; two messages out.
    assert zero[:at] == [120, 240, 120, 120]
    # Four steps of one chunk, 16 bytes, each after two messages in already.
    assert zero[at + 1 :: 2] == [120, 120, 120, 120]  # 116, to the next ten
    assert zero[at + 2 :: 2] == [360, 470, 590, 700]  # 240 and then 116 more each time


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
    for name, events in zip([*ALL_REDUCES, "broadcast"], recorded, strict=True):
        one_way = name == "broadcast"
        op, way = ("broadcast", "tree") if one_way else ("all_reduce", name)
        cost = collective_cost(op, 4 * 840, world_size, way)
        assert max(replay_s(events, Link(1.0, float("inf")))) == cost.messages
        assert max(replay_s(events, Link(0.0, 1.0))) == pytest.approx(cost.path_bytes)
        for link in (FAST, SLOW):
            assert max(replay_s(events, link)) == pytest.approx(cost.time_s(link), rel=1e-9)
        sent = [sum(e.wire_bytes for e in calls) for calls in events]
        assert max(sent) == cost.sent_bytes
        if one_way:
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
        whole_tensor_ring(tensor)
    elif kind == "a thread":
        thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
        thread.start()
        ring_all_reduce(tensor.clone())
        thread.join()
    elif kind == "a hidden call and empty messages":
        for _ in range(2 * (n - 1)):
            exchange(tensor[:0], (rank + 1) % n, tensor[:0].clone(), (rank - 1) % n)
        dist.all_reduce(tensor)
    elif kind == "left":
        ring_all_reduce(tensor, group=reverse)


KINDS = [
    *("pytorch", "root", "doubling", "ring and a call", "whole tensors"),
    *("a hidden call and empty messages", "a thread", "left"),
]


def impostors() -> list[Any]:
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


def test_impostors_are_seen_through() -> None:
    for kind, events in zip(KINDS, zip(*found_by("impostors"), strict=True), strict=True):
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


@pytest.mark.parametrize(("ranks_per_node", "nodes"), NODES)
def test_nodes(ranks_per_node: int, nodes: int) -> None:
    """Two levels sum and send as predicted; the single ring goes as its slow links do."""
    calls = found_by(f"nodes of {ranks_per_node}, {nodes}")
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


def refused() -> bool:
    for size in (2, 6, 0, -5):
        with pytest.raises(ValueError, match=f"5 ranks do not make nodes of {size}"):
            two_levels(size)
    for src in (-1, 5):
        says = f"src is {src}: expected a rank of the group, 0 to 4"
        with pytest.raises(ValueError, match=says):
            tree_broadcast(torch.ones(1), src=src)
    return True


def test_nodes_that_do_not_fill_the_world_and_sources_outside_it_are_refused() -> None:
    assert found_by("refused") == [True] * 5


SOUND = {"all_reduce": True, "reduce": True, "reduce_scatter": True}
PROBES = [(op, is_refused) for op in SOUND for is_refused in (False, True)]


def averages() -> Any:
    return average_is_sound(), average_is_sound(odd_or_even())


def test_the_average_is_sound_in_the_world_and_in_groups() -> None:
    assert found_by("averages") == [(SOUND, SOUND)] * 5


def with_the_bug(op: str, is_refused: bool) -> dict[str, bool]:
    real = getattr(dist, op)

    def summing(*args: Any, **kwargs: Any) -> None:
        if is_refused:
            raise RuntimeError("Cannot use ReduceOp.AVG with Gloo")
        real(*args, **kwargs | {"op": dist.ReduceOp.SUM})

    with mock.patch.object(dist, op, summing):
        return average_is_sound()


def test_the_probe_of_the_average_sees_a_sum_and_a_refusal() -> None:
    for (op, is_refused), *found in zip(PROBES, *found_by("probe of a bug"), strict=True):
        on_1 = op == "reduce" and not is_refused  # only rank 0 has the result of a reduce
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


HANGING = ("remainder forgotten", "wrong partner", "result not handed back", "send before recv")
"""Bugs after which ranks wait for each other, or fail: each needs processes of its own."""


def run_source(source: str) -> bool:
    names: dict[str, Any] = {"__name__": "broken"}
    exec(compile(source, "<broken>", "exec"), names)
    return all_of(names)


def with_bug(bug: str) -> str:
    old, new = BUGS[bug]
    assert old in SOURCE
    return SOURCE.replace(old, new)


def test_the_exported_cells_stand_alone() -> None:
    assert found_by("alone") == [True] * 5


def test_planted_bugs_give_wrong_sums() -> None:
    wrong = [bug for bug in BUGS if bug not in HANGING]
    sources = [with_bug(bug) for bug in wrong]
    ranks = launch(lambda: [run_source(source) for source in sources], world_size=5)
    seen = [bug for bug, *right in zip(wrong, *ranks, strict=True) if False in right]
    assert seen == wrong


@pytest.mark.parametrize("bug", HANGING)
def test_a_bug_that_hangs_is_caught(bug: str) -> None:
    try:
        found = launch(run_source, with_bug(bug), world_size=5, collective_timeout_s=2)
    except LaunchTimeout:
        return  # a rank waits for a message that nobody sends
    except LaunchError as error:  # rank 4 of 5 takes rank 5 for its partner
        assert bug == "remainder forgotten" and "found peer 5" in str(error)
        return
    assert False in found
