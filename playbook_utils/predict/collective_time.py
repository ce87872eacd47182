"""Messages, bytes and seconds of a collective, by the algorithm that carries it out.

With K = `payload_bytes` (the whole message, counted as in `communication`), N ranks,
L = ceil(log2 N), and P the largest power of two that is not above N:

    op               algorithm            messages in a row    bytes in a row
    all_reduce       ring                 2 (N-1)              2 (N-1)/N K              [1]
                     recursive_doubling   log2 P (+2)          K log2 P (+2 K)          [2]
                     halving_doubling     2 log2 P (+2)        2 (P-1)/P K (+2 K)       [2]
                     tree                 2 L                  2 L K                    [2]
                     root                 2 (N-1)              2 (N-1) K
    reduce_scatter,
    all_gather       ring                 N-1                  (N-1)/N K                [1, 2]
    broadcast        tree                 L                    L K                      [2]
                     scatter_all_gather   L + N-1              2 (N-1)/N K              [2]
                     root                 N-1                  (N-1) K
    reduce           tree                 L                    L K                      [2]
                     root                 N-1                  (N-1) K
    gather, scatter  tree                 L                    (N-1)/N K                [2]
                     root                 N-1                  (N-1)/N K
    all_to_all       pairwise             N-1                  (N-1)/N K                [2]
    barrier          dissemination        L                    0                        [3]
    send             direct               1                    K

"In a row": one after another on the longest path; ranks send and receive at once, one message each
way. (+2) where N is no power of two: N - P ranks first hand their data to a neighbour and get the
result from it at the end. "root" is the naive way: one rank talks to each of the others in turn.
Seconds are messages x latency + bytes / bandwidth (`link.Link`, Hockney 1994).

[1] Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
[2] Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in
    MPICH", section 4. [3] Hensgen, Finkel and Manber 1988, "Two algorithms for barrier
    synchronization".

    >>> collective_cost("all_reduce", 1_000_000, 4)
    CollectiveCost(messages=6, path_bytes=1500000.0, sent_bytes=1500000.0)

Left out: the additions of a reduction, pipelining of a tree (NCCL's double tree), several links a
rank, reduction inside the switch. Chunks are equal: where K / N is no whole number of elements, a
real message is up to one element longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from playbook_utils.predict.communication import wire_bytes
from playbook_utils.predict.link import Link

__all__ = [
    "ALGORITHMS",
    "CollectiveCost",
    "bus_bandwidth",
    "collective_cost",
    "collective_time_s",
    "crossover_bytes",
]


@dataclass(frozen=True)
class CollectiveCost:
    """What the longest path of a collective is made of, and what its busiest rank sends."""

    messages: int
    """Messages one after another, each of which costs the latency."""
    path_bytes: float
    """Bytes one after another, which the bandwidth divides."""
    sent_bytes: float
    """Bytes that the rank sends which sends most."""

    def time_s(self, link: Link) -> float:
        """Seconds over links that are all alike."""
        return self.messages * link.latency_s + self.path_bytes / link.bytes_per_s


_Formula = Callable[[float, int], CollectiveCost]


def _log2_up(n: int) -> int:
    return (n - 1).bit_length()


def _ring(passes: int) -> _Formula:
    def cost(k: float, n: int) -> CollectiveCost:
        share = passes * (n - 1) * k / n
        return CollectiveCost(passes * (n - 1), share, share)

    return cost


def _recursive_doubling(k: float, n: int) -> CollectiveCost:
    power = n.bit_length() - 1
    odd = n != 2**power
    return CollectiveCost(power + 2 * odd, (power + 2 * odd) * k, (power + odd) * k)


def _halving_doubling(k: float, n: int) -> CollectiveCost:
    power = n.bit_length() - 1
    odd, share = n != 2**power, 2 * (2**power - 1) * k / 2**power
    return CollectiveCost(2 * power + 2 * odd, share + 2 * odd * k, share + odd * k)


def _tree(k: float, n: int) -> CollectiveCost:
    rounds = _log2_up(n)
    return CollectiveCost(rounds, rounds * k, rounds * k)


def _reduce_tree(k: float, n: int) -> CollectiveCost:
    return CollectiveCost(_log2_up(n), _log2_up(n) * k, k)


def _two_trees(k: float, n: int) -> CollectiveCost:
    rounds = _log2_up(n)
    return CollectiveCost(2 * rounds, 2 * rounds * k, rounds * k)


def _shard_tree(k: float, n: int) -> CollectiveCost:
    share = (n - 1) * k / n
    return CollectiveCost(_log2_up(n), share, share)


def _gather_tree(k: float, n: int) -> CollectiveCost:
    # The child at distance 2^i passes on its whole subtree.
    subtree = max(min(2**i, n - 2**i) for i in range(_log2_up(n)))
    return CollectiveCost(_log2_up(n), (n - 1) * k / n, subtree * k / n)


def _scatter_all_gather(k: float, n: int) -> CollectiveCost:
    share = 2 * (n - 1) * k / n
    return CollectiveCost(_log2_up(n) + n - 1, share, share)


_ALGORITHMS: dict[str, dict[str, _Formula]] = {
    "all_gather": {"ring": _ring(1)},
    "all_reduce": {
        "ring": _ring(2),
        "recursive_doubling": _recursive_doubling,
        "halving_doubling": _halving_doubling,
        "tree": _two_trees,
        "root": lambda k, n: CollectiveCost(2 * (n - 1), 2 * (n - 1) * k, (n - 1) * k),
    },
    "all_to_all": {"pairwise": _ring(1)},
    "barrier": {"dissemination": lambda k, n: CollectiveCost(_log2_up(n), 0.0, 0.0)},
    "broadcast": {
        "tree": _tree,
        "scatter_all_gather": _scatter_all_gather,
        "root": lambda k, n: CollectiveCost(n - 1, (n - 1) * k, (n - 1) * k),
    },
    "gather": {
        "tree": _gather_tree,
        "root": lambda k, n: CollectiveCost(n - 1, (n - 1) * k / n, k / n),
    },
    "reduce": {
        "tree": _reduce_tree,
        "root": lambda k, n: CollectiveCost(n - 1, (n - 1) * k, k),
    },
    "reduce_scatter": {"ring": _ring(1)},
    "scatter": {"tree": _shard_tree, "root": _ring(1)},
    "send": {"direct": lambda k, n: CollectiveCost(1, k, k)},
}

ALGORITHMS: dict[str, tuple[str, ...]] = {op: tuple(known) for op, known in _ALGORITHMS.items()}
"""The algorithms that are known for each operation; the first is the default."""


def collective_cost(
    op: str, payload_bytes: float, world_size: int, algorithm: str | None = None
) -> CollectiveCost:
    """Messages and bytes of one call of `op`; nothing for one rank alone.

    Args:
        op: a key of `ALGORITHMS`.
        payload_bytes: K of the module's table, the whole message in bytes.
        world_size: N, the number of ranks in the group.
        algorithm: one of `ALGORITHMS[op]`; None takes the first.

    Raises:
        ValueError: unknown `op` or `algorithm`, a size that cannot be.
    """
    if op not in _ALGORITHMS:
        raise ValueError(f"unknown op {op!r}: expected one of {', '.join(_ALGORITHMS)}")
    known = _ALGORITHMS[op]
    if algorithm is not None and algorithm not in known:
        raise ValueError(
            f"no algorithm {algorithm!r} for {op}: expected None or one of {', '.join(known)}"
        )
    wire_bytes("send", payload_bytes, world_size)  # refuses sizes that cannot be
    if world_size == 1:
        return CollectiveCost(0, 0.0, 0.0)
    cost = known[algorithm or next(iter(known))](payload_bytes, world_size)
    return CollectiveCost(cost.messages, float(cost.path_bytes), float(cost.sent_bytes))


def collective_time_s(
    op: str, payload_bytes: float, world_size: int, link: Link, algorithm: str | None = None
) -> float:
    """Seconds of one call of `op` over links that are all alike (see `collective_cost`)."""
    return collective_cost(op, payload_bytes, world_size, algorithm).time_s(link)


def crossover_bytes(
    op: str, world_size: int, link: Link, few_messages: str, few_bytes: str
) -> float:
    """K at which two algorithms of `op` take equally long; below it `few_messages` is faster.

    Both times are straight lines in K, so that they meet once.

    Raises:
        ValueError: the first does not need fewer messages and more bytes than the second.
    """
    # One byte, so that path_bytes is the slope.
    short = collective_cost(op, 1, world_size, few_messages)
    slim = collective_cost(op, 1, world_size, few_bytes)
    if not (short.messages < slim.messages and short.path_bytes > slim.path_bytes):
        raise ValueError(
            f"{op} on {world_size} ranks: {few_messages} needs {short.messages} messages and "
            f"{short.path_bytes:g} K, {few_bytes} {slim.messages} and {slim.path_bytes:g} K: "
            "expected fewer messages and more bytes of the first; they do not cross"
        )
    saved_s = (slim.messages - short.messages) * link.latency_s
    return saved_s * link.bytes_per_s / (short.path_bytes - slim.path_bytes)


def bus_bandwidth(op: str, payload_bytes: float, world_size: int, time_s: float) -> float:
    """Bytes per second by the convention of nccl-tests, comparable with a link's own bandwidth.

    busbw = K / time x factor: 2 (N-1)/N for all_reduce, (N-1)/N for reduce_scatter, all_gather and
    all_to_all, 1 for broadcast and reduce (NVIDIA, nccl-tests, doc/PERFORMANCE.md; not its factor
    for a reduction in the switch), and from the code of its tests (src/gather.cu, scatter.cu,
    sendrecv.cu) (N-1)/N for gather and scatter, 1 for send. It is independent of the algorithm: a
    slower one shows as a lower number.

    Raises:
        ValueError: an op without a factor there, a size that cannot be, a time of 0 or less.
    """
    shares = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
    factors = {"all_reduce": 2} | dict.fromkeys(shares, 1)
    if op not in factors and op not in ("broadcast", "reduce", "send"):
        named = ", ".join([*factors, "broadcast", "reduce", "send"])
        raise ValueError(f"nccl-tests has no factor for {op!r}: expected one of {named}")
    if not time_s > 0:
        raise ValueError(f"time_s is {time_s}: expected more than 0 seconds")
    wire_bytes(op, payload_bytes, world_size)  # refuses sizes that cannot be
    share = factors[op] * (world_size - 1) / world_size if op in factors else 1.0
    return payload_bytes / time_s * share
