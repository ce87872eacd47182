"""Triton's FlashAttention, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.triton import INTERPRETED
from kernels.triton.flash_attention import flash_attention, flash_attention_with_lse
from kernels.triton.flash_attention_backward import backward
from tests.kernels.triton_reference import DTYPES, assert_near, randn, strided

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU, `make gpu` checks the kernels")

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def standard(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the log-sum-exp, by the formula, with the whole matrix of scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def inputs(
    dtype: torch.dtype, queries: int, keys: int, head_dim: int = 24, heads: int = 2, shared: int = 1
) -> Tensors:
    q = randn(dtype, 2, heads, queries, head_dim)
    k, v = (randn(dtype, 2, heads // shared, keys, head_dim, seed=seed) for seed in (1, 2))
    return q, k, v


def one_head(queries: int, keys: int, head_dim: int = 24) -> Tensors:
    """Of one sequence, in fp32: for what no other head or sequence changes."""
    q, k, v = (x[:1, :1] for x in inputs(torch.float32, queries, keys, head_dim))
    return q, k, v


def check(qkv: Tensors, causal: bool, scale: float | None = None, use_lse: bool = True) -> None:
    """Values, lse and gradients, those through the lse too.

    Scores are sums of 24 products and their errors go into exponents, so the fp32 errors come to a
    few dozen steps of the largest element. Delta in backward is made of the stored output: half a
    step of storage of it, which for bf16 and fp16 is added here as steps of fp32.
    """
    leaves = [strided(x).requires_grad_() for x in qkv]
    doubles = [x.double().requires_grad_() for x in qkv]
    found, found_lse = flash_attention_with_lse(*leaves, causal=causal, scale=scale)
    exact, exact_lse = standard(doubles[0], doubles[1], doubles[2], causal, scale)
    assert_near(found.detach(), exact.detach(), 32, "the output")
    assert_near(found_lse.detach(), exact_lse.detach(), 16, "the lse")
    dout, dlse = randn(found.dtype, *found.shape, seed=7), randn(torch.float32, *found_lse.shape)
    upstream = [strided(dout), strided(dlse * use_lse)]
    torch.autograd.backward([found, found_lse], upstream)
    torch.autograd.backward([exact, exact_lse], [dout.double(), dlse.double() * use_lse])
    stored = torch.finfo(found.dtype).eps / torch.finfo(torch.float32).eps / 2
    for name, leaf, double in zip("qkv", leaves, doubles, strict=True):
        assert leaf.grad is not None and double.grad is not None
        assert_near(leaf.grad, double.grad, 32 + stored, f"the gradient of {name}")


class TestAgreement:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("causal", [False, True])
    def test_odd_lengths_in_all_dtypes(self, causal: bool, dtype: torch.dtype) -> None:
        """Two blocks of queries, three of keys, none of them full at the end; grouped queries."""
        check(inputs(dtype, 70, 133, shared=2), causal)

    @pytest.mark.parametrize("lengths", [(1, 1), (64, 64), (1, 70), (65, 65), (63, 130)])
    @pytest.mark.parametrize("causal", [False, True])
    def test_lengths(self, lengths: tuple[int, int], causal: bool) -> None:
        check(one_head(*lengths), causal)

    def test_more_queries_than_keys(self) -> None:
        check(one_head(100, 37), causal=False)

    @pytest.mark.parametrize("head_dim", [1, 16, 80])
    def test_head_dims(self, head_dim: int) -> None:
        check(one_head(33, 40, head_dim), causal=True)

    def test_grouped_queries_with_own_scale_without_lse(self) -> None:
        """Six heads, three a key head; values with weights from a scale that is no power of two."""
        check(inputs(torch.float32, 40, 40, heads=6, shared=3), True, scale=0.7, use_lse=False)

    def test_sdpa_says_the_same(self) -> None:
        q, k, v = inputs(torch.float32, 70, 70)
        expected = F.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), is_causal=True
        )
        assert_near(flash_attention(q, k, v, causal=True), expected, 32, "against SDPA")

    def test_views(self) -> None:
        """(batch, seq_len, heads, head_dim), transposed, as a projection leaves it."""
        q, k, v = (
            x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(torch.float32, 9, 9)
        )
        assert not q.is_contiguous()
        assert_near(flash_attention(q, k, v), standard(q, k, v, False)[0].double(), 64, "a view")


class TestOnline:
    def test_scores_that_overflow(self) -> None:
        """Scores of several hundred, largest in the last block: e^s alone would be inf."""
        q, k, v = (x.clone() for x in one_head(5, 150))
        k[:, :, 140] *= 100
        exact, exact_lse = standard((30 * q).double(), k.double(), v.double(), False)
        out, lse = flash_attention_with_lse(30 * q, k, v)
        # An error of a score, 2^-24 of thousands, is a relative error of its exponential.
        assert float(exact_lse.max()) > 500
        assert float((out - exact).abs().max()) < 1e-3
        assert_near(lse, exact_lse, 16, "the lse")

    def test_parts_merge_by_their_lse(self) -> None:
        """What ring attention does with a part of the keys on each rank."""
        q, k, v = one_head(20, 96)
        whole, whole_lse = flash_attention_with_lse(q, k, v)
        parts = [
            flash_attention_with_lse(q, k[:, :, i : i + 32], v[:, :, i : i + 32])
            for i in (0, 32, 64)
        ]
        outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
        merged = (outs * lses.softmax(0)[..., None]).sum(0)
        assert_near(merged, whole.double(), 32, "the merged output")
        assert_near(lses.logsumexp(0), whole_lse.double(), 16, "the merged lse")

    def test_saves_a_number_a_query(self) -> None:
        """q, k, v, the output, and the lse; nothing of the size of the scores."""
        q, k, v = (x.requires_grad_() for x in inputs(torch.float32, 50, 60))
        saved: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            saved[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            flash_attention(q, k, v)
        assert sorted(saved.values()) == sorted([4 * 50, *[4 * 50 * 24] * 2, *[4 * 60 * 24] * 2])


class TestCausalBlocks:
    @pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
    def test_blocks_above_the_diagonal_are_not_read(self) -> None:
        """NaN in keys 64 and later reaches no query of the first block, whose mask would not help.

        A masked weight is 0, and 0 times NaN is NaN: the values must not have been read.
        """
        q, k, v = (x.clone() for x in one_head(130, 130))
        expected = standard(q, k, v, causal=True)[0]
        k[:, :, 64:], v[:, :, 64:] = float("nan"), float("nan")
        out = flash_attention(q, k, v, causal=True)
        assert_near(out[:, :, :64], expected[:, :, :64].double(), 64, "queries 0 to 63")
        assert bool(out[:, :, 64:].isnan().all())

    def test_nor_in_backward(self) -> None:
        """dq of the first block reads no key after 63; dk, dv of the last no query before 128."""
        q, k, v = one_head(130, 130)
        out, lse = flash_attention_with_lse(q, k, v, causal=True)
        dout, dlse = torch.ones_like(out), torch.zeros_like(lse)
        clean = backward(q, k, v, out, lse, dout, dlse, True, 0.2)
        late_keys = k.clone()
        late_keys[:, :, 64:] = float("nan")
        dq, _, _ = backward(q, late_keys, v, out, lse, dout, dlse, True, 0.2)
        assert torch.equal(dq[:, :, :64], clean[0][:, :, :64]) and dq[:, :, 64:].isnan().all()
        dout[:, :, :128] = float("nan")
        _, dk, dv = backward(q, k, v, out, lse, dout, dlse, True, 0.2)
        assert torch.equal(dk[:, :, 128:], clean[1][:, :, 128:])
        assert torch.equal(dv[:, :, 128:], clean[2][:, :, 128:]) and dv[:, :, :128].isnan().all()


class TestErrors:
    def test_refuses_what_does_not_fit(self) -> None:
        q, k, v = inputs(torch.float32, 8, 8, heads=6, shared=3)
        with pytest.raises(ValueError, match=r"v \(2, 2, 7, 24\): expected \(batch, heads"):
            flash_attention(q, k, v[:, :, :7])
        with pytest.raises(
            ValueError, match=r"expected key heads \(2\) that divide the heads \(5\)"
        ):
            flash_attention(q[:, :5], k, v)
        with pytest.raises(ValueError, match="causal, expected no more queries than keys"):
            flash_attention(q, k[:, :, :7], v[:, :, :7], causal=True)
        with pytest.raises(ValueError, match="head_dim up to 256"):
            flash_attention(*(torch.ones(1, 1, 2, 257) for _ in range(3)))
        with pytest.raises(ValueError, match="expected no empty dimension"):
            flash_attention(q[:, :, :0], k, v)
        with pytest.raises(ValueError, match=r"k is torch.float16, q torch.float32"):
            flash_attention(q, k.half(), v)
        with pytest.raises(ValueError, match=r"q has shape \(6, 8, 24\): expected 4 dimension"):
            flash_attention(q[0], k, v)
