"""Compare a Triton kernel, values and gradients, with PyTorch in fp64.

    agree(softmax, lambda x: x.softmax(-1), randn(dtype, 5, 333), roundings=2)

The reference gets the same inputs, exactly: what is rounded to bf16 before is bf16's own loss and
no kernel's. A kernel computes in fp32 and rounds its result once, so an element may differ by half
a step of the storage type where it is (`finfo.eps / 2` of its magnitude) and by fp32's errors,
which grow with the sum they come from: `roundings` steps of fp32 at the largest element of the
result. A tolerance for the whole tensor, wide enough for bf16, would hide much in its small
elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with gaps between them: a kernel that forgets to copy reads the gaps."""
    if not x.ndim:
        return x
    wide = torch.stack([x, torch.full_like(x, 1e4 if x.is_floating_point() else 0)], -1)
    return wide.flatten(-2)[..., ::2]


def assert_near(
    found: torch.Tensor,
    exact: torch.Tensor,
    roundings: float,
    name: str,
    scale: float | torch.Tensor | None = None,
) -> None:
    """`found` is `exact` rounded to its dtype, but for `roundings` fp32 steps at `scale`.

    `scale` is the size of the numbers that were added up; None for the largest in `exact`.
    """
    scale = float(exact.abs().max()) if scale is None else scale
    assert found.shape == exact.shape, f"{name}: shape {found.shape}, expected {exact.shape}"
    info = torch.finfo(found.dtype)
    # Half a step, a hair more because the fp32 error may push a value over a tie.
    half_step = (exact.abs() * info.eps * 0.501).clamp_min(info.tiny * info.eps)
    allowed = half_step + roundings * torch.finfo(torch.float32).eps * scale
    wrong = (found.double() - exact).abs() / allowed
    worst = int(wrong.nan_to_num(nan=float("inf")).argmax())
    share = float(wrong.flatten()[worst])
    assert share <= 1, (
        f"{name}, element {worst}: {float(found.flatten()[worst])}, expected "
        f"{float(exact.flatten()[worst])}: off by {share:.2f} times the bound"
    )


def agree(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    *inputs: torch.Tensor,
    roundings: float,
    gradient_roundings: float | None = None,
) -> None:
    """`fn(*inputs)` and the gradient of each input against `reference` in fp64.

    The inputs and the gradient that backward starts from are views with gaps.
    """
    leaves = [strided(x.detach()).requires_grad_() for x in inputs]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    found, exact = fn(*leaves), reference(*doubles)
    assert_near(found.detach(), exact.detach(), roundings, "the result")
    upstream = randn(found.dtype, *found.shape, seed=7) if found.ndim else torch.tensor(1.5)
    found.backward(strided(upstream))
    exact.backward(upstream.double())
    for i, (leaf, double) in enumerate(zip(leaves, doubles, strict=True)):
        assert leaf.grad is not None and double.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        allowed = roundings if gradient_roundings is None else gradient_roundings
        assert_near(leaf.grad, double.grad, allowed, f"the gradient of input {i}")
