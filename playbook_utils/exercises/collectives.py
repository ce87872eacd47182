"""Exercises of lesson 05, collectives: what is asked, and how an answer is checked.

    check(RING, ring_reduce_scatter)

Every check runs the answer on real ranks, at world sizes that are no power of two, at lengths that
do not divide, in several types and with numbers that nobody knows beforehand. It reads from the
recorded messages of all threads who sent how much to whom: a right result by a wrong method fails.
`expect_ring` is that check for a ring, for the lesson and tests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from playbook_utils.checks import Exercise, expect_calls, expect_close, expect_equal
from playbook_utils.errors import CheckFailed, LaunchTimeout
from playbook_utils.events import CollectiveEvent
from playbook_utils.measure import record_communication
from playbook_utils.predict.collective_time import bus_bandwidth
from playbook_utils.predict.link import Link
from playbook_utils.predict.message_clock import replay_s
from playbook_utils.workers import launch

__all__ = [
    "ALL_TO_ALL",
    "BUS_BANDWIDTH",
    "LEFT_RING",
    "PARTNER",
    "RING",
    "RING_SHIFT",
    "ROOT",
    "TREE_REDUCE",
    "expect_ring",
]

_Events = tuple[CollectiveEvent, ...]
_Case = tuple[int, torch.dtype]
"""Length and type of a tensor."""
_DOUBLES = torch.float64


def expect_ring(
    events: Sequence[Sequence[CollectiveEvent]],
    payload_bytes: int,
    *,
    direction: int = 1,
    passes: int = 2,
) -> None:
    """These calls, one list a rank, are a ring all-reduce and nothing else.

    Each rank sends 2 (N-1) messages, all to the neighbour in `direction`, receives as many, all
    from the other neighbour, and all ranks together send 2 (N-1) times the message. passes: 1 for
    one half of it, a reduce-scatter or an all-gather.

    Raises:
        CheckFailed: with what was found instead, on which rank.
    """
    world_size = len(events)
    steps = passes * (world_size - 1)
    for rank, calls in enumerate(events):
        hint = "a ring is made of sends and receives alone, in no thread a collective"
        expect_calls(calls, {"send": steps, "recv": steps}, rank=rank, hint=hint)
        for op, peer in (("send", rank + direction), ("recv", rank - direction)):
            found = dict(Counter(call.group[-1] for call in calls if call.op == op))
            expected = {peer % world_size: steps} if steps else {}
            hint = "each rank sends to one neighbour and receives from the other"
            expect_equal(found, expected, f"{op} calls by peer", rank=rank, hint=hint)
        shares = [call.payload_bytes for call in calls if call.op == "send"]
        most = -(-payload_bytes // world_size) + 15  # a chunk may be one element longer
        if any(share > most for share in shares):
            raise CheckFailed(
                f"largest message on rank {rank}: found {max(shares)} bytes, expected at most "
                f"about {payload_bytes} / {world_size}\n"
                "hint: a ring passes on one chunk a step, not the whole tensor"
            )
    found_bytes = sum(c.payload_bytes for calls in events for c in calls if c.op == "send")
    hint = f"every chunk crosses N-1 links in each pass: {passes} (N-1) K bytes over all ranks"
    expect_equal(found_bytes, steps * payload_bytes, "bytes sent by all ranks", hint=hint)


def _numbers(rank: int, case: _Case, seed: int) -> Tensor:
    """Whole numbers, exact under any order of addition, that nobody can know beforehand."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-1000, 1000, (case[0],), generator=generator).to(case[1])


def _recorded(attempt: Callable[..., Any], cases: Sequence[_Case], seed: int) -> list[Any]:
    """(tensor afterwards, value, calls) of this rank in each case."""
    found = []
    for place, case in enumerate(cases):
        tensor = _numbers(dist.get_rank(), case, seed + place)
        with record_communication() as log:
            value = attempt(tensor)
        found.append((tensor, value, log.events))
    return found


_Runs = list[tuple[_Case, list[Tensor], list[Any]]]


def _run(attempt: Callable[..., Any], world_size: int, *cases: _Case) -> _Runs:
    """(case, the numbers of all ranks, what each rank found) in each case, in one launch."""
    seed = random.SystemRandom().randrange(10**6)
    found = _launched(_recorded, attempt, cases, seed, world_size=world_size)
    return [
        (case, [_numbers(rank, case, seed + place) for rank in range(world_size)], list(ranks))
        for place, (case, ranks) in enumerate(zip(cases, zip(*found, strict=True), strict=True))
    ]


def _launched(work: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    try:
        return launch(work, *args, world_size=world_size, collective_timeout_s=3)
    except LaunchTimeout as error:
        raise CheckFailed(
            f"with {world_size} ranks: {error}\n"
            "hint: who waits for whom? somebody must receive while the other sends"
        ) from error


def _total(numbers: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(numbers)).sum(0, dtype=numbers[0].dtype)


def _in_halves(attempt: Callable[..., Any]) -> None:
    """A sum over the odd ranks of five reaches their first one, by messages among them alone."""

    def work() -> Any:
        groups = [dist.new_group(range(first, 5, 2)) for first in (0, 1)]
        tensor = torch.full((2,), 10.0 ** dist.get_rank())
        attempt(tensor, group=groups[dist.get_rank() % 2])
        return tensor

    first, second, *_ = _launched(work, world_size=5)
    hint = "count ranks within the group: get_rank(group), group_src=, group_dst="
    expected = torch.tensor([10101.0] * 2)
    expect_equal(first, expected, "sum over the group of ranks 0, 2, 4", rank=0, hint=hint)
    expected = torch.tensor([1010.0] * 2)
    expect_equal(second, expected, "sum over the group of ranks 1, 3", rank=1, hint=hint)


def _verify_root(attempt: Callable[..., object]) -> None:
    for world_size, cases in (
        (3, [(5, _DOUBLES), (4, torch.int64), (0, torch.float32)]),
        (1, [(4, _DOUBLES)]),
    ):
        for (numel, _), numbers, ranks in _run(attempt, world_size, *cases):
            for rank, (tensor, _, events) in enumerate(ranks):
                what = f"sum of {numel} numbers over {world_size} ranks"
                hint = "in place, and on every rank: rank 0 adds up, then sends the sum to each"
                expect_equal(tensor, _total(numbers), what, rank=rank, hint=hint)
                others = [peer for peer in range(world_size) if peer != rank]
                expected = others if rank == 0 else [0]
                for op in ("send", "recv"):
                    found = sorted(e.group[-1] for e in events if e.op == op)
                    hint = "everybody sends to rank 0 and receives from it; no collective"
                    expect_equal(found, expected, f"peers of {op}", rank=rank, hint=hint)
                each = len(expected)
                expect_calls(events, {"send": each, "recv": each}, rank=rank, hint=hint)
    _in_halves(attempt)


def _refused(*_: object, **__: object) -> None:
    raise CheckFailed(
        "calls that do not block: found isend, irecv or a batch, expected send and recv alone\n"
        "hint: let some ranks receive first, so that those who send are heard"
    )


def _verify_ring_shift(attempt: Callable[[Tensor], Tensor]) -> None:
    def blocking(tensor: Tensor) -> Tensor:
        with mock.patch.multiple(
            dist, isend=_refused, irecv=_refused, P2POp=_refused, batch_isend_irecv=_refused
        ):
            return attempt(tensor)

    cases = [(5, _DOUBLES), (3, torch.int32), (0, torch.float32)]
    for world_size in (2, 3):
        for _, numbers, ranks in _run(blocking, world_size, *cases):
            for rank, (_, value, events) in enumerate(ranks):
                hint = "return the tensor of the rank before this one"
                expect_equal(value, numbers[rank - 1], "what arrived", rank=rank, hint=hint)
                hint = "one send to the next rank, one recv from the one before"
                expect_calls(events, {"send": 1, "recv": 1}, rank=rank, hint=hint)
    ((_, (mine,), (alone,)),) = _run(attempt, 1, (5, _DOUBLES))
    expect_equal(alone[1], mine, "with 1 rank", hint="one rank alone is its own neighbour")


def _verify_tree_reduce(attempt: Callable[..., object]) -> None:
    for world_size in (2, 3, 6, 1):
        for _, numbers, runs in _run(attempt, world_size, (5, _DOUBLES), (3, torch.int64)):
            hint = "every rank's numbers reach rank 0 once, also where N is no power of two"
            what = f"sum of {world_size} ranks"
            expect_equal(runs[0][0], _total(numbers), what, rank=0, hint=hint)
            _expect_tree([events for _, _, events in runs])
    _in_halves(attempt)


def _expect_tree(events: Sequence[_Events]) -> None:
    """Every rank sends once, and rank 0 is done after log2 N rounds."""
    world_size = len(events)
    rounds = (world_size - 1).bit_length()
    for rank, calls in enumerate(events):
        received = sum(event.op == "recv" for event in calls)
        if received > rounds:
            raise CheckFailed(
                f"messages received of {world_size} ranks on rank {rank}: found {received}, "
                f"expected at most {rounds}\nhint: a tree halves the ranks that are left in "
                "each round; let others add up for rank 0"
            )
        expected = {"send": int(rank > 0), "recv": received}
        hint = "each rank but rank 0 sends once, and leaves; no collectives"
        expect_calls(calls, expected, rank=rank, hint=hint)
        depth = _depth(rank, events)
        if depth > rounds:
            raise CheckFailed(
                f"rounds until rank {rank}'s sum is complete: found {depth}, expected at most "
                f"{rounds} for {world_size} ranks\nhint: a chain is no tree: pairs that have "
                "nothing to do with each other must not wait for each other"
            )


def _depth(rank: int, events: Sequence[_Events]) -> int:
    """Messages one after another before this rank has all that it receives."""
    rounds = 0
    for event in events[rank]:
        if event.op == "recv":
            rounds = max(rounds, _depth(event.group[-1], events)) + 1
    return rounds


# Chunks of equal length come first: a wrong index then gives a wrong sum, and no broken message.
_RING_CASES: tuple[tuple[int, list[_Case]], ...] = (
    (4, [(8, _DOUBLES)]),
    (3, [(12, torch.int64), (9, torch.float32)]),
    (5, [(3, _DOUBLES), (12, torch.float32), (0, _DOUBLES)]),
    (1, [(4, _DOUBLES)]),
)


def _is(found: Tensor, expected: Tensor) -> bool:
    return bool(expected.numel()) and torch.equal(found, expected)


def _verify_ring(attempt: Callable[..., Tensor]) -> None:
    for world_size, cases in _RING_CASES:
        for (numel, dtype), numbers, ranks in _run(attempt, world_size, *cases):
            chunks = _total(numbers).tensor_split(world_size)
            for rank, (tensor, value, _) in enumerate(ranks):
                what = f"chunk {rank} of the sum of {numel} numbers over {world_size} ranks"
                hint = (
                    "what a rank receives is the chunk that its left neighbour has just sent: "
                    "add it to your own, and send that chunk in the next step"
                )
                after = (rank + 1) % world_size
                if world_size > 1 and _is(tensor.tensor_split(world_size)[after], chunks[after]):
                    hint = "it ends one chunk too late: send chunk r - 1 first, not your own"
                expect_equal(value, chunks[rank], what, rank=rank, hint=hint)
                part = tensor.tensor_split(world_size)[rank]
                hint = "return a part of `tensor` itself, so that the all-gather finds it there"
                expect_equal(part, chunks[rank], f"{what}, in place", rank=rank, hint=hint)
            expect_ring([events for _, _, events in ranks], dtype.itemsize * numel, passes=1)


def _verify_left_ring(attempt: Callable[[Tensor], object]) -> None:
    for world_size, cases in _RING_CASES:
        for (numel, dtype), numbers, ranks in _run(attempt, world_size, *cases):
            for rank, (tensor, _, _) in enumerate(ranks):
                hint = (
                    "in place: the sum must stand in `tensor` itself; and towards the left, "
                    "which chunk comes next is one more, not one less"
                )
                what = f"sum of {numel} numbers over {world_size} ranks"
                expect_equal(tensor, _total(numbers), what, rank=rank, hint=hint)
            expect_ring([events for _, _, events in ranks], dtype.itemsize * numel, direction=-1)


def _verify_partner(attempt: Callable[[int, int], int]) -> None:
    for size in (2, 4, 8, 16):
        known = [Counter([place]) for place in range(size)]
        distance = 1
        while distance < size:
            partners = [attempt(place, distance) for place in range(size)]
            for place, partner in enumerate(partners):
                what = f"doubling_partner({place}, {distance})"
                hint = f"a partner is one of the places 0 to {size - 1}, `distance` away"
                found = abs(partner - place) if type(partner) is int else partner
                expect_equal(found, distance, f"distance to {what}", hint=hint)
                inside = 0 <= partner < size
                back = partners[partner] if inside else partner
                hint = "two partners exchange: each is the partner of the other"
                expect_equal(back, place, f"doubling_partner({partner}, {distance})", hint=hint)
            known = [known[place] + known[partners[place]] for place in range(size)]
            distance *= 2
        for place, has in enumerate(known):
            hint = "after the last round every place has added each of the others once"
            expect_equal(dict(has), dict.fromkeys(range(size), 1), f"place {place}", hint=hint)


def _verify_all_to_all(attempt: Callable[[list[Tensor]], list[Tensor]]) -> None:
    for world_size, case in (
        (3, (1, torch.int64)),
        (4, (4, torch.float32)),
        (5, (2, _DOUBLES)),
        (1, (3, torch.float32)),
    ):
        seed = random.SystemRandom().randrange(10**6)
        runs = _launched(_equal_parts, attempt, case, seed, world_size=world_size)
        for rank, (received, events) in enumerate(runs):
            expect_equal(len(received), world_size, "number of parts", rank=rank)
            for peer, part in enumerate(received):
                expected = _numbers(peer, case, seed + rank)
                hint = "part i of the answer is what rank i had for this rank, its own included"
                what = f"the part of rank {peer}, with {world_size} ranks"
                expect_equal(part, expected, what, rank=rank, hint=hint)
            others = [peer for peer in range(world_size) if peer != rank]
            for op in ("send", "recv"):
                found = sorted(e.group[-1] for e in events if e.op == op)
                hint = "one message to each other rank, nothing passed on, no collective"
                expect_equal(found, others, f"peers of {op}", rank=rank, hint=hint)
            calls = {"send": len(others), "recv": len(others)}
            expect_calls(events, calls, rank=rank, hint="sends and receives only")
        _expect_pairwise([events for _, events in runs])


def _equal_parts(attempt: Callable[[list[Tensor]], list[Tensor]], case: _Case, seed: int) -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [_numbers(rank, case, seed + peer) for peer in range(world_size)]
    with record_communication() as log:
        received = attempt(parts)
    return received, log.events


def _expect_pairwise(events: Sequence[_Events]) -> None:
    """Nobody queues: with a message a unit of time, all is there after N units, a pause included.

    By time and not by the place in a rank's list: which partner comes in which step is free.
    """
    units, world_size = max(replay_s(events, Link(1.0, float("inf")))), len(events)
    if units > world_size:
        raise CheckFailed(
            f"messages one after another with {world_size} ranks: found {units:g}, expected at "
            f"most {world_size}\n"
            "hint: if all begin with rank 0, they queue there: begin with the next rank"
        )


def _verify_bus_bandwidth(attempt: Callable[[str, int, int, float], float]) -> None:
    for op, payload_bytes, world_size, seconds, hint in (
        ("all_reduce", 8 * 10**8, 8, 0.01, "an all-reduce sends 2 (N-1)/N times the message"),
        ("all_gather", 8 * 10**8, 8, 0.01, "K is the whole array, of which each rank has 1/N"),
        ("reduce_scatter", 3 * 10**6, 3, 0.5, "half of an all-reduce"),
        ("broadcast", 5 * 10**6, 4, 0.25, "every byte leaves the root once: the factor is 1"),
        ("all_reduce", 10**6, 1, 0.5, "one rank alone uses no bus"),
    ):
        expected = bus_bandwidth(op, payload_bytes, world_size, seconds)
        what = f"bus_bandwidth_of({op!r}, {payload_bytes:,}, {world_size}, {seconds:g})"
        found = attempt(op, payload_bytes, world_size, seconds)
        expect_close(found, expected, what, rtol=1e-6, hint=hint)


ROOT = Exercise(
    "root_all_reduce",
    "all send to rank 0, which adds up and sends the sum to all",
    _verify_root,
    (
        "rank 0 needs a second tensor to receive into, of the same shape and type",
        "ranks are counted within the group: get_rank(group), group_src=, group_dst=",
    ),
)
TREE_REDUCE = Exercise(
    "tree_reduce",
    "sum on rank 0 after log2(N) rounds, by send and recv",
    _verify_tree_reduce,
    (
        "where N is no power of two, rank + distance may lie beyond the last rank",
        "ranks are counted within the group: get_rank(group), group_src=, group_dst=",
    ),
)
RING = Exercise(
    "ring_reduce_scatter",
    "N-1 steps to the right, one chunk a step, each added where it arrives",
    _verify_ring,
    (
        "where the length does not divide, chunks differ by an element: a rank must receive into "
        "a tensor as long as the chunk that its left neighbour sends in this step",
    ),
)
PARTNER = Exercise(
    "doubling_partner",
    "with whom does a place exchange at this distance?",
    _verify_partner,
    ("blocks of twice the distance: the lower half exchanges with the upper half",),
)
RING_SHIFT = Exercise(
    "ring_shift",
    "pass the tensor to the next rank with blocking send and recv alone",
    _verify_ring_shift,
    ("one rank alone has nobody to send to: it keeps its own tensor",),
)
LEFT_RING = Exercise(
    "left_ring_all_reduce",
    "a ring all-reduce in which everyone sends to the left",
    _verify_left_ring,
    (
        "where the length does not divide, chunks differ by an element: a rank must receive the "
        "very chunk that its right neighbour sends in this step",
    ),
)
ALL_TO_ALL = Exercise(
    "pairwise_all_to_all",
    "every rank's part for every other, in N-1 exchanges",
    _verify_all_to_all,
    ("in step s, send part rank + s to rank + s, and receive from rank - s",),
)
BUS_BANDWIDTH = Exercise(
    "bus_bandwidth_of",
    "the bandwidth that nccl-tests would report",
    _verify_bus_bandwidth,
)
