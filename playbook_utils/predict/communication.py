"""Bytes that one rank puts on the wire for a collective, by the ring convention.

One number per call, so that predictions and measurements of different collectives can be added
up and compared. With K = `payload_bytes`, the bytes of the *whole* message, and N ranks:

    op                          bytes sent per rank     K counts
    all_reduce                  2 (N-1)/N K             the tensor
    reduce_scatter              (N-1)/N K               the full input (N shards)
    all_gather                  (N-1)/N K               the gathered output (N shards)
    all_to_all                  (N-1)/N K               the input (what this rank hands out)
    broadcast, reduce           K                       the tensor
    gather, scatter             K                       all shards, as the root holds them
    send                        K                       the tensor
    recv, barrier               0

One rank alone sends nothing. The first four are what every rank sends in a ring (Patarasuk and
Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", which also
proves that no all_reduce sends less; the book's appendix A0; the factors of `busbw` in
nccl-tests, doc/PERFORMANCE.md). For the rooted ones ranks differ, so the convention is the
busiest rank of a pipeline or tree, in which each byte leaves a rank once: K, an upper bound that
all ranks are charged.

Left out: time (bandwidth, latency) and other algorithms (trees, in-switch reduction).

    >>> wire_bytes("all_reduce", 1_000_000, world_size=4)
    1500000
"""

from __future__ import annotations

from numbers import Integral

__all__ = ["OPS", "wire_bytes"]

_SHARE: dict[str, tuple[int, bool]] = {
    # op: (how many times K is sent, whether only (N-1)/N of it crosses the wire)
    "all_gather": (1, True),
    "all_reduce": (2, True),
    "all_to_all": (1, True),
    "barrier": (0, False),
    "broadcast": (1, False),
    "gather": (1, False),
    "recv": (0, False),
    "reduce": (1, False),
    "reduce_scatter": (1, True),
    "scatter": (1, False),
    "send": (1, False),
}

OPS: tuple[str, ...] = tuple(_SHARE)
"""The operations that `wire_bytes` knows, sorted."""


def wire_bytes(op: str, payload_bytes: int | float, world_size: int) -> int:
    """Bytes that each rank sends for one call of `op`, rounded up to whole bytes.

    Args:
        op: one of `OPS`.
        payload_bytes: K of the module's table, the whole message in bytes. A float is accepted
            where it holds a whole number (``4e9``); the arithmetic is exact.
        world_size: N, the number of ranks in the group.

    Raises:
        ValueError: unknown `op`, negative or fractional `payload_bytes`, `world_size` below 1.
        TypeError: a size that is not a number.
    """
    if op not in _SHARE:
        raise ValueError(f"unknown op {op!r}: expected one of {', '.join(OPS)}")
    payload = _whole("payload_bytes", payload_bytes, minimum=0)
    ranks = _whole("world_size", world_size, minimum=1)
    times, share_only = _SHARE[op]
    if ranks == 1:
        return 0
    if not share_only:
        return times * payload
    return -(-times * (ranks - 1) * payload // ranks)  # rounded up


def _whole(name: str, value: object, minimum: int) -> int:
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"{name} is {value}: expected a whole number")
    elif isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name} is {value!r} ({type(value).__name__}): expected a whole number, "
            "as an int or a float such as 4e9"
        )
    number = int(value)
    if number < minimum:
        raise ValueError(f"{name} is {number}: expected at least {minimum}")
    return number
