"""Messages and bytes by algorithm, against walks that send message after message."""

from __future__ import annotations

import math

import pytest

from playbook_utils.predict.collective_time import (
    ALGORITHMS,
    CollectiveCost,
    bus_bandwidth,
    collective_cost,
    collective_time_s,
    crossover_bytes,
)
from playbook_utils.predict.communication import OPS, wire_bytes
from playbook_utils.predict.link import Link

K = 840 * 64
SIZES = (2, 3, 4, 5, 6, 7, 8)
EVERY = [(op, algorithm) for op, known in ALGORITHMS.items() for algorithm in known]
LINK = Link(1e-5, 1e9)


def test_every_op_but_recv_has_an_algorithm() -> None:
    assert set(ALGORITHMS) == set(OPS) - {"recv"}


@pytest.mark.parametrize(("op", "algorithm"), EVERY)
def test_one_rank_alone_is_done_at_once(op: str, algorithm: str) -> None:
    assert collective_cost(op, K, 1, algorithm) == CollectiveCost(0, 0.0, 0.0)
    assert collective_time_s(op, K, 1, LINK, algorithm) == 0


@pytest.mark.parametrize(
    ("op", "algorithm", "world_size", "expected"),
    [
        # By hand, K = 53,760: messages in a row, bytes in a row, bytes of the busiest rank.
        ("all_reduce", "ring", 4, (6, 80_640, 80_640)),
        ("all_reduce", "root", 4, (6, 6 * K, 3 * K)),
        ("all_reduce", "tree", 8, (6, 6 * K, 3 * K)),
        ("all_reduce", "recursive_doubling", 8, (3, 3 * K, 3 * K)),
        ("all_reduce", "recursive_doubling", 6, (4, 4 * K, 3 * K)),
        ("all_reduce", "halving_doubling", 8, (6, 94_080, 94_080)),
        ("all_reduce", "halving_doubling", 5, (6, 80_640 + 2 * K, 80_640 + K)),
        ("broadcast", "tree", 5, (3, 3 * K, 3 * K)),
        ("broadcast", "scatter_all_gather", 8, (10, 94_080, 94_080)),
        ("broadcast", "root", 5, (4, 4 * K, 4 * K)),
        ("reduce", "tree", 7, (3, 3 * K, K)),
        ("gather", "root", 4, (3, 40_320, 13_440)),
        ("gather", "tree", 5, (3, 43_008, 2 * K / 5)),
        ("gather", "tree", 8, (3, 47_040, 4 * K / 8)),
        ("scatter", "tree", 8, (3, 47_040, 47_040)),
        ("all_to_all", "pairwise", 6, (5, 44_800, 44_800)),
        ("barrier", "dissemination", 5, (3, 0, 0)),
        ("send", "direct", 2, (1, K, K)),
    ],
)
def test_by_hand(op: str, algorithm: str, world_size: int, expected: tuple[float, ...]) -> None:
    cost = collective_cost(op, K, world_size, algorithm)
    assert (cost.messages, cost.path_bytes, cost.sent_bytes) == pytest.approx(expected)


@pytest.mark.parametrize("n", SIZES)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(n: int) -> None:
    whole, first, second = (
        collective_cost(op, K, n) for op in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert whole.messages == first.messages + second.messages
    assert whole.path_bytes == pytest.approx(first.path_bytes + second.path_bytes)
    assert whole.sent_bytes == pytest.approx(wire_bytes("all_reduce", K, n), abs=1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_the_default_sends_what_wire_bytes_says(op: str, n: int) -> None:
    assert collective_cost(op, K, n).sent_bytes == pytest.approx(wire_bytes(op, K, n), abs=1)


@pytest.mark.parametrize("n", SIZES)
def test_nothing_sends_less_than_the_ring(n: int) -> None:
    ring = collective_cost("all_reduce", K, n)
    for algorithm in ALGORITHMS["all_reduce"]:
        assert collective_cost("all_reduce", K, n, algorithm).path_bytes >= ring.path_bytes - 1e-6


@pytest.mark.parametrize(("op", "algorithm"), EVERY)
def test_time_is_linear_in_bytes_and_each_part_has_its_limit(op: str, algorithm: str) -> None:
    for n in SIZES:
        cost = collective_cost(op, K, n, algorithm)
        no_bytes = collective_time_s(op, 0, n, LINK, algorithm)
        assert no_bytes == pytest.approx(cost.messages * 1e-5)
        assert cost.time_s(Link(0.0, 1e9)) == pytest.approx(cost.path_bytes / 1e9)
        assert cost.time_s(Link(1e-5, math.inf)) == pytest.approx(cost.messages * 1e-5)
        one, three = (collective_time_s(op, k, n, LINK, algorithm) for k in (K, 3 * K))
        assert three - no_bytes == pytest.approx(3 * (one - no_bytes))


def test_rounds_of_trees_are_logarithms() -> None:
    rounds = {n: collective_cost("broadcast", K, n, "tree").messages for n in (2, 3, 4, 5, 9, 1024)}
    assert rounds == {2: 1, 3: 2, 4: 2, 5: 3, 9: 4, 1024: 10}


@pytest.mark.parametrize("n", [4, 5, 8, 64, 100])
def test_at_the_crossover_both_take_equally_long(n: int) -> None:
    few, slim = "recursive_doubling", "ring"
    at = crossover_bytes("all_reduce", n, LINK, few, slim)
    below, above = int(0.9 * at), int(1.1 * at)

    def seconds(nbytes: int, algorithm: str) -> float:
        return collective_time_s("all_reduce", nbytes, n, LINK, algorithm)

    assert seconds(below, few) < seconds(below, slim)
    assert seconds(above, few) > seconds(above, slim)
    assert seconds(int(at), few) == pytest.approx(seconds(int(at), slim), rel=1e-3)


def test_by_hand_the_crossover_of_four_ranks() -> None:
    # 2 a + 2 K / B = 6 a + 1.5 K / B  =>  K = 8 a B
    at = crossover_bytes("all_reduce", 4, LINK, "recursive_doubling", "ring")
    assert at == pytest.approx(8 * 1e-5 * 1e9)


@pytest.mark.parametrize(
    ("n", "few", "slim"),
    [
        (3, "ring", "recursive_doubling"),  # more messages
        (2, "recursive_doubling", "ring"),  # fewer messages, and as many bytes
        (1, "recursive_doubling", "ring"),
    ],
)
def test_lines_that_do_not_cross_are_refused(n: int, few: str, slim: str) -> None:
    with pytest.raises(ValueError, match="they do not cross"):
        crossover_bytes("all_reduce", n, LINK, few, slim)


@pytest.mark.parametrize("n", SIZES)
def test_a_perfect_ring_has_the_link_s_own_bandwidth(n: int) -> None:
    link = Link(0.0, 7e9)
    for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        time_s = collective_time_s(op, K, n, link)
        assert bus_bandwidth(op, K, n, time_s) == pytest.approx(7e9)


def test_bus_bandwidth_by_hand() -> None:
    # nccl-tests: 1 GB in 10 ms on 8 ranks is algbw 100 GB/s, busbw 175 GB/s
    assert bus_bandwidth("all_reduce", 10**9, 8, 0.01) == pytest.approx(175e9)
    assert bus_bandwidth("all_gather", 10**9, 8, 0.01) == pytest.approx(87.5e9)
    assert bus_bandwidth("broadcast", 10**9, 8, 0.01) == pytest.approx(100e9)
    assert bus_bandwidth("reduce", 10**9, 8, 0.01) == pytest.approx(100e9)
    # Not in PERFORMANCE.md, but in gather.cu, scatter.cu and sendrecv.cu.
    assert bus_bandwidth("gather", 10**9, 8, 0.01) == pytest.approx(87.5e9)
    assert bus_bandwidth("scatter", 10**9, 8, 0.01) == pytest.approx(87.5e9)
    assert bus_bandwidth("send", 10**9, 8, 0.01) == pytest.approx(100e9)
    assert bus_bandwidth("all_reduce", 10**9, 1, 0.01) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: collective_cost("allreduce", 8, 2), "unknown op 'allreduce'.*all_gather"),
        (lambda: collective_cost("recv", 8, 2), "unknown op 'recv'"),
        (lambda: collective_cost("all_reduce", 8, 2, "star"), "no algorithm 'star' for all_reduce"),
        (lambda: collective_cost("all_reduce", -8, 2), "payload_bytes is -8"),
        (lambda: collective_cost("all_reduce", 8, 0), "world_size is 0"),
        (lambda: bus_bandwidth("barrier", 8, 2, 1.0), "no factor for 'barrier'"),
        (lambda: bus_bandwidth("all_reduce", 8, 2, 0.0), "time_s is 0.0"),
        (lambda: bus_bandwidth("all_reduce", 8, 0, 1.0), "world_size is 0"),
    ],
)
def test_bad_arguments_say_what_was_found(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
