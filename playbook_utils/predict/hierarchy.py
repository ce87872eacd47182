"""All-reduce on two levels: within each node over fast links, then between nodes over slow ones.

With G ranks a node and M nodes: a reduce-scatter inside the node leaves each rank with 1/G of the
sum, an all-reduce with the ranks of equal place in the other nodes completes it, an all-gather
inside the node spreads it. All three are rings (Patarasuk and Yuan 2009); the bytes are

    inside a node, by each rank        2 (G-1)/G K
    between nodes, by each rank        2 (M-1)/M K/G
    between nodes, by each node        2 (M-1)/M K

A single ring through all G M ranks, node after node, sends 2 (GM-1)/(GM) K over the one link that
leaves a node: nearly the same bytes, but over one network card instead of G, and with G M - 1 slow
steps instead of M - 1 in each pass.

    levels = two_level_cost(1_000_000, ranks_per_node=8, nodes=4)
    levels.network.sent_bytes, levels.time_s(nvlink, network_card)

Left out: a third level, overlap of the levels (NCCL pipelines chunks through both).
"""

from __future__ import annotations

from dataclasses import dataclass

from playbook_utils.predict.collective_time import CollectiveCost, collective_cost
from playbook_utils.predict.link import Link

__all__ = ["TwoLevelCost", "flat_ring_time_s", "two_level_cost"]


@dataclass(frozen=True)
class TwoLevelCost:
    """What one rank spends on the links of its node and on those between nodes."""

    node: CollectiveCost
    network: CollectiveCost

    def time_s(self, fast: Link, slow: Link) -> float:
        """Seconds, each rank having a network card of its own: first, middle and last phase."""
        return self.node.time_s(fast) + self.network.time_s(slow)


def two_level_cost(payload_bytes: float, ranks_per_node: int, nodes: int) -> TwoLevelCost:
    """Messages and bytes of each rank, by level.

    Raises:
        ValueError: a size that cannot be.
    """
    _check(ranks_per_node, nodes)
    inside = collective_cost("all_reduce", payload_bytes, ranks_per_node)
    between = collective_cost("all_reduce", payload_bytes, nodes)
    share = 1 / ranks_per_node
    return TwoLevelCost(
        inside,
        CollectiveCost(between.messages, between.path_bytes * share, between.sent_bytes * share),
    )


def flat_ring_time_s(
    payload_bytes: float, ranks_per_node: int, nodes: int, fast: Link, slow: Link
) -> float:
    """Seconds of a single ring through all ranks, node after node.

    The chunk that goes round waits for each link in turn, but all chunks go round at once, and a
    step is over when its slowest message is: the slow link sets the pace of every step.
    """
    _check(ranks_per_node, nodes)
    cost = collective_cost("all_reduce", payload_bytes, ranks_per_node * nodes)
    if nodes == 1:
        return cost.time_s(fast)
    chunk = cost.path_bytes / cost.messages
    links = (slow,) if ranks_per_node == 1 else (fast, slow)  # alone in its node: no fast link
    return cost.messages * max(link.message_s(chunk) for link in links)


def _check(ranks_per_node: int, nodes: int) -> None:
    for name, value in (("ranks_per_node", ranks_per_node), ("nodes", nodes)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}: expected an int of at least 1")
