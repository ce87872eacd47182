"""Exercises of lesson 20, FlashAttention: what is asked, and how an answer is checked.

    check(ONE_PASS_LSE, one_pass_lse)

Blocks come from a stream that is gone through once and sees who holds on to earlier blocks, and
a watch counts all numbers held, so that the right result from the whole matrix does not pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from playbook_utils.checks import Exercise, expect_close, expect_equal
from playbook_utils.errors import CheckFailed
from playbook_utils.measure.operators import OperatorWatch
from playbook_utils.measure.private import tree_leaves

__all__ = ["ATTEND_BLOCKS", "CAUSAL_TRAFFIC", "KEY_TILES", "ONE_PASS_LSE", "TILE_GRADIENTS"]


class _Held(OperatorWatch):
    """How many numbers the tensors made inside of it hold, of those still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}

    def after(self, op: Any, passed: dict[str, Any], out: Any) -> None:
        """Note what was made."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                size = storage.nbytes() // tensor.element_size()
                self._sizes[StorageWeakRef(storage)] = size  # type: ignore[no-untyped-call]

    def numbers(self) -> int:
        """Of all tensors that are still alive, each storage once."""
        alive = {ref: n for ref, n in self._sizes.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        self._sizes = alive
        return sum(alive.values())


class _Stream:
    """Yields copies of blocks once. An error if a block before the last one is still alive, or if
    what is held grows by more than a block after the second one."""

    def __init__(self, blocks: list[tuple[Tensor, ...]]) -> None:
        self._blocks = blocks
        self._given: list[list[StorageWeakRef]] = []
        self._started = False
        self._held = _Held()
        self._held_early = 0
        self.finished = False

    def given_to(self, attempt: Callable[..., Tensor], *args: Any) -> Tensor:
        """What `attempt` returns for `args` and this stream; an error if it left blocks over."""
        with self._held:
            found = attempt(*args, self)
        self.expect_finished()
        return found

    def __iter__(self) -> Iterator[Any]:
        if self._started:
            raise CheckFailed(
                "blocks: found a second pass over them, expected one\nhint: what a later block "
                "changes about earlier ones is a factor, which a maximum and sums can be given"
            )
        self._started = True
        for tensors in self._blocks:
            for references in self._given[:-1]:  # a loop variable may hold the last one
                if not all(reference.expired() for reference in references):  # type: ignore[no-untyped-call]
                    raise CheckFailed(
                        "blocks: found an earlier block still held when the one after the next "
                        "was asked for, expected it gone\nhint: keep a few numbers a row, not "
                        "blocks, slices of them, or all weights"
                    )
            self._expect_no_growth(sum(tensor.numel() for tensor in self._blocks[0]))
            yield self._give(tensors)
        self.finished = True

    def _expect_no_growth(self, block_numbers: int) -> None:
        held, taken = self._held.numbers(), len(self._given)
        if taken <= 2:
            self._held_early = held
        elif held > self._held_early + block_numbers:
            raise CheckFailed(
                f"blocks: found {held} numbers held after {taken} blocks, {self._held_early} after "
                "2, expected no more than after 2\nhint: copies of blocks, or blocks joined, are "
                "the whole matrix: keep a few numbers a row"
            )

    def _give(self, tensors: tuple[Tensor, ...]) -> Any:
        copies = tuple(tensor.clone() for tensor in tensors)
        self._given.append(
            [StorageWeakRef(copy.untyped_storage()) for copy in copies]  # type: ignore[no-untyped-call]
        )
        return copies if len(copies) > 1 else copies[0]

    def expect_finished(self) -> None:
        """An error unless every block was taken."""
        if not self.finished:
            raise CheckFailed(
                f"blocks: found {len(self._given)} of {len(self._blocks)} taken, expected all\n"
                "hint: go on to the end of the iterator"
            )


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _verify_one_pass_lse(attempt: Callable[[Any], Tensor]) -> None:
    near = _random(5, 23, seed=0)
    rising = near + torch.arange(23.0, dtype=torch.float64)
    cases = {
        "scores near 0": (
            near,
            "maximum + log(sum); when the maximum grows, the sum so far is multiplied by "
            "e^(old maximum - new maximum)",
        ),
        "scores that rise along the row": (
            rising,
            "the sum so far was taken relative to the old maximum: multiply it by "
            "e^(old maximum - new maximum)",
        ),
        "scores near 5,000": (
            rising + 5000,
            "no exponential of a score itself: of score - maximum, and add the maximum in the end",
        ),
        "scores that fall along the row": (
            near - 300 * torch.arange(23.0, dtype=torch.float64),
            "the maximum so far never falls: the larger one of the old and the block's",
        ),
        "scores near -5,000": (
            near - 5000,
            "the first maximum must be lower than any score: -inf, and a sum of 0",
        ),
    }
    for name, (scores, hint) in cases.items():
        stream = _Stream([(block,) for block in torch.split(scores, 4, dim=1)])
        found = stream.given_to(attempt)
        expected = scores.logsumexp(1)
        expect_close(found, expected, f"log-sum-exp, {name}", rtol=1e-13, hint=hint)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def _verify_attend_blocks(attempt: Callable[[Tensor, Any], Tensor]) -> None:
    q, k, v = _random(5, 8, seed=1), _random(23, 8, seed=2), _random(23, 6, seed=3)
    v = torch.cat([v, v[:, :2].cos()], 1)
    # Keys along one query grow, so that every block has a new maximum for some rows.
    growing = k + torch.linspace(0, 4, 23, dtype=torch.float64)[:, None] * q[0]
    cases = {
        "one block": (k, 23, "softmax divides by the sum: once, at the end"),
        "small scores": (k, 4, "scores are q k^T / sqrt(d); divide by the sum once, at the end"),
        "scores that rise along the row": (
            growing,
            4,
            "when the maximum grows, both the sum and the weighted values are multiplied by "
            "e^(old maximum - new maximum)",
        ),
        "scores in the thousands": (
            300 * growing,
            4,
            "subtract the maximum so far before the exponential",
        ),
    }
    for name, (keys, block, hint) in cases.items():
        pairs = zip(torch.split(keys, block), torch.split(v, block), strict=True)
        stream = _Stream(list(pairs))
        found = stream.given_to(attempt, q.clone())
        expected = _attention(q, keys, v)
        expect_close(found, expected, f"attention, {name}", rtol=1e-10, atol=1e-10, hint=hint)


def _seen(start: int, stop: int, seq_q: int, seq_k: int) -> Tensor:
    """(queries, keys) True where a query of the block sees the key."""
    i, j = torch.arange(start, stop)[:, None], torch.arange(seq_k)
    return j <= i + seq_k - seq_q


def _expected_tiles(
    start: int, stop: int, seq_q: int, seq_k: int, block_k: int
) -> list[tuple[int, int, bool]]:
    seen = _seen(start, stop, seq_q, seq_k)
    tiles = []
    for first in range(0, seq_k, block_k):
        part = seen[:, first : first + block_k]
        if bool(part.any()):
            tiles.append((first, first + part.shape[1], not bool(part.all())))
    return tiles


def _verify_key_tiles(attempt: Callable[..., list[tuple[int, int, bool]]]) -> None:
    sizes = [(16, 16, 4, 4), (16, 16, 8, 4), (16, 16, 4, 8), (13, 13, 5, 3), (7, 19, 3, 4)]
    sizes += [(1, 9, 1, 4), (5, 8, 2, 3), (12, 12, 1, 4)]
    for seq_q, seq_k, block_q, block_k in sizes:
        for start in range(0, seq_q, block_q):
            stop = min(start + block_q, seq_q)
            args = (start, stop, seq_q, seq_k, block_k)
            found = attempt(*args)
            tiles = [tuple(tile) for tile in found] if isinstance(found, list) else found
            expected = _expected_tiles(*args)
            hint = _tiles_hint(tiles, expected)
            expect_equal(tiles, expected, f"key_tiles{args}", hint=hint)


def _tiles_hint(found: object, expected: list[tuple[int, int, bool]]) -> str:
    if not isinstance(found, list) or not all(len(tile) == 3 for tile in found):
        return "return a list of (first key, key after the last, needs a mask)"
    spans = [tile[:2] for tile in found]
    wanted = [tile[:2] for tile in expected]
    if spans == wanted:
        return "a tile needs a mask if the block's first query does not see the tile's last key"
    if set(wanted) < set(spans):
        return "a tile that begins after the last key of the block's last query is not computed"
    if set(spans) < set(wanted):
        return (
            "a tile is missing whose keys some query of the block sees: the last query, stop - 1, "
            "sees keys up to stop - 1 + seq_k - seq_q, that one included"
        )
    return "tiles begin at multiples of block_k and end with the keys"


def _verify_tile_gradients(attempt: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    q, k, v = _random(6, 8, seed=4), _random(17, 8, seed=5), _random(17, 8, seed=6)
    grad = _random(6, 8, seed=7)
    leaves = [x.clone().requires_grad_() for x in (3 * q, k, v)]
    out = _attention(*leaves)
    out.backward(grad)  # type: ignore[no-untyped-call]
    lse = (leaves[0] @ leaves[1].mT / math.sqrt(8)).logsumexp(-1).detach()
    spans, found = [slice(0, 5), slice(5, 6), slice(6, 17)], []
    for span in spans:
        parts = attempt(3 * q, k[span], v[span], grad.clone(), lse.clone(), out.detach().clone())
        if not isinstance(parts, tuple | list) or len(parts) != 3:
            raise CheckFailed(
                f"tile_gradients: found {type(parts).__name__}, expected (dq, dk, dv)\n"
                "hint: return three tensors"
            )
        shapes, expected_shapes = [tuple(x.shape) for x in parts], [(6, 8), *[k[span].shape] * 2]
        expect_equal(
            shapes, [tuple(s) for s in expected_shapes], "shapes of (dq, dk, dv)",
            hint="in this order: dq as q, dk and dv as the tile's k and v",
        )  # fmt: skip
        found.append(parts)
    sums = (sum(part[0] for part in found), *(torch.cat([p[i] for p in found]) for i in (1, 2)))
    hints = {
        "dv": "dV = P^T dO with P = e^(S - lse): the lse is of whole rows, so that a tile's "
        "weights do not sum to one",
        "dk": "dS = P (dP - delta) with delta = rowsum(dO O), dK = dS^T Q / sqrt(d)",
        "dq": "dQ = dS K / sqrt(d)",
    }
    for name, index in (("dv", 2), ("dk", 1), ("dq", 0)):
        where = f"{name}, {'added' if name == 'dq' else 'joined'} over three tiles"
        expected = leaves[index].grad
        assert expected is not None
        expect_close(sums[index], expected, where, rtol=1e-11, atol=1e-12, hint=hints[name])


def _verify_causal_traffic(attempt: Callable[[int, int, int, int], tuple[int, int]]) -> None:
    hints = {
        "loaded": "each query once; for each block of queries the keys and values of the tiles "
        "that it computes: whole tiles, also where half of one is masked, but none beyond T",
        "stored": "the result, d numbers a query, and the log-sum-exp, one: each once",
    }
    for case in ((64, 8, 16, 16), (64, 8, 16, 8), (64, 4, 8, 32), (50, 8, 16, 12), (7, 2, 3, 16)):
        T, d, block_q, block_k = case
        found = attempt(*case)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise CheckFailed(
                f"causal_traffic{case}: found {found!r}, expected (loaded, stored)\n"
                "hint: return two whole numbers"
            )
        starts = range(0, T, block_q)
        tiles = [_expected_tiles(i, min(i + block_q, T), T, T, block_k) for i in starts]
        keys = sum(end - first for block in tiles for first, end, _ in block)
        expected = {"loaded": T * d + 2 * d * keys, "stored": T * d + T}
        for value, (name, number) in zip(found, expected.items(), strict=True):
            expect_equal(value, number, f"{name}, causal_traffic{case}", hint=hints[name])


ONE_PASS_LSE = Exercise(
    "one_pass_lse", "a maximum and a sum a row, corrected as blocks come", _verify_one_pass_lse,
    hints=("the iterator yields tensors (T, c); return a tensor (T,)",),
)  # fmt: skip
ATTEND_BLOCKS = Exercise(
    "attend_blocks", "maximum, sum and weighted values of each row", _verify_attend_blocks,
    hints=("the iterator yields pairs (keys, values); return a tensor (T, d)",),
)  # fmt: skip
KEY_TILES = Exercise(
    "key_tiles", "tiles up to the last query's last key", _verify_key_tiles,
    hints=("return a list of (first key, key after the last, needs a mask)",),
)  # fmt: skip
TILE_GRADIENTS = Exercise(
    "tile_gradients", "P from S - lse, then the five formulas", _verify_tile_gradients,
    hints=("lse and delta are one number a row: [:, None] puts them beside a tile",),
)  # fmt: skip
CAUSAL_TRAFFIC = Exercise(
    "causal_traffic", "add up what each block of queries loads", _verify_causal_traffic,
    hints=("return two whole numbers, (loaded, stored)",),
)  # fmt: skip
