"""Lesson 05's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.notebooks.exercises import Lesson, ThreeWays, plant, run_cell

LESSON = Lesson.read("05_collectives")

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "not handed back": (
        "root_all_reduce",
        "    for other in range(1, n):\n        dist.send(tensor, group=group, group_dst=other)",
        "    for other in range(2, n):\n        dist.send(tensor, group=group, group_dst=other)",
        "who waits for whom?",
    ),
    "one all_reduce for the root": (
        "root_all_reduce",
        "    if rank != 0:\n",
        "    dist.all_reduce(tensor, group=group)\n    return\n    if rank != 0:\n",
        "no collective",
    ),
    "an all_reduce in a thread for the root": (
        "root_all_reduce",
        "    if rank != 0:\n",
        "    from threading import Thread\n"
        "    thread = Thread(target=dist.all_reduce, args=(tensor,), kwargs={'group': group})\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "    tensor = tensor.clone()\n"
        "    if rank != 0:\n",
        "found {'all_reduce': 1, ",
    ),
    "one type for the root": (
        "root_all_reduce",
        "torch.empty_like(tensor)",
        "torch.empty(tensor.shape, dtype=torch.float64)",
        "root_all_reduce",
    ),
    "the world's ranks": (
        "root_all_reduce",
        "dist.get_rank(group), dist.get_world_size(group)",
        "dist.get_rank(), dist.get_world_size()",
        "hint: ",
    ),
    "begins with its own chunk": (
        "ring_reduce_scatter",
        "        outgoing = chunks[(rank - step - 1) % n]\n"
        "        growing = chunks[(rank - step - 2) % n]\n",
        "        outgoing = chunks[(rank - step) % n]\n"
        "        growing = chunks[(rank - step - 1) % n]\n",
        "send chunk r - 1 first",
    ),
    "the whole tensor round": (
        "ring_reduce_scatter",
        "    for step in range(n - 1):\n",
        "    passing, box = tensor.clone(), torch.empty_like(tensor)\n"
        "    for step in range(n - 1):\n"
        "        exchange(passing, right, box, left, group)\n"
        "        passing, box = box, passing\n"
        "        tensor += passing\n"
        "    for step in range(0):\n",
        "one chunk a step",
    ),
    "it begins with its own chunk": (
        "ring_reduce_scatter",
        "rank - step - ",
        "rank - step + 1 - ",
        "chunk 0 of the sum of 8 numbers over 4 ranks on rank 0",
    ),
    "copied, not added": (
        "ring_reduce_scatter",
        "growing += incoming",
        "growing.copy_(incoming)",
        "add it to your own",
    ),
    "a thread does it": (
        "ring_reduce_scatter",
        "    for step in range(n - 1):\n",
        "    from threading import Thread\n"
        "    thread = Thread(target=dist.all_reduce, args=(tensor,), kwargs={'group': group})\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "    result, chunks = chunks, tensor.clone().tensor_split(n)\n"
        "    for step in range(n - 1):\n"
        "        exchange(chunks[rank - 1], right, torch.empty_like(chunks[rank - 2]), left)\n"
        "    return result[rank]\n"
        "    for step in range(n - 1):\n",
        "in no thread a collective",
    ),
    "chunks of its own": (
        "ring_reduce_scatter",
        "return chunks[rank]",
        "result = chunks[rank].clone()\n    chunks[rank].zero_()\n    return result",
        "a part of `tensor` itself",
    ),
    "the next place": (
        "doubling_partner",
        "place ^ distance",
        "place + distance",
        "each is the partner",
    ),
    "the lower half only": (
        "doubling_partner",
        "place ^ distance",
        "place - distance if place & 1 else place + distance",
        "hint: ",
    ),
    "always the neighbour": ("doubling_partner", "place ^ distance", "place ^ 1", "distance to"),
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
    "a ring for show": (
        "left_ring_all_reduce",
        "    for step in range(n - 1):\n        growing",
        "    from threading import Thread\n"
        "    thread = Thread(target=dist.all_reduce, args=(tensor,))\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "    chunks = tensor.clone().tensor_split(n)\n"
        "    for step in range(n - 1):\n        growing",
        "in no thread a collective",
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
        "sum of 8 numbers",
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
    "a part by heart": (
        "pairwise_all_to_all",
        "received[rank].copy_(parts[rank])",
        "received[rank].copy_((torch.arange(len(parts[rank])) + 10 * rank) * 7 % 31 + 100)",
        "its own included",
    ),
    "one length, one type": (
        "pairwise_all_to_all",
        "[torch.empty_like(part) for part in parts]",
        "[torch.empty(3, dtype=torch.float64) for part in parts]",
        "pairwise_all_to_all",
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


# another way that is right as well: (function, what stands there, what is put in its place)
RIGHT = {
    "partner s - rank": (
        "pairwise_all_to_all",
        "    for step in range(1, n):\n"
        "        to, source = (rank + step) % n, (rank - step) % n\n"
        "        exchange(parts[to], to, received[source], source)\n",
        "    for step in range(n):\n"
        "        partner = (step - rank) % n\n"
        "        if partner != rank:\n"
        "            exchange(parts[partner], partner, received[partner], partner)\n",
    ),
    "to the left": (
        "pairwise_all_to_all",
        "to, source = (rank + step) % n, (rank - step) % n",
        "to, source = (rank - step) % n, (rank + step) % n",
    ),
    "by arithmetic": (
        "doubling_partner",
        "place ^ distance",
        "place + distance * (1 if place // distance % 2 == 0 else -1)",
    ),
    "the last rank first": (
        "root_all_reduce",
        "    for other in range(1, n):\n        dist.send",
        "    for other in reversed(range(1, n)):\n        dist.send",
    ),
    "rank 0 alone listens first": (
        "ring_shift",
        "    if rank % 2 == 0:\n"
        "        dist.send(tensor, dst=(rank + 1) % n)\n"
        "    dist.recv(received, src=(rank - 1) % n)\n"
        "    if rank % 2 == 1:\n",
        "    if rank > 0:\n"
        "        dist.send(tensor, dst=(rank + 1) % n)\n"
        "    dist.recv(received, src=(rank - 1) % n)\n"
        "    if rank == 0:\n",
    ),
}


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS

    @pytest.mark.parametrize("other", RIGHT)
    def test_another_right_answer_passes(self, other: str, names: dict[str, Any]) -> None:
        function, old, new = RIGHT[other]
        result = run_cell(plant(self.lesson.solution(function), old, new), names)
        assert result.text == f"passed: {function}"
