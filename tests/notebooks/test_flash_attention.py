"""The technique of lesson 20, imported from its cells, against plain formulas at odd sizes.

References are written here once more, in other ways than the lesson's own: masks by loops, sums by
torch.softmax in float64, gradients by autograd or by finite differences.
"""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import playbook_utils  # noqa: F401 (makes `notebooks` importable)
from notebooks.flash_attention import (
    FlashAttention,
    SlowMemory,
    Tiling,
    add_keys,
    flash_attention,
    flash_backward,
    flash_forward,
    flash_forward_1,
    merge,
    merge_sums,
    standard_attention,
)
from playbook_utils.commands.export import export_script
from playbook_utils.measure import count_flops, saved_for_backward

SIZES = [
    # seq_q, seq_k, block_q, block_k
    (1, 1, 16, 16),
    (13, 13, 5, 3),
    (13, 13, 3, 5),
    (16, 16, 4, 4),
    (7, 19, 3, 4),
    (1, 9, 4, 2),
    (10, 10, 64, 1),
    (10, 10, 1, 64),
]


def qkv(seq_q: int, seq_k: int, *lead: int, dim: int = 6, size: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seq_q * 100 + seq_k)
    q, k, v = (
        torch.randn(*lead, n, dim, dtype=torch.float64, generator=generator)
        for n in (seq_q, seq_k, seq_k)
    )
    return size * q, k, v


def scores_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = torch.einsum("...id,...jd->...ij", q, k) / math.sqrt(q.shape[-1])
    bias = torch.zeros(scores.shape[-2:], dtype=q.dtype)
    for i in range(bias.shape[0]):
        for j in range(bias.shape[1]):
            if causal and j - bias.shape[1] > i - bias.shape[0]:  # counted from the end
                bias[i, j] = -math.inf
    return scores + bias


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return torch.softmax(scores_of(q, k, causal), -1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [0.0, 1.0, 300.0])
@pytest.mark.parametrize("sizes", SIZES)
def test_forward_is_attention(sizes: tuple[int, ...], size: float, causal: bool) -> None:
    q, k, v = qkv(*sizes[:2], 2, 3, size=size)
    out, lse = flash_forward(q, k, v, Tiling(*sizes, causal))
    scores = scores_of(q, k, causal)
    torch.testing.assert_close(out, attention(q, k, v, causal), rtol=0, atol=1e-14 * (1 + size))
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("sizes", SIZES)
def test_first_version_is_attention(sizes: tuple[int, ...]) -> None:
    q, k, v = qkv(*sizes[:2], 2, size=5.0)
    out, lse = flash_forward_1(q, k, v, Tiling(*sizes))
    torch.testing.assert_close(out, attention(q, k, v), rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, scores_of(q, k, False).logsumexp(-1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("sizes", SIZES)
def test_backward_is_autograds(sizes: tuple[int, ...], size: float, causal: bool) -> None:
    inputs = qkv(*sizes[:2], 2, 3, size=size)
    mine, right = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    out = FlashAttention.apply(*mine, Tiling(*sizes, causal))
    grad = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    out.backward(grad)
    attention(*right, causal).backward(grad)
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-13 * (1 + size))


def test_backward_is_that_of_finite_differences() -> None:
    inputs = [x.requires_grad_() for x in qkv(5, 7, dim=3)]
    tiling = Tiling(5, 7, 2, 3, causal=True)
    assert torch.autograd.gradcheck(lambda *x: FlashAttention.apply(*x, tiling), inputs)


def test_a_second_derivative_is_refused() -> None:
    inputs = [x.requires_grad_() for x in qkv(5, 7)]
    out = FlashAttention.apply(*inputs, Tiling(5, 7, 2, 3))
    with pytest.raises(RuntimeError, match="create_graph=True is not supported"):
        torch.autograd.grad(out.sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize(("heads", "groups"), [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_shared_keys(heads: int, groups: int) -> None:
    q, k, v = qkv(13, 13, 2, 6)
    q, k, v = q[:, :heads], k[:, :groups], v[:, :groups]
    leaves = [[x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2)]
    with saved_for_backward() as saved:
        mine = flash_attention(*leaves[0], causal=True, block_q=5, block_k=3)
    right = F.scaled_dot_product_attention(*leaves[1], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(mine, right, rtol=0, atol=1e-14)
    assert saved.total_bytes == 8 * 2 * 13 * (2 * heads * 6 + 2 * groups * 6 + heads)
    for out in (mine, right):
        out.square().sum().backward()
    for one, other in zip(*leaves, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-13)


def test_in_float32_as_exact_as_the_formula() -> None:
    q, k, v = qkv(128, 128, 4, dim=32)
    right, single = attention(q, k, v), [x.float() for x in (q, k, v)]
    tiled = (flash_forward(*single, Tiling(128, 128, 16, 16))[0].double() - right).norm()
    assert tiled < 2 * (attention(*single).double() - right).norm()


@pytest.mark.parametrize("sizes", SIZES)
def test_kinds_are_those_of_the_mask(sizes: tuple[int, ...]) -> None:
    tiling = Tiling(*sizes, causal=True)
    seen = ~torch.isinf(scores_of(*qkv(*sizes[:2])[:2], True))
    covered = torch.zeros_like(seen, dtype=torch.int)
    for rows in tiling.rows():
        for columns in tiling.columns():
            part = seen[rows, columns]
            covered[rows, columns] += 1
            kind = "full" if part.all() else "masked" if part.any() else "skipped"
            assert tiling.kind(rows, columns) == kind, (rows, columns)
    assert bool((covered == 1).all())


def test_more_queries_than_keys_cannot_be_causal() -> None:
    assert Tiling(9, 4).rows()
    with pytest.raises(ValueError, match="9 queries, 4 keys; the first queries would see none"):
        Tiling(9, 4, causal=True)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_traffic_and_flops_of_the_tiles(sizes: tuple[int, ...], causal: bool) -> None:
    seq_q, seq_k, block_q, _ = sizes
    tiling, (q, k, v) = Tiling(*sizes, causal), qkv(*sizes[:2])
    memory = SlowMemory()
    _, flops = count_flops(lambda: flash_forward(q, k, v, tiling, memory))
    computed = [
        (rows.stop - rows.start, columns.stop - columns.start)
        for rows in tiling.rows()
        for columns in tiling.columns()
        if tiling.kind(rows, columns) != "skipped"
    ]
    assert flops == sum(4 * 6 * b * c for b, c in computed)
    assert memory.loaded == 6 * seq_q + sum(2 * 6 * c for _, c in computed)
    assert memory.stored == 7 * seq_q
    if not causal:
        assert memory.loaded == 6 * seq_q + -(-seq_q // block_q) * 2 * 6 * seq_k


def test_traffic_of_standard_attention() -> None:
    q, k, v = qkv(7, 11)
    memory = SlowMemory()
    torch.testing.assert_close(standard_attention(q, k, v, memory), attention(q, k, v))
    assert (memory.loaded, memory.stored) == (6 * (7 + 22) + 2 * 77, 2 * 77 + 6 * 7)


def test_traffic_of_backward() -> None:
    q, k, v = qkv(8, 12)
    tiling, memory = Tiling(8, 12, 4, 3), SlowMemory()
    out, lse = flash_forward(q, k, v, tiling)
    flash_backward(q, k, v, out, lse, out, tiling, memory)
    blocks = 4  # of keys; for each: q, the gradient, lse, delta and dq come in, dq goes out
    assert memory.loaded == 2 * 6 * 8 + 2 * 6 * 12 + blocks * 8 * (3 * 6 + 2)
    assert memory.stored == 8 + 2 * 6 * 12 + blocks * 8 * 6


def test_a_loaded_tile_is_a_copy() -> None:
    x, memory = torch.zeros(4, 3), SlowMemory()
    memory.load(x, slice(1, 3)).fill_(7.0)
    assert x.sum() == 0 and (memory.loaded, memory.stored, memory.moved) == (6, 0, 6)


@pytest.mark.parametrize("cuts", [[1], [5], [3, 4, 9], list(range(1, 12))])
def test_sums_of_parts_merge_in_any_order(cuts: list[int]) -> None:
    row = 500 * qkv(1, 12)[1][:, 0]
    parts = [
        (part.max(), (part - part.max()).exp().sum())
        for part in torch.tensor_split(row, cuts)
    ]  # fmt: skip
    for order in (parts, parts[::-1]):
        largest, total = reduce(merge_sums, order)
        assert largest == row.max()
        torch.testing.assert_close(largest + total.log(), row.logsumexp(0), rtol=1e-14, atol=0)


def test_keys_added_one_by_one() -> None:
    q, k, v = qkv(3, 8, size=50.0)
    scores = scores_of(q, k, False)
    state = (torch.full((3, 1), -math.inf), torch.zeros(3, 1), torch.zeros(3, 6))
    for j in range(8):
        state = add_keys(state, scores[:, j : j + 1], v[j : j + 1])
    torch.testing.assert_close(state[2] / state[1], attention(q, k, v))


@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("cuts", [[4], [0, 3], [2, 3, 9, 11]])
def test_parts_merge_forward_and_backward(cuts: list[int], size: float) -> None:
    """[0, 3]: the first part has no key."""
    q, k, v = qkv(5, 11, 2, size=size)
    keys, values = (torch.tensor_split(x, cuts, dim=-2) for x in (k, v))
    nothing = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    done = [
        flash_forward(q, a, b, Tiling(5, a.shape[-2], 2, 3)) if a.shape[-2] else nothing
        for a, b in zip(keys, values, strict=True)
    ]
    for order in (done, done[::-1]):
        out, lse = reduce(lambda one, other: merge(*one, *other), order)
        torch.testing.assert_close(out, attention(q, k, v), rtol=0, atol=1e-13 * (1 + size))
        torch.testing.assert_close(lse, scores_of(q, k, False).logsumexp(-1), rtol=1e-14, atol=0)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    parts = [
        flash_backward(q, a, b, out, lse, grad, Tiling(5, a.shape[-2], 2, 3))
        for a, b in zip(keys, values, strict=True)
    ]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    attention(*leaves).backward(grad)
    found = sum(p[0] for p in parts), *(torch.cat([p[i] for p in parts], -2) for i in (1, 2))
    for one, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(one, leaf.grad, rtol=1e-11, atol=1e-13 * (1 + size))


def test_nothing_merged_with_nothing_is_nothing() -> None:
    out, lse = torch.zeros(3, 4), torch.full((3,), -math.inf)
    merged, merged_lse = merge(out, lse, out, lse)
    assert merged.tolist() == out.tolist()
    assert merged_lse.tolist() == lse.tolist()


def test_kept_bytes_grow_with_the_length_and_not_its_square() -> None:
    def kept(T: int) -> int:
        leaves = [x.float().requires_grad_() for x in qkv(T, T, 2)]
        with saved_for_backward() as saved:
            FlashAttention.apply(*leaves, Tiling(T, T))
        return saved.total_bytes

    assert kept(33) == 4 * 2 * 33 * (4 * 6 + 1)
    assert kept(66) == 2 * kept(33)


def test_agrees_with_the_triton_kernel() -> None:
    triton_module = pytest.importorskip("kernels.triton.flash_attention")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (x.float().to(device) for x in qkv(37, 37, 1, 2, dim=16))
    found, found_lse = triton_module.flash_attention_with_lse(q, k[:, :1], v[:, :1], causal=True)
    out, lse = flash_forward(q, k[:, :1], v[:, :1], Tiling(37, 37, 8, 4, causal=True))
    torch.testing.assert_close(found, out, rtol=0, atol=1e-5)
    torch.testing.assert_close(found_lse, lse, rtol=0, atol=1e-5)


def test_exported_cells_stand_alone() -> None:
    script = export_script("20_flash_attention")
    assert "def flash_backward" in script and "show." not in script


def computed(tiling: Tiling) -> list[tuple[int, int]]:
    """(queries, keys) of each tile that is not skipped."""
    return [
        (rows.stop - rows.start, columns.stop - columns.start)
        for rows in tiling.rows()
        for columns in tiling.columns()
        if tiling.kind(rows, columns) != "skipped"
    ]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_backward_skips_what_the_mask_hides(sizes: tuple[int, ...], causal: bool) -> None:
    seq_q, seq_k = sizes[:2]
    tiling, memory, (q, k, v) = Tiling(*sizes, causal), SlowMemory(), qkv(*sizes[:2])
    out, lse = flash_forward(q, k, v, tiling)
    _, flops = count_flops(lambda: flash_backward(q, k, v, out, lse, out, tiling, memory))
    tiles = computed(tiling)
    assert flops == sum(5 * 2 * 6 * b * c for b, c in tiles)
    assert memory.loaded == 2 * 6 * (seq_q + seq_k) + sum((3 * 6 + 2) * b for b, _ in tiles)
    assert memory.stored == seq_q + 2 * 6 * seq_k + sum(6 * b for b, _ in tiles)


def test_traffic_of_the_first_version() -> None:
    memory, (q, k, v) = SlowMemory(), qkv(7, 11)
    flash_forward_1(q, k, v, Tiling(7, 11, 3, 4), memory)
    blocks = 3  # of keys; for each: q, out, sum and maximum come in, all but q go out
    assert memory.loaded == 2 * 6 * 11 + blocks * 7 * (2 * 6 + 2)
    assert memory.stored == blocks * 7 * (6 + 2)


def test_the_first_version_refuses_a_mask() -> None:
    with pytest.raises(ValueError, match="flash_forward_1 has no mask"):
        flash_forward_1(*qkv(7, 11), Tiling(7, 11, 3, 4, causal=True))


def test_blocks_are_those_asked_for() -> None:
    q, k, v = qkv(13, 13, 1, 1)
    tiles = computed(Tiling(13, 13, 5, 3, causal=True))
    _, flops = count_flops(
        lambda: flash_attention(q, k, v, causal=True, block_q=5, block_k=3)
    )  # fmt: skip
    assert flops == sum(4 * 6 * b * c for b, c in tiles)
