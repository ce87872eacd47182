"""Lesson 20's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from tests.notebooks.exercises import Lesson, ThreeWays

LESSON = Lesson.read("20_flash_attention")

_LOOP = """\
        for columns in tiling.columns():
            if tiling.kind(rows, columns) == "skipped":
                continue
            k_tile, v_tile = memory.load(k, columns), memory.load(v, columns)
            scores = tile_scores(q_tile, k_tile, rows, columns, tiling)
            state = add_keys(state, scores, v_tile)
        maximum, total, weighted = state
"""
_WHOLE = """\
        scores = q_tile @ k.mT * q.shape[-1] ** -0.5
        maximum = scores.amax(-1, keepdim=True)
        weights = (scores - maximum).exp()
        total, weighted = weights.sum(-1, keepdim=True), weights @ v
"""
_COLLECTED = """\
        tiles = []
        for columns in tiling.columns():
            k_tile, v_tile = memory.load(k, columns), memory.load(v, columns)
            tiles.append((tile_scores(q_tile, k_tile, rows, columns, tiling), v_tile))
        scores = torch.cat([s for s, _ in tiles], -1)
        maximum = scores.amax(-1, keepdim=True)
        weights = (scores - maximum).exp()
        total = weights.sum(-1, keepdim=True)
        weighted = weights @ torch.cat([x for _, x in tiles], -2)
"""
_ONCE = """\
    memory = memory or SlowMemory()
    k, v = memory.load(k), memory.load(v)
"""
_GLOBAL = """\
    seen = add_keys.__dict__.setdefault("seen", [])
    if torch.isinf(state[0]).all():
        seen.clear()
    seen.append((scores, v))
    scores, v = torch.cat([s for s, _ in seen], -1), torch.cat([x for _, x in seen], -2)
    larger = scores.amax(-1, keepdim=True)
    weights = (scores - larger).exp()
    return larger, weights.sum(-1, keepdim=True), weights @ v
"""

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "sum not corrected": ("add_keys", "total * correction", "total", "total after 8 keys"),
    "values not corrected": (
        "add_keys",
        "weighted * correction",
        "weighted",
        "weighted after 8 keys",
    ),
    "nothing corrected": (
        "add_keys",
        "correction = (maximum - larger).exp()",
        "correction = 1.0",
        "total after 8 keys",
    ),
    "corrected the wrong way round": (
        "add_keys",
        "(maximum - larger).exp()",
        "(larger - maximum).exp()",
        "total after 4 keys",
    ),
    "the last tile's maximum": (
        "add_keys",
        "torch.maximum(maximum, scores.amax(-1, keepdim=True))",
        "scores.amax(-1, keepdim=True)",
        "maximum after 8 keys",
    ),
    "no maximum": (
        "add_keys",
        "larger = torch.maximum(maximum, scores.amax(-1, keepdim=True))",
        "larger = torch.zeros_like(maximum)",
        "maximum after 4 keys",
    ),
    "one maximum for all rows": (
        "add_keys",
        "torch.maximum(maximum, scores.amax(-1, keepdim=True))",
        "torch.maximum(maximum, scores.amax().expand_as(maximum))",
        "maximum after 4 keys",
    ),
    "divided in each tile": (
        "add_keys",
        "return larger, total, weighted * correction + weights @ v",
        "return larger, total, (weighted * correction + weights @ v) / total",
        "weighted after 4 keys",
    ),
    "all scores kept aside": (
        "add_keys",
        "    maximum, total, weighted = state\n",
        _GLOBAL,
        "maximum after 8 keys",
    ),
    "only two returned": (
        "add_keys",
        "return larger, total, weighted * correction + weights @ v",
        "return total, weighted * correction + weights @ v",
        "expected (maximum, total, weighted)",
    ),
    "not divided by the sum": (
        "flash_forward",
        "weighted / total.clamp(min=1)",
        "weighted",
        "out, 20 queries",
    ),
    "log-sum-exp without the maximum": (
        "flash_forward",
        "maximum + total.log()",
        "total.log()",
        "lse, 20 queries",
    ),
    "the whole matrix": ("flash_forward", _LOOP, _WHOLE, "found nan"),
    "the library's, after all loads": (
        "flash_forward",
        "    return out, lse",
        "    out = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]\n"
        "    return out, lse",
        "found nan",
    ),
    "tiles collected": ("flash_forward", _LOOP, _COLLECTED, "numbers held at once"),
    "all keys loaded once": (
        "flash_forward",
        "    memory = memory or SlowMemory()\n",
        _ONCE,
        "numbers loaded",
    ),
    "nothing skipped": (
        "flash_forward",
        'if tiling.kind(rows, columns) == "skipped":',
        "if False:",
        "causal",
    ),
    "log-sum-exp written past the memory": (
        "flash_forward",
        "memory.store(lse, rows, maximum + total.log())",
        "lse[..., rows, :] = maximum + total.log()",
        "numbers stored",
    ),
    "weights of the tile alone": (
        "backward_tile",
        "p = (scores - lse).exp()",
        "p = scores.softmax(-1)",
        "dv, joined over three tiles",
    ),
    "log-sum-exp forgotten": ("backward_tile", " - lse", "", "dv, joined over three tiles"),
    "no delta": ("backward_tile", " - delta", "", "dk, joined over three tiles"),
    "delta of the tile alone": (
        "backward_tile",
        " - delta",
        " - (p * (grad @ v.mT)).sum(-1, keepdim=True)",
        "dk, joined over three tiles",
    ),
    "not scaled": (
        "backward_tile",
        " * q.shape[-1] ** -0.5",
        "",
        "dk, joined over three tiles",
    ),
    "dq not scaled": (
        "backward_tile",
        "return ds @ k,",
        "return ds @ k * q.shape[-1] ** 0.5,",
        "dq, added over three tiles",
    ),
    "in another order": (
        "backward_tile",
        "return ds @ k, ds.mT @ q, p.mT @ grad",
        "return p.mT @ grad, ds.mT @ q, ds @ k",
        "shapes of (dq, dk, dv)",
    ),
    "only dq returned": (
        "backward_tile",
        "return ds @ k, ds.mT @ q, p.mT @ grad",
        "return ds @ k",
        "expected (dq, dk, dv)",
    ),
    "aligned at the first key": ("tile_kind", " + shift", "", "shift 12"),
    "mask off by one, too many": (
        "tile_kind",
        "columns.stop - 1 <= rows.start",
        "columns.stop <= rows.start",
        "already sees the tile's last key",
    ),
    "mask off by one, too few": (
        "tile_kind",
        "columns.stop - 1 <= rows.start",
        "columns.stop - 2 <= rows.start",
        "some query sees some key",
    ),
    "masked everywhere": (
        "tile_kind",
        "columns.stop - 1 <= rows.start + shift",
        "False",
        "already sees the tile's last key",
    ),
    "nothing skipped at all": (
        "tile_kind",
        "columns.start <= rows.stop - 1 + shift",
        "True",
        "lies beyond what the last query sees",
    ),
    "skips by the first query": (
        "tile_kind",
        "columns.start <= rows.stop - 1 + shift",
        "columns.start <= rows.start + shift",
        "some query sees some key",
    ),
    "one tile too many": (
        "tile_kind",
        "columns.start <= rows.stop - 1 + shift",
        "columns.start <= rows.stop + shift",
        "lies beyond what the last query sees",
    ),
    "a mean of both": (
        "merge",
        "one, other = (lse - finite).exp(), (other_lse - finite).exp()",
        "one = other = torch.full_like(lse, 0.5)",
        "out, 4 and 7 keys",
    ),
    "log-sum-exps without a maximum": (
        "merge",
        "torch.logaddexp(lse, other_lse)",
        "(lse.exp() + other_lse.exp()).log()",
        "4 and 7 keys, scores x 300",
    ),
    "weights exchanged": (
        "merge",
        "one, other = (lse - finite)",
        "other, one = (lse - finite)",
        "out, 4 and 7 keys",
    ),
    "nothing with nothing is NaN": (
        "merge",
        "merged.masked_fill(merged.isneginf(), 0.0)",
        "merged",
        "out of two parts without keys",
    ),
    "nothing skipped in the count": (
        "causal_traffic",
        "keys = min(T, math.ceil(stop / block_k) * block_k)",
        "keys = T",
        "loaded, causal_traffic(64, 8, 16, 16)",
    ),
    "half of everything": (
        "causal_traffic",
        "keys = min(T, math.ceil(stop / block_k) * block_k)",
        "keys = T // 2",
        "loaded, causal_traffic(64, 8, 16, 16)",
    ),
    "keys to the row, not to the tile": (
        "causal_traffic",
        "min(T, math.ceil(stop / block_k) * block_k)",
        "stop",
        "loaded, causal_traffic(64, 4, 8, 32)",
    ),
    "tiles beyond the end": (
        "causal_traffic",
        "min(T, math.ceil(stop / block_k) * block_k)",
        "math.ceil(stop / block_k) * block_k",
        "loaded, causal_traffic(50, 8, 16, 12)",
    ),
    "keys without values": (
        "causal_traffic",
        "2 * keys * d",
        "keys * d",
        "loaded, causal_traffic(64, 8, 16, 16)",
    ),
    "log-sum-exp not stored": (
        "causal_traffic",
        "T * d + T",
        "T * d",
        "stored, causal_traffic(64, 8, 16, 16)",
    ),
}


class TestExercises(ThreeWays):
    lesson = LESSON
    bugs = BUGS
