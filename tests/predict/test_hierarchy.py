"""All-reduce on two levels, by hand and against the single ring."""

from __future__ import annotations

import pytest

from playbook_utils.predict.collective_time import collective_cost
from playbook_utils.predict.hierarchy import flat_ring_time_s, two_level_cost
from playbook_utils.predict.link import Link

FAST, SLOW = Link(1e-6, 4e11), Link(1e-5, 5e10)


def test_by_hand() -> None:
    levels = two_level_cost(8_000_000, ranks_per_node=8, nodes=4)
    assert levels.node.sent_bytes == pytest.approx(2 * 7 / 8 * 8e6)
    assert levels.network.sent_bytes == pytest.approx(2 * 3 / 4 * 1e6)
    assert (levels.node.messages, levels.network.messages) == (14, 6)
    seconds = 14 * 1e-6 + 14e6 / 4e11 + 6 * 1e-5 + 1.5e6 / 5e10
    assert levels.time_s(FAST, SLOW) == pytest.approx(seconds)


@pytest.mark.parametrize(("ranks_per_node", "nodes"), [(1, 5), (5, 1), (1, 1)])
def test_one_level_is_the_ring(ranks_per_node: int, nodes: int) -> None:
    levels = two_level_cost(10_000, ranks_per_node, nodes)
    ring = collective_cost("all_reduce", 10_000, ranks_per_node * nodes)
    assert levels.node.sent_bytes + levels.network.sent_bytes == ring.sent_bytes
    assert levels.node.messages + levels.network.messages == ring.messages
    link = FAST if nodes == 1 else SLOW
    assert levels.time_s(FAST, SLOW) == pytest.approx(ring.time_s(link))
    assert flat_ring_time_s(10_000, ranks_per_node, nodes, FAST, SLOW) == pytest.approx(
        ring.time_s(link)
    )


@pytest.mark.parametrize(("ranks_per_node", "nodes"), [(2, 2), (4, 3), (8, 64)])
def test_a_node_sends_no_more_than_with_the_single_ring_over_all_its_cards(
    ranks_per_node: int, nodes: int
) -> None:
    levels = two_level_cost(1e9, ranks_per_node, nodes)
    single = collective_cost("all_reduce", 1e9, ranks_per_node * nodes).sent_bytes
    assert ranks_per_node * levels.network.sent_bytes < single
    assert levels.network.sent_bytes < single / ranks_per_node


def test_the_slow_link_sets_the_pace_of_the_single_ring() -> None:
    chunk = 1e9 / 16
    assert flat_ring_time_s(1e9, 8, 2, FAST, SLOW) == pytest.approx(30 * SLOW.message_s(chunk))
    # One rank a node: no message takes a link inside a node, however slow that would be.
    assert flat_ring_time_s(1e9, 1, 16, SLOW, FAST) == pytest.approx(30 * FAST.message_s(chunk))
    assert flat_ring_time_s(1e9, 8, 2, SLOW, FAST) == pytest.approx(30 * SLOW.message_s(chunk))


@pytest.mark.parametrize(("ranks_per_node", "nodes"), [(0, 2), (2, 0), (2.0, 2), (True, 2)])
def test_layouts_that_cannot_be_are_refused(ranks_per_node: int, nodes: int) -> None:
    with pytest.raises(ValueError, match="expected an int of at least 1"):
        two_level_cost(8, ranks_per_node, nodes)
    with pytest.raises(ValueError, match="expected an int of at least 1"):
        flat_ring_time_s(8, ranks_per_node, nodes, FAST, SLOW)
