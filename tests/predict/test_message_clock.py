"""Recorded messages on a clock, by hand; against the formulas in tests/notebooks/."""

from __future__ import annotations

import pytest

from playbook_utils.events import CollectiveEvent
from playbook_utils.predict.link import Link
from playbook_utils.predict.message_clock import replay_s

LINK = Link(latency_s=1.0, bytes_per_s=10.0)


def calls(rank: int, *steps: tuple[str, int, int]) -> list[CollectiveEvent]:
    """(op, peer, bytes) of each call of `rank`."""
    return [
        CollectiveEvent(rank, i, op, (rank, peer), "uint8", (nbytes,), nbytes, nbytes)
        for i, (op, peer, nbytes) in enumerate(steps)
    ]


def test_one_message() -> None:
    assert replay_s([calls(0, ("send", 1, 20)), calls(1, ("recv", 0, 20))], LINK) == (0.0, 3.0)


def test_a_chain_adds_up_and_an_exchange_does_not() -> None:
    chain = [
        calls(0, ("send", 1, 10)),
        calls(1, ("recv", 0, 10), ("send", 2, 10)),
        calls(2, ("recv", 1, 10)),
    ]
    assert replay_s(chain, LINK) == (0.0, 2.0, 4.0)
    exchange = [calls(r, ("send", 1 - r, 10), ("recv", 1 - r, 10)) for r in (0, 1)]
    assert replay_s(exchange, LINK) == (2.0, 2.0)


def test_one_way_out_and_one_way_in() -> None:
    out = [calls(0, ("send", 1, 10), ("send", 2, 10)), calls(1, ("recv", 0, 10)),
           calls(2, ("recv", 0, 10))]  # fmt: skip
    assert replay_s(out, LINK) == (0.0, 2.0, 4.0)
    into = [calls(0, ("recv", 1, 10), ("recv", 2, 10)), calls(1, ("send", 0, 10)),
            calls(2, ("send", 0, 10))]  # fmt: skip
    assert replay_s(into, LINK) == (4.0, 0.0, 0.0)


def test_messages_between_two_ranks_keep_their_order() -> None:
    ordered = [
        calls(0, ("send", 1, 0), ("send", 1, 100)),
        calls(1, ("recv", 0, 0), ("send", 2, 0), ("recv", 0, 100)),
        calls(2, ("recv", 1, 0)),
    ]
    assert replay_s(ordered, LINK) == (0.0, 12.0, 2.0)


def test_a_rank_that_comes_late_is_waited_for() -> None:
    late = [
        calls(0, ("recv", 1, 100), ("send", 2, 10)),
        calls(1, ("send", 0, 100)),
        calls(2, ("recv", 0, 10)),
    ]
    assert replay_s(late, LINK) == (11.0, 0.0, 13.0)


def test_links_may_differ() -> None:
    slow = Link(5.0, 10.0)
    pair = [calls(0, ("send", 1, 10), ("recv", 1, 10)), calls(1, ("send", 0, 10), ("recv", 0, 10))]
    assert replay_s(pair, lambda a, b: slow if a == 0 else LINK) == (2.0, 6.0)


def test_nothing_takes_no_time() -> None:
    assert replay_s([], LINK) == ()
    assert replay_s([[], []], LINK) == (0.0, 0.0)


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 1 receives from rank 0, which sends nothing"):
        replay_s([[], calls(1, ("recv", 0, 8))], LINK)
    with pytest.raises(ValueError, match="rank 0 receives from rank 1"):
        replay_s(
            [calls(r, ("recv", 1 - r, 8), ("send", 1 - r, 8)) for r in (0, 1)], LINK
        )  # a deadlock
    with pytest.raises(
        ValueError, match=r"rank 0 sends to rank 1 what it does not receive \(messages: 1"
    ):
        replay_s([calls(0, ("send", 1, 8)), []], LINK)
    with pytest.raises(ValueError, match="rank 1 receives 16 bytes from rank 0, which sends 8"):
        replay_s([calls(0, ("send", 1, 8)), calls(1, ("recv", 0, 16))], LINK)
    with pytest.raises(ValueError, match="rank 0 calls all_reduce, whose messages"):
        replay_s([calls(0, ("all_reduce", 1, 8)), []], LINK)
    anybody = CollectiveEvent(0, 0, "recv", (0,), "uint8", (8,), 8, 0)
    with pytest.raises(ValueError, match="a recv with its source"):
        replay_s([[anybody], []], LINK)
    with pytest.raises(ValueError, match="stands in the list of rank 0"):
        replay_s([calls(1, ("send", 0, 8)), []], LINK)
