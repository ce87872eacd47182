"""Exercises of lesson 20, FlashAttention: what is asked, and how an answer is checked.

    check(ADD_KEYS, add_keys)

The forward pass gets a slow memory that alone gives numbers and notes which, and a watch counts
all that are held, so that the right result from the whole matrix does not pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from playbook_utils.checks import Exercise, expect_close, expect_equal
from playbook_utils.errors import CheckFailed
from playbook_utils.measure.operators import OperatorWatch
from playbook_utils.measure.private import tree_leaves

__all__ = ["ADD_KEYS", "BACKWARD_TILE", "CAUSAL_TRAFFIC", "FLASH_FORWARD", "MERGE", "TILE_KIND"]

_State = tuple[Tensor, Tensor, Tensor]
_ALL = torch.tensor(True)


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
        alive = [n for ref, n in self._sizes.items() if not ref.expired()]  # type: ignore[no-untyped-call]
        return sum(alive)


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _tuple_of(found: Any, names: str) -> tuple[Any, ...]:
    """What was returned, if it has as many parts as there are names."""
    if not isinstance(found, tuple | list) or len(found) != names.count(",") + 1:
        found = type(found).__name__
        raise CheckFailed(f"found {found}, expected ({names})\nhint: return them in this order")
    return tuple(found)


def _verify_add_keys(attempt: Callable[[_State, Tensor, Tensor], _State]) -> None:
    near, v = _random(2, 5, 23, seed=0), _random(2, 23, 4, seed=1)
    rising = near + torch.arange(23.0, dtype=torch.float64)
    cases = {
        "one tile after another": near,
        "scores that rise along the row": rising,
        "scores near 5,000": rising + 5000,
        "scores near -5,000": near - 5000,
        "scores that fall along the row": near - 300 * torch.arange(23.0, dtype=torch.float64),
    }
    zero = torch.zeros(2, 5, 1, dtype=torch.float64)
    states = {name: (zero - math.inf, zero, torch.zeros_like(near[..., :4])) for name in cases}
    for first in range(0, 23, 4):  # the cases take turns: what is kept outside the state shows
        tile = slice(first, min(first + 4, 23))
        for name, scores in cases.items():
            found = attempt(states[name], scores[..., tile], v[:, tile])
            states[name] = _tuple_of(found, "maximum, total, weighted")
            _expect_state(states[name], scores[..., : tile.stop], v[:, : tile.stop], name)


def _expect_state(found: _State, scores: Tensor, v: Tensor, name: str) -> None:
    maximum = scores.amax(-1, keepdim=True)
    weights = (scores - maximum).exp()
    expected = (maximum, weights.sum(-1, keepdim=True), weights @ v)
    correct = (
        "all terms so far were taken relative to the old maximum: multiply by e^(old - new), and "
        "add e^(score - new maximum){}; nothing is divided here"
    )
    hints = {
        "maximum": "the larger one of the old and the tile's; keepdim=True keeps (..., b, 1)",
        "total": correct.format(" of each new score"),
        "weighted": correct.format(" v of each new score"),
    }
    for (part, hint), value, right in zip(hints.items(), found, expected, strict=True):
        where = f"{part} after {scores.shape[-1]} keys, {name}"
        expect_close(value, right, where, rtol=1e-10, atol=1e-10, hint=hint)


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor = _ALL) -> _State:
    """The result, the log-sum-exp (T,) and the scores, whole."""
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1), scores


def _seen(start: int, stop: int, seq_q: int, seq_k: int) -> Tensor:
    """(queries, keys) True where a query of the block sees the key."""
    i, j = torch.arange(start, stop)[:, None], torch.arange(seq_k)
    return j <= i + seq_k - seq_q


def _cut(size: int, block: int) -> list[slice]:
    return [slice(i, min(i + block, size)) for i in range(0, size, block)]


def _kind(rows: slice, columns: slice, seq_q: int, seq_k: int) -> str:
    part = _seen(rows.start, rows.stop, seq_q, seq_k)[:, columns]
    return "full" if bool(part.all()) else "masked" if bool(part.any()) else "skipped"


@dataclass(frozen=True)
class _Tiling:
    """What the lesson's Tiling offers."""

    seq_q: int
    seq_k: int
    block_q: int
    block_k: int
    causal: bool

    def rows(self) -> list[slice]:
        return _cut(self.seq_q, self.block_q)

    def columns(self) -> list[slice]:
        return _cut(self.seq_k, self.block_k)

    def kind(self, rows: slice, columns: slice) -> str:
        return _kind(rows, columns, self.seq_q, self.seq_k) if self.causal else "full"

    def keys(self) -> int:
        """Of all tiles that are not skipped."""
        pairs = ((r, c) for r in self.rows() for c in self.columns())
        return sum(c.stop - c.start for r, c in pairs if self.kind(r, c) != "skipped")


class _Memory:
    """What the lesson's SlowMemory offers; notes numbers loaded by tensor, and the most held.
    The tensors in it are shown as NaN: only `load` gives their numbers."""

    def __init__(self, **tensors: Tensor) -> None:
        self._real = tensors
        self.shown = {name: torch.full_like(x, math.nan) for name, x in tensors.items()}
        self.loaded: Counter[str] = Counter()
        self.stored, self.most, self.held = 0, 0, _Held()

    def load(self, x: Tensor, rows: slice = slice(None)) -> Tensor:
        name = next((name for name, shown in self.shown.items() if shown is x), "another")
        tile = self._real.get(name, x)[..., rows, :].clone()
        self.loaded[name] += tile.numel()
        self.most = max(self.most, self.held.numbers())
        return tile

    def store(self, x: Tensor, rows: slice, tile: Tensor) -> None:
        x[..., rows, :] = tile
        self.stored += tile.numel()


def _verify_flash_forward(attempt: Callable[..., tuple[Tensor, Tensor]]) -> None:
    for size, tiling in (
        (1.0, _Tiling(20, 90, 8, 90, False)),
        (1.0, _Tiling(20, 90, 8, 6, False)),
        (300.0, _Tiling(20, 90, 8, 6, False)),
        (1.0, _Tiling(45, 90, 8, 6, True)),
    ):
        q, k, v = (_random(n, 4, seed=i) for i, n in enumerate((tiling.seq_q, 90, 90)))
        memory = _Memory(q=size * q, k=k, v=v)
        with memory.held:
            out, lse = _tuple_of(attempt(*memory.shown.values(), tiling, memory), "out, lse")
        seen = _seen(0, tiling.seq_q, tiling.seq_q, tiling.seq_k) if tiling.causal else _ALL
        right, right_lse, _ = _attention(size * q, k, v, seen)
        hints = (
            "a new state for each block of queries, add_keys for each tile, at the end weighted / "
            "total; what does not come from memory.load is NaN here",
            "maximum + log(total), one number a query: squeeze its last axis",
        )
        if tiling.causal:
            hints = 2 * (
                "pass over tiles whose tiling.kind(rows, columns) is 'skipped': tile_scores masks "
                "only those that are 'masked'",
            )
        case = f"{tiling.seq_q} queries, {tiling.seq_k} keys in tiles of 8 x {tiling.block_k}"
        for name, found, expected, hint in zip(
            ("out", "lse"), (out, lse), (right, right_lse), hints, strict=True
        ):
            where = f"{name}, {case}, {'causal' if tiling.causal else f'scores x {size:g}'}"
            expect_close(found, expected, where, rtol=1e-9, atol=1e-9, hint=hint)
        _expect_tiled(memory, tiling)


def _expect_tiled(memory: _Memory, tiling: _Tiling) -> None:
    keys, case = 4 * tiling.keys(), ", causal" if tiling.causal else ""
    expected = {"q": 4 * tiling.seq_q, "k": keys, "v": keys}
    hint = (
        "each block of queries once; for each of them every tile of keys and of values that is "
        "not skipped, by memory.load(k, columns): use the tile, not k"
    )
    expect_equal(dict(memory.loaded), expected, f"numbers loaded{case}", hint=hint)
    hint = "out and log-sum-exp, once for each block of queries, by memory.store"
    expect_equal(memory.stored, 5 * tiling.seq_q, f"numbers stored{case}", hint=hint)
    block = tiling.block_q * tiling.block_k + 4 * (tiling.block_q + 2 * tiling.block_k)
    if memory.most > 9 * tiling.seq_q + 8 * tiling.seq_k + 5 * block:  # q, k, v, out, lse; tiles
        raise CheckFailed(
            f"numbers held at once{case}: found {memory.most}, expected no more than the result "
            "and a few tiles\nhint: tiles that are collected are the whole matrix: hand each to "
            "add_keys and let it go"
        )


def _verify_backward_tile(attempt: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    q, k, v, grad = (_random(n, 8, seed=4 + i) for i, n in enumerate((6, 17, 17, 6)))
    leaves = [x.clone().requires_grad_() for x in (3 * q, k, v)]
    out, lse, scores = (x.detach() for x in _attention(*leaves))
    _attention(*leaves)[0].backward(grad)  # type: ignore[no-untyped-call]
    rows = lse[:, None], (grad * out).sum(-1, keepdim=True)
    found = []
    for span in (slice(0, 5), slice(5, 6), slice(6, 17)):
        args = (scores[:, span], k[span], v[span], 3 * q, grad, *rows)
        parts = _tuple_of(attempt(*(x.clone() for x in args)), "dq, dk, dv")
        expect_equal(
            [tuple(x.shape) for x in parts], [(6, 8), *[tuple(k[span].shape)] * 2],
            "shapes of (dq, dk, dv)", hint="dq as q, dk and dv as the tile's k and v",
        )  # fmt: skip
        found.append(parts)
    sums = (sum(part[0] for part in found), *(torch.cat([p[i] for p in found]) for i in (1, 2)))
    hints = {
        "dv": "dV = P^T dO with P = e^(S - lse): the lse is of whole rows, so that a tile's "
        "weights do not sum to one",
        "dk": "dS = P (dP - delta), and dK = dS^T Q / sqrt(d)",
        "dq": "dQ = dS K / sqrt(d)",
    }
    for name, index in (("dv", 2), ("dk", 1), ("dq", 0)):
        where = f"{name}, {'added' if name == 'dq' else 'joined'} over three tiles"
        expected = leaves[index].grad
        assert expected is not None
        expect_close(sums[index], expected, where, rtol=1e-11, atol=1e-12, hint=hints[name])


def _verify_tile_kind(attempt: Callable[[slice, slice, int], str]) -> None:
    hints = {
        "skipped": "a tile whose first key lies beyond what the last query sees: its last query "
        "is rows.stop - 1, and that sees the keys up to rows.stop - 1 + shift",
        "full": "no mask where the first query already sees the tile's last key, columns.stop - 1",
        "masked": "some query sees some key of it, and some does not",
    }
    sizes = [(16, 16, 4, 4), (16, 16, 8, 4), (16, 16, 4, 8), (13, 13, 5, 3), (7, 19, 3, 4)]
    for seq_q, seq_k, block_q, block_k in [*sizes, (1, 9, 1, 4), (5, 8, 2, 3), (12, 12, 1, 4)]:
        for rows in _cut(seq_q, block_q):
            for columns in _cut(seq_k, block_k):
                expected, shift = _kind(rows, columns, seq_q, seq_k), seq_k - seq_q
                where = f"rows {rows}, columns {columns}, shift {shift}"
                expect_equal(attempt(rows, columns, shift), expected, where, hint=hints[expected])


def _verify_merge(attempt: Callable[..., tuple[Tensor, Tensor]]) -> None:
    for size, cut in ((1.0, 4), (300.0, 4), (1.0, 0), (1.0, 11)):
        q, k, v = size * _random(2, 5, 8, seed=1), _random(2, 11, 8, seed=2), _random(11, 8, seed=3)
        parts = [_attention(q, k[:, s], v[s])[:2] for s in (slice(0, cut), slice(cut, 11))]
        found = _tuple_of(attempt(*parts[0], *parts[1]), "out, lse")
        for name, value, right in zip(("out", "lse"), found, _attention(q, k, v), strict=False):
            hint = "each part's out times e^(its lse - merged lse); merged lse = logaddexp of both"
            if cut in (0, 11):
                hint = "a part without keys has lse -inf, and weighs nothing"
            where = f"{name}, {cut} and {11 - cut} keys, scores x {size:g}"
            expect_close(value, right, where, rtol=1e-10, atol=1e-10, hint=hint)
    out, lse = torch.zeros(3, 4), torch.full((3,), -math.inf)
    merged, merged_lse = _tuple_of(attempt(out, lse, out, lse), "out, lse")
    hint = "-inf - -inf is NaN: subtract 0 where the merged lse is -inf"
    expect_equal(merged, out, "out of two parts without keys", hint=hint)
    expect_equal(merged_lse, lse, "lse of two parts without keys", hint=hint)


def _verify_causal_traffic(attempt: Callable[[int, int, int, int], tuple[int, int]]) -> None:
    hints = {
        "loaded": "each query once; for each block of queries the keys and values of the tiles "
        "that it computes: whole tiles, also where half of one is masked, but none beyond T",
        "stored": "the result, d numbers a query, and the log-sum-exp, one: each once",
    }
    for case in ((64, 8, 16, 16), (64, 8, 16, 8), (64, 4, 8, 32), (50, 8, 16, 12), (7, 2, 3, 16)):
        T, d, block_q, block_k = case
        found = _tuple_of(attempt(*case), "loaded, stored")
        keys = _Tiling(T, T, block_q, block_k, True).keys()
        expected = {"loaded": T * d + 2 * d * keys, "stored": T * d + T}
        for value, (name, number) in zip(found, expected.items(), strict=True):
            expect_equal(value, number, f"{name}, causal_traffic{case}", hint=hints[name])


ADD_KEYS = Exercise("add_keys", "a new maximum, two sums corrected", _verify_add_keys)
FLASH_FORWARD = Exercise(
    "flash_forward", "blocks of queries outside, tiles of keys inside", _verify_flash_forward,
    hints=("a state is (maximum, total, weighted): -inf, 0 and zeros before the first tile",),
)  # fmt: skip
BACKWARD_TILE = Exercise(
    "backward_tile", "P from S - lse, then the five formulas", _verify_backward_tile,
    hints=("lse and delta are (b, 1): they stand beside a tile as they are",),
)  # fmt: skip
TILE_KIND = Exercise("tile_kind", "two comparisons", _verify_tile_kind)
MERGE = Exercise("merge", "weigh both results by their log-sum-exps", _verify_merge)
CAUSAL_TRAFFIC = Exercise(
    "causal_traffic", "add up what each block of queries loads", _verify_causal_traffic
)
