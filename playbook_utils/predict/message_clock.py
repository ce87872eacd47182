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
that is held up because its receiver is busy; receives started early (`irecv` before `isend` in one
batch): a recv waits where it was issued.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from playbook_utils.events import CollectiveEvent
from playbook_utils.predict.link import Link

__all__ = ["replay_s"]

LinkOf = Callable[[int, int], Link]
_UnderWay = dict[tuple[int, int], deque[tuple[float, int]]]  # arrival and bytes, by pair


def replay_s(events: Sequence[Sequence[CollectiveEvent]], link: Link | LinkOf) -> tuple[float, ...]:
    """Seconds after which each rank has received everything, all ranks starting at 0.

    Args:
        events: of each rank, in order of rank: its send and recv calls in order of issue.
        link: of every pair of ranks, or link(source, destination).

    Raises:
        ValueError: a call that is neither send nor recv, a recv from anybody, a message of which
            only one end was recorded, or whose ends differ in size.
    """
    link_of: LinkOf = (lambda source, destination: link) if isinstance(link, Link) else link
    way_out, way_in = ([0.0] * len(events) for _ in range(2))  # when each was last in use
    under_way: _UnderWay = defaultdict(deque)
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
                    way_out[rank] = max(way_in[rank], way_out[rank]) + message_s
                    under_way[rank, peer].append((way_out[rank], event.payload_bytes))
                elif under_way[peer, rank]:
                    message_s = link_of(peer, rank).message_s(event.payload_bytes)
                    arrived, sent_bytes = under_way[peer, rank].popleft()
                    _check_size(event, peer, sent_bytes)
                    way_in[rank] = max(arrived, way_in[rank] + message_s)
                else:
                    break  # the peer must go on first
                positions[rank] += 1
                moved = True
    _check_nothing_left(events, positions, under_way)
    return tuple(way_in)


def _check_size(event: CollectiveEvent, peer: int, sent_bytes: int) -> None:
    if sent_bytes != event.payload_bytes:
        raise ValueError(
            f"rank {event.rank} receives {event.payload_bytes} bytes from rank {peer}, which sends "
            f"{sent_bytes} (call {event.index} of the recording)"
        )


def _check_nothing_left(
    events: Sequence[Sequence[CollectiveEvent]], positions: list[int], under_way: _UnderWay
) -> None:
    for rank, calls in enumerate(events):
        if positions[rank] < len(calls):
            peer = _peer(calls[positions[rank]], rank)
            raise ValueError(
                f"rank {rank} receives from rank {peer}, which sends nothing that is left (call "
                f"{positions[rank]} of {len(calls)}): record the whole exchange, on all ranks"
            )
    for (source, destination), left in under_way.items():
        if left:
            raise ValueError(
                f"rank {source} sends to rank {destination} what it does not receive (messages: "
                f"{len(left)}): record the whole exchange, on all ranks"
            )


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
