"""Cross-entropy of logits, forward and backward, any vocabulary size, without the probabilities.

    cross_entropy(logits, target, ignore_index=-100, reduction="mean")

PyTorch's own keeps log-probabilities for backward: as many numbers as there are logits, in fp32
under autocast, and a vocabulary of 128,000 makes that the largest tensor of a small model. Here a
program reads a row of logits in pieces and keeps one number, the log-sum-exp (online softmax, as in
`softmax`); backward reads the logits again and writes e^(logit - lse) - [it is the target].

Left out: label smoothing, weights of classes, and writing the gradient over the logits, with which
Liger-Kernel saves their second copy too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check_float, check_tensor, no_second_derivative
from kernels.triton.storage import stored
from kernels.triton.tuning import plain, row_block

__all__ = ["cross_entropy", "cross_entropy_backward_kernel", "cross_entropy_kernel"]

_PIECE = 8192  # logits a program holds at once


@triton.jit
def cross_entropy_kernel(
    logits_ptr, target_ptr, loss_ptr, lse_ptr, vocab_size, ignore_index, BLOCK: tl.constexpr
):
    # 64 bits: 16,384 tokens times 151,936 words is more than 2^31.
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab_size
    target = tl.load(target_ptr + row)
    # The lowest fp32 number: a piece of -inf alone (a masked vocabulary) would give NaN with -inf.
    maximum = tl.full((), -3.4028234663852886e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab_size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + offsets, mask=offsets < vocab_size, other=float("-inf"))
        x = x.to(tl.float32)
        larger = tl.maximum(maximum, tl.max(x, axis=0))
        total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(x - larger), axis=0)
        maximum = larger
    lse = maximum + tl.log(total)
    # A target outside the vocabulary reads nothing: its loss is NaN, which is seen.
    known = (target >= 0) & (target < vocab_size)
    at_target = tl.load(logits_ptr + target, mask=known, other=float("nan")).to(tl.float32)
    loss = tl.where(target == ignore_index, 0.0, lse - at_target)
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, loss)


@triton.jit
def cross_entropy_backward_kernel(
    logits_ptr, target_ptr, lse_ptr, dloss_ptr, dlogits_ptr, vocab_size, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < vocab_size
    target = tl.load(target_ptr + row)
    lse = tl.load(lse_ptr + row)
    dloss = tl.load(dloss_ptr + row)
    x = tl.load(logits_ptr + row * vocab_size + offsets, mask=inside, other=0.0).to(tl.float32)
    dx = dloss * (tl.exp(x - lse) - tl.where(offsets == target, 1.0, 0.0))
    dx = tl.where(target == ignore_index, 0.0, dx)
    dlogits_ptr += row * vocab_size
    tl.store(dlogits_ptr + offsets, stored(dx, dlogits_ptr.dtype.element_ty), mask=inside)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int
    ) -> torch.Tensor:
        logits, target = logits.contiguous(), target.contiguous()
        rows, vocab_size = logits.shape
        loss, lse = (torch.empty(rows, device=logits.device) for _ in range(2))
        if rows:
            with torch.cuda.device_of(logits):
                cross_entropy_kernel[(rows,)](
                    logits, target, loss, lse, vocab_size, ignore_index,
                    **row_block(vocab_size, _PIECE),
                )  # fmt: skip
        ctx.save_for_backward(logits, target, lse)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    @no_second_derivative("cross_entropy", instead="torch.nn.functional.cross_entropy")
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, lse = ctx.saved_tensors
        rows, vocab_size = logits.shape
        dlogits = torch.empty_like(logits)
        if rows:
            block = row_block(vocab_size, _PIECE)
            with torch.cuda.device_of(logits):
                cross_entropy_backward_kernel[(rows, triton.cdiv(vocab_size, block["BLOCK"]))](
                    logits, target, lse, dloss.contiguous(), dlogits, vocab_size,
                    ctx.ignore_index, **block,
                )  # fmt: skip
        return dlogits, None, None


@plain
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    """-log softmax(logits)[target], in fp32 whatever the dtype of the logits.

    Args:
        logits: (tokens, vocab_size), fp32, fp16 or bf16.
        target: (tokens,), int64. One outside the vocabulary is refused on the CPU; on a GPU, where
            looking would stop the host, it makes the loss NaN.
        ignore_index: a target that counts neither in the sum nor in the mean.
        reduction: "mean" over the targets not ignored (NaN if there is none, as in PyTorch), "sum",
            or "none" (zero where ignored).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a target outside the vocabulary.
    """
    check_float("logits", logits, ndim=2)
    check_tensor("target", target, (torch.int64,), ndim=1)
    _check_targets(logits, target, ignore_index)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is {reduction!r}: expected "mean", "sum" or "none"')
    losses: torch.Tensor = _CrossEntropy.apply(logits, target, ignore_index)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (target != ignore_index).sum()


def _check_targets(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> None:
    if target.shape[0] != logits.shape[0] or not logits.shape[1]:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, target {tuple(target.shape)}: expected "
            "(tokens, vocab_size) and (tokens,); flatten both: logits.flatten(0, -2)"
        )
    if target.device != logits.device:
        raise ValueError(f"target is on {target.device}, logits on {logits.device}: expected one")
    if target.is_cuda:
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= logits.shape[1]))
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"target[{first}] is {int(target[first])}: expected 0 to {logits.shape[1] - 1}, or "
            f"{ignore_index} (ignore_index)"
        )
