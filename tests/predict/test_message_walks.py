"""Every algorithm of `collective_time`, message after message, on the clock of `message_clock`."""

from __future__ import annotations

import math

import pytest

from playbook_utils.events import CollectiveEvent
from playbook_utils.predict.collective_time import ALGORITHMS, collective_cost
from playbook_utils.predict.link import Link
from playbook_utils.predict.message_clock import replay_s

K = 840 * 64  # divides by all SIZES and powers of two
SIZES = (2, 3, 4, 5, 6, 7, 8)
Round = list[tuple[int, int, int]]  # (source, destination, bytes) of messages that cross


def pairs_of(n: int) -> tuple[list[Round], ...]:
    """Recursive doubling and halving: the leftover ranks' way in, both walks, the way out."""
    power = 2 ** (n.bit_length() - 1)
    extra = n - power
    real = [2 * p + 1 if p < extra else p + extra for p in range(power)]  # rank of a place
    distances = [2**i for i in range(power.bit_length() - 1)]

    def swap(d: int, nbytes: int) -> Round:
        return [(real[p], real[p ^ d], nbytes) for p in range(power)]

    fold = [[(2 * i, 2 * i + 1, K) for i in range(extra)]]
    unfold = [[(2 * i + 1, 2 * i, K) for i in range(extra)]]
    doubling = [swap(d, K) for d in distances]
    halving = [swap(d, K * d // power) for d in reversed(distances)]
    return fold, doubling, halving, unfold


def rounds_of(op: str, algorithm: str, n: int) -> list[Round]:
    """Every message of an algorithm, as the papers have it; root and source are rank 0."""
    distances = [2**i for i in range((n - 1).bit_length())]
    part, others = K // n, range(1, n)
    ring = [[(r, (r + 1) % n, part) for r in range(n)] for _ in others]
    up = [[(r, r - d, d) for r in range(d, n, 2 * d)] for d in distances]
    reduce = [[(r, to, K) for r, to, _ in step] for step in up]
    spread = [[(r, r + d, K) for r in range(min(d, n - d))] for d in distances]
    gather = [[(r, to, min(d, n - r) * part) for r, to, d in step] for step in up]
    scatter = [[(to, r, nbytes) for r, to, nbytes in step] for step in reversed(gather)]
    pairs = [[(r, (r + s) % n, part) for r in range(n)] for s in others]
    beyond = [[(r, (r + d) % n, 0) for r in range(n)] for d in distances]
    to_root = [[(r, 0, K)] for r in others]
    from_root = [[(0, r, K)] for r in others]
    fold, doubling, halving, unfold = pairs_of(n)
    return {
        ("all_gather", "ring"): ring,
        ("all_reduce", "ring"): ring + ring,
        ("all_reduce", "recursive_doubling"): fold + doubling + unfold,
        ("all_reduce", "halving_doubling"): fold + halving + halving[::-1] + unfold,
        ("all_reduce", "tree"): reduce + spread,
        ("all_reduce", "root"): to_root + from_root,
        ("all_to_all", "pairwise"): pairs,
        ("barrier", "dissemination"): beyond,
        ("broadcast", "tree"): spread,
        ("broadcast", "scatter_all_gather"): scatter + ring,
        ("broadcast", "root"): from_root,
        ("gather", "tree"): gather,
        ("gather", "root"): [[(r, 0, part)] for r in others],
        ("reduce", "tree"): reduce,
        ("reduce", "root"): to_root,
        ("reduce_scatter", "ring"): ring,
        ("scatter", "tree"): scatter,
        ("scatter", "root"): [[(0, r, part)] for r in others],
        ("send", "direct"): [[(0, 1, K)]],
    }[op, algorithm]


def calls_of(rounds: list[Round], n: int) -> list[list[CollectiveEvent]]:
    calls: list[list[CollectiveEvent]] = [[] for _ in range(n)]
    for step in rounds:
        for op in ("send", "recv"):
            for source, destination, nbytes in step:
                me, peer = (source, destination) if op == "send" else (destination, source)
                wire = nbytes if op == "send" else 0
                one = CollectiveEvent(me, len(calls[me]), op, (me, peer), "", (), nbytes, wire)
                calls[me].append(one)
    return calls


EVERY = [(op, algorithm) for op, known in ALGORITHMS.items() for algorithm in known]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("op", "algorithm"), EVERY)
def test_message_after_message(op: str, algorithm: str, n: int) -> None:
    calls, cost = calls_of(rounds_of(op, algorithm, n), n), collective_cost(op, K, n, algorithm)
    assert max(replay_s(calls, Link(1.0, math.inf))) == cost.messages
    assert max(replay_s(calls, Link(0.0, 1.0))) == pytest.approx(cost.path_bytes)
    sent = [sum(event.wire_bytes for event in mine) for mine in calls]
    assert max(sent) == pytest.approx(cost.sent_bytes)
