"""Lesson 05's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from typing import Any

import pytest

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.collectives import exchange, ring_all_reduce
from playbook_utils.workers import shutdown
from tests.notebooks.exercises import Lesson, ThreeWays

LESSON = Lesson.read("05_collectives")

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "all send first": ("ring_shift", "rank % 2 == 0", "True", "who waits for whom?"),
    "all receive first": ("ring_shift", "rank % 2 == 0", "False", "who waits for whom?"),
    "to the left": (
        "ring_shift",
        "src=(rank - 1) % n",
        "src=(rank + 1) % n",
        "who waits for whom?",
    ),
    "own tensor back": ("ring_shift", "    return received\n", "    return tensor\n", "before"),
    "nothing blocks": (
        "ring_shift",
        "    received = torch.empty_like(tensor)\n",
        "    received = torch.empty_like(tensor)\n"
        "    exchange(tensor, (rank + 1) % n, received, (rank - 1) % n)\n"
        "    return received\n",
        "do not block",
    ),
    "alone it waits for itself": (
        "ring_shift",
        "    if n == 1:\n        return tensor\n",
        "",
        "one rank alone",
    ),
    "a collective instead": (
        "ring_shift",
        "    received = torch.empty_like(tensor)\n",
        "    boxes = [torch.empty_like(tensor) for _ in range(n)]\n"
        "    dist.all_gather(boxes, tensor)\n"
        "    return boxes[rank - 1]\n"
        "    received = torch.empty_like(tensor)\n",
        "found {'all_gather': 1}",
    ),
    "powers of two only": (
        "tree_reduce",
        "if rank + distance < n:",
        "if rank + distance <= n - (n % 2):",
        "beyond the last rank",
    ),
    "one round short": (
        "tree_reduce",
        "while distance < n:",
        "while 2 * distance < n:",
        "reach rank 0 once",
    ),
    "not added": ("tree_reduce", "tensor += incoming", "tensor.copy_(incoming)", "sum of 2"),
    "everything through rank 0": (
        "tree_reduce",
        "    while distance < n:\n",
        "    if rank > 0:\n"
        "        dist.send(tensor, dst=0)\n"
        "    for other in range(1, n) if rank == 0 else []:\n"
        "        dist.recv(incoming, src=other)\n"
        "        tensor += incoming\n"
        "    distance = n\n"
        "    while distance < n:\n",
        "a tree halves the ranks",
    ),
    "a chain": (
        "tree_reduce",
        "    while distance < n:\n",
        "    if rank + 1 < n:\n"
        "        dist.recv(incoming, src=rank + 1)\n"
        "        tensor += incoming\n"
        "    if rank > 0:\n"
        "        dist.send(tensor, dst=rank - 1)\n"
        "    distance = n\n"
        "    while distance < n:\n",
        "a chain is no tree",
    ),
    "one call": (
        "tree_reduce",
        "    while distance < n:\n",
        "    dist.reduce(tensor, dst=0)\n    return\n    while distance < n:\n",
        "no collectives",
    ),
    "still to the right": (
        "left_ring_all_reduce",
        "(rank - 1) % n, (rank + 1) % n",
        "(rank + 1) % n, (rank - 1) % n",
        "one more, not one less",
    ),
    "chunk off by one": (
        "left_ring_all_reduce",
        "chunks[(rank + step + 2) % n]",
        "chunks[(rank + step + 3) % n]",
        "one more, not one less",
    ),
    "second half forgotten": (
        "left_ring_all_reduce",
        "    for step in range(n - 1):\n        exchange(",
        "    for step in range(0):\n        exchange(",
        "sum of 6 numbers",
    ),
    "the lesson's own ring": (
        "left_ring_all_reduce",
        "    for step in range(n - 1):\n        growing",
        "    ring_all_reduce(tensor)\n    return\n    for step in range(n - 1):\n        growing",
        "send calls by peer",
    ),
    "one all_reduce": (
        "left_ring_all_reduce",
        "    for step in range(n - 1):\n        growing",
        "    dist.all_reduce(tensor)\n    return\n    for step in range(n - 1):\n        growing",
        "found {'all_reduce': 1}",
    ),
    "own part forgotten": (
        "pairwise_all_to_all",
        "received[rank].copy_(parts[rank])",
        "received[rank].zero_()",
        "its own included",
    ),
    "its own part to all": (
        "pairwise_all_to_all",
        "exchange(parts[to], to",
        "exchange(parts[rank], to",
        "what rank i had for this rank",
    ),
    "all begin with rank 0": (
        "pairwise_all_to_all",
        "    for step in range(1, n):\n"
        "        to, source = (rank + step) % n, (rank - step) % n\n"
        "        exchange(parts[to], to, received[source], source)\n",
        "    others = [peer for peer in range(n) if peer != rank]\n"
        "    works = [dist.isend(parts[peer], peer) for peer in others]\n"
        "    works += [dist.irecv(received[peer], peer) for peer in others]\n"
        "    for work in works:\n"
        "        work.wait()\n",
        "begin with the next rank",
    ),
    "all_to_all itself": (
        "pairwise_all_to_all",
        "    for step in range(1, n):\n",
        "    dist.all_to_all(received, parts)\n    return received\n    for step in range(1, n):\n",
        "nothing passed on, no collective",
    ),
    "factor 2 forgotten": ("bus_bandwidth_of", "2 * share", "share", "2 (N-1)/N"),
    "upside down": (
        "bus_bandwidth_of",
        "(world_size - 1) / world_size",
        "world_size / max(world_size - 1, 1)",
        "bus_bandwidth_of('all_reduce'",
    ),
    "broadcast too": ("bus_bandwidth_of", ', "broadcast": 1', "", "the factor is 1"),
    "algorithm bandwidth": (
        "bus_bandwidth_of",
        "payload_bytes / seconds * factor",
        "payload_bytes / seconds",
        "2 (N-1)/N",
    ),
}


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS

    @pytest.fixture(scope="class")
    @classmethod
    def names(cls) -> Any:
        """As above, and what the lesson lets the solutions use."""
        found = cls.lesson.setup() | {"exchange": exchange, "ring_all_reduce": ring_all_reduce}
        exec(cls.lesson.stub("ring_shift").split("def ring_shift")[0], found)
        yield found
        shutdown()
