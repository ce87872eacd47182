"""Triton's kernels over rows: softmax, LayerNorm, RMSNorm, cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.triton import INTERPRETED
from kernels.triton import cross_entropy as cross_entropy_module
from kernels.triton import softmax as softmax_module
from kernels.triton.cross_entropy import cross_entropy
from kernels.triton.layer_norm import layer_norm
from kernels.triton.rms_norm import rms_norm
from kernels.triton.softmax import softmax
from tests.kernels.triton_reference import DTYPES, agree, assert_near, randn, strided

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU, `make gpu` checks the kernels")

SHAPES = [(1, 1), (5, 333), (2, 3, 128)]


class TestSoftmax:
    @pytest.mark.parametrize("widest", [16384, 64])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_agrees_with_fp64(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        widest: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """In one piece, and in pieces of 64.

        An element is off by a few steps of its own (exponential, sum, division), hence its scale.
        Backward starts from y as it was stored, and so does its reference; what it subtracts is
        as large as y times the largest dy, 4.
        """
        monkeypatch.setattr(softmax_module, "WIDEST", widest)
        x = strided(4 * randn(dtype, *shape)).requires_grad_()
        y = softmax(x)
        exact = x.detach().double().softmax(-1)
        # e^(x - max) carries the rounding of x - max, up to 30 here: half a step of 16 to 32.
        assert_near(y.detach(), exact, 16, "softmax", scale=exact)
        dy = randn(dtype, *shape, seed=7)
        y.backward(strided(dy))
        assert x.grad is not None
        stored, dy = y.detach().double(), dy.double()
        exact = stored * (dy - (stored * dy).sum(-1, keepdim=True))
        assert_near(x.grad, exact, 4, "softmax's gradient", scale=4 * stored)

    def test_gradient_agrees_with_autograd(self) -> None:
        """fp32; the scale is that of dy, which the gradient's terms are made of."""
        x, dy = randn(torch.float32, 5, 333), randn(torch.float32, 5, 333, seed=7)
        leaf, double = x.clone().requires_grad_(), x.double().requires_grad_()
        softmax(leaf).backward(dy)
        double.softmax(-1).backward(dy.double())
        assert leaf.grad is not None and double.grad is not None
        assert_near(leaf.grad, double.grad, 4, "softmax's gradient", scale=0.1)

    @pytest.mark.parametrize("widest", [16384, 64])
    def test_large_and_masked_scores(self, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Scores whose exponentials overflow, and a first piece that is -inf throughout."""
        monkeypatch.setattr(softmax_module, "WIDEST", widest)
        x = 1000 * randn(torch.float32, 3, 150)
        x[1, :100] = -float("inf")
        assert_near(softmax(x), x.double().softmax(-1), 4, "softmax")

    def test_views_and_nothing(self) -> None:
        x = randn(torch.float32, 9, 4).t()
        assert_near(softmax(x), x.double().softmax(-1), 4, "softmax of a view")
        assert softmax(x[:0]).shape == (0, 9)
        with pytest.raises(ValueError, match=r"shape \(\): expected at least 1 dimension"):
            softmax(torch.tensor(1.0))


class TestNorms:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(5, 333), (2, 3, 128)])
    @pytest.mark.parametrize("bias", [True, False])
    def test_layer_norm(self, shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
        """Mean, variance, root and product lose about a step each; a sum over the row a few."""
        x, weight = 3 * randn(dtype, *shape) + 1, randn(dtype, shape[-1])
        inputs = (x, weight, randn(dtype, shape[-1], seed=3)) if bias else (x, weight)
        agree(
            lambda x, *more: layer_norm(x, *more, eps=1e-3),
            lambda x, *more: F.layer_norm(x, shape[-1:], *more, eps=1e-3),
            *inputs,
            roundings=6,
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(1, 3), (5, 333), (2, 3, 128)])
    def test_rms_norm(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        agree(
            lambda x, w: rms_norm(x, w, eps=1e-3),
            lambda x, w: F.rms_norm(x, shape[-1:], w, eps=1e-3),
            3 * randn(dtype, *shape),
            randn(dtype, shape[-1]),
            roundings=6,
        )

    def test_layer_norm_keeps_digits_beside_a_large_mean(self) -> None:
        """E[x^2] - E[x]^2 in fp32 would lose all of them: 10^8 + 1 - 10^8, with steps of 8."""
        x = randn(torch.float32, 4, 333) + 10_000
        found = layer_norm(x, torch.ones(333))
        # The mean, near 10^4, is off by up to 2^-11 (half a step there), and y by as much.
        assert float((found - F.layer_norm(x.double(), (333,))).abs().max()) < 2**-10

    def test_norms_of_mixed_dtypes(self) -> None:
        """bf16 activations with fp32 weights, as mixed precision has them."""
        x, weight = randn(torch.bfloat16, 5, 77), randn(torch.float32, 77)
        agree(rms_norm, lambda x, w: F.rms_norm(x, (77,), w, 1e-6), x, weight, roundings=6)
        agree(layer_norm, lambda x, w: F.layer_norm(x, (77,), w), x, weight, roundings=6)

    def test_only_the_gradients_that_are_wanted(self) -> None:
        x, weight, bias, dy = (randn(torch.float32, *s) for s in [(4, 9), (9,), (9,), (4, 9)])
        every = [t.clone().requires_grad_() for t in (x, weight, bias)]
        whole = torch.autograd.grad(layer_norm(*every), every, dy)
        for wanted in (0, 1, 2):
            leaves = [x, weight, bias]
            leaves[wanted] = leaves[wanted].clone().requires_grad_()
            layer_norm(*leaves).backward(dy)
            grad = leaves[wanted].grad
            assert grad is not None and torch.equal(grad, whole[wanted])
        leaf = x.clone().requires_grad_()
        rms_norm(leaf, weight).backward(dy)
        assert leaf.grad is not None and weight.grad is None

    def test_frozen_weights_need_no_sums(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The tensors of partial sums, the only ones of zeros, are not made."""
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("sums were made"))
        x = randn(torch.float32, 4, 9).requires_grad_()
        layer_norm(x, torch.ones(9), torch.ones(9)).sum().backward()
        rms_norm(x, torch.ones(9)).sum().backward()

    def test_refuse_what_does_not_fit(self) -> None:
        x = torch.ones(2, 8)
        with pytest.raises(ValueError, match="weight has 7 elements: expected 8"):
            layer_norm(x, torch.ones(7))
        with pytest.raises(ValueError, match="bias has 9 elements: expected 8"):
            layer_norm(x, torch.ones(8), torch.ones(9))
        with pytest.raises(ValueError, match=r"weight has shape \(1, 8\): expected 1 dimension"):
            rms_norm(x, torch.ones(1, 8))
        with pytest.raises(ValueError, match="expected a last dimension of 1 to 65536"):
            rms_norm(torch.ones(1, 65537), torch.ones(65537))


class TestCrossEntropy:
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("piece", [8192, 64])
    def test_agrees_with_fp64(
        self, dtype: torch.dtype, reduction: str, piece: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A vocabulary of 333 in one piece and in six; one target ignored, first and last used."""
        monkeypatch.setattr(cross_entropy_module, "_PIECE", piece)
        target = strided(torch.tensor([0, 332, -100, 17, 64]))
        agree(
            lambda x: cross_entropy(x, target, reduction=reduction),
            lambda x: F.cross_entropy(x, target, reduction=reduction),
            5 * randn(dtype, 5, 333),
            roundings=6,
        )

    def test_a_real_vocabulary(self) -> None:
        """Llama 3's 128,256 words: 16 pieces."""
        target = torch.tensor([128_255, 3])
        x = randn(torch.bfloat16, 2, 128_256)
        agree(
            lambda x: cross_entropy(x, target),
            lambda x: F.cross_entropy(x, target),
            x,
            roundings=16,
        )

    def test_masked_vocabulary_and_own_ignore_index(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cross_entropy_module, "_PIECE", 64)
        x = 3 * randn(torch.float32, 3, 150)
        x[:, :100] = -float("inf")
        target = torch.tensor([120, 0, 149])
        agree(
            lambda x: cross_entropy(x, target, ignore_index=0),
            lambda x: F.cross_entropy(x, target, ignore_index=0),
            x,
            roundings=6,
        )

    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
    def test_all_ignored_is_nan_as_in_pytorch(self) -> None:
        x = torch.zeros(2, 5, requires_grad=True)
        target = torch.full((2,), -100)
        assert cross_entropy(x, target).isnan() and F.cross_entropy(x, target).isnan()
        assert float(cross_entropy(x, target, reduction="sum").detach()) == 0

    def test_saves_no_probabilities(self) -> None:
        """What is kept for backward: the logits themselves, the targets, a number a token."""
        logits = torch.zeros(4, 1000, requires_grad=True)
        saved: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            cross_entropy(logits, torch.zeros(4, dtype=torch.int64), reduction="none")
        del saved[logits.untyped_storage().data_ptr()]
        assert sorted(saved.values()) == [4 * 4, 4 * 8]

    def test_refuses_what_does_not_fit(self) -> None:
        x = torch.zeros(3, 5)
        with pytest.raises(ValueError, match=r"target\[1\] is 5: expected 0 to 4, or -100"):
            cross_entropy(x, torch.tensor([0, 5, -1]))
        with pytest.raises(ValueError, match=r"target \(2,\): expected \(tokens, vocab_size\)"):
            cross_entropy(x, torch.tensor([0, 1]))
        with pytest.raises(ValueError, match=r"logits has shape \(1, 3, 5\)"):
            cross_entropy(x[None], torch.tensor([0, 1, 2]))
        with pytest.raises(ValueError, match=r"target is torch.int32: expected torch.int64"):
            cross_entropy(x, torch.zeros(3, dtype=torch.int32))
        with pytest.raises(ValueError, match="reduction is 'avg'"):
            cross_entropy(x, torch.zeros(3, dtype=torch.int64), reduction="avg")


class TestCompile:
    def test_torch_compile_leaves_interpreted_kernels_alone(self) -> None:
        x = randn(torch.float32, 3, 50)
        compiled = torch.compile(lambda x: 2 * softmax(x) + 1, backend="eager")
        torch.testing.assert_close(compiled(x), 2 * x.softmax(-1) + 1)
