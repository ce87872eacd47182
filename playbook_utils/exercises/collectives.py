"""Exercises of lesson 05, collectives: what is asked, and how an answer is checked.

    check(RING_SHIFT, ring_shift)

Every check runs the answer on real ranks, at world sizes that are no power of two and lengths
that do not divide, and reads from the recorded messages who sent how much to whom: a right result
by a wrong method fails. `expect_ring` is that check for an all-reduce, for the lesson and tests.
"""

from __future__ import annotations

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
from playbook_utils.workers import launch

__all__ = [
    "ALL_TO_ALL",
    "BUS_BANDWIDTH",
    "LEFT_RING",
    "RING_SHIFT",
    "TREE_REDUCE",
    "expect_ring",
]

_Events = tuple[CollectiveEvent, ...]


def expect_ring(
    events: Sequence[Sequence[CollectiveEvent]], payload_bytes: int, *, direction: int = 1
) -> None:
    """These calls, one list a rank, are a ring all-reduce and nothing else.

    Each rank sends 2 (N-1) messages, all to the neighbour in `direction`, receives as many, all
    from the other neighbour, and all ranks together send 2 (N-1) times the message.

    Raises:
        CheckFailed: with what was found instead, on which rank.
    """
    world_size = len(events)
    steps = 2 * (world_size - 1)
    for rank, calls in enumerate(events):
        hint = "a ring is made of sends and receives alone: no collective, nothing left out"
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
    hint = "every chunk crosses N-1 links twice: 2 (N-1) K bytes over all ranks"
    expect_equal(found_bytes, steps * payload_bytes, "bytes sent by all ranks", hint=hint)


def _numbers(rank: int, numel: int, offset: int = 0) -> Tensor:
    """Whole numbers that differ by rank and place, exact in float64 under any order of addition."""
    return ((torch.arange(numel) + offset) * 7 % 31 + 100 * (rank + 1)).double()


def _recorded(attempt: Callable[..., Any], numel: int, args: tuple[Any, ...]) -> Any:
    tensor = _numbers(dist.get_rank(), numel)
    with record_communication() as log:
        value = attempt(tensor, *args)
    return tensor, value, log.events


def _run(attempt: Callable[..., Any], numel: int, world_size: int, *args: Any) -> list[Any]:
    try:
        return launch(
            _recorded, attempt, numel, args, world_size=world_size, collective_timeout_s=3
        )
    except LaunchTimeout as error:
        raise CheckFailed(
            f"with {world_size} ranks: {error}\n"
            "hint: who waits for whom? somebody must receive while the other sends"
        ) from error


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

    for world_size in (2, 3, 4):
        for rank, (_, value, events) in enumerate(_run(blocking, 5, world_size)):
            expected = _numbers((rank - 1) % world_size, 5)
            hint = "return the tensor of the rank before this one"
            expect_equal(value, expected, "what arrived", rank=rank, hint=hint)
            hint = "one send to the next rank, one recv from the one before"
            expect_calls(events, {"send": 1, "recv": 1}, rank=rank, hint=hint)
    (alone,) = _run(attempt, 5, 1)
    hint = "one rank alone is its own neighbour"
    expect_equal(alone[1], _numbers(0, 5), "with 1 rank", hint=hint)


def _verify_tree_reduce(attempt: Callable[[Tensor], object]) -> None:
    for world_size in (2, 3, 6, 8, 1):
        runs = _run(attempt, 5, world_size)
        total = torch.stack([_numbers(rank, 5) for rank in range(world_size)]).sum(0)
        hint = "every rank's numbers reach rank 0 once, also where N is no power of two"
        what = f"sum of {world_size} ranks"
        expect_equal(runs[0][0], total, what, rank=0, hint=hint)
        rounds = (world_size - 1).bit_length()
        for rank, (_, _, events) in enumerate(runs):
            received = sum(event.op == "recv" for event in events)
            if received > rounds:
                raise CheckFailed(
                    f"messages received of {world_size} ranks on rank {rank}: found {received}, "
                    f"expected at most {rounds}\nhint: a tree halves the ranks that are left in "
                    "each round; let others add up for rank 0"
                )
            expected = {"send": int(rank > 0), "recv": received}
            hint = "each rank but rank 0 sends once, and leaves; no collectives"
            expect_calls(events, expected, rank=rank, hint=hint)
            depth = _depth(rank, runs)
            if depth > rounds:
                raise CheckFailed(
                    f"rounds until rank {rank}'s sum is complete: found {depth}, expected at most "
                    f"{rounds} for {world_size} ranks\nhint: a chain is no tree: pairs that have "
                    "nothing to do with each other must not wait for each other"
                )


def _depth(rank: int, runs: list[Any]) -> int:
    """Messages one after another before this rank has all that it receives."""
    rounds = 0
    for event in runs[rank][2]:
        if event.op == "recv":
            rounds = max(rounds, _depth(event.group[-1], runs)) + 1
    return rounds


def _verify_left_ring(attempt: Callable[[Tensor], object]) -> None:
    for world_size, numel in ((2, 6), (4, 8), (4, 10), (3, 12), (5, 3), (1, 4)):
        runs = _run(attempt, numel, world_size)
        total = torch.stack([_numbers(rank, numel) for rank in range(world_size)]).sum(0)
        for rank, (tensor, _, _) in enumerate(runs):
            hint = (
                "in place: the sum must stand in `tensor` itself; and towards the left, "
                "which chunk comes next is one more, not one less"
            )
            what = f"sum of {numel} numbers over {world_size} ranks"
            expect_equal(tensor, total, what, rank=rank, hint=hint)
        expect_ring([events for _, _, events in runs], 8 * numel, direction=-1)


def _verify_all_to_all(attempt: Callable[[list[Tensor]], list[Tensor]]) -> None:
    for world_size in (2, 3, 4, 1):
        try:
            runs = launch(_equal_parts, attempt, world_size=world_size, collective_timeout_s=3)
        except LaunchTimeout as error:
            raise CheckFailed(
                f"with {world_size} ranks: {error}\n"
                "hint: in step s every rank sends s places ahead and receives from s places behind"
            ) from error
        for rank, (received, events) in enumerate(runs):
            expect_equal(len(received), world_size, "number of parts", rank=rank)
            for peer, part in enumerate(received):
                expected = _numbers(peer, 3, offset=10 * rank)
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


def _equal_parts(attempt: Callable[[list[Tensor]], list[Tensor]]) -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [_numbers(rank, 3, offset=10 * peer) for peer in range(world_size)]
    with record_communication() as log:
        received = attempt(parts)
    return received, log.events


def _expect_pairwise(events: Sequence[_Events]) -> None:
    """In no step do two ranks send to the same one."""
    sends = [[e.group[-1] for e in calls if e.op == "send"] for calls in events]
    for step, targets in enumerate(zip(*sends, strict=True)):
        if len(set(targets)) < len(targets):
            raise CheckFailed(
                f"targets of step {step}, by rank: found {list(targets)}, expected each rank once\n"
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


RING_SHIFT = Exercise(
    "ring_shift",
    "pass the tensor to the next rank with blocking send and recv alone",
    _verify_ring_shift,
    ("one rank alone has nobody to send to: it keeps its own tensor",),
)
TREE_REDUCE = Exercise(
    "tree_reduce",
    "sum on rank 0 after log2(N) rounds, by send and recv",
    _verify_tree_reduce,
    ("where N is no power of two, rank + distance may lie beyond the last rank",),
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
