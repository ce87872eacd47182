"""The time that recorded messages would take over given links: who waits for whom, step by step.

A run's send and recv calls (`measure.record_communication`) are walked in the order in which each
rank issued them. Each rank has one way out and one way in, usable at the same time. A message takes
its way out for latency + bytes / bandwidth, in the order of the sends, and its way in equally
long, in the order of the receives; a rank goes on once what it receives has arrived, and does not
wait for what it sends. That is the machine for which the formulas of `collective_time` are written
(the cost model of Thakur, Rabenseifner and Gropp 2005), so that formula and recording can be
compared.

    logs = launch(run, world_size=8)                     # one CommunicationLog a rank
    max(replay_s([log.events for log in logs], Link(1e-5, 1e9)))

Left out: collectives, whose messages the recording does not show; the time of computing; a sender
that is held up because its receiver is busy.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from playbook_utils.events import CollectiveEvent
from playbook_utils.predict.link import Link

__all__ = ["replay_s"]

LinkOf = Callable[[int, int], Link]


def replay_s(events: Sequence[Sequence[CollectiveEvent]], link: Link | LinkOf) -> tuple[float, ...]:
    """Seconds after which each rank has received everything, all ranks starting at 0.

    Args:
        events: of each rank, in order of rank: its send and recv calls in order of issue.
        link: of every pair of ranks, or link(source, destination).

    Raises:
        ValueError: a call that is neither send nor recv, a recv from anybody, or one for which no
            send was recorded.
    """
    link_of: LinkOf = (lambda source, destination: link) if isinstance(link, Link) else link
    clocks, way_out, way_in = ([0.0] * len(events) for _ in range(3))
    under_way: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    positions = [0] * len(events)
    moved = True
    while moved:
        moved = False
        for rank, calls in enumerate(events):
            while positions[rank] < len(calls):
                event = calls[positions[rank]]
                peer = _peer(event, rank)
                if event.op == "send":
                    message_s = link_of(rank, peer).message_s(event.payload_bytes)
                    way_out[rank] = max(clocks[rank], way_out[rank]) + message_s
                    under_way[rank, peer].append(way_out[rank])
                elif under_way[peer, rank]:
                    message_s = link_of(peer, rank).message_s(event.payload_bytes)
                    arrived = under_way[peer, rank].popleft()
                    way_in[rank] = max(arrived, way_in[rank] + message_s)
                    clocks[rank] = max(clocks[rank], way_in[rank])
                else:
                    break  # the peer must go on first
                positions[rank] += 1
                moved = True
    for rank, calls in enumerate(events):
        if positions[rank] < len(calls):
            peer = _peer(calls[positions[rank]], rank)
            raise ValueError(
                f"rank {rank} receives from rank {peer}, which sends nothing that is left (call "
                f"{positions[rank]} of {len(calls)}): record the whole exchange, on all ranks"
            )
    return tuple(clocks)


def _peer(event: CollectiveEvent, rank: int) -> int:
    if event.op not in ("send", "recv"):
        raise ValueError(
            f"rank {rank} calls {event.op}, whose messages are not recorded: expected send and "
            "recv only"
        )
    if event.rank != rank or len(event.group) != 2:
        raise ValueError(
            f"call {event.index} of rank {event.rank} stands in the list of rank {rank} and names "
            f"the ranks {event.group}: expected one list a rank and a recv with its source"
        )
    return event.group[1]
