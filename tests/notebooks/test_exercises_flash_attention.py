"""Lesson 20's exercises three ways: stub -> not solved yet, solution -> passed, bugs -> failed."""

from __future__ import annotations

from tests.notebooks.exercises import Lesson, ThreeWays

LESSON = Lesson.read("20_flash_attention")

_NAIVE_LSE = """\
    return torch.cat(list(blocks), 1).logsumexp(-1)
    for scores in blocks:
"""
_WHOLE = """\
    pairs = list(blocks)
    k, v = torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
    for k, v in blocks:
"""
_TWICE = """\
    top = torch.stack([scores.amax(-1) for scores in blocks]).amax(0)
    return top + sum((s - top[:, None]).exp().sum(-1) for s in blocks).log()
    for scores in blocks:
"""

_JOINED_LSE = """\
    whole = None
    for scores in blocks:
        whole = scores.clone() if whole is None else torch.cat([whole, scores], 1)
    return whole.logsumexp(-1)
    for scores in blocks:
"""
_COPIES = """\
    pairs = [(k.clone(), v.clone()) for k, v in blocks]
    k, v = (torch.cat(x) for x in zip(*pairs))
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
    for k, v in blocks:
"""

# what is wrong: (function, what stands there, what is put in its place, what the check says)
BUGS = {
    "sum not corrected": (
        "one_pass_lse",
        "total * (maximum - larger).exp()",
        "total",
        "log-sum-exp, scores near 0",
    ),
    "corrected the wrong way round": (
        "one_pass_lse",
        "(maximum - larger).exp()",
        "(larger - maximum).exp()",
        "log-sum-exp, scores near 0",
    ),
    "log-sum-exp without the maximum": (
        "one_pass_lse",
        "return maximum + total.log()",
        "return total.log()",
        "log-sum-exp, scores near 0",
    ),
    "no maximum at all": (
        "one_pass_lse",
        "larger = torch.maximum(maximum, scores.amax(-1))",
        "larger = torch.zeros_like(maximum)",
        "scores near 5,000: found inf",
    ),
    "maximum starts at zero": (
        "one_pass_lse",
        "torch.full_like(scores[:, 0], -math.inf)",
        "torch.zeros_like(scores[:, 0])",
        "scores near -5,000",
    ),
    "maximum starts at zero, and the sum of it": (
        "one_pass_lse",
        "total = torch.zeros_like(maximum)",
        "total = torch.ones_like(maximum)\n            maximum = torch.zeros_like(maximum)",
        "log-sum-exp, scores near 0",
    ),
    "the last block's maximum": (
        "one_pass_lse",
        "torch.maximum(maximum, scores.amax(-1))",
        "scores.amax(-1)",
        "that fall along the row",
    ),
    "all blocks at once": (
        "one_pass_lse",
        "    for scores in blocks:\n",
        _NAIVE_LSE,
        "an earlier block still held",
    ),
    "blocks joined as they come": (
        "one_pass_lse",
        "    for scores in blocks:\n",
        _JOINED_LSE,
        "numbers held after 4 blocks",
    ),
    "two passes": (
        "one_pass_lse",
        "    for scores in blocks:\n",
        _TWICE,
        "a second pass",
    ),
    "values not corrected": (
        "attend_blocks",
        "weighted * correction",
        "weighted",
        "attention, small scores",
    ),
    "nothing corrected": (
        "attend_blocks",
        "correction = (maximum - larger).exp()",
        "correction = 1.0",
        "attention, small scores",
    ),
    "not divided by the sum": (
        "attend_blocks",
        "return weighted / total",
        "return weighted",
        "attention, one block",
    ),
    "divided in each block": (
        "attend_blocks",
        "weighted = weighted * correction + weights @ v",
        "weighted = weighted * correction + weights @ v / total",
        "attention, one block",
    ),
    "not scaled": (
        "attend_blocks",
        " / math.sqrt(q.shape[-1])",
        "",
        "attention, one block",
    ),
    "no maximum": (
        "attend_blocks",
        "larger = torch.maximum(maximum, scores.amax(-1, keepdim=True))",
        "larger = torch.zeros_like(maximum)",
        "scores in the thousands",
    ),
    "whole matrix": (
        "attend_blocks",
        "    for k, v in blocks:\n",
        _WHOLE,
        "an earlier block still held",
    ),
    "copies of all blocks": (
        "attend_blocks",
        "    for k, v in blocks:\n",
        _COPIES,
        "numbers held after 4 blocks",
    ),
    "stops one key early": (
        "key_tiles",
        "range(0, stop + shift, block_k)",
        "range(0, stop + shift - 1, block_k)",
        "a tile is missing",
    ),
    "one tile too many": (
        "key_tiles",
        "range(0, stop + shift, block_k)",
        "range(0, min(stop + shift + 1, seq_k), block_k)",
        "begins after the last key",
    ),
    "nothing skipped": (
        "key_tiles",
        "range(0, stop + shift, block_k)",
        "range(0, seq_k, block_k)",
        "begins after the last key",
    ),
    "skips by the first query": (
        "key_tiles",
        "range(0, stop + shift, block_k)",
        "range(0, start + shift + 1, block_k)",
        "a tile is missing",
    ),
    "aligned at the first key": (
        "key_tiles",
        "shift = seq_k - seq_q",
        "shift = 0",
        "key_tiles(0, 3, 7, 19, 4)",
    ),
    "mask off by one, too many": (
        "key_tiles",
        "end - 1 > start + shift",
        "end > start + shift",
        "needs a mask if",
    ),
    "mask off by one, too few": (
        "key_tiles",
        "end - 1 > start + shift",
        "end - 1 > start + shift + 1",
        "needs a mask if",
    ),
    "masked everywhere": (
        "key_tiles",
        "end - 1 > start + shift",
        "True",
        "needs a mask if",
    ),
    "last tile beyond the keys": (
        "key_tiles",
        "min(first + block_k, seq_k)",
        "first + block_k",
        "end with the keys",
    ),
    "weights of the tile alone": (
        "tile_gradients",
        "p = (scale * q @ k.mT - lse[:, None]).exp()",
        "p = (scale * q @ k.mT).softmax(-1)",
        "dv, joined over three tiles",
    ),
    "log-sum-exp forgotten": (
        "tile_gradients",
        " - lse[:, None]",
        "",
        "dv, joined over three tiles",
    ),
    "no delta": (
        "tile_gradients",
        " - delta",
        "",
        "dk, joined over three tiles",
    ),
    "delta of the tile alone": (
        "tile_gradients",
        "delta = (grad * out).sum(-1, keepdim=True)",
        "delta = (p * (grad @ v.mT)).sum(-1, keepdim=True)",
        "dk, joined over three tiles",
    ),
    "dq not scaled": (
        "tile_gradients",
        "return scale * ds @ k",
        "return ds @ k",
        "dq, added over three tiles",
    ),
    "in another order": (
        "tile_gradients",
        "return scale * ds @ k, scale * ds.mT @ q, p.mT @ grad",
        "return p.mT @ grad, scale * ds.mT @ q, scale * ds @ k",
        "shapes of (dq, dk, dv)",
    ),
    "only dq returned": (
        "tile_gradients",
        "return scale * ds @ k, scale * ds.mT @ q, p.mT @ grad",
        "return scale * ds @ k",
        "expected (dq, dk, dv)",
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
